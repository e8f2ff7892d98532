// Where the time of a turn went, as a table whose last column draws it.

const STAGES = [
  ["first_text", "First word sent", "page"],
  ["commit", "Text complete (commit)", "page"],
  ["prefill_done", "Prefill done", "server"],
  ["first_step", "First step", "server"],
  ["first_pcm", "First PCM", "server"],
  ["first_packet", "First packet sent", "server"],
  ["packet_here", "First packet here", "page"],
  ["audible", "First audible sample", "page"],
];

// Milliseconds on the page's clock; the server's stamps count from the commit, or without one from
// the first word; those that come before its account is complete, always from the first word.
function timesOf(turn) {
  const times = { ...turn.stamps };
  const isComplete = turn.metrics !== null;
  const originMs = isComplete ? (times.commit ?? times.first_text) : times.first_text;
  for (const [name, ms] of Object.entries(turn.metrics?.timeline_ms ?? turn.begun)) {
    times[name] ??= originMs + ms;
  }
  return times;
}

export function drawWaterfall(body, caption, turn) {
  const times = timesOf(turn);
  const drawn = JSON.stringify([times, turn.isInterrupted]);
  if (body.dataset.drawn === drawn) return;
  body.dataset.drawn = drawn;
  const firstSoundMs = times.audible ?? times.packet_here ?? Infinity;
  const isTextLate = times.commit === undefined || times.commit > firstSoundMs; // words still came
  const stages = isTextLate ? [...STAGES.filter(isNotCommit), STAGES[1]] : STAGES;
  const originMs = isTextLate ? times.first_text : times.commit;
  caption.textContent = isTextLate
    ? "Milliseconds from the first word; the sound began before the text was complete."
    : "Milliseconds from the commit.";

  const startMs = times.first_text;
  const shown = stages.filter(([name]) => isNotCommit([name]) || !isTextLate);
  const endMs = Math.max(...shown.map(([name]) => times[name] ?? startMs), startMs + 1);
  let fromMs = startMs;
  const rows = stages.map(([name, label, clock]) => {
    const atMs = times[name];
    const row = makeRow(label, clock, atMs === undefined ? null : atMs - originMs);
    if (atMs !== undefined) {
      const isBeyond = atMs > endMs;
      const beginMs = name === "commit" ? startMs : Math.min(fromMs, atMs);
      place(row.bar, beginMs, Math.min(atMs, endMs), startMs, endMs);
      row.bar.classList.toggle("beyond", isBeyond);
      row.bar.classList.add(name === "commit" ? "text" : clock);
      fromMs = Math.max(fromMs, isBeyond ? fromMs : atMs);
    }
    return row.element;
  });
  body.replaceChildren(...rows);
}

function isNotCommit([name]) {
  return name !== "commit";
}

function makeRow(label, clock, ms) {
  const element = document.createElement("tr");
  const head = document.createElement("th");
  head.scope = "row";
  head.textContent = label;
  const where = cell("where", clock);
  const time = cell("number", ms === null ? "–" : formatMs(ms));
  const track = cell("track", "");
  track.setAttribute("aria-hidden", "true");
  const bar = document.createElement("div");
  bar.className = "bar";
  bar.hidden = ms === null;
  track.append(bar);
  element.append(head, where, time, track);
  return { element, bar };
}

function cell(className, text) {
  const element = document.createElement("td");
  element.className = className;
  element.textContent = text;
  return element;
}

function place(bar, fromMs, toMs, startMs, endMs) {
  const percent = (ms) => (100 * (ms - startMs)) / (endMs - startMs);
  bar.style.marginLeft = `min(${percent(fromMs)}%, 100% - 3px)`;
  bar.style.width = `max(3px, ${percent(toMs) - percent(fromMs)}%)`;
}

export function formatMs(ms) {
  const text = Math.abs(ms) < 10 ? ms.toFixed(1) : Math.round(ms).toLocaleString("en");
  return text.replace("-", "\u2212"); // a minus sign is read aloud, a hyphen is not
}
