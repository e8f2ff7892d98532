"""Voices that are uploaded, recorded and deleted on the page."""

import io
import wave
from pathlib import Path

import numpy as np

from realtime.pingpong.messages import OpenSlot
from tests.fakes import FakeEngine
from tests.page.browser import Page
from tests.page.support import needs_browser, opened, text_of, wait
from tests.realtime.support import make_engine, serving


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
        assert "is chosen. The clip holds 1.0 s of speech" in await text_of(page, "voiceState")
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
