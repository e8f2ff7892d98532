"""uvicorn's HTTP protocol with a time for requests to come: idle sockets are not collected."""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

REQUEST_S = (
    20.0  # between this and twice as long: for a request's head, and for what is left to read
)


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
