// The turn's loudness over time: what was played, what is ahead of it, what will not be heard.

const PEAK_SAMPLES = 960; // 20 ms at 48 kHz
const PEAK_MS = 20;
const PITCH_PX = 5;
const BAR_PX = 3;

export class Wave {
  constructor(canvas) {
    this.canvas = canvas;
    this.clear();
  }

  clear() {
    this.peaks = [];
    this.numInLast = PEAK_SAMPLES; // samples of the last peak
  }

  add(samples) {
    for (const sample of samples) {
      if (this.numInLast === PEAK_SAMPLES) {
        this.peaks.push(0);
        this.numInLast = 0;
      }
      this.numInLast++;
      const last = this.peaks.length - 1;
      this.peaks[last] = Math.max(this.peaks[last], Math.abs(sample));
    }
  }

  draw(playedMs) {
    const { canvas } = this;
    const scale = globalThis.devicePixelRatio || 1;
    const width = canvas.clientWidth;
    const height = canvas.clientHeight;
    if (canvas.width !== Math.round(width * scale)) canvas.width = Math.round(width * scale);
    if (canvas.height !== Math.round(height * scale)) canvas.height = Math.round(height * scale);
    const pen = canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    const style = getComputedStyle(canvas);
    pen.fillStyle = pen.strokeStyle = style.color;

    const loudest = this.peaks.reduce((a, b) => Math.max(a, b), 0.1);
    const maxBars = Math.max(1, Math.floor(width / PITCH_PX));
    let numPerBar = 2;
    while (this.peaks.length > numPerBar * maxBars) numPerBar *= 2;
    for (let i = 0; i * numPerBar < this.peaks.length; i++) {
      const peak = Math.max(...this.peaks.slice(i * numPerBar, (i + 1) * numPerBar));
      const length = Math.max(BAR_PX, (peak / loudest) * height);
      const isPlayed = (i + 0.5) * numPerBar * PEAK_MS < playedMs;
      pen.beginPath();
      pen.roundRect(i * PITCH_PX + 0.5, (height - length) / 2 + 0.5, BAR_PX - 1, length - 1, 1);
      pen.stroke(); // an outline is still to come; a filled bar has been played
      if (isPlayed) pen.fill();
    }
  }
}
