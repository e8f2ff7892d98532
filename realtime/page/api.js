// Requests to the server, with the API key that was typed where it asks for one.

const KEY_ITEM = "plosive.key";
let key = sessionStorage.getItem(KEY_ITEM) ?? ""; // until the tab is closed

export function setKey(text) {
  key = text;
  sessionStorage.setItem(KEY_ITEM, text);
}

export class KeyNeeded extends Error {}

// The answer's JSON; throws an Error whose message is a sentence.
export async function request(path, options = {}) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch {
    throw new Error("The server cannot be reached. Is it running?");
  }
  const body = await response.json().catch(() => null);
  const message = body?.error?.message ?? `The server answered with status ${response.status}`;
  if (response.status === 401) {
    throw new KeyNeeded(key ? sentence(message) : "This server needs an API key.");
  }
  if (!response.ok) throw new Error(sentence(message));
  return body;
}

// A browser sets no headers on a WebSocket, so the key is offered as a subprotocol.
export function subprotocols() {
  const escaped = encodeURIComponent(key).replace(/[()]/g, (c) => (c === "(" ? "%28" : "%29"));
  return key ? ["plosive.v1", `plosive.key.${escaped}`] : ["plosive.v1"];
}

// A server's message as a sentence.
export function sentence(message) {
  const text = message.trim();
  const end = /[.!?]$/.test(text) ? "" : ".";
  return text.charAt(0).toUpperCase() + text.slice(1) + end;
}
