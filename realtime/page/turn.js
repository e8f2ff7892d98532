// One reply: its text on the way to the server, its time stamps, and which text was heard.

export class Turn {
  // `unsent` holds words with the spaces after them; `stamps` are in ms of `performance.now()`.
  constructor(id, text) {
    this.id = id;
    this.unsent = text.match(/\s*\S+\s*/g) ?? [];
    this.sent = "";
    this.isOver = false; // played to its end, interrupted or failed
    this.isStopping = false;
    this.isInterrupted = false;
    this.spokenText = ""; // once it is over
    this.silentAfterMs = null; // from the key to silence, if known
    this.numPackets = 0;
    this.marks = []; // {text spoken by then, audioMs}
    this.stamps = {};
    this.begun = {}; // the server's stamps by its first packet, in ms from the first word
    this.metrics = null; // its whole account, in the end
    this.receivedMs = 0;
    this.clock = { playedMs: 0, underruns: 0, starvedMs: 0 };
  }

  stamp(name, atMs = performance.now()) {
    this.stamps[name] ??= atMs;
  }

  // Sends word by word as a language model would, or everything at once.
  stream(session, wordsPerS, onProgress) {
    const step = () => {
      if (this.isOver || this.isStopping) return;
      const numWords = wordsPerS > 0 ? 1 : this.unsent.length;
      const text = this.unsent.splice(0, numWords).join("");
      this.sent += text;
      this.stamp("first_text");
      session.send({ type: "text.append", turn_id: this.id, text });
      if (this.unsent.length > 0) {
        setTimeout(step, 1000 / wordsPerS);
      } else {
        session.send({ type: "turn.commit", turn_id: this.id });
        this.stamp("commit");
      }
      onProgress();
    };
    step();
  }

  get text() {
    return this.sent + this.unsent.join("");
  }

  get leadMs() {
    return Math.max(0, this.receivedMs - this.clock.playedMs);
  }

  // What the marks say was heard after `playedMs`.
  heardBy(playedMs) {
    return this.marks.findLast((mark) => mark.audioMs <= playedMs + 1)?.text ?? "";
  }

  sinceCommit(name) {
    const { commit, [name]: atMs } = this.stamps;
    return commit === undefined || atMs === undefined ? null : atMs - commit;
  }
}
