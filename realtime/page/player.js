// Packets in, sound out: Opus through WebCodecs (PCM where a browser has none), then the ring.

export const SAMPLE_RATE = 48_000;
const STOP_TIMEOUT_MS = 150; // an interruption does not wait for a sound card that hangs
const START_TIMEOUT_MS = 3_000; // a Bluetooth headset that wakes up takes a second or two

export async function canDecodeOpus() {
  if (!globalThis.AudioDecoder) return false;
  const config = { codec: "opus", sampleRate: SAMPLE_RATE, numberOfChannels: 1 };
  return (await AudioDecoder.isConfigSupported(config)).supported;
}

export class Player {
  // Called with times in milliseconds of `performance.now()`.
  onSamples = (samples) => {};
  onClock = (clock) => {};
  onAudible = (atMs) => {};
  onEnded = (clock) => {};
  onError = (message) => {};

  #context;
  #node;
  #turn = null; // counts the turns of this page, over all its sessions
  #numTurns = 0;
  #decoder = null;
  #toSkip = 0;
  #stopped = null;
  #playedMs = 0;
  #isWatched = false; // this turn

  // Once; needs a page that counts as secure (https, or this computer).
  async prepare() {
    this.#context = new AudioContext({ sampleRate: SAMPLE_RATE, latencyHint: "interactive" });
    await this.#context.audioWorklet.addModule("/page/ring.js");
    const shape = { numberOfInputs: 0, outputChannelCount: [1] };
    this.#node = new AudioWorkletNode(this.#context, "plosive-ring", shape);
    this.#node.port.onmessage = ({ data }) => this.#heard(data);
    this.#node.connect(this.#context.destination);
  }

  // From within a key press or a click: browsers stay silent until one of them.
  wake() {
    this.#context.resume().catch(() => {});
  }

  open(format) {
    this.#turn = ++this.#numTurns;
    this.#playedMs = 0;
    this.#isWatched = false;
    this.#toSkip = format.pre_skip_samples ?? 0;
    this.#closeDecoder();
    if (format.codec === "opus") this.#decoder = this.#makeDecoder(this.#turn);
    this.#post("open");
  }

  push(packet) {
    if (!this.#decoder) {
      const pcm = new Int16Array(packet.payload.slice().buffer);
      this.#play(Float32Array.from(pcm, (sample) => sample / 32_768));
      return;
    }
    const timestamp = Math.round((packet.pts / SAMPLE_RATE) * 1e6);
    this.#decoder.decode(
      new EncodedAudioChunk({ type: "key", timestamp, data: packet.payload }),
    );
  }

  // All packets are here; `total` is the number of samples without pre-skip and padding.
  async finish(total) {
    const turn = this.#turn;
    await this.#decoder?.flush().catch(() => {}); // aborted by an interruption
    if (turn === this.#turn) this.#post("end", { total });
  }

  // Silence, now. Resolves to how much was played and when it fell silent (if that is known).
  async stop() {
    const turn = this.#turn;
    this.#closeDecoder();
    const stopped = new Promise((resolve) => (this.#stopped = resolve));
    this.#post("stop");
    const timeout = new Promise((resolve) => setTimeout(resolve, STOP_TIMEOUT_MS, null));
    const account = await Promise.race([stopped, timeout]);
    if (turn === this.#turn) this.#turn = null;
    return account ?? { playedMs: this.#playedMs, silentAtMs: null };
  }

  #makeDecoder(turn) {
    const decoder = new AudioDecoder({
      output: (audio) => this.#decoded(turn, audio),
      error: (error) => this.onError(`This browser could not decode the audio: ${error.message}`),
    });
    // Without a description the packets are raw Opus, as the server sends them.
    decoder.configure({ codec: "opus", sampleRate: SAMPLE_RATE, numberOfChannels: 1 });
    return decoder;
  }

  #closeDecoder() {
    if (this.#decoder && this.#decoder.state !== "closed") this.#decoder.close();
    this.#decoder = null;
  }

  #decoded(turn, audio) {
    const samples = new Float32Array(audio.numberOfFrames);
    audio.copyTo(samples, { planeIndex: 0, format: "f32-planar" });
    audio.close();
    if (turn === this.#turn) this.#play(samples);
  }

  #play(samples) {
    const numSkipped = Math.min(this.#toSkip, samples.length);
    this.#toSkip -= numSkipped;
    const audible = samples.slice(numSkipped);
    if (audible.length === 0) return;
    if (!this.#isWatched) this.#watch(this.#turn);
    this.onSamples(audible);
    this.#post("push", { samples: audible }, [audible.buffer]);
  }

  // Without an output device some browsers wait for one for ever and say nothing.
  #watch(turn) {
    this.#isWatched = true;
    setTimeout(() => {
      if (turn !== this.#turn || this.#context.state === "running") return;
      this.onError("This browser does not begin to play. Is a loudspeaker connected and allowed?");
    }, START_TIMEOUT_MS);
  }

  #heard(message) {
    if (message.turn !== this.#turn) return;
    const clock = {
      playedMs: toMs(message.played),
      underruns: message.underruns,
      starvedMs: toMs(message.starved),
    };
    if (message.type === "audible") {
      this.onAudible(this.#pageTime(message.at));
      return;
    }
    this.#playedMs = clock.playedMs;
    if (message.type === "clock") this.onClock(clock);
    if (message.type === "ended") this.onEnded(clock);
    if (message.type === "stopped") {
      this.#stopped({ playedMs: clock.playedMs, silentAtMs: this.#pageTime(message.at) });
    }
  }

  // When a sample of that context time comes out of the loudspeaker, on the page's clock.
  #pageTime(contextS) {
    const latencyS = this.#context.outputLatency || this.#context.baseLatency || 0;
    return performance.now() + (contextS - this.#context.currentTime + latencyS) * 1000;
  }

  #post(type, rest = {}, transfer = []) {
    this.#node.port.postMessage({ type, turn: this.#turn, ...rest }, transfer);
  }
}

function toMs(numSamples) {
  return (numSamples / SAMPLE_RATE) * 1000;
}
