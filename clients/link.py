"""One connection: its socket, its protocol, its reader task, and the turns opened on it."""

import asyncio
import ssl
import time
from collections.abc import Callable
from weakref import WeakValueDictionary

from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as open_websocket
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
from websockets.typing import Subprotocol

from clients.address import is_loopback, refused
from clients.explain import no_connection
from clients.protocol import ClientProtocol, ForSession, Routed, SessionEvent
from clients.turn import Turn
from realtime.errors import ConnectionFailed, PlosiveError, SessionError
from realtime.wire import SUBPROTOCOL, SessionReady, SessionStart

PING_S = 10.0  # a server that is gone without a word is missed after twice this


class Link:
    """An open connection. `on_event` gets what belongs to no turn, except answers to `ask`."""

    def __init__(
        self,
        websocket: ClientConnection,
        start: SessionStart,
        on_event: Callable[["Link", SessionEvent], None],
    ) -> None:
        self.protocol = ClientProtocol(start)
        self.turns: WeakValueDictionary[int, Turn] = WeakValueDictionary()
        self.has_spoken = False  # a turn got something other than an error
        self._websocket = websocket
        self._loop = asyncio.get_running_loop()
        self._on_event = on_event
        self._answer: asyncio.Future[SessionReady] | None = None  # start or update in flight
        self.reader = asyncio.create_task(self._read())

    def register(self, turn: Turn) -> int:
        turn_id = self.protocol.open_turn()
        self.turns[turn_id] = turn
        return turn_id

    def check_loop(self) -> None:
        """Raises SessionError `other_loop`, where this is not the event loop of the connection."""
        if asyncio.get_running_loop() is not self._loop:
            why = (
                "a session belongs to the event loop that opened it; "
                "clients.sync has one for any number of threads"
            )
            raise SessionError("other_loop", why)

    async def ask(self, frame: str) -> SessionReady:
        """Send what `session.ready` answers. One whose caller leaves is answered all the same, before
        the next is sent."""
        self.check_loop()
        while self._answer is not None:
            await asyncio.wait([self._answer])
        self.protocol.check_open()
        self._answer = answer = self._loop.create_future()
        answer.add_done_callback(self._on_answered)
        try:
            await self.send([frame])
        except BaseException:
            answer.cancel()
            raise
        return await asyncio.shield(answer)

    def _on_answered(self, answer: asyncio.Future[SessionReady]) -> None:
        self._answer = None
        if not answer.cancelled():
            answer.exception()  # counts as retrieved if the caller has left

    async def send(self, frames: list[str]) -> None:
        try:
            for frame in frames:
                await self._websocket.send(frame)
        except ConnectionClosed:
            await asyncio.wait([self.reader])
            self.protocol.check_open()

    async def drop(self) -> None:
        """Close the socket now, whatever is under way."""
        await self._websocket.close()
        await self.reader

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
        self.has_spoken |= not isinstance(routed.event, PlosiveError)
        turn = self.turns.get(routed.turn_id)
        if turn is not None:
            turn.deliver(routed.event, now_s)

    def _on_session_event(self, event: SessionEvent) -> None:
        waiting = self._answer if self._answer and not self._answer.done() else None
        if waiting and isinstance(event, SessionReady):
            waiting.set_result(event)
            return
        if waiting and isinstance(event, PlosiveError):
            waiting.set_exception(event)
            if not self.protocol.has_failed:
                return
        self._on_event(self, event)


async def open_link(
    address: str,
    headers: dict[str, str],
    start: SessionStart,
    on_event: Callable[[Link, SessionEvent], None],
    ssl_context: ssl.SSLContext | None = None,
) -> tuple[Link, SessionReady]:
    """Connect and start a session.

    Raises:
        ConnectionFailed: nobody answers, or the upgrade was refused.
        PlosiveError: the server refused the session.
    """
    link = Link(await _open_websocket(address, headers, ssl_context), start, on_event)
    try:
        return link, await link.ask(link.protocol.start_frame)
    except BaseException:
        await link.drop()
        raise


async def _open_websocket(
    address: str, headers: dict[str, str], ssl_context: ssl.SSLContext | None
) -> ClientConnection:
    try:
        return await open_websocket(
            address,
            subprotocols=[Subprotocol(SUBPROTOCOL)],
            additional_headers=headers,
            compression=None,  # audio does not shrink
            open_timeout=None,
            ping_interval=PING_S,
            ping_timeout=PING_S,
            close_timeout=2.0,
            ssl=(ssl_context or True) if address.startswith("wss:") else None,
            proxy=None if is_loopback(address) else True,
        )
    except InvalidStatus as error:
        answer = error.response
        body, retry_after = bytes(answer.body or b""), answer.headers.get("Retry-After")
        raise refused(
            "the session", answer.status_code, body, retry_after, is_key_shown=bool(headers)
        ) from None
    except (OSError, WebSocketException, ImportError, ValueError) as error:  # the latter of a proxy
        raise ConnectionFailed(no_connection(address, error)) from None
