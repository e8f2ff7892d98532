"""One session: any number of turns, over one connection at a time. `clients.opening` makes it."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Self
from weakref import WeakSet

from clients.checks import valid_message
from clients.interruption import Interruption, interrupt
from clients.link import Link
from clients.protocol import ClientProtocol, SessionEvent
from clients.reconnect import Attempts, Reconnect
from clients.speech import Speech, TextSource
from clients.turn import Turn, check_played_ms
from realtime.errors import ConnectionFailed, ConnectionLost, PlosiveError
from realtime.wire import (
    EffectiveFormat,
    Sampling,
    SessionClose,
    SessionReady,
    SessionStart,
    SessionUpdate,
    Warn,
    encode,
)

OnEvent = Callable[[Link, SessionEvent], None]
OpenLink = Callable[[SessionStart, OnEvent], Awaitable[tuple[Link, SessionReady]]]


class Session:
    """An open session with its voice prefilled. Made by `connect`."""

    ready: SessionReady  # of the start, the latest update or the latest reconnection
    ready_ms: float  # connect() called -> session.ready

    def __init__(self, open_link: OpenLink, start: SessionStart, reconnect: Reconnect) -> None:
        self.warnings: deque[Warn] = deque(maxlen=100)  # of no turn; see `Turn.warnings`
        self.num_reconnects = 0
        self._open_link = open_link
        self._start = start
        self._attempts = Attempts(reconnect)
        self._link: Link  # the latest; set by `open`
        self._turns: WeakSet[Turn] = WeakSet()
        self._latest: Turn | None = None  # what was heard of it is asked when its reader has left
        self._reopening: asyncio.Task[None] | None = None
        self._failure: PlosiveError | None = None  # why it was not opened again
        self._is_closing = False

    @property
    def protocol(self) -> ClientProtocol:
        """Of the latest connection."""
        return self._link.protocol

    @property
    def has_ended(self) -> bool:
        """Nothing can be said any more, and it is not being opened again."""
        return not self._is_reopening and self.protocol.has_failed

    @property
    def format(self) -> EffectiveFormat:
        """The format that really flows; `clients.Decoder` takes it."""
        return self.ready.format

    def turn(self) -> Turn:
        """A new turn. Several may be open at once; each gets its own events. Servers speak them
        one after another, in the order in which they got their first text.

        Raises:
            PlosiveError: what ended the session.
        """
        if not self._is_reopening:
            self._check_open()
        turn = Turn(self._open_channel)
        self._turns.add(turn)
        self._latest = turn
        return turn

    def say(self, text: TextSource) -> Speech:
        """Say a text, or an (async) iterator of pieces of it, as one turn.

        Example:
            speech = session.say("Hello there.")
            async for packet in speech:
                player.feed(packet)
            print(speech.turn.timings.ttfa_ms)

        Raises:
            PlosiveError: from the loop, whatever keeps the turn from being said to its end.
        """
        return Speech(self.turn(), text)

    async def interrupt(self, played_ms: float | None = None) -> Interruption:
        """Barge-in: cancel what is being said and all that waits behind it.

        If every turn is done, or its loop was left, which cancels it, the account is of the latest:
        it may still be playing. `played_ms` is how much was heard of the first of them; None leaves it
        to the server's estimate, and so does leaving a loop. (`clients.Player.interrupt` knows both
        by itself.)

        Example:
            heard = await session.interrupt(played_ms=player_position_ms)
            history.append(assistant=heard.spoken_text)

        Returns:
            `spoken_text` and `remaining_text`, and the account of each turn.

        Raises:
            SessionError: `invalid_option`, if `played_ms` is no number from 0 on; nothing is cancelled.
            PlosiveError: what ended all of the turns, or the session, otherwise.
        """
        check_played_ms(played_ms)
        turns = self._interruptible()
        behind_ms = None if played_ms is None else 0.0
        return await interrupt(
            [(turn, behind_ms if i else played_ms) for i, turn in enumerate(turns)]
        )

    async def update(
        self,
        *,
        voice: str | None = None,
        prompt: str | None = None,
        sampling: Sampling | None = None,
        max_lead_ms: int | None = None,
    ) -> SessionReady:
        """Change what the next turn uses; what is left out stays. Where the connection is lost and
        opened again meanwhile, it is asked for there.

        Raises:
            VoiceError: no such voice; the session goes on with the old one.
            SessionError: `invalid_option`.
            PlosiveError: the server refused otherwise, or the session has ended.
        """
        with valid_message():
            update = SessionUpdate(
                voice=voice, prompt=prompt, sampling=sampling, max_lead_ms=max_lead_ms
            )
        self.ready = await self._ask(encode(update))
        changes = {field: getattr(update, field) for field in update.model_fields_set - {"type"}}
        kept = {field: value for field, value in changes.items() if value is not None}
        self._start = self._start.model_copy(update=kept)
        return self.ready

    async def _ask(self, frame: str) -> SessionReady:
        while True:
            link = await self._open_channel()
            try:
                return await link.ask(frame)
            except ConnectionLost:
                if not self._is_reopening:
                    raise

    async def close(self) -> None:
        """Let the server finish what is committed, then close. Turns deliver until they end."""
        await self._stop_reopening()
        if not self.protocol.has_failed:
            await self._link.send([encode(SessionClose())])
        await asyncio.wait([self._link.reader])

    async def open(self, started_s: float) -> None:
        """Called once by `connect`."""
        while True:
            try:
                await self._open()
                break
            except ConnectionFailed as error:
                is_busy = error.status is not None and self._attempts.policy.also_first
                delay_s = self._attempts.next_delay_s(error) if is_busy else None
                if delay_s is None:
                    raise
            await asyncio.sleep(delay_s)
        self.ready_ms = 1000.0 * (time.perf_counter() - started_s)

    async def drop(self) -> None:
        """Close the socket now, whatever is under way."""
        await self._stop_reopening()
        await self._link.drop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.drop()

    @property
    def _is_reopening(self) -> bool:
        return self._reopening is not None and not self._reopening.done()

    def _check_open(self) -> None:
        if self._is_closing and self.protocol.has_failed:
            raise ConnectionLost("the session was closed here")
        if self._failure is not None:
            raise self._failure
        self.protocol.check_open()

    async def _open_channel(self) -> Link:
        """The connection; where it is being opened again, wait for that."""
        while self._reopening is not None and self._is_reopening:
            await asyncio.wait([self._reopening])
        self._check_open()
        return self._link

    async def _stop_reopening(self) -> None:
        self._is_closing = True
        if self._reopening is not None:
            self._reopening.cancel()
            await asyncio.wait([self._reopening])

    async def _open(self) -> None:
        self._link, self.ready = await self._open_link(self._start, self._on_event)
        self.protocol.check_open()

    async def _reopen(self, delay_s: float | None) -> None:
        while delay_s is not None:
            await asyncio.sleep(delay_s)
            try:
                await self._open()
            except PlosiveError as error:
                self._failure = error
                delay_s = self._attempts.next_delay_s(error)
            else:
                self._failure = None
                self.num_reconnects += 1
                return

    def _on_event(self, link: Link, event: SessionEvent) -> None:
        if isinstance(event, Warn):
            self.warnings.append(event)
        if not isinstance(event, PlosiveError) or link is not getattr(self, "_link", None):
            return
        if not link.protocol.has_failed:
            self._on_unclaimed(event)
        elif not self._is_closing and not self._is_reopening:
            if link.has_spoken:
                self._attempts.spoke()
            delay_s = self._attempts.next_delay_s(event)
            if delay_s is not None:
                self._reopening = asyncio.create_task(self._reopen(delay_s))

    def _on_unclaimed(self, error: PlosiveError) -> None:
        """An error that names no turn ends, and cancels, every turn that is not over. It is no
        matter of those to come: where there is none, it is a warning."""
        live = [turn for turn in self._link.turns.values() if not turn.is_over]
        for turn in live:
            turn.fail(error)
        for turn_id in [turn.turn_id for turn in live if turn.turn_id is not None]:
            self._link.protocol.give_up(turn_id)
        if not live:
            self.warnings.append(Warn(code=error.code, message=error.message, param=error.param))

    def _interruptible(self) -> list[Turn]:
        """In speaking order: all that is still to be read or spoken, and the latest that was, where
        none of them has a text yet."""
        turns = sorted(self._turns, key=lambda turn: turn.opened_s or float("inf"))
        live = [turn for turn in turns if turn.is_pending]
        latest = [turn for turn in turns if turn.can_be_accounted][-1:]
        return [*(latest if all(turn.is_empty for turn in live) else []), *live]
