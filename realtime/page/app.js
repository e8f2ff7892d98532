// The page: connects what a person does with the session, the player and the drawings.

import { KeyNeeded, sentence, setKey } from "/page/api.js";
import { canDecodeOpus, Player, SAMPLE_RATE } from "/page/player.js";
import { Session } from "/page/session.js";
import { Turn } from "/page/turn.js";
import { fillVoices, VoiceDeleter, VoiceForm } from "/page/voices.js";
import { drawWaterfall, formatMs } from "/page/waterfall.js";
import { Wave } from "/page/wave.js";

const ui = Object.fromEntries(
  [...document.querySelectorAll("[id]")].map((element) => [element.id, element]),
);
const player = new Player();
const wave = new Wave(ui.wave);
let codec = "opus";
let format = null; // as the server says it flows
let voiceName = null;
let turn = null;
let connecting = null; // a promise, while there is one

// ------------------------------------------------------------------------------ the session

const session = new Session({
  audio: (packet) => {
    if (!isSpeaking() || packet.turn !== turn.id) return;
    turn.stamp("packet_here");
    if (packet.seq !== turn.numPackets) return fail("A part of the audio got lost on its way.");
    turn.numPackets++;
    player.push(packet);
  },
  "turn.started": ({ turn_id: id, timeline_ms: timelineMs }) => {
    if (id === turn?.id) turn.begun = timelineMs ?? {};
  },
  "turn.text": ({ turn_id: id, text, audio_ms: audioMs }) => {
    if (id === turn?.id) turn.marks.push({ text, audioMs });
  },
  "turn.done": ({ turn_id: id, metrics }) => {
    if (id !== turn?.id) return;
    turn.metrics = metrics;
    if (isSpeaking()) player.finish(metrics.num_samples);
  },
  "turn.cancelled": (message) => {
    if (message.turn_id !== turn?.id) return;
    turn.metrics ??= message.metrics;
    settle(message.spoken_text, message.played_ms);
  },
  warning: (message) => {
    if (message.code === "unknown_turn") settleAlone();
    else complain(message.message);
  },
  error: (message) => {
    if (message.turn_id === turn?.id) fail(message.message);
    else complain(message.message);
    if (message.param === "voice") fillVoices(ui.voice, voiceName).catch(() => {});
  },
  "session.closing": ({ reason }) => complain(`The session ends soon: ${reason}`),
  lost: (why) => {
    ui.connection.textContent = "Not connected";
    fail(why);
  },
});

function connect() {
  connecting ??= connectOnce().finally(() => (connecting = null));
  return connecting;
}

async function connectOnce() {
  ui.connection.textContent = "Connecting …";
  const voice = ui.voice.value || null;
  try {
    const ready = await session.connect({
      ...(voice && { voice }),
      format: { codec, sample_rate: SAMPLE_RATE },
    });
    showReady(ready);
    session.handlers["session.ready"] = showReady;
    return true;
  } catch (error) {
    ui.connection.textContent = "Not connected";
    complain(error.message);
    await fillVoices(ui.voice, ui.voice.value).catch(() => {}); // it may have been removed
    return false;
  }
}

function showReady(ready) {
  format = ready.format;
  voiceName = ready.voice;
  const how = ready.cached ? "from the cache" : "prefilled";
  const codecName = format.codec === "opus" ? "Opus" : "PCM";
  ui.connection.textContent =
    `Ready: voice ${ready.voice} ${how} in ${formatMs(ready.prefill_ms)} ms, ` +
    `model ${ready.model}, ${codecName}`;
}

// ------------------------------------------------------------------------------ one turn

function isSpeaking() {
  return turn !== null && !turn.isOver && !turn.isStopping;
}

async function speak() {
  if (turn !== null && !turn.isOver) return;
  player.wake();
  complain("");
  const text = ui.text.value;
  if (!text.trim()) return complain("Type something to speak first.");
  if (!session.isOpen && !(await connect())) return;
  if (isSpeaking()) return; // asked for twice while connecting
  turn = new Turn(++session.lastTurn, text);
  wave.clear();
  ui.turn.classList.remove("empty");
  ui.speak.textContent = "Interrupt";
  announce("Speaking.");
  player.open(format);
  turn.stream(session, Number(ui.pace.value), render);
  requestAnimationFrame(renderWhileSpeaking);
}

// The ring falls silent first; then the server learns how much was played.
async function interrupt(pressedMs) {
  if (!isSpeaking()) return;
  const stopping = turn;
  stopping.isStopping = true;
  const { playedMs, silentAtMs } = await player.stop();
  if (stopping.isOver) return;
  stopping.clock.playedMs = playedMs;
  stopping.silentAfterMs = silentAtMs === null ? null : Math.max(0, silentAtMs - pressedMs);
  session.send({ type: "turn.cancel", turn_id: stopping.id, played_ms: playedMs });
  if (!session.isOpen) settleAlone();
}

// The interrupted turn's account, as the server gives it.
function settle(spokenText, playedMs) {
  if (turn.isOver) return;
  const after = turn.silentAfterMs;
  end({ spokenText, isInterrupted: true });
  announce(
    `Interrupted after ${seconds(playedMs)}` +
      (after === null ? ". " : `, silent ${formatMs(after)} ms after the key. `) +
      `Heard: ${spokenText.trim() || "nothing"}. ` +
      `Not heard: ${turn.text.slice(spokenText.length).trim() || "nothing"}`,
  );
}

// ... and when the server knows no more of it.
function settleAlone() {
  if (turn?.isStopping) settle(turn.heardBy(turn.clock.playedMs), turn.clock.playedMs);
}

function fail(message) {
  complain(message);
  if (turn === null || turn.isOver) return;
  player.stop();
  session.send({ type: "turn.cancel", turn_id: turn.id, played_ms: turn.clock.playedMs });
  end({ spokenText: turn.heardBy(turn.clock.playedMs), isInterrupted: true });
}

function end({ spokenText, isInterrupted }) {
  turn.isOver = true;
  turn.spokenText = spokenText;
  turn.isInterrupted = isInterrupted;
  ui.speak.textContent = "Speak";
  render();
}

player.onSamples = (samples) => {
  turn.receivedMs += (samples.length / SAMPLE_RATE) * 1000;
  wave.add(samples);
};
player.onClock = (clock) => (turn.clock = clock);
player.onAudible = (atMs) => turn.stamp("audible", atMs);
player.onError = (message) => fail(message);
player.onEnded = (clock) => {
  if (!isSpeaking()) return;
  turn.clock = clock;
  end({ spokenText: turn.text, isInterrupted: false });
  if (clock.playedMs === 0) return announce("Nothing was spoken.");
  const { value, note } = sinceStart("packet_here");
  const { underruns } = clock;
  announce(
    `Finished: ${seconds(clock.playedMs)} of speech, first audio ${value} ${note}, ` +
      `${underruns === 0 ? "no" : underruns} ${underruns === 1 ? "underrun" : "underruns"}.`,
  );
};

// ------------------------------------------------------------------------------ what is shown

const RENDER_EVERY_MS = 50; // the audio has the right of way
let renderedMs = 0;

function complain(message) {
  ui.problem.textContent = message ? sentence(message) : "";
}

function announce(text) {
  ui.announcer.textContent = text;
}

function seconds(ms) {
  return `${(ms / 1000).toFixed(1)} s`;
}

function renderWhileSpeaking(nowMs) {
  if (turn.isOver) return;
  if (nowMs - renderedMs >= RENDER_EVERY_MS) {
    renderedMs = nowMs;
    render();
  }
  requestAnimationFrame(renderWhileSpeaking);
}

function render() {
  showText();
  showFigure(ui.ttfa, sinceStart("packet_here"));
  showFigure(ui.sound, sinceStart("audible"));
  const { underruns, starvedMs } = turn.clock;
  const lead = turn.isOver ? "–" : `${formatMs(turn.leadMs)} ms`;
  showFigure(ui.lead, { value: lead, note: `${seconds(turn.clock.playedMs)} played` });
  const missed = underruns ? `${formatMs(starvedMs)} ms missed` : "none";
  showFigure(ui.underruns, { value: String(underruns), note: missed });
  const isFinished = turn.isOver && !turn.isInterrupted;
  wave.draw(isFinished ? Infinity : turn.clock.playedMs);
  drawWaterfall(ui.stages, ui.stagesCaption, turn);
}

function showText() {
  const heard = turn.isOver ? turn.spokenText : turn.heardBy(turn.clock.playedMs);
  const rest = (turn.isInterrupted ? turn.text : turn.sent).slice(heard.length);
  const numSpaces = rest.length - rest.trimStart().length;
  setText(ui.heard, heard + rest.slice(0, numSpaces));
  setText(ui.rest, rest.slice(numSpaces));
  ui.rest.classList.toggle("unheard", turn.isInterrupted);
  ui.cut.hidden = !turn.isInterrupted;
  const after = turn.silentAfterMs;
  const silent = after === null ? "" : `, silent after ${formatMs(after)} ms`;
  setText(ui.cut, `interrupted at ${seconds(turn.clock.playedMs)}${silent}`);
}

// From the commit; from the first word where the sound came before the commit.
function sinceStart(name) {
  const { first_text: firstTextMs, [name]: atMs } = turn.stamps;
  if (atMs === undefined) return { value: "–", note: "not yet" };
  const sinceCommitMs = turn.sinceCommit(name);
  if (sinceCommitMs !== null && sinceCommitMs >= 0) {
    return { value: `${formatMs(sinceCommitMs)} ms`, note: "after the commit" };
  }
  return { value: `${formatMs(atMs - firstTextMs)} ms`, note: "after the first word" };
}

function showFigure(element, { value, note }) {
  setText(element.querySelector(".value"), value);
  setText(element.querySelector(".note"), note);
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// ------------------------------------------------------------------------------ the keyboard

function isTyping(element) {
  return element.matches?.("textarea, input, select") ?? false;
}

let swallowSpace = false; // the key's release would press a focused button again

document.addEventListener("keydown", (event) => {
  const isSpace = event.key === " " && !isTyping(event.target);
  if ((event.key === "Escape" || isSpace) && isSpeaking()) {
    event.preventDefault();
    swallowSpace = isSpace;
    interrupt(event.timeStamp);
  } else if (isSpace && swallowSpace) {
    event.preventDefault(); // it is still held down
  } else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    speak();
  }
});
document.addEventListener("keyup", (event) => {
  if (event.key === " " && swallowSpace) {
    event.preventDefault();
    swallowSpace = false;
  }
});

ui.speak.addEventListener("click", (event) => {
  if (isSpeaking()) interrupt(event.timeStamp);
  else speak();
});
ui.voice.addEventListener("change", () => useVoice(ui.voice.value));

// ------------------------------------------------------------------------------ start

function useVoice(name) {
  session.send({ type: "session.update", voice: name });
}

async function chooseVoice(name) {
  await fillVoices(ui.voice, name);
  useVoice(ui.voice.value);
  complain("");
}

async function start() {
  new VoiceForm(ui, chooseVoice);
  new VoiceDeleter(ui, chooseVoice, complain);
  if (!globalThis.isSecureContext || !globalThis.AudioWorkletNode) {
    complain(
      "This browser lets only secure pages play sound: open the page over https, " +
        "or on the server's own machine as http://127.0.0.1.",
    );
    return;
  }
  codec = (await canDecodeOpus()) ? "opus" : "pcm_s16le";
  await player.prepare();
  await enter();
}

// The voices, then the session; or the question for a key.
async function enter() {
  complain("");
  try {
    await fillVoices(ui.voice);
  } catch (error) {
    complain(error.message);
    if (error instanceof KeyNeeded) {
      ui.connection.textContent = "Not connected";
      ui.keyForm.hidden = false;
      ui.apiKey.focus();
      return;
    }
  }
  ui.keyForm.hidden = true;
  await connect();
  ui.speak.disabled = false;
}

ui.keyForm.addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(ui.apiKey.value.trim());
  enter();
});

start();
