"""A request body must come within a time: whoever trickles it would hold a place of those who wait."""

import asyncio
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from realtime.errors import PlosiveError

_MIN_BYTES_PER_S = 32 * 1024  # 20 MiB have 640 s more; a phone on a bad line is faster


class SlowBodies:
    """ASGI middleware: `body_timeout` is raised from the `receive` of a request whose body is late."""

    def __init__(self, app: ASGIApp, timeout_s: float) -> None:
        self._app = app
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            receive = _Body(receive, self._timeout_s)
        await self._app(scope, receive, send)


class _Body:
    def __init__(self, receive: Receive, timeout_s: float) -> None:
        self._receive = receive
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s
        self._is_complete = False

    async def __call__(self) -> Message:
        if self._is_complete:  # what comes is that the client leaves
            return await self._receive()
        left_s = max(0.0, self._deadline_s - time.monotonic())
        try:
            message = await asyncio.wait_for(self._receive(), left_s)
        except TimeoutError:
            raise PlosiveError(
                "body_timeout",
                f"the request body did not come within {self._timeout_s:g} s, and 1 s more for "
                f"each {_MIN_BYTES_PER_S // 1024} KiB of it",
            ) from None
        self._deadline_s += len(message.get("body", b"")) / _MIN_BYTES_PER_S
        self._is_complete = not message.get("more_body", False)
        return message


async def discard_body(receive: Receive, max_bytes: int) -> None:
    """For an answer that does not need it: a client that is cut off while it sends hears none."""
    num_bytes = 0
    while num_bytes < max_bytes:
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if not message.get("more_body", False):
            return
