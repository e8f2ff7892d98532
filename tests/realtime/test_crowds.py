"""Many more clients than slots, and clients that are cut off at any byte: none hangs, none is lost."""

from pathlib import Path

from websockets.exceptions import InvalidStatus

from realtime import wire
from tests.realtime.support import (
    Served,
    break_off,
    check_crowd,
    make_engine,
    serving,
    session,
    upgrade,
)

TEXT = "Some words to say."
UPGRADE = upgrade(wire.PATH)


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
    await check_crowd(tmp_path, speak)


async def test_cut_off_at_any_byte(tmp_path: Path) -> None:
    async with serving(tmp_path, make_engine(tmp_path, num_slots=4)) as served:
        await break_off(served, UPGRADE[:-1])
        await break_off(served, MESSAGES, head=UPGRADE)
        await served.until_free()
        assert await speak(served)
