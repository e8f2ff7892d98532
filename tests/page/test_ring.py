"""The page's ring buffer by itself: what it was given comes out, however often it wraps and grows."""

from pathlib import Path

import pytest

from tests.page.support import needs_browser, opened
from tests.realtime.support import serving

# As the audio thread runs it, but without a sound card.
RUN = """
(async (scenario, ...given) => {
  const told = [];
  let Ring;
  Object.assign(globalThis, {
    sampleRate: 48_000,
    currentTime: 0,
    AudioWorkletProcessor: class { port = { postMessage: (message) => told.push(message) }; },
    registerProcessor: (_, made) => (Ring = made),
  });
  await import("/page/ring.js");
  const ring = new Ring();
  return scenario(ring, (message) => ring.port.onmessage({ data: message }), told, ...given);
})
"""

# 12 s, first 1 s ahead and after 3 s `leadS`, and sample i is i + 1. Neither packets nor calls divide
# the ring's room, so both cross its border.
PLAY = """
(ring, say, told, leadS) => {
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
}
"""


@needs_browser
@pytest.mark.parametrize(("lead_s", "room_s"), [(0.1, 4), (2, 4), (7, 8)])
async def test_every_sample_comes_out_once_in_order(
    devtools: str, tmp_path: Path, lead_s: float, room_s: float
) -> None:
    async with serving(tmp_path) as served, opened(devtools, served) as page:
        found = await page.evaluate(f"({RUN})({PLAY}, {lead_s})")
    assert found == {
        "numWrong": 0,
        "type": "ended",
        "playedS": 12,
        "underruns": 0,
        "roomS": room_s,
    }


# Half a second of ones, of which too little is there at first, and then an interruption: what is
# heard before there is enough, and of the fade.
STOP = """
(ring, say, told) => {
  const push = (length) =>
    say({ type: "push", turn: 1, samples: new Float32Array(length).fill(1) });
  const pull = (num) => {
    const heard = [];
    while (heard.length < num) {
      const out = new Float32Array(128);
      ring.process([], [[out]]);
      heard.push(...out);
    }
    return heard;
  };
  say({ type: "open", turn: 1 });
  push(1_919);
  const early = pull(256);
  push(24_000);
  const before = pull(256);
  say({ type: "stop", turn: 1 });
  const after = pull(512);
  const { type, played } = told.at(-1);
  return { early, before, after, type, played };
}
"""


@needs_browser
async def test_it_begins_with_40_ms_and_fades_out_in_5_ms(devtools: str, tmp_path: Path) -> None:
    """One sample less is not enough to begin with; cut at a loud sample, an interruption would click."""
    async with serving(tmp_path) as served, opened(devtools, served) as page:
        found = await page.evaluate(f"({RUN})({STOP})")
    assert not any(found["early"])
    assert found["before"] == [1.0] * 256
    num_fading = 240
    fade = [1.0 - i / num_fading for i in range(num_fading)]
    assert found["after"] == pytest.approx([*fade, *[0.0] * (512 - num_fading)], abs=1e-6)
    assert (found["type"], found["played"]) == ("stopped", 512)
