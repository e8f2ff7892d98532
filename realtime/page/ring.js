// The ring buffer between decoder and loudspeaker, and the clock of what was played.
// It runs on the audio thread and holds one turn at a time.
//
// in:   {type: "open", turn}  {type: "push", turn, samples}  {type: "end", turn, total}
//       {type: "stop", turn}
// out:  {type: "clock", turn, played, underruns, starved}  about every 20 ms
//       {type: "audible", turn, at}   the context time of the first sample that can be heard
//       {type: "ended", turn, played, underruns, starved}   everything has been played
//       {type: "stopped", turn, played, at}   silence begins at that context time
//
// `played` counts the samples that have left for the loudspeaker. They cannot be called back, so an
// interruption counts them as heard.

const START_SAMPLES = 0.04 * sampleRate; // buffered before playback begins, or goes on
const FADE_SAMPLES = 0.005 * sampleRate; // of an interruption: no click
const AUDIBLE = 0.003; // about -50 dB
const CLOCK_QUANTA = 8;

class Ring extends AudioWorkletProcessor {
  constructor() {
    super();
    this.data = new Float32Array(4 * sampleRate);
    this.clear(null);
    this.port.onmessage = ({ data: message }) => {
      if (message.type === "open") this.clear(message.turn);
      else if (message.turn === this.turn) this[message.type](message);
    };
  }

  clear(turn) {
    this.turn = turn;
    this.head = this.size = this.played = this.underruns = this.starved = this.quanta = 0;
    this.total = null; // samples of the whole turn, once that is known
    this.isFlowing = false;
    this.isAudible = false;
    this.fadeLeft = null;
  }

  push({ samples }) {
    while (this.size + samples.length > this.data.length) this.grow();
    const at = (this.head + this.size) % this.data.length;
    const numFirst = Math.min(samples.length, this.data.length - at);
    this.data.set(samples.subarray(0, numFirst), at);
    this.data.set(samples.subarray(numFirst), 0);
    this.size += samples.length;
  }

  grow() {
    const data = new Float32Array(2 * this.data.length);
    data.set(this.data.subarray(this.head), 0);
    data.set(this.data.subarray(0, this.head), this.data.length - this.head);
    this.data = data;
    this.head = 0;
  }

  end({ total }) {
    this.total = total;
    if (this.size === 0 && !this.isFlowing) this.finish("ended");
  }

  stop() {
    if (this.isFlowing) this.fadeLeft = FADE_SAMPLES;
    else this.finish("stopped", currentTime);
  }

  finish(type, at) {
    const { turn, played, underruns, starved } = this;
    this.clear(null);
    this.port.postMessage({ type, turn, played, underruns, starved, at });
  }

  process(_inputs, [[out]]) {
    if (this.turn === null) return true;
    this.isFlowing ||= this.size >= START_SAMPLES || (this.total !== null && this.size > 0);
    const left = this.total === null ? out.length : Math.max(0, this.total - this.played);
    const num = this.isFlowing ? this.take(out.subarray(0, Math.min(left, out.length))) : 0;
    this.played += num;
    if (!this.isAudible) this.listen(out, num);
    if (this.fadeLeft !== null) this.fade(out);
    else this.judge(num, out.length);
    if (this.turn !== null && ++this.quanta % CLOCK_QUANTA === 0) this.tell();
    return true;
  }

  take(out) {
    const num = Math.min(out.length, this.size);
    const numFirst = Math.min(num, this.data.length - this.head);
    out.set(this.data.subarray(this.head, this.head + numFirst), 0);
    out.set(this.data.subarray(0, num - numFirst), numFirst);
    this.head = (this.head + num) % this.data.length;
    this.size -= num;
    return num;
  }

  listen(out, num) {
    const first = out.findIndex((sample, i) => i < num && Math.abs(sample) > AUDIBLE);
    if (first < 0) return;
    this.isAudible = true;
    const at = currentTime + first / sampleRate;
    this.port.postMessage({ type: "audible", turn: this.turn, at });
  }

  fade(out) {
    for (let i = 0; i < out.length; i++) {
      out[i] *= Math.max(0, this.fadeLeft) / FADE_SAMPLES;
      this.fadeLeft--;
    }
    if (this.fadeLeft <= 0) this.finish("stopped", currentTime + out.length / sampleRate);
  }

  judge(num, numWanted) {
    const isAllThere = this.total !== null;
    if (isAllThere && this.isFlowing && (this.size === 0 || this.played >= this.total)) {
      this.finish("ended");
      return;
    }
    if (this.isFlowing && num < numWanted) {
      this.underruns++;
      this.isFlowing = false;
    }
    if (!this.isFlowing && this.played > 0) this.starved += numWanted - num;
  }

  tell() {
    const { turn, played, underruns, starved } = this;
    this.port.postMessage({ type: "clock", turn, played, underruns, starved });
  }
}

registerProcessor("plosive-ring", Ring);
