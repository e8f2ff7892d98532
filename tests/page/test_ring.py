"""The page's ring buffer by itself: what it was given comes out, however often it wraps and grows."""

from pathlib import Path

import pytest

from tests.page.support import needs_browser, opened
from tests.realtime.support import serving

# As the audio thread runs it, but without a sound card: 12 s, first 1 s ahead and after 3 s `leadS`,
# and sample i is i + 1. Neither packets nor calls divide the ring's room, so both cross its border.
PLAY = """
(async (leadS) => {
  const told = [];
  let Ring;
  Object.assign(globalThis, {
    sampleRate: 48_000,
    currentTime: 0,
    AudioWorkletProcessor: class { port = { postMessage: (message) => told.push(message) }; },
    registerProcessor: (_, made) => (Ring = made),
  });
  await import("/page/ring.js");
  const ring = new Ring(), say = (message) => ring.port.onmessage({ data: message });
  const total = 12 * 48_000, out = new Float32Array(133);
  let pushed = 0, numWrong = 0;
  say({ type: "open", turn: 1 });
  while (ring.turn !== null) {
    const aheadS = ring.played < 3 * 48_000 ? 1 : leadS;
    while (pushed < total && pushed - ring.played < aheadS * 48_000) {
      const first = pushed + 1, length = Math.min(pushed ? 960 : 648, total - pushed);
      say({ type: "push", turn: 1, samples: Float32Array.from({ length }, (_, i) => first + i) });
      pushed += length;
      if (pushed === total) say({ type: "end", turn: 1, total });
    }
    const played = ring.played;
    ring.process([], [[out.fill(0)]]);
    const wanted = (i) => (played + i < total ? played + i + 1 : 0);
    numWrong += out.reduce((wrong, sample, i) => wrong + (sample !== wanted(i)), 0);
  }
  const { type, played, underruns } = told.at(-1);
  return { numWrong, type, playedS: played / 48_000, underruns, roomS: ring.data.length / 48_000 };
})
"""


@needs_browser
@pytest.mark.parametrize(("lead_s", "room_s"), [(0.1, 4), (2, 4), (7, 8)])
async def test_every_sample_comes_out_once_in_order(
    devtools: str, tmp_path: Path, lead_s: float, room_s: float
) -> None:
    async with serving(tmp_path) as served, opened(devtools, served) as page:
        found = await page.evaluate(f"{PLAY}({lead_s})")
    assert found == {
        "numWrong": 0,
        "type": "ended",
        "playedS": 12,
        "underruns": 0,
        "roomS": room_s,
    }
