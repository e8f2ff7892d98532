"""Takes the page's pictures of the README anew: `make screenshots`. The embedded model speaks."""

import asyncio
import base64
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clients import Reconnect, connect
from clients.local_server import LocalServer
from tests.page.browser import CHROMIUM, CTRL, Page, chromium, tab
from tests.page.support import EAR, WAIT_FOR_PAGE, wait

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "page"
CAFE = "Good morning! The café opens at half past eight. "
STORY = (
    CAFE + "Let me tell you, in the meantime, how the harbour got its name, which is a long story."
)


@dataclass(frozen=True)
class Scene:
    """What is done before the picture is taken."""

    act: Callable[[Page], Coroutine[Any, Any, None]]
    width: int = 1180
    height: int = 620
    is_dark: bool = False


async def say(page: Page, text: str) -> None:
    await page.evaluate("text.focus(); text.select()")
    await page.type(text)
    await page.press("Enter", CTRL)
    await wait(page, "isLoud()")


async def finish(page: Page) -> None:
    await say(page, CAFE.strip())
    await wait(page, "textOf('announcer').startsWith('Finished')")


async def speak(page: Page) -> None:
    await say(page, STORY)
    await wait(page, "turn && textOf('heard').includes('half')")


async def interrupt(page: Page) -> None:
    await speak(page)
    await page.press("Escape")
    await wait(page, "textOf('announcer').startsWith('Interrupted')")


async def fail(page: Page) -> None:
    await wait(page, "textOf('problem')")


SCENES = {
    "light": Scene(finish),
    "speaking": Scene(speak),
    "dark": Scene(interrupt, is_dark=True),
    "small": Scene(interrupt, width=390, height=844),
    "error": Scene(fail, height=400),
}


@asynccontextmanager
async def all_slots_taken(url: str, name: str) -> AsyncIterator[None]:
    if name != "error":
        yield
        return
    async with connect(url, reconnect=Reconnect(also_first=True)):  # the last tab may still leave
        yield


async def take(devtools: str, url: str, name: str, scene: Scene) -> bytes:
    async with all_slots_taken(url, name), tab(devtools) as page:
        await page.call(
            "Emulation.setDeviceMetricsOverride",
            width=scene.width,
            height=scene.height,
            deviceScaleFactor=1,
            mobile=scene.width < 600,
        )
        await page.call("Emulation.setScrollbarsHidden", hidden=True)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if scene.is_dark else "light"}
        await page.call("Emulation.setEmulatedMedia", features=[scheme])
        await page.before_load(EAR)
        await page.go(url + "/")
        await page.evaluate(WAIT_FOR_PAGE)
        await wait(page, "!speak.disabled")
        await scene.act(page)
        shot = await page.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(shot["data"])


async def main() -> None:
    with (
        LocalServer(["--device", "cpu", "--max-slots", "1"]) as server,
        tempfile.TemporaryDirectory() as profile,
        chromium(Path(profile)) as devtools,
    ):
        for name, scene in SCENES.items():
            file = FOLDER / f"{name}.png"
            file.write_bytes(await take(devtools, server.url, name, scene))
            print(f"{file}: {file.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    if CHROMIUM is None:
        sys.exit("no chromium here; as root, `make browser` installs it")
    asyncio.run(main())
