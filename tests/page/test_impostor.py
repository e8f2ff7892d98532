"""The page in front of a server that sends it markup, or what is no message at all."""

import json
from pathlib import Path

import pytest

from tests.page.browser import CTRL
from tests.page.support import needs_browser, opened, text_of, wait, write
from tests.realtime.support import serving

MARKUP = "<img src=x onerror=window.xss=1><script>window.xss=1</script>"

# In place of the server: its messages are in `script`, and come when the page speaks.
IMPOSTOR = """
window.WebSocket = class {
  static OPEN = 1;
  readyState = 1;
  constructor() { setTimeout(() => this.onopen()); }
  say(message) { this.onmessage({ data: message }); }
  send(text) {
    const { type } = JSON.parse(text);
    const format = { codec: "pcm_s16le", sample_rate: 48000, pre_skip_samples: 0 };
    const ready = { type: "session.ready", voice: MARKUP, model: MARKUP, format, prefill_ms: 1 };
    if (type === "session.start") setTimeout(() => this.say(JSON.stringify(ready)));
    if (type === "turn.commit") for (const message of script) setTimeout(() => this.say(message));
  }
  close() { this.readyState = 3; setTimeout(() => this.onclose({ code: 1006 })); }
};
const ask = fetch;
window.fetch = async (path, options) => path !== "/v1/voices" ? ask(path, options) :
  new Response(JSON.stringify({ default: MARKUP, voices: [{ name: MARKUP, is_builtin: false }] }));
"""


def impostor(*script: str) -> str:
    values = f"window.MARKUP = {json.dumps(MARKUP)}; window.script = {json.dumps(script)};"
    return values + IMPOSTOR


@needs_browser
@pytest.mark.parametrize(
    "message",
    [
        {"type": "error", "turn_id": 1, "message": MARKUP, "fatal": False},
        {"type": "error", "message": MARKUP, "fatal": True},
        {"type": "warning", "code": "x", "message": MARKUP},
        {"type": "session.closing", "reason": MARKUP},
        {"type": "turn.cancelled", "turn_id": 1, "spoken_text": MARKUP, "played_ms": 1},
    ],
    ids=lambda message: message["type"],
)
async def test_markup_in_a_message_is_shown_as_text(
    devtools: str, tmp_path: Path, message: dict[str, object]
) -> None:
    text = json.dumps({"type": "turn.text", "turn_id": 1, "text": MARKUP, "audio_ms": 0})
    before = impostor(text, json.dumps(message))
    async with serving(tmp_path) as served, opened(devtools, served, before=before) as page:
        assert MARKUP in await text_of(page, "connection")
        await write(page, MARKUP)
        await page.press("Enter", CTRL)
        await wait(page, "textOf('problem') || textOf('announcer').startsWith('Interrupted')")
        assert await page.evaluate("voice.value") == MARKUP
        assert await page.evaluate("document.querySelector('img, main script')") is None
        assert await page.evaluate("window.xss") is None
        assert page.complaints == []


@needs_browser
@pytest.mark.parametrize("message", ["{", "null", '{"type": "error", "message": 7}'])
async def test_a_message_that_means_nothing_ends_the_session_with_a_sentence(
    devtools: str, tmp_path: Path, message: str
) -> None:
    before = impostor(message)
    async with serving(tmp_path) as served, opened(devtools, served, before=before) as page:
        await write(page, "Hello.")
        await page.press("Enter", CTRL)
        await wait(page, "textOf('problem')")
        assert "does not understand" in await text_of(page, "problem")
        assert await text_of(page, "speak") == "Speak"
