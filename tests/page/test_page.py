"""The page: its files, and what it does in a real browser with the fake engine behind it."""

import asyncio
import contextlib
import io
import re
import tomllib
import wave
from pathlib import Path

import numpy as np
import pytest

from realtime.auth import ApiKeys
from realtime.page_routes import ASSETS_PATH, FOLDER, MEDIA_TYPES
from realtime.pingpong.messages import CancelTurn, OpenSlot
from tests.fakes import FakeEngine
from tests.page.browser import CTRL, Page
from tests.page.support import LONG_TEXT, needs_browser, opened, stages_ms, text_of, wait, write
from tests.realtime.support import make_engine, serving, session

ROOT = Path(__file__).resolve().parent.parent.parent
FILES = sorted(path.name for path in FOLDER.iterdir())
TONE_HZ = 440.0

# ------------------------------------------------------------------------ without a browser


async def test_every_file_is_served_with_its_type_and_a_strict_policy(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, served.http() as http:
        for name in FILES:
            url = "/" if name == "index.html" else ASSETS_PATH + name
            response = await http.get(url)
            assert response.status_code == 200, name
            assert response.content == (FOLDER / name).read_bytes()
            assert response.headers["content-type"] == MEDIA_TYPES[Path(name).suffix]
            assert response.headers["x-content-type-options"] == "nosniff"
            policy = response.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
            assert "unsafe" not in policy and "*" not in policy and "http" not in policy
            assert (await http.head(url)).status_code == 200
        missing = await http.get(ASSETS_PATH + "nothing.js")
        assert missing.status_code == 404
        assert missing.json()["error"]["code"] == "not_found"


@pytest.mark.parametrize("name", FILES)
def test_files_name_no_other_host_and_nothing_inline(name: str) -> None:
    text = (FOLDER / name).read_text("utf-8").replace('xmlns="http://www.w3.org/2000/svg"', "")
    urls = set(re.findall(r"(?:https?:)?//[\w-]+(?:\.[\w-]+)+", text))
    assert urls <= {"http://127.0.0.1"}  # in a sentence
    assert not re.search(r"<style|\sstyle=|\son\w+=\"|<script(?![^>]*\ssrc=)", text)


def test_files_are_in_the_package() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    patterns = config["tool"]["setuptools"]["package-data"]["*"]
    assert {f"*{Path(name).suffix}" for name in FILES} <= set(patterns)


# ------------------------------------------------------------------------ in a browser


@needs_browser
@pytest.mark.parametrize("codec", ["Opus", "PCM"])
async def test_it_speaks(devtools: str, tmp_path: Path, codec: str) -> None:
    before = "delete window.AudioDecoder;" if codec == "PCM" else ""
    async with serving(tmp_path) as served, opened(devtools, served, before=before) as page:
        assert (await text_of(page, "connection")).endswith(codec)
        text = (
            "A tone of two seconds: it hums, and hums, and hums, and it hums again, and then ends."
        )
        await write(page, text, pace="50")
        await page.press("Enter", CTRL)
        await wait(page, "isLoud()")
        await wait(page, "listen().every((sample, i) => i % 1024 || sample !== 0)")  # full of sound
        assert await page.evaluate("pitchHz()") == pytest.approx(TONE_HZ, abs=3)
        await wait(page, "textOf('announcer').startsWith('Finished')")
        assert await text_of(page, "heard") == text
        pushed = np.array(await page.evaluate("pushed.slice(0, 48000)"))
        t_s = np.arange(len(pushed)) / 48_000
        in_phase = np.sin(2 * np.pi * TONE_HZ * t_s[4800:])
        assert np.corrcoef(pushed[4800:], in_phase)[0, 1] > 0.97  # its loudness varies a little
        (frames,) = served.engine.emitted.values()
        duration_s = len(frames) / served.engine.info.frame_rate_hz
        assert f": {duration_s:.1f} s of speech" in await text_of(page, "announcer")
        figures = [await text_of(page, name) for name in ("ttfa", "sound")]
        assert all(re.search(r"[\d.,]+ ms", figure) for figure in figures), figures
        assert await text_of(page, "problem") == ""
        assert page.complaints == []


@needs_browser
async def test_the_waterfall_shows_every_stage_in_order(devtools: str, tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    engine.hold()
    bars = "[...document.querySelectorAll('#stages .bar')].filter((bar) => !bar.hidden).length"
    async with serving(tmp_path, engine) as served, opened(devtools, served) as page:
        await write(page, "All of it at once.")
        await page.press("Enter", CTRL)
        await wait(page, f"{bars} === 2")  # of what is known before the server has said anything
        assert list(await stages_ms(page)) == ["First word sent", "Text complete (commit)"]
        engine.let_all()
        await wait(page, "textOf('announcer').startsWith('Finished')")
        at_ms = await stages_ms(page)
        assert await page.evaluate(bars) == len(at_ms)
        assert list(at_ms) == [
            "First word sent",
            "Text complete (commit)",
            "Prefill done",
            "First step",
            "First PCM",
            "First packet sent",
            "First packet here",
            "First audible sample",
        ]
        stages = list(at_ms.values())
        assert stages == sorted(stages)


@needs_browser
@pytest.mark.parametrize("key", ["Escape", " "])
async def test_a_key_silences_it_within_100_ms(devtools: str, tmp_path: Path, key: str) -> None:
    async with serving(tmp_path) as served, opened(devtools, served) as page:
        await write(page, LONG_TEXT)
        await page.press("Enter", CTRL)
        await wait(page, "isLoud() && textOf('heard').length > 20")
        if key == " ":
            await page.evaluate("speak.focus()")  # in the text, a space is a space
        await page.press(key)
        await wait(page, "ear.context.currentTime > pressedS + 0.4")
        last_sound_s, pressed_s = await page.evaluate("[lastSoundS(), pressedS]")
        assert -0.05 < last_sound_s - pressed_s < 0.1

        await wait(page, "textOf('announcer').startsWith('Interrupted')")
        heard, rest = await text_of(page, "heard"), await text_of(page, "rest")
        assert heard + rest == LONG_TEXT
        assert heard.strip() and rest.strip()
        assert "interrupted at" in await text_of(page, "cut")
        assert len(served.engine.seen(CancelTurn)) == 1
        found = re.search(r"after ([\d.]+) s", await text_of(page, "announcer"))
        assert found is not None
        played_s = float(found[1])
        assert len(heard) / 2 * 0.04 == pytest.approx(played_s, abs=0.5)

        await write(page, "And again.")
        await page.press("Enter", CTRL)
        await wait(page, "textOf('announcer').startsWith('Finished')")
        assert await text_of(page, "heard") == "And again."
        assert page.complaints == []


@needs_browser
async def test_an_interrupted_turn_shows_the_servers_stages(devtools: str, tmp_path: Path) -> None:
    engine = make_engine(tmp_path, frame_s=0.01)
    async with serving(tmp_path, engine) as served, opened(devtools, served) as page:
        await write(page, LONG_TEXT)
        await page.press("Enter", CTRL)
        await wait(page, "isLoud()")
        await page.press("Escape")
        await wait(page, "textOf('announcer').startsWith('Interrupted')")
        at_ms = await stages_ms(page)
        assert {"Text complete (commit)", "First PCM", "First packet sent"} <= set(at_ms)
        assert 0 < at_ms["First PCM"] <= at_ms["First packet sent"] <= at_ms["First packet here"]


@needs_browser
async def test_an_interruption_also_ends_text_that_still_comes(
    devtools: str, tmp_path: Path
) -> None:
    async with serving(tmp_path) as served, opened(devtools, served) as page:
        await write(page, LONG_TEXT, pace="15")
        await page.press("Enter", CTRL)
        await wait(page, "isLoud()")
        await page.press("Escape")
        await wait(page, "textOf('announcer').startsWith('Interrupted')")
        shown = await text_of(page, "heard") + await text_of(page, "rest")
        assert shown == LONG_TEXT  # with the words that were never sent
        sent = sum(len(c.text) for c in served.engine.commands if hasattr(c, "text"))
        assert sent < len(LONG_TEXT) / 2
        at_ms = await stages_ms(page)
        assert "Text complete (commit)" not in at_ms
        assert at_ms["First word sent"] == 0.0
        stages = [at_ms[name] for name in ("First PCM", "First packet sent", "First packet here")]
        assert stages == sorted(stages)


@needs_browser
async def test_the_keyboard_is_enough(devtools: str, tmp_path: Path) -> None:
    async with serving(tmp_path) as served, opened(devtools, served) as page:
        order = []
        for _ in range(5):
            await page.press("Tab")
            order.append(await page.evaluate("document.activeElement.id || 'summary'"))
        assert order == ["text", "voice", "pace", "speak", "summary"]
        await page.press("Enter")
        assert await page.evaluate("document.querySelector('details').open")

        await write(page, LONG_TEXT)
        await page.evaluate("speak.focus()")
        await page.press(" ")
        await wait(page, "isLoud()")
        assert await text_of(page, "speak") == "Interrupt"
        await page.evaluate("text.focus()")
        await page.press(" ")  # typed, not obeyed
        assert (await page.evaluate("text.value.length")) == len(LONG_TEXT) + 1
        assert await text_of(page, "speak") == "Interrupt"
        await page.evaluate("speak.focus()")
        await page.press(" ")
        await wait(page, "textOf('announcer').startsWith('Interrupted')")
        assert await text_of(page, "speak") == "Speak"
        assert await page.evaluate("document.activeElement.id") == "speak"


@needs_browser
async def test_every_control_has_a_name(devtools: str, tmp_path: Path) -> None:
    async with serving(tmp_path) as served, opened(devtools, served) as page:
        await page.evaluate("document.querySelector('details').open = true")
        tree = await page.call("Accessibility.getFullAXTree")
        roles = {"textbox", "combobox", "button", "table", "DisclosureTriangle", "region"}
        controls = [
            (node["role"]["value"], node["name"]["value"])
            for node in tree["nodes"]
            if not node["ignored"] and node["role"]["value"] in roles
        ]
        assert len(controls) >= 9
        assert all(name for _, name in controls), controls


@needs_browser
@pytest.mark.parametrize("width", [320, 390, 768])
async def test_small_screens_need_no_sideways_scrolling(
    devtools: str, tmp_path: Path, width: int
) -> None:
    async with serving(tmp_path) as served, opened(devtools, served) as page:
        await page.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=800,
            deviceScaleFactor=1,
            mobile=True,
        )
        await page.evaluate("document.querySelector('details').open = true")
        await write(page, "A few words, and a wordthatisverylongandstillhastofitintothepage " * 3)
        await page.press("Enter", CTRL)
        await wait(page, "isLoud()")
        await page.press("Escape")
        await wait(page, "textOf('announcer').startsWith('Interrupted')")
        assert await page.evaluate("document.documentElement.scrollWidth") <= width


@needs_browser
async def test_the_two_lists_are_as_wide_as_the_text_beside_a_hidden_button(
    devtools: str, tmp_path: Path
) -> None:
    async with serving(tmp_path) as served, opened(devtools, served) as page:
        await page.call(
            "Emulation.setDeviceMetricsOverride",
            width=360,
            height=800,
            deviceScaleFactor=1,
            mobile=True,
        )
        width_of = "document.getElementById({!r}).getBoundingClientRect().width"
        widths = [await page.evaluate(width_of.format(name)) for name in ("text", "voice", "pace")]
        assert widths == widths[:1] * 3


# ------------------------------------------------------------------------ errors


@needs_browser
async def test_a_full_server_is_a_sentence_and_speak_tries_again(
    devtools: str, tmp_path: Path
) -> None:
    engine = make_engine(tmp_path, num_slots=1)
    async with serving(tmp_path, engine) as served:
        async with session(served), contextlib.AsyncExitStack() as stack:
            page = await stack.enter_async_context(opened(devtools, served))
            assert await text_of(page, "problem") == (
                "The server refused the connection: all its places are taken. Try again shortly."
            )
            stack_for_later = stack.pop_all()
        async with stack_for_later:
            await served.until_free()
            await page.evaluate("speak.click()")
            await wait(page, "isLoud()")
            assert await text_of(page, "problem") == ""


@needs_browser
async def test_a_failing_engine_is_a_sentence(devtools: str, tmp_path: Path) -> None:
    async with serving(tmp_path) as served, opened(devtools, served) as page:
        await write(page, LONG_TEXT)
        await page.press("Enter", CTRL)
        await wait(page, "isLoud()")
        served.engine.die()
        await wait(page, "textOf('problem')")
        assert re.fullmatch(r"[A-Z].*[.]", await text_of(page, "problem"))
        assert await text_of(page, "connection") == "Not connected"
        assert await text_of(page, "speak") == "Speak"


@needs_browser
async def test_nothing_to_say_is_a_sentence(devtools: str, tmp_path: Path) -> None:
    async with serving(tmp_path) as served, opened(devtools, served) as page:
        await page.evaluate("text.value = '  '; speak.click()")
        assert await text_of(page, "problem") == "Type something to speak first."
        await write(page, "...")
        await page.press("Enter", CTRL)
        await wait(page, "textOf('announcer') === 'Nothing was spoken.'")
        assert "has nothing that can be spoken" in await text_of(page, "problem")
        assert await text_of(page, "speak") == "Speak"


@needs_browser
async def test_a_page_that_may_not_play_says_what_to_do(devtools: str, tmp_path: Path) -> None:
    """A browser gives a page from another machine over plain http no AudioWorklet."""
    before = "delete window.AudioWorkletNode;"
    async with (
        serving(tmp_path) as served,
        opened(devtools, served, before=before, until="textOf('problem')") as page,
    ):
        assert "open the page over https" in await text_of(page, "problem")
        assert await page.evaluate("speak.disabled")


@needs_browser
async def test_a_key_is_asked_for_and_used(devtools: str, tmp_path: Path) -> None:
    key = "a_(longer)_key/with+signs"
    keys = ApiKeys([key])
    async with (
        serving(tmp_path, keys=keys) as served,
        opened(devtools, served, until="textOf('problem')") as page,
    ):
        assert await text_of(page, "problem") == "This server needs an API key."
        assert await page.evaluate("document.activeElement.id") == "apiKey"
        await page.type("not the key of this server")
        await page.press("Enter")
        await wait(page, "textOf('problem') === \"The API key is not one of this server's.\"")
        await page.evaluate("apiKey.select()")
        await page.type(key)
        await page.press("Enter")
        await wait(page, "textOf('connection').startsWith('Ready')")
        assert await page.evaluate("keyForm.hidden") and await text_of(page, "problem") == ""
        await page.evaluate("speak.click()")
        await wait(page, "isLoud()")


# ------------------------------------------------------------------------ voices


def wav(duration_s: float) -> bytes:
    rate = 16_000
    pcm = (8_000 * np.sin(np.arange(int(rate * duration_s)) * 0.1)).astype("<i2")
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, rate, len(pcm), "NONE", ""))
        writer.writeframes(pcm.tobytes())
    return file.getvalue()


async def fill_in(page: Page, name: str) -> None:
    await page.evaluate(
        "document.querySelector('details').open = true;"
        f"voiceName.value = {name!r}; voiceText.value = 'What she says.'"
    )


def opened_voices(engine: FakeEngine) -> list[str]:
    commands = [command for command in engine.commands if isinstance(command, OpenSlot)]
    return [command.voices[0].name for command in commands]


@needs_browser
async def test_an_uploaded_voice_is_listed_and_spoken_with(devtools: str, tmp_path: Path) -> None:
    clip, bad_clip = tmp_path / "anna.wav", tmp_path / "bad.wav"
    clip.write_bytes(wav(1.0))
    bad_clip.write_bytes(b"no sound at all")
    async with serving(tmp_path) as served, opened(devtools, served) as page:
        assert await page.evaluate("[...voice.options].map((o) => o.value)") == ["tone"]
        await fill_in(page, "anna")
        await page.evaluate("addVoice.requestSubmit()")
        assert await text_of(page, "voiceState") == "Record a clip or choose a file first."

        await page.choose_file("#clip", bad_clip)
        await page.evaluate("addVoice.requestSubmit()")
        await wait(page, "textOf('voiceState').startsWith('Not audio')")

        await page.choose_file("#clip", clip)
        await page.evaluate("addVoice.requestSubmit()")
        await wait(page, "textOf('voiceState').includes('has been added')")
        assert await page.evaluate("voice.value") == "anna"
        await wait(page, "textOf('connection').startsWith('Ready: voice anna')")
        assert opened_voices(served.engine) == ["tone", "anna"]


@needs_browser
async def test_an_added_voice_is_deleted_by_a_button_pressed_twice(
    devtools: str, tmp_path: Path
) -> None:
    async with serving(tmp_path) as served, served.http() as http:
        for name in ("anna", "bob"):
            files = {"file": wav(1.0)}
            form = {"name": name, "text": "words"}
            assert (await http.post("/v1/voices", data=form, files=files)).status_code == 201
        async with opened(devtools, served) as page:
            assert await page.evaluate("deleteVoice.hidden"), "the built-in one is chosen"
            choose = "voice.value = {!r}; voice.dispatchEvent(new Event('change'))"
            await page.evaluate(choose.format("anna"))
            await page.evaluate("deleteVoice.focus(); deleteVoice.click()")
            assert await text_of(page, "deleteVoice") == "Delete for good"
            assert "Press again to delete the voice “anna”" in await text_of(page, "announcer")
            await page.evaluate("text.focus()")
            assert await text_of(page, "deleteVoice") == "Delete", "asked anew"

            await page.evaluate("deleteVoice.click(); deleteVoice.click()")
            await wait(page, "textOf('announcer').includes('“anna” has been deleted')")
            names = await page.evaluate("[...voice.options].map((o) => o.value)")
            assert names == ["tone", "bob"]
            assert await page.evaluate("voice.value") == "tone"
            assert await page.evaluate("deleteVoice.hidden")
            await wait(page, "textOf('connection').startsWith('Ready: voice tone')")

            await page.evaluate(choose.format("bob"))
            assert (await http.delete("/v1/voices/bob")).status_code == 204
            await page.evaluate("deleteVoice.click(); deleteVoice.click()")
            await wait(page, "textOf('problem').includes('no voice')")
            assert [c for c in page.complaints if "404" not in c] == []


class AnyClipEngine(FakeEngine):
    """Takes every clip for a second of sound."""

    clip = b""

    def encode_voice(self, clip: bytes, max_seconds: float) -> np.ndarray:
        self.clip = clip
        return super().encode_voice(wav(1.0), max_seconds)


@needs_browser
async def test_a_recorded_voice(devtools: str, tmp_path: Path) -> None:
    builtin = make_engine(tmp_path).info.builtin_voices_path
    engine = AnyClipEngine(builtin_voices_path=builtin)
    async with serving(tmp_path, engine) as served, opened(devtools, served) as page:
        await fill_in(page, "recorded")
        await page.evaluate("record.click()")
        await wait(page, "textOf('record') === 'Stop (1 s)'")
        await page.evaluate("record.click()")
        await wait(page, "textOf('voiceState').startsWith('Recorded')")
        await page.evaluate("addVoice.requestSubmit()")
        await wait(page, "textOf('voiceState').includes('has been added')")
        assert engine.clip.startswith(b"\x1a\x45\xdf\xa3")  # WebM, what Chromium records
        assert page.complaints == []


# ------------------------------------------------------------------------ a browser without sound


@needs_browser
async def test_a_browser_that_does_not_begin_to_play_says_so(devtools: str, tmp_path: Path) -> None:
    """Firefox without an output device: its AudioContext stays suspended, and is never refused."""
    before = """
    const Running = AudioContext;
    window.AudioContext = class extends Running {
      constructor(options) { super(options); this.suspend(); }
      resume() { return new Promise(() => {}); }
    };
    """
    async with serving(tmp_path) as served, opened(devtools, served, before=before) as page:
        await write(page, LONG_TEXT)
        await page.press("Enter", CTRL)
        await wait(page, "textOf('problem')")
        assert "does not begin to play" in await text_of(page, "problem")
        assert await text_of(page, "speak") == "Speak"
        await asyncio.to_thread(
            served.engine.wait_until, lambda: bool(served.engine.seen(CancelTurn))
        )
