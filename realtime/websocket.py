"""uvicorn's WebSocket protocol with short buffers, and a close that a stalled client cannot block."""

import asyncio
import socket
import struct
from asyncio.transports import BaseTransport
from collections.abc import Sequence
from typing import Any, cast

from uvicorn._types import ASGISendEvent
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.http11 import Request
from websockets.protocol import State

from realtime.connection import ABORT_EXTENSION, MAX_SIZE_EXTENSION, WRITE_NOW_EXTENSION
from realtime.errors import CLOSE_CODE

# What the kernel and the transport hold is audio that a barge-in cannot take back and that the
# high-water mark cannot see. 64 KiB is 0.7 s of 48 kHz PCM and more than enough for Opus. (TLS holds
# another 64 KiB of its own; however much fits, it is never ahead of the listener by more than the lead.)
_SOCKET_BUFFER_BYTES = 64 * 1024
_TRANSPORT_BUFFER_BYTES = 8 * 1024
_ABORT_AFTER_S = 5.0  # a client that was closed for being too slow may still read so long


_FIN = 0x80
_MAX_LENGTH_7, _MAX_LENGTH_16 = 125, 0xFFFF


def frame_header(opcode: int, num_bytes: int) -> bytes:
    """Of one whole message from a server without extensions (RFC 6455, section 5.2).

    Example:
        >>> frame_header(0x2, 200).hex()
        '827e00c8'
    """
    if num_bytes <= _MAX_LENGTH_7:
        return bytes((_FIN | opcode, num_bytes))
    if num_bytes <= _MAX_LENGTH_16:
        return struct.pack("!BBH", _FIN | opcode, 126, num_bytes)
    return struct.pack("!BBQ", _FIN | opcode, 127, num_bytes)


class PlosiveWebSocket(WebSocketsSansIOProtocol):
    def connection_made(self, transport: BaseTransport) -> None:
        super().connection_made(transport)
        sock: socket.socket | None = transport.get_extra_info("socket")
        if sock is not None:
            # asyncio sets this only on sockets that were made with an explicit protocol number.
            # Without it a second small write waits 40 ms for the client's delayed acknowledgement.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
        cast(asyncio.Transport, transport).set_write_buffer_limits(high=_TRANSPORT_BUFFER_BYTES)

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if self.response.status_code == 101:  # the app's task is created but has not run yet
            extensions: dict[Any, Any] = self.scope["extensions"]
            extensions[ABORT_EXTENSION] = self._close_now
            extensions[MAX_SIZE_EXTENSION] = self._set_max_size
            extensions[WRITE_NOW_EXTENSION] = self._write_now

    def _set_max_size(self, num_bytes: int) -> None:
        """Of this connection's messages, by whoever expects large ones, before it accepts."""
        self.conn.max_message_size = num_bytes

    def _write_now(self, messages: Sequence[tuple[int, bytes]]) -> bool:
        """Whole messages, in order, in one write, if the socket has taken all that came before.

        A packet that goes through the writer's task and ASGI costs the event loop twice as much:
        40 us instead of 20 at 64 paced streams (one core of an AMD EPYC).
        """
        is_open = self.handshake_complete and not self.close_sent and not self.disconnected
        if not is_open or self.conn.state is not State.OPEN:
            return False
        if self.transport.get_write_buffer_size():
            return False
        parts: list[bytes] = []
        for opcode, payload in messages:
            parts += (frame_header(opcode, len(payload)), payload)
        self.transport.write(b"".join(parts))
        return True

    async def send(self, message: ASGISendEvent) -> None:
        await super().send(message)
        is_body = message["type"] == "websocket.http.response.body"
        if is_body and not message.get("more_body", False):
            self.handshake_complete = True  # or a refusal is logged as a failure of the app

    def keepalive_timeout(self) -> None:
        """No pong in time. uvicorn's own close would wait for the transport's buffer to drain, and
        the slot with it: a client that has stopped reading is told why, a silent one is cut off."""
        if self.transport.get_write_buffer_size():
            code = CLOSE_CODE["client_too_slow"]
            self._close_now(code, f"no ping was answered for {self.ping_timeout:g} s")
            self.queue.put_nowait({"type": "websocket.disconnect", "code": code})
        else:
            super().keepalive_timeout()
            self.transport.abort()

    def _close_now(self, code: int, reason: str) -> None:
        """Queue the close frame behind what the client has not read, and stop waiting for it."""
        if self.close_sent or self.transport.is_closing():
            return
        self.stop_keepalive()
        self.conn.send_close(code, reason)
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()
        self.close_timer = self.loop.call_later(_ABORT_AFTER_S, self.transport.abort)
