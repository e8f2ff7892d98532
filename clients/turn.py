"""A turn as its caller sees it: text goes in, typed events come out, time is kept.

What a frame means is `clients.protocol`'s decision and the socket is `clients.session`'s; this file
holds the bounded buffer between the reader and whoever iterates.
"""

import asyncio
import math
import time
from array import array
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol, Self

from clients.checks import expect, is_from
from clients.protocol import ClientProtocol, TurnEvent
from realtime.errors import PlosiveError, SessionError, shorten
from realtime.wire import (
    PACKET_MS,
    AudioPacket,
    TurnCancelled,
    TurnDone,
    TurnMetrics,
    Warn,
)

# A server never runs further ahead of playback than the largest `max_lead_ms`, so a consumer that
# keeps up with real time cannot meet this limit.
MAX_BUFFERED_EVENTS = 600_000 // PACKET_MS


class Channel(Protocol):
    """The connection that a turn is spoken over."""

    @property
    def protocol(self) -> ClientProtocol: ...
    def check_loop(self) -> None: ...
    def register(self, turn: "Turn") -> int: ...
    async def send(self, frames: list[str]) -> None: ...


OpenChannel = Callable[[], Awaitable[Channel]]


@dataclass
class Timings:
    """When what happened to a turn, in seconds of the client's clock (`time.perf_counter`)."""

    first_text_s: float | None = None  # just before the first text was sent
    commit_s: float | None = None  # just before the commit was sent
    over_s: float | None = None
    packets_s: "array[float]" = field(default_factory=lambda: array("d"))  # arrival of each packet

    @property
    def ttfa_ms(self) -> float | None:
        """Commit sent -> first packet. Negative when speech began before the text was complete."""
        return _ms_between(self.commit_s, self._first_packet_s)

    @property
    def ttfa_from_first_text_ms(self) -> float | None:
        """First text sent -> first packet."""
        return _ms_between(self.first_text_s, self._first_packet_s)

    @property
    def total_ms(self) -> float | None:
        """Commit sent -> turn over."""
        return _ms_between(self.commit_s, self.over_s)

    @property
    def _first_packet_s(self) -> float | None:
        return self.packets_s[0] if self.packets_s else None


class Turn:
    """One reply. Made by `Session.turn`.

    Iterating gives `TurnStarted`, `AudioPacket`, `TurnText`, `Warn` and, last, exactly one of
    `TurnDone` and `TurnCancelled`; any other end raises. As a context manager it cancels what is
    not over when the block is left. `warnings` keeps every `Warn`, also for who reads only audio.

    Example:
        async with session.turn() as turn:
            await turn.append("Hello. ")
            await turn.append("How are you?")
            await turn.commit()
            async for event in turn:
                match event:
                    case AudioPacket():
                        player.feed(event)
                    case TurnText(text=text):
                        print(text)
    """

    def __init__(self, open_channel: OpenChannel) -> None:
        self.turn_id: int | None = None  # given with the first text: that is the turns' order
        self.timings = Timings()
        self.metrics: TurnMetrics | None = None  # the server's account, from the turn's end on
        self.warnings: list[Warn] = []  # what the server found wrong with its text, so far
        self.opened_s: float | None = None  # when it got its id
        self._open_channel = open_channel
        self._channel: Channel | None = None
        self._unsent = ""  # what waits for the channel
        self._events: deque[TurnEvent] = deque()
        self._arrived = asyncio.Event()
        self.was_left = False  # its reader left it before its end, and has not asked what was heard
        self._outcome: TurnDone | TurnCancelled | Exception | None = None
        self._cancelled: asyncio.Future[TurnCancelled] | None = None

    @property
    def is_over(self) -> bool:
        """Done, cancelled or failed: no audio comes any more."""
        return self._outcome is not None

    @property
    def is_empty(self) -> bool:
        """No text was given to it: nothing of it is heard, or could be."""
        return self.turn_id is None and not self._unsent

    @property
    def is_done(self) -> bool:
        """Said to its end, though perhaps not yet read or played to its end."""
        return isinstance(self._outcome, TurnDone)

    @property
    def has_failed(self) -> bool:
        return isinstance(self._outcome, Exception)

    @property
    def can_be_accounted(self) -> bool:
        """No audio comes any more, but what was heard of it has not been asked yet."""
        return self.is_done or (self.was_left and not self.has_failed)

    @property
    def is_pending(self) -> bool:
        """Not left, and not over, or its end has not been read yet."""
        return not self.was_left and (not self.is_over or (self.is_done and bool(self._events)))

    async def append(self, text: str) -> None:
        """Send a piece of text. Pieces are concatenated verbatim: spaces are the caller's.

        Raises:
            SessionError: code `turn_closed`, if the turn is committed, cancelled or done;
                `invalid_text`, if it is no string.
            PlosiveError: what ended the turn or the session.
        """
        if not isinstance(text, str):
            raise SessionError("invalid_text", f"text: got {shorten(text)}, expected a string")
        if self._channel is None:
            self._unsent += text
        channel, turn_id = await self._opened()
        frames = channel.protocol.append(turn_id, text)
        if frames and self.timings.first_text_s is None:
            self.timings.first_text_s = time.perf_counter()
        await channel.send(frames)

    async def flush(self) -> None:
        """Have spoken what was sent so far, although no clause has ended. Raises like `append`."""
        channel, turn_id = await self._opened()
        await channel.send(channel.protocol.flush(turn_id))

    async def commit(self) -> None:
        """Say that no more text comes. Raises like `append`."""
        channel, turn_id = await self._opened()
        frames = channel.protocol.commit(turn_id)
        self.timings.commit_s = time.perf_counter()
        await channel.send(frames)

    async def cancel(self, played_ms: float | None = None) -> TurnCancelled:
        """Barge-in: from this call on, no audio comes out of the turn any more.

        `played_ms` is how much of the turn's audio the listener has heard; None leaves it to the
        server's estimate, and so does leaving a loop over the turn early: the account of that is
        what this returns afterwards. A turn that is done can be cancelled too, while it still plays.

        Returns:
            What was spoken and what was not: `spoken_text`, `remaining_text`, `played_ms`.

        Raises:
            SessionError: `invalid_option`, if `played_ms` is no number from 0 on; nothing is cancelled.
            PlosiveError: what ended the turn otherwise.
        """
        check_played_ms(played_ms)
        self._raise_failure()
        self.was_left = False
        if not isinstance(self._outcome, TurnCancelled):
            await self._begin_cancel(played_ms)
        if isinstance(self._outcome, TurnCancelled):
            return self._outcome
        assert self._cancelled is not None, self.turn_id
        return await asyncio.shield(self._cancelled)

    async def audio(self) -> AsyncIterator[AudioPacket]:
        """Only the audio, to the turn's end. Raises like iterating the turn."""
        async for event in self:
            if isinstance(event, AudioPacket):
                yield event

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TurnEvent:
        while not self._events:
            self._raise_failure()
            if self.is_over:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        return self._events.popleft()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.abandon()

    async def abandon(self) -> None:
        """Stop the turn, unless its end has been read, without waiting for the server's account."""
        if isinstance(self._outcome, TurnCancelled) or (self.is_done and not self._events):
            self._events.clear()
            return
        if self._channel is not None and self._cancelled is None:
            self.was_left = True
        with suppress(PlosiveError):  # the session has ended, and the turn with it
            await self._begin_cancel(None)

    def fail(self, error: Exception) -> None:
        """End the turn: iterating and every later call raise `error`. A turn that is over, or is
        being cancelled, has its end already."""
        if not self.is_over and self._cancelled is None:
            self._finish(error)

    def deliver(self, event: TurnEvent, now_s: float) -> None:
        """Called by the reader with what the protocol routed here."""
        if isinstance(self._outcome, Exception):
            return
        match event:
            case AudioPacket():
                self.timings.packets_s.append(now_s)
            case Warn():
                self.warnings.append(event)
            case TurnDone(metrics=metrics):
                self.metrics = metrics
                self.timings.over_s = now_s
                if self._cancelled is not None:
                    return  # the account of the cancel follows
                self._outcome = event
            case TurnCancelled() | PlosiveError():
                if isinstance(event, TurnCancelled) and event.metrics is not None:
                    self.metrics = event.metrics
                self.timings.over_s = self.timings.over_s or now_s
                self._finish(event)
                return
        self._events.append(event)
        self._arrived.set()
        if len(self._events) > MAX_BUFFERED_EVENTS:
            self._overflow()

    def _overflow(self) -> None:
        assert self._channel is not None and self.turn_id is not None  # it got events
        turn_id = self.turn_id
        self._finish(
            SessionError(
                "receive_buffer_full",
                f"{len(self._events):,} events of turn {turn_id} were not read; it is cancelled. "
                "Read a turn while it is spoken, or cancel it.",
                turn_id=turn_id,
            )
        )
        self._channel.protocol.give_up(turn_id)

    def _finish(self, outcome: TurnCancelled | Exception) -> None:
        if isinstance(outcome, TurnCancelled) and not self.is_over:
            self._events.append(outcome)
        self._outcome = outcome
        self._arrived.set()
        if self._cancelled is None or self._cancelled.done():
            return
        if isinstance(outcome, TurnCancelled):
            self._cancelled.set_result(outcome)
        else:
            self._cancelled.set_exception(outcome)
            self._cancelled.exception()  # counts as retrieved if the canceller has left

    async def _opened(self) -> tuple[Channel, int]:
        """The channel and the id; both are given with the first text."""
        self._raise_failure()
        channel = self._channel or await self._open_channel()
        channel.check_loop()
        if self._channel is None or self.turn_id is None:
            self._raise_failure()
            if self._outcome is not None:
                raise SessionError(
                    "turn_closed",
                    "the turn was cancelled before it began; open another with turn()",
                )
            self._channel, self.turn_id = channel, channel.register(self)
            self.opened_s = time.perf_counter()
        self._channel.protocol.check_open()
        return self._channel, self.turn_id

    async def _begin_cancel(self, played_ms: float | None) -> None:
        """No audio comes out from here on; the outcome is, or will be, what was heard."""
        if self._channel is not None:
            self._channel.check_loop()
        is_unread = bool(self._events)
        self._events.clear()
        if self._channel is None or self.turn_id is None:  # the server never hears of it
            if not self.is_over:
                unsent = self._unsent
                self._finish(
                    TurnCancelled(turn_id=0, spoken_text="", remaining_text=unsent, played_ms=0.0)
                )
            return
        if self._cancelled is not None:
            return
        if self.is_done and is_unread:
            self._outcome = None  # nobody has read that it is done: cancelled is its end
        self._cancelled = asyncio.get_running_loop().create_future()
        frames = self._channel.protocol.cancel(self.turn_id, played_ms)
        if not frames and not self.has_failed:
            self._finish(self._channel.protocol.account(self.turn_id))
        await self._channel.send(frames)

    def _raise_failure(self) -> None:
        if isinstance(self._outcome, Exception):
            raise self._outcome


def check_played_ms(played_ms: float | None) -> None:
    """Raises SessionError `invalid_option` for what no cancel can carry."""
    is_valid = played_ms is None or (is_from(0, played_ms) and played_ms < math.inf)
    expect(is_valid, "played_ms", played_ms, "milliseconds from 0 on, or None")


def _ms_between(start_s: float | None, end_s: float | None) -> float | None:
    return None if start_s is None or end_s is None else 1000.0 * (end_s - start_s)
