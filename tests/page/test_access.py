"""The page by keyboard, by screen reader and on small screens."""

from pathlib import Path

import pytest

from tests.page.browser import CTRL
from tests.page.support import LONG_TEXT, needs_browser, opened, text_of, wait, write
from tests.realtime.support import serving


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
        hint = "document.getElementById('keys').innerText.split(/\\s+/).join(' ')"
        assert await page.evaluate(hint) == "Ctrl Enter speaks Esc or Space interrupts"
        await page.evaluate("text.focus()")
        assert await page.evaluate(hint) == "Ctrl Enter speaks Esc interrupts"
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
