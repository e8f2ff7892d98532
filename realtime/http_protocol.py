"""uvicorn's HTTP protocol with a time for requests to come: idle sockets are not collected."""

import asyncio
from functools import partial
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from realtime.connection import CUT_EXTENSION

REQUEST_S = 20.0  # to twice as long: for a request's head, and for what is left to read
TLS_CAME = (
    "A TLS handshake came: this server speaks http; start it with --ssl-certfile, or use http://"
)
_TLS_HANDSHAKE = b"\x16\x03"
CUT_S = 5.0  # for what was sent before an answer was cut to be read


class PlosiveHttp(H11Protocol):
    """Closes a connection that has no request under way and has begun none for `REQUEST_S`: one that
    trickles its head, the rest of a body that was answered already, or nothing at all. (uvicorn's
    own limit is for connections that are silent after an answer.)"""

    _seen: RequestResponseCycle | None = None
    _look: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._look = self.loop.call_later(REQUEST_S, self._close_if_idle)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_looking()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self._stop_looking()  # the socket has another protocol from here on
        super().handle_websocket_upgrade(event)

    def data_received(self, data: bytes) -> None:
        is_tls = data.startswith(_TLS_HANDSHAKE) and self.scheme == "http"
        if is_tls and self.conn.their_state is h11.IDLE:  # no body is on its way
            self.logger.warning(TLS_CAME)
            self.send_400_response(TLS_CAME)
        else:
            super().data_received(data)

    def handle_events(self) -> None:
        """The app's task for a request is created in here; it has not run yet."""
        super().handle_events()
        if self.cycle is not None and self.scope is self.cycle.scope:
            extensions: dict[Any, Any] = self.scope.setdefault("extensions", {})
            extensions.setdefault(CUT_EXTENSION, partial(self._cut, self.cycle))

    def _cut(self, cycle: RequestResponseCycle) -> None:
        """Let the client see that its answer is not whole. To uvicorn an answer without an end is a
        fault of the app, and logged as one, unless the client has left before."""
        cycle.disconnected = True
        self.transport.close()
        self.loop.call_later(CUT_S, self.transport.abort)

    def _stop_looking(self) -> None:
        if self._look is not None:
            self._look.cancel()
            self._look = None

    def _close_if_idle(self) -> None:
        cycle: RequestResponseCycle | None = self.cycle
        is_busy = cycle is not None and not cycle.response_complete
        if not is_busy and cycle is self._seen:
            self.transport.abort()
            return
        self._seen = None if is_busy else cycle
        self._look = self.loop.call_later(REQUEST_S, self._close_if_idle)
