"""What waits for one socket: its order, what is dropped, and who is held back."""

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from realtime import wire
from realtime.config import ServerConfig
from realtime.connection import WRITE_NOW_EXTENSION, Connection
from realtime.metrics import Metrics
from realtime.outbox import MAX_MESSAGES, Audio, Closing, Outbox, Text
from realtime.pingpong.messages import SlotRef
from realtime.session.actions import Send, SendAudio


def audio(turn_id: int, audio_ms: float = 20.0) -> Audio:
    return Audio((b"packet",), turn_id, audio_ms)


async def test_it_is_idle_only_while_its_reader_waits_for_something() -> None:
    outbox = Outbox()
    assert not outbox.is_idle  # nobody has asked yet
    taking = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    assert outbox.is_idle
    outbox.put(Text("first", None))
    assert not outbox.is_idle
    item = await taking
    assert not outbox.is_idle  # it is being written: what goes past it would come first
    outbox.taken(item)
    taking = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    assert outbox.is_idle
    taking.cancel()


async def test_a_turn_is_dropped_with_its_texts_and_all_else_stays_in_order() -> None:
    outbox = Outbox()
    kept = [Text("a", None), audio(2, 40.0), Text("b", 2), Closing(1000, "")]
    for item in (kept[0], audio(1), Text("c", 1), *kept[1:3], audio(1), kept[3]):
        outbox.put(item)
    assert outbox.audio_ms == 80.0
    outbox.drop(1)
    assert outbox.audio_ms == 40.0
    assert [await outbox.take() for _ in kept] == kept
    assert outbox.audio_ms == 40.0  # the socket is just being given it
    outbox.taken(kept[1])
    assert outbox.audio_ms == 0.0


async def test_a_client_that_takes_no_replies_is_not_read_from() -> None:
    outbox = Outbox()
    for number in range(MAX_MESSAGES - 1):
        outbox.put(Text(str(number), None))
    outbox.put(audio(1))  # which is held back elsewhere
    await asyncio.wait_for(outbox.wait_for_room(), 1.0)
    outbox.put(Text("one more", None))
    waiting = asyncio.create_task(outbox.wait_for_room())
    await asyncio.sleep(0)
    assert not waiting.done()
    outbox.taken(await outbox.take())
    await asyncio.wait_for(waiting, 1.0)


@pytest.mark.parametrize("can_write_now", [False, True])
async def test_the_end_never_overtakes_the_audio(can_write_now) -> None:
    """Whatever waits, and whether or not the socket could take the later ones at once."""
    written: list[str | bytes] = []
    came = asyncio.Event()

    async def send(frame: str | bytes) -> None:
        written.append(frame)
        if len(written) == 6:
            came.set()

    def write_now(frames: Any) -> bool:
        written.extend(frame for _, frame in frames)
        return True

    extensions = {WRITE_NOW_EXTENSION: write_now} if can_write_now else {}
    socket: Any = SimpleNamespace(scope={"extensions": extensions}, send_text=send, send_bytes=send)
    session = Mock(slot=SlotRef(0, 0), is_closed=False)
    connection = Connection(socket, session, Mock(), ServerConfig(), Metrics())
    packets = [
        wire.AudioPacket(wire.AudioKind.OPUS, wire.AudioFlags(0), 1, seq, 0, b"")
        for seq in range(2)
    ]
    end = wire.TurnText(turn_id=1, text="One.", audio_ms=20.0)
    for _ in range(2):  # the first call waits: nobody has asked for it yet
        connection.apply([SendAudio(1, tuple(packets)), Send(end)])
    writing = asyncio.create_task(connection._write())
    await asyncio.wait_for(came.wait(), 5.0)
    writing.cancel()
    assert written == [*map(wire.pack_audio, packets), wire.encode(end)] * 2
