"""Barge-in: stop speaking, learn what was heard, and answer at once on the same session.

Needs a server: `plosive serve`.

    python clients/examples/03_interrupt.py [URL]
"""

import asyncio
import sys

from clients import PlosiveError, connect
from realtime.wire import PACKET_MS

STORY = "Let me tell you a very long story about a small town where nothing ever happened at all."


async def main(url: str) -> None:
    async with connect(url) as session:
        speech = session.say(STORY)
        played_ms = 0.0
        async for _ in speech:
            played_ms += PACKET_MS  # a real player knows how much has left the loudspeaker
            if played_ms >= 200:  # the user begins to talk
                heard = await session.interrupt(played_ms=played_ms)
        print(f"heard:   {heard.spoken_text!r}")
        print(f"unheard: {heard.remaining_text!r}")

        num_packets = 0
        answer = session.say("Sorry, go ahead.")
        async for _ in answer:
            num_packets += 1
        print(
            f"answer:  {num_packets} packets, first one after {answer.turn.timings.ttfa_ms:.0f} ms"
        )


if __name__ == "__main__":
    try:
        asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8765"))
    except PlosiveError as error:
        sys.exit(error.message)
