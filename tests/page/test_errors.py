"""What goes wrong on the page is a sentence that says what to do."""

import asyncio
import contextlib
import re
from pathlib import Path

from realtime.auth import ApiKeys
from realtime.pingpong.messages import CancelTurn
from tests.page.browser import CTRL
from tests.page.support import LONG_TEXT, needs_browser, opened, text_of, wait, write
from tests.realtime.support import make_engine, serving, session


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
