"""Socket options of an accepted connection, and what is written past ASGI."""

import asyncio
import socket
from pathlib import Path

import pytest
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame, Opcode

from realtime.cli.serve import bind
from realtime.connection import BINARY, TEXT
from realtime.websocket import PlosiveWebSocket, frame_header
from realtime.wire import AudioFormat, AudioPacket, TurnDone
from tests.realtime.support import Client, make_engine, serving, session


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


@pytest.mark.parametrize("num_bytes", [0, 1, 125, 126, 200, 65_535, 65_536])
@pytest.mark.parametrize("opcode", [TEXT, BINARY])
def test_headers_are_those_of_the_library(opcode: int, num_bytes: int) -> None:
    frame = Frame(Opcode(opcode), b"x" * num_bytes)
    assert frame_header(opcode, num_bytes) == frame.serialize(mask=False)[: -num_bytes or None]


async def test_order_is_kept_between_a_full_and_an_empty_socket(tmp_path: Path) -> None:
    """Packets go past the writer's task while the client reads, and through it while it does not."""
    engine = make_engine(tmp_path)
    water = {"high_water_ms": 100, "low_water_ms": 40}
    async with (
        serving(tmp_path, engine, **water, write_stall_s=60.0) as served,
        session(served, format=AudioFormat(codec="pcm_s16le", sample_rate=48_000)) as client,
    ):
        await client.begin("a long sentence " * 40)
        seqs = [(await _next_packet(client)).seq for _ in range(20)]
        await asyncio.to_thread(engine.wait_until, lambda: any(b for _, b in engine.blocked))
        done = await client.until(TurnDone)
        seqs += [packet.seq for packet in client.heard.packets[20:]]
        assert seqs == list(range(done.metrics.num_packets))
        assert client.heard.packets[-1].is_last


async def _next_packet(client: Client) -> AudioPacket:
    while not isinstance(message := await client.next(), AudioPacket):
        pass
    return message
