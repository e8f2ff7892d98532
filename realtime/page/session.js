// One connection of the protocol `plosive.v1`: JSON text frames, binary frames of audio.

import { request, sentence, subprotocols } from "/page/api.js";

const HEADER_BYTES = 16;

export class Session {
  // `handlers[type](message)` for each type of message, and `audio(packet)`, `lost(sentence)`.
  constructor(handlers) {
    this.handlers = handlers;
    this.socket = null;
    this.isReady = false;
    this.lastTurn = 0;
  }

  get isOpen() {
    return this.isReady && this.socket?.readyState === WebSocket.OPEN;
  }

  // Resolves with `session.ready`; rejects with an Error whose message is a sentence.
  connect(start) {
    return new Promise((resolve, reject) => {
      const url = new URL("/v1/realtime", location.href);
      url.protocol = location.protocol === "https:" ? "wss:" : "ws:";
      const socket = new WebSocket(url, subprotocols());
      socket.binaryType = "arraybuffer";
      this.socket = socket;
      this.isReady = false;
      this.lastTurn = 0;
      let fatal = null;
      socket.onopen = () => this.send({ type: "session.start", ...start });
      const take = (data) => {
        if (typeof data !== "string") {
          this.handlers.audio(unpack(data));
          return;
        }
        const message = JSON.parse(data);
        if (message.type === "session.ready") {
          this.isReady = true;
          resolve(message);
        }
        if (message.type === "error" && (message.fatal || !this.isReady)) {
          fatal = sentence(message.message);
          reject(new Error(fatal));
          socket.close();
          return;
        }
        this.handlers[message.type]?.(message);
      };
      socket.onmessage = ({ data }) => {
        try {
          take(data);
        } catch (error) {
          console.error(error);
          fatal = "The server sent something that this page does not understand.";
          socket.close();
        }
      };
      socket.onclose = async ({ code }) => {
        const wasReady = this.isReady && this.socket === socket;
        const why = fatal ?? (wasReady ? whyClosed(code) : await whyRefused());
        reject(new Error(why));
        if (wasReady) this.handlers.lost(why);
      };
    });
  }

  send(message) {
    if (this.socket?.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify(message));
  }
}

function unpack(buffer) {
  const view = new DataView(buffer);
  return {
    isLast: (view.getUint16(2, true) & 1) === 1,
    turn: view.getUint32(4, true),
    seq: view.getUint32(8, true),
    pts: view.getUint32(12, true),
    payload: new Uint8Array(buffer, HEADER_BYTES),
  };
}

function whyClosed(code) {
  const reasons = {
    1000: "The session was closed.",
    1001: "The server is shutting down.",
    1011: "The server had an internal error.",
    4000: "The session was idle for a long time, so the server closed it.",
    4001: "This page could not take the audio fast enough, so the server closed the session.",
  };
  return (reasons[code] ?? "The connection to the server was lost.") + " Speak opens a new one.";
}

// Browsers do not tell why a socket was refused, so the server is asked.
async function whyRefused() {
  try {
    const { ready, reason } = await (await fetch("/ready")).json();
    if (!ready) return `The server is not ready: ${reason}. Try again shortly.`;
    await request("/v1/voices"); // throws where a key or this page's origin is refused
    return "The server refused the connection: all its places are taken. Try again shortly.";
  } catch (error) {
    return error instanceof TypeError ? "The server cannot be reached." : error.message;
  }
}
