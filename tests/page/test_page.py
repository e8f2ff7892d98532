"""The page in a real browser: it speaks, shows where the time went, and falls silent at a key."""

import re
from pathlib import Path

import numpy as np
import pytest

from realtime.pingpong.messages import CancelTurn
from tests.page.browser import CTRL
from tests.page.support import LONG_TEXT, needs_browser, opened, stages_ms, text_of, wait, write
from tests.realtime.support import make_engine, serving

TONE_HZ = 440.0


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
        await write(page, "All of it at once and more than the engine is let say at first.")
        await page.press("Enter", CTRL)
        await wait(page, f"{bars} === 2")  # of what is known before the server has said anything
        assert list(await stages_ms(page)) == ["First word sent", "Text complete (commit)"]
        engine.let(10)
        await wait(page, f"{bars} === 8")  # of the server too, while it speaks
        while_it_speaks = await stages_ms(page)
        assert await text_of(page, "announcer") == "Speaking."
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
        assert at_ms == pytest.approx(while_it_speaks, abs=20.0)  # of clocks that are set anew


@needs_browser
async def test_lead_and_underruns_are_shown_while_it_speaks(devtools: str, tmp_path: Path) -> None:
    figure = "document.querySelector('#{} .value').textContent".format
    engine = make_engine(tmp_path)
    engine.hold()
    engine.let(25)  # a second
    async with serving(tmp_path, engine) as served, opened(devtools, served) as page:
        await write(page, LONG_TEXT)
        await page.press("Enter", CTRL)
        await wait(page, f"/^[1-9][0-9]+ ms$/.test({figure('lead')})")
        assert await page.evaluate(figure("underruns")) == "0"
        assert re.fullmatch(r"[\d.,]+ ms", await page.evaluate(figure("ttfa")))
        await wait(page, f"{figure('underruns')} === '1'")
        assert re.fullmatch(r"[\d.]+ ms", await page.evaluate(figure("lead")))
        engine.let_all()
        await wait(page, f"/^[1-9][0-9,]+ ms$/.test({figure('lead')})")
        await page.press("Escape")
        await wait(page, "textOf('announcer').startsWith('Interrupted')")
        assert await page.evaluate(figure("lead")) == "–"


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
