"""The asynchronous client: one session, any number of turns, over one connection at a time."""

import asyncio
import ssl
import time
from collections import deque
from collections.abc import Awaitable, Callable, Generator
from typing import TYPE_CHECKING, Any, Self, TypedDict
from weakref import WeakSet

from clients.address import key_headers, websocket_url
from clients.checks import check_ssl_context, expect, is_from, valid_message
from clients.interruption import Interruption, interrupt
from clients.link import Link, open_link
from clients.protocol import ClientProtocol, SessionEvent
from clients.reconnect import Attempts, Reconnect
from clients.speech import Speech, TextSource
from clients.turn import Turn, check_played_ms
from realtime.errors import ConnectionFailed, ConnectionLost, PlosiveError, SessionError
from realtime.wire import (
    AudioFormat,
    EffectiveFormat,
    Sampling,
    SessionClose,
    SessionReady,
    SessionStart,
    SessionUpdate,
    Warn,
    encode,
)

_OPUS_24_KHZ = AudioFormat()
_MODEL_SAMPLING = Sampling()
NEVER = Reconnect(max_attempts=0)

OnEvent = Callable[[Link, SessionEvent], None]
OpenLink = Callable[[SessionStart, OnEvent], Awaitable[tuple[Link, SessionReady]]]


class Session:
    """An open session with its voice prefilled. Made by `connect`."""

    ready: SessionReady  # of the start, the latest update or the latest reconnection
    ready_ms: float  # connect() called -> session.ready

    def __init__(self, open_link: OpenLink, start: SessionStart, reconnect: Reconnect) -> None:
        self.warnings: deque[Warn] = deque(maxlen=100)  # those that belong to no turn
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
        """In speaking order: all that is still to be read or spoken, or else the latest."""
        turns = sorted(self._turns, key=lambda turn: turn.opened_s or float("inf"))
        live = [turn for turn in turns if turn.is_pending]
        return live or [turn for turn in turns if turn.can_be_accounted][-1:]


class ConnectOptions(TypedDict, total=False):
    """Of `connect`, for what passes them on."""

    api_key: str | None
    voice: str | None
    prompt: str
    format: AudioFormat
    sampling: Sampling
    max_lead_ms: int | None
    open_timeout_s: float
    reconnect: Reconnect
    ssl_context: ssl.SSLContext | None


class Opening:
    """What `connect` gives, to be entered or awaited."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._started_s = time.perf_counter()
        self._is_used = False

    def __await__(self) -> Generator[Any, None, Session]:
        return self.__aenter__().__await__()

    async def __aenter__(self) -> Session:
        if self._is_used:
            why = "what connect() gave opens one session; call connect() again for another"
            raise SessionError("opened_already", why)
        self._is_used = True
        await self._session.open(self._started_s)
        return self._session

    async def __aexit__(self, *_: object) -> None:
        await self._session.drop()

    if not TYPE_CHECKING:  # a type checker sees by itself that it is no session

        def __getattr__(self, name: str) -> None:
            how = "async with connect(url) as session: ..., or session = await connect(url)"
            raise AttributeError(f"a session is open, and has {name!r}, only inside of {how}")


def connect(  # noqa: PLR0913 - what a session can be told
    url: str,
    *,
    api_key: str | None = None,
    voice: str | None = None,
    prompt: str = "",
    format: AudioFormat = _OPUS_24_KHZ,
    sampling: Sampling = _MODEL_SAMPLING,
    max_lead_ms: int | None = None,
    open_timeout_s: float = 30.0,
    reconnect: Reconnect = NEVER,
    ssl_context: ssl.SSLContext | None = None,
) -> Opening:
    """Open a session; the block begins when voice and prompt are prefilled.

    `url` is the server ("http://host:8765", "ws://host:8765") or the full address of its endpoint.
    `api_key` is for servers that need one. `ssl_context` is for an https server whose certificate
    this machine does not trust (or name the authority's file in SSL_CERT_FILE). `voice` None is the
    server's default voice. Leaving the block closes the socket; a session that was awaited instead,
    `session = await connect(url)`, is closed by `close`, or by a block of its own.

    With `reconnect`, a connection that is lost is opened again in the background, with the voice
    and the prompt in force; the turns that were under way fail with ConnectionLost, which says how
    far they had come, and later ones wait until it is open. What the model remembers of the
    dialogue goes with the connection. The first opening is tried again with `also_first` only, and
    where the server answers that it is busy, as one does that is still loading its model.

    Example:
        async with connect("http://localhost:8765", voice="af_heart") as session:
            async for packet in session.say("Hello there."):
                player.feed(packet)

    Raises:
        ConnectionFailed: `url` is no address, `api_key` cannot be sent, nobody answers, or the upgrade
            was refused: `status`, `retry_after_s`.
        VoiceError: no such voice.
        SessionError: `invalid_option`, before anything is opened; `opened_already`.
        PlosiveError: the server refused the session otherwise.
    """
    address, headers = websocket_url(url), key_headers(api_key)
    expect(is_from(0, open_timeout_s), "open_timeout_s", open_timeout_s, "seconds from 0 on")
    how = "connect(url, reconnect=Reconnect())"
    expect(isinstance(reconnect, Reconnect), "reconnect", reconnect, f"a Reconnect: {how}")
    check_ssl_context(ssl_context)
    with valid_message():
        start = SessionStart(
            voice=voice, prompt=prompt, format=format, sampling=sampling, max_lead_ms=max_lead_ms
        )

    async def open_in_time(start: SessionStart, on_event: OnEvent) -> tuple[Link, SessionReady]:
        try:
            async with asyncio.timeout(open_timeout_s):
                return await open_link(address, headers, start, on_event, ssl_context)
        except TimeoutError:
            raise ConnectionFailed(
                f"{url} did not get a session ready within {open_timeout_s:g} s"
            ) from None

    return Opening(Session(open_in_time, start, reconnect))
