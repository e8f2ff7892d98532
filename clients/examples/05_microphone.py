"""A microphone loop: when you speak it falls silent, when you have spoken it answers.

It listens for loudness only; put your speech recognition and your language model into `answer`.
Wear headphones, or it will interrupt itself. Needs a server, `plosive serve`, and
`pip install -e ".[audio]"`.

    python clients/examples/05_microphone.py [URL]
"""

import asyncio
import sys
from collections.abc import AsyncIterator

import numpy as np

from clients import Player, PlosiveError, connect
from clients.decode import Samples
from clients.devices import load_sounddevice

SAMPLE_RATE_HZ = 16_000
BLOCK_MS = 20
SPEECH_DBFS = -38.0
MIN_SPEECH_MS = 100  # louder for so long: speech, and not a door
MIN_SILENCE_MS = 600  # quiet for so long: the speaker has finished


class VoiceActivity:
    """Says when speech begins and when it has ended."""

    def __init__(self) -> None:
        self.is_speech = False
        self.speech_ms = 0
        self._changed_ms = 0  # how long the microphone has disagreed with `is_speech`

    def feed(self, block: Samples) -> str | None:
        """ "began", "ended", or None for no news."""
        power = float(np.mean(np.square(block))) + 1e-10
        is_loud = 10 * np.log10(power) > SPEECH_DBFS
        self._changed_ms = self._changed_ms + BLOCK_MS if is_loud != self.is_speech else 0
        self.speech_ms += BLOCK_MS if self.is_speech else 0
        if self._changed_ms < (MIN_SILENCE_MS if self.is_speech else MIN_SPEECH_MS):
            return None
        self.is_speech, self._changed_ms = not self.is_speech, 0
        if not self.is_speech:
            self.speech_ms -= MIN_SILENCE_MS
            return "ended"
        self.speech_ms = MIN_SPEECH_MS
        return "began"


async def microphone() -> AsyncIterator[Samples]:
    """Blocks of 20 ms, f32 [num_samples]."""
    sounddevice = load_sounddevice()
    loop, blocks = asyncio.get_running_loop(), asyncio.Queue[Samples]()

    def on_block(block: Samples, num_samples: int, time: object, status: object) -> None:
        loop.call_soon_threadsafe(blocks.put_nowait, block[:, 0].copy())

    with sounddevice.InputStream(
        samplerate=SAMPLE_RATE_HZ,
        channels=1,
        dtype="float32",
        blocksize=SAMPLE_RATE_HZ * BLOCK_MS // 1000,
        callback=on_block,
    ):
        while True:
            yield await blocks.get()


def answer(speech_ms: int) -> str:
    """Stands for speech recognition and a language model."""
    return f"You spoke for {speech_ms / 1000:.1f} seconds. Go on, interrupt me whenever you like."


async def converse(player: Player, blocks: AsyncIterator[Samples]) -> None:
    activity = VoiceActivity()
    async for block in blocks:
        match activity.feed(block):
            case "began":
                heard = await player.interrupt()
                if heard.turns:
                    print(f"interrupted; heard: {heard.spoken_text!r}")
            case "ended":
                player.play(answer(activity.speech_ms))


async def main(url: str) -> None:
    async with connect(url) as session, Player(session) as player:
        player.play("Hello! I am listening.")
        await converse(player, microphone())


if __name__ == "__main__":
    try:
        asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8765"))
    except PlosiveError as error:
        sys.exit(error.message)
    except OSError as error:  # no sounddevice, or nothing to play on
        sys.exit(str(error))
