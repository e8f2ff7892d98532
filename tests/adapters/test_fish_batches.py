"""Packets that come faster than they are taken go out together, but never wait, nor mix."""

import asyncio
from collections import deque
from typing import Any, cast

import numpy as np
import ormsgpack
from fastapi import WebSocket

from realtime.adapters.fish_live import LiveSocket, Speech
from realtime.adapters.fish_request import TtsRequest
from realtime.adapters.fish_voices import Voices
from realtime.adapters.local import LocalSession
from realtime.adapters.speech import session_pcm
from realtime.errors import ConnectionLost, PlosiveError
from realtime.wire import AudioFlags, AudioKind, AudioPacket, TurnDone, TurnMetrics, Warn

METRICS = TurnMetrics(num_samples=0, num_packets=0, num_frames=0, audio_ms=0.0, num_segments=0)


class ScriptedSession:
    """All items are there at once; then the session is over, once `is_heard` is set."""

    def __init__(self, items: list[Any]) -> None:
        self._items = deque(items)
        self.is_heard = asyncio.Event()

    @property
    def num_waiting(self) -> int:
        return len(self._items)

    async def receive(self) -> Any:
        if not self._items:
            await self.is_heard.wait()
            raise ConnectionLost("over", close_code=1000)
        item = self._items.popleft()
        if isinstance(item, PlosiveError):
            raise item
        return item

    def cancel(self, turn_id: int) -> None:
        pass


class Wire:
    """What the client gets, unpacked; `until` waits for so much audio."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._came = asyncio.Event()

    async def send_bytes(self, data: bytes) -> None:
        self.events.append(ormsgpack.unpackb(data))
        self._came.set()

    async def close(self, code: int, reason: str) -> None:
        pass

    async def receive(self) -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    @property
    def audio(self) -> list[bytes]:
        return [event["audio"] for event in self.events if event["event"] == "audio"]

    async def until(self, num_bytes: int) -> None:
        async with asyncio.timeout(5.0):
            while len(b"".join(self.audio)) < num_bytes:
                self._came.clear()
                await self._came.wait()


def packet(turn_id: int, seq: int, level: int) -> AudioPacket:
    payload = np.full(480, level, "<i2").tobytes()
    return AudioPacket(AudioKind.PCM_S16LE, AudioFlags.NONE, turn_id, seq, 480 * seq, payload)


async def hear(items: list[Any], num_bytes: int) -> list[bytes]:
    """Two speeches of a turn each; the client's audio events until so much is there."""
    wire, session = Wire(), ScriptedSession(items)
    socket = LiveSocket(
        cast(WebSocket, wire),
        cast(LocalSession, session),
        cast(Voices, None),
        charge=lambda num_chars: None,
        pcm=session_pcm(24_000),
        lead_ms=2_000,
        stall_s=5.0,
        with_timestamps=False,
    )
    for turn_id in (1, 2):
        speech = Speech(TtsRequest(format="pcm", sample_rate=24_000), 24_000)
        speech.open_turn(turn_id)
        speech.is_stopped = True
        socket._speeches.append(speech)
    running = asyncio.create_task(socket.run())
    await wire.until(num_bytes)
    session.is_heard.set()
    await running
    return wire.audio


async def test_packets_that_wait_go_out_together() -> None:
    audio = await hear([packet(1, seq, 100) for seq in range(10)], 10 * 960)
    assert [len(part) // 960 for part in audio] == [8, 2]


async def test_a_packet_does_not_wait_behind_a_message_that_nobody_hears_of() -> None:
    warning = Warn(code="unspoken", message="left out", turn_id=1)
    assert len(await hear([packet(1, 0, 100), warning], 960)) == 1


async def test_what_is_left_of_a_turn_that_failed_is_not_heard_in_the_next() -> None:
    failure = PlosiveError("engine_overloaded", "no", turn_id=1)
    done = TurnDone(turn_id=2, metrics=METRICS)
    audio = b"".join(await hear([packet(1, 0, 100), failure, packet(2, 0, 200), done], 960))
    assert set(np.frombuffer(audio, "<i2")) == {200}
