"""Two voices in one conversation: a session each, so that neither waits for the other's prefill.

Needs a server with two voices: `plosive serve`.

    python clients/examples/04_two_voices.py [URL] [FILE]
"""

import asyncio
import sys

import numpy as np

from clients import PlosiveError, Session, connect, decode_turn, save
from clients.decode import Samples
from clients.save import check_path
from clients.voices import list_voices

LINES = (
    "Did you hear that the ferry is late again?",
    "It is always late. I brought a book.",
    "May I read it with you?",
    "Only if you do not talk.",
)
PAUSE_S = 0.25


async def say(session: Session, line: str) -> tuple[Samples, int]:
    speech = session.say(line)
    packets = [packet async for packet in speech]
    assert speech.turn.metrics is not None
    return decode_turn(packets, session.format, speech.turn.metrics.num_samples)


async def main(url: str, path: str) -> None:
    check_path(path)  # before anything is spoken
    voices = await asyncio.to_thread(list_voices, url)
    first, second = voices[0].name, voices[1].name
    async with connect(url, voice=first) as a, connect(url, voice=second) as b:
        # Both speak at once into memory; a player would say one line after the other.
        said = await asyncio.gather(*(say((a, b)[i % 2], line) for i, line in enumerate(LINES)))

    sample_rate_hz = said[0][1]
    pause = np.zeros(int(PAUSE_S * sample_rate_hz), np.float32)
    conversation = np.concatenate([part for samples, _ in said for part in (samples, pause)])
    save(path, conversation, sample_rate_hz)
    print(f"{path}: {first} and {second}, {len(conversation) / sample_rate_hz:.1f} s")


if __name__ == "__main__":
    defaults = ["http://localhost:8765", "conversation.wav"]
    arguments = sys.argv[1:]
    if len(arguments) > len(defaults):
        sys.exit(__doc__)
    try:
        asyncio.run(main(*arguments, *defaults[len(arguments) :]))
    except PlosiveError as error:
        sys.exit(error.message)
    except (OSError, ValueError) as error:  # the file cannot be written
        sys.exit(str(error))
