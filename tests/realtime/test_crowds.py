"""Many more clients than slots, and clients that are cut off at any byte: none hangs, none is lost."""

import asyncio
from pathlib import Path

from websockets.exceptions import InvalidStatus

from realtime import wire
from tests.realtime.support import Served, make_engine, serving, session

TEXT = "Some words to say."
UPGRADE = (
    f"GET {wire.PATH} HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
).encode()


def masked(message: wire.ClientMessage) -> bytes:
    data = wire.encode(message).encode()
    length = (
        bytes([len(data) | 0x80]) if len(data) <= 125 else b"\xfe" + len(data).to_bytes(2, "big")
    )
    return b"\x81" + length + bytes(4) + data


MESSAGES = b"".join(
    map(
        masked,
        (
            wire.SessionStart(),
            wire.TextAppend(turn_id=1, text=TEXT),
            wire.TextFlush(turn_id=1),
            wire.TurnCommit(turn_id=1),
            wire.TurnCancel(turn_id=1),
        ),
    )
)


async def speak(served: Served) -> int:
    """Packets heard; 0: refused with 503."""
    try:
        async with session(served) as client:
            await client.say(TEXT)
            return len(client.heard.packets)
    except InvalidStatus as refused:
        assert refused.response.status_code == 503
        assert int(refused.response.headers["Retry-After"]) >= 1
        return 0


async def test_300_connections_and_4_slots(tmp_path: Path) -> None:
    async with serving(tmp_path, make_engine(tmp_path, num_slots=4)) as served:
        heard = await asyncio.gather(*(speak(served) for _ in range(300)))
        assert len(set(heard) - {0}) == 1, "who is served hears everything"
        await served.until_free()
        assert await speak(served)


async def test_cut_off_at_any_byte(tmp_path: Path) -> None:
    async with serving(tmp_path, make_engine(tmp_path, num_slots=4)) as served:
        for cut in range(1, len(UPGRADE)):
            _, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(UPGRADE[:cut])
            await writer.drain()
            writer.transport.abort()
        for cut in range(1, len(MESSAGES) + 1):
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(UPGRADE)
            if b" 503 " in await reader.readuntil(b"\r\n\r\n"):
                await served.until_free()  # the ones before are still being cleared away
            writer.write(MESSAGES[:cut])
            await writer.drain()
            writer.transport.abort()
        await served.until_free()
        assert await speak(served)
