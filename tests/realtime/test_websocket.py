"""Socket options of an accepted connection."""

import socket

import pytest
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from realtime.cli.serve import bind
from realtime.websocket import PlosiveWebSocket


class Transport:
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def get_extra_info(self, name: str) -> socket.socket:
        assert name == "socket"
        return self._sock

    def set_write_buffer_limits(self, high: int) -> None:
        pass


def test_small_messages_do_not_wait_for_acknowledgements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WebSocketsSansIOProtocol, "connection_made", lambda *_: None)
    with bind("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            protocol = PlosiveWebSocket.__new__(PlosiveWebSocket)
            protocol.connection_made(Transport(accepted))  # type: ignore[arg-type]
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
