"""A text said as one turn, while its audio is read."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable
from contextlib import aclosing

from clients.protocol import TurnEvent
from clients.turn import Turn
from realtime.errors import SessionError, shorten
from realtime.wire import AudioPacket

TextSource = str | Iterable[str] | AsyncIterable[str]


class Speech:
    """A turn that says a text: iterate it for its packets. Made by `Session.say`.

    The text is sent when iteration begins, and while audio is read. Leaving the loop early cancels
    the turn. `turn` has the timings, the server's metrics and its warnings: that words were left out,
    say, or that there was nothing to speak.

    Example:
        packets = [packet async for packet in speech]
        for warning in speech.turn.warnings:
            print(warning.code, warning.message)
    """

    def __init__(self, turn: Turn, text: TextSource) -> None:
        self.turn = turn
        self._text = text
        self._is_said = False

    async def __aiter__(self) -> AsyncGenerator[AudioPacket, None]:
        async with aclosing(self.events()) as events:
            async for event in events:
                if isinstance(event, AudioPacket):
                    yield event

    async def events(self) -> AsyncGenerator[TurnEvent, None]:
        """The turn's events, as iterating the turn gives them, while the text is sent.

        Example:
            async with aclosing(session.say("Hello.").events()) as events:
                async for event in events:
                    ...
        """
        if self._is_said:
            raise SessionError("said_already", "this speech is said already; say() makes another")
        self._is_said = True
        sender = asyncio.create_task(self._send())
        try:
            async for event in self.turn:
                yield event
        finally:
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)
            await self.turn.abandon()

    async def _send(self) -> None:
        """A text source that fails ends the turn, and the loop raises its exception."""
        try:
            async for piece in _pieces(self._text):
                await self.turn.append(piece)
            await self.turn.commit()
        except Exception as error:  # noqa: BLE001 - handed to the reader of the turn
            self.turn.fail(error)


async def _pieces(text: TextSource) -> AsyncIterator[str]:
    if isinstance(text, str):
        yield text
    elif isinstance(text, AsyncIterable):
        async for piece in text:
            yield piece
    elif isinstance(text, Iterable):
        for piece in text:
            yield piece
    else:
        expected = "a string, or an (async) iterator of strings"
        raise SessionError("invalid_text", f"text: got {shorten(text)}, expected {expected}")
