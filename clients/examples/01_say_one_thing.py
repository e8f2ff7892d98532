"""Say one sentence and save it. Needs a server: `plosive serve`.

python clients/examples/01_say_one_thing.py [URL] [FILE]
"""

import asyncio
import sys

from clients import PlosiveError, connect, decode_turn, save
from clients.save import check_path


async def main(url: str, path: str) -> None:
    check_path(path)  # before anything is spoken
    async with connect(url) as session:
        speech = session.say("Hello! This sentence left the server while it was being spoken.")
        packets = [packet async for packet in speech]

    metrics = speech.turn.metrics
    assert metrics is not None  # a turn that ends without an exception has them
    samples, sample_rate_hz = decode_turn(packets, session.format, metrics.num_samples)
    save(path, samples, sample_rate_hz)
    print(f"{path}: {metrics.audio_ms:.0f} ms, first audio {speech.turn.timings.ttfa_ms:.0f} ms")


if __name__ == "__main__":
    defaults = ["http://localhost:8765", "hello.wav"]
    arguments = sys.argv[1:]
    if len(arguments) > len(defaults):
        sys.exit(__doc__)
    try:
        asyncio.run(main(*arguments, *defaults[len(arguments) :]))
    except PlosiveError as error:
        sys.exit(error.message)
    except (OSError, ValueError) as error:  # the file cannot be written
        sys.exit(str(error))
