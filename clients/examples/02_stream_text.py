"""Speak text while it is still being written, as a language model writes it.

The first clause is spoken before the last word exists. Needs a server: `plosive serve`.

    python clients/examples/02_stream_text.py [URL]
"""

import asyncio
import sys
from collections.abc import AsyncIterator

from clients import AudioPacket, Decoder, PlosiveError, TurnText, connect

REPLY = "Of course. Your table for four is booked, tonight at half past seven. See you then!"


async def language_model() -> AsyncIterator[str]:
    """Stands for the token stream of a real one."""
    for word in REPLY.split(" "):
        yield word + " "
        await asyncio.sleep(0.03)


async def main(url: str) -> None:
    async with connect(url) as session, session.turn() as turn, asyncio.TaskGroup() as tasks:

        async def write() -> None:
            async for piece in language_model():
                await turn.append(piece)
            await turn.commit()

        tasks.create_task(write())
        decoder = Decoder(session.format)
        num_samples = 0
        async for event in turn:
            match event:
                case AudioPacket():
                    num_samples += len(decoder.decode(event))  # give these to your player
                case TurnText(text=text, audio_ms=audio_ms):
                    print(f"{audio_ms:6.0f} ms  {text}")

    seconds = num_samples / decoder.sample_rate_hz
    print(
        f"{seconds:.1f} s, first audio {turn.timings.ttfa_from_first_text_ms:.0f} ms after a word"
    )


if __name__ == "__main__":
    try:
        asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8765"))
    except PlosiveError as error:
        sys.exit(error.message)
