"""The asynchronous client: one WebSocket, one reader task, any number of turns."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as open_websocket
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
from websockets.typing import Subprotocol

from clients.address import is_loopback, refusal, retry_after_s, websocket_url
from clients.protocol import ClientProtocol, ForSession, Routed, SessionEvent
from clients.turn import MAX_BUFFERED_EVENTS, Speech, TextSource, Turn
from realtime.errors import ConnectionFailed, PlosiveError
from realtime.wire import (
    SUBPROTOCOL,
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


class Session:
    """An open session with its voice prefilled. Made by `connect`."""

    ready: SessionReady  # of the start or the latest update
    ready_ms: float  # connect() called -> session.ready

    def __init__(self, websocket: ClientConnection, protocol: ClientProtocol) -> None:
        self.protocol = protocol
        self.warnings: deque[Warn] = deque(maxlen=100)  # those that belong to no turn
        self._websocket = websocket
        self._turns: WeakValueDictionary[int, Turn] = WeakValueDictionary()
        self._answer: asyncio.Future[SessionReady] | None = None  # start or update in flight
        self._unclaimed: PlosiveError | None = None
        self._reader = asyncio.create_task(self._read())

    @property
    def format(self) -> EffectiveFormat:
        """The format that really flows; `clients.Decoder` takes it."""
        return self.ready.format

    def turn(self) -> Turn:
        """A new turn. Several may be open at once; each gets its own events. Servers speak them
        one after another, in the order in which they got their first text.

        Raises:
            PlosiveError: what ended the session, or what the server last complained about.
        """
        if self._unclaimed is not None:
            error, self._unclaimed = self._unclaimed, None
            raise error
        self.protocol.check_open()
        return Turn(self.protocol, self._register, self._send, MAX_BUFFERED_EVENTS)

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

    async def update(
        self,
        *,
        voice: str | None = None,
        prompt: str | None = None,
        sampling: Sampling | None = None,
        max_lead_ms: int | None = None,
    ) -> SessionReady:
        """Change what the next turn uses; what is left out stays.

        Raises:
            VoiceError: no such voice; the session goes on with the old one.
            PlosiveError: the server refused otherwise, or the session has ended.
        """
        update = SessionUpdate(
            voice=voice, prompt=prompt, sampling=sampling, max_lead_ms=max_lead_ms
        )
        self.ready = await self._ask(encode(update))
        return self.ready

    async def close(self) -> None:
        """Let the server finish what is committed, then close. Turns deliver until they end."""
        if not self.protocol.has_failed:
            await self._send([encode(SessionClose())])
        await asyncio.wait([self._reader])

    async def start(self, started_s: float) -> None:
        """Called once by `connect`."""
        self.ready = await self._ask(self.protocol.start_frame)
        self.ready_ms = 1000.0 * (time.perf_counter() - started_s)

    async def drop(self) -> None:
        """Close the socket now, whatever is under way."""
        await self._websocket.close()
        await self._reader

    def _register(self, turn: Turn) -> int:
        turn_id = self.protocol.open_turn()
        self._turns[turn_id] = turn
        return turn_id

    async def _ask(self, frame: str) -> SessionReady:
        """Send what `session.ready` answers."""
        while self._answer is not None:
            await asyncio.wait([self._answer])
        self.protocol.check_open()
        self._answer = asyncio.get_running_loop().create_future()
        try:
            await self._send([frame])
            return await self._answer
        finally:
            self._answer = None

    async def _send(self, frames: list[str]) -> None:
        try:
            for frame in frames:
                await self._websocket.send(frame)
        except ConnectionClosed:
            await asyncio.wait([self._reader])
            self.protocol.check_open()

    async def _read(self) -> None:
        websocket = self._websocket
        try:
            while not self.protocol.has_failed:
                frame = await websocket.recv()
                now_s = time.perf_counter()
                for routed in self.protocol.receive(frame):
                    self._route(routed, now_s)
                for reply in self.protocol.take_replies():
                    await websocket.send(reply)
            await websocket.close()
        except ConnectionClosed:
            pass
        finally:
            lost = self.protocol.connection_lost(websocket.close_code, websocket.close_reason or "")
            for routed in lost:
                self._route(routed, time.perf_counter())

    def _route(self, routed: Routed, now_s: float) -> None:
        if isinstance(routed, ForSession):
            self._on_session_event(routed.event)
            return
        turn = self._turns.get(routed.turn_id)
        if turn is not None:
            turn.deliver(routed.event, now_s)

    def _on_session_event(self, event: SessionEvent) -> None:
        waiting = self._answer if self._answer and not self._answer.done() else None
        match event:
            case SessionReady() if waiting:
                waiting.set_result(event)
            case Warn():
                self.warnings.append(event)
            case PlosiveError() if waiting:
                waiting.set_exception(event)
            case PlosiveError() if not self.protocol.has_failed:
                self._on_unclaimed(event)

    def _on_unclaimed(self, error: PlosiveError) -> None:
        """An error that names no turn fails every turn that is not over, or the next one."""
        live = [turn for turn in self._turns.values() if not turn.is_over]
        for turn in live:
            turn.fail(error)
        self._unclaimed = None if live else error


@asynccontextmanager
async def connect(
    url: str,
    *,
    voice: str | None = None,
    prompt: str = "",
    format: AudioFormat = _OPUS_24_KHZ,
    sampling: Sampling = _MODEL_SAMPLING,
    max_lead_ms: int | None = None,
    open_timeout_s: float = 30.0,
) -> AsyncIterator[Session]:
    """Open a session; the block begins when voice and prompt are prefilled.

    `url` is the server ("http://host:8765", "ws://host:8765") or the full address of its endpoint.
    `voice` None is the server's default voice. Leaving the block closes the socket.

    Example:
        async with connect("http://localhost:8765", voice="af_heart") as session:
            async for packet in session.say("Hello there."):
                player.feed(packet)

    Raises:
        ConnectionFailed: nobody answers, or the upgrade was refused: `status`, `retry_after_s`.
        VoiceError: no such voice.
        PlosiveError: the server refused the session otherwise.
    """
    started_s = time.perf_counter()
    start = SessionStart(
        voice=voice, prompt=prompt, format=format, sampling=sampling, max_lead_ms=max_lead_ms
    )
    try:
        async with asyncio.timeout(open_timeout_s):
            session = Session(await _open(websocket_url(url)), ClientProtocol(start))
            try:
                await session.start(started_s)
            except BaseException:
                await session.drop()
                raise
    except TimeoutError as error:
        raise ConnectionFailed(
            f"{url} did not get a session ready within {open_timeout_s:g} s"
        ) from error
    try:
        yield session
    finally:
        await session.drop()


async def _open(address: str) -> ClientConnection:
    try:
        return await open_websocket(
            address,
            subprotocols=[Subprotocol(SUBPROTOCOL)],
            compression=None,  # audio does not shrink
            open_timeout=None,
            close_timeout=2.0,
            proxy=None if is_loopback(address) else True,
        )
    except InvalidStatus as error:
        raise _refused(error) from error
    except (OSError, WebSocketException) as error:
        raise ConnectionFailed(
            f"cannot connect to {address}: {error}. Is the server up?"
        ) from error


def _refused(error: InvalidStatus) -> ConnectionFailed:
    response = error.response
    _, said = refusal(bytes(response.body or b""))
    return ConnectionFailed(
        f"the server refused the session with status {response.status_code}"
        + (f": {said}" if said else ""),
        status=response.status_code,
        retry_after_s=retry_after_s(response.headers.get("Retry-After")),
    )
