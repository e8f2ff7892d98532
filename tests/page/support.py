"""The page in a tab of a real browser, an ear at its loudspeaker, and what its tests ask of it."""

import contextlib
from collections.abc import AsyncIterator

import pytest

from tests.page.browser import CHROMIUM, Page, tab
from tests.realtime.support import Served

LONG_TEXT = "one two three four five six seven eight nine ten. " * 20  # 20 s of the fake voice

needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium here; as root, `make browser` installs it"
)

# Before the page's own scripts: an ear at the loudspeaker, and the audio clock's time of each key.
EAR = """
const connect = AudioNode.prototype.connect;
AudioNode.prototype.connect = function (to, ...rest) {
  if (to instanceof AudioDestinationNode) {
    window.ear = this.context.createAnalyser();
    ear.fftSize = 32768;
    window.heard = new Float32Array(ear.fftSize);
    connect.call(this, ear);
  }
  return connect.call(this, to, ...rest);
};
addEventListener("keydown", (event) => {
  const agoMs = performance.now() - event.timeStamp;
  if (window.ear) window.pressedS = ear.context.currentTime - agoMs / 1000;
}, true);

window.pushed = []; // the samples that the ring was given
const post = MessagePort.prototype.postMessage;
MessagePort.prototype.postMessage = function (message, ...rest) {
  if (message?.type === "push") pushed.push(...message.samples);
  return post.call(this, message, ...rest);
};

window.until = (test) => new Promise((resolve) => {
  const look = () => { const found = test(); found ? resolve(found) : setTimeout(look, 5); };
  look();
});
window.listen = () => { ear.getFloatTimeDomainData(heard); return heard; };
window.isLoud = () => window.ear && listen().slice(-2048).some((sample) => Math.abs(sample) > 0.05);
window.lastSoundS = () => {
  const last = listen().findLastIndex((sample) => Math.abs(sample) > 0.001);
  return ear.context.currentTime - (heard.length - 1 - last) / ear.context.sampleRate;
};
window.pitchHz = () => {
  const levels = new Float32Array(ear.frequencyBinCount);
  ear.getFloatFrequencyData(levels);
  return levels.indexOf(Math.max(...levels)) * ear.context.sampleRate / ear.fftSize;
};
window.textOf = (id) => document.getElementById(id).textContent;
"""


@contextlib.asynccontextmanager
async def opened(
    devtools: str, served: Served, *, before: str = "", until: str = "!speak.disabled"
) -> AsyncIterator[Page]:
    """The page in a tab, ready to speak."""
    async with tab(devtools) as page:
        await page.before_load(EAR + before)
        await page.go(f"http://127.0.0.1:{served.port}/")
        await page.evaluate(WAIT_FOR_PAGE)
        await wait(page, until)
        yield page


WAIT_FOR_PAGE = """new Promise((resolve) => {
  const look = () => document.getElementById("speak") ? resolve() : setTimeout(look, 5);
  look();
})"""


async def wait(page: Page, condition: str) -> None:
    await page.evaluate(f"until(() => {condition})")


async def write(page: Page, text: str, pace: str = "0") -> None:
    await page.evaluate(f"pace.value = {pace!r}; text.focus(); text.select()")
    await page.type(text)


async def text_of(page: Page, element_id: str) -> str:
    found = await page.evaluate(f"textOf({element_id!r})")
    assert isinstance(found, str)
    return found


async def stages_ms(page: Page) -> dict[str, float]:
    """The waterfall's rows that have a time."""
    rows = await page.evaluate(
        "[...document.querySelectorAll('#stages tr')]"
        ".map((row) => [row.cells[0].textContent, row.cells[2].textContent])"
    )
    shown = [(label, ms) for label, ms in rows if ms != "–"]
    return {label: float(ms.replace("−", "-").replace(",", "")) for label, ms in shown}
