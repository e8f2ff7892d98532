"""A Fish client that is nothing but a socket, and what audio should come out."""

import asyncio
import contextlib
import io
from collections.abc import AsyncIterator
from typing import Any

import av
import numpy as np
import ormsgpack
import soxr
from websockets.asyncio.client import ClientConnection, connect

from realtime.pingpong.messages import SetText
from tests.fakes import FakeEngine
from tests.realtime.support import TIMEOUT_S, Served

LIVE = "/v1/tts/live"
SENTENCES = ("The quick brown fox jumps. ", "It runs over the lazy dog. ", "Then it sleeps.")
TEXT = "The quick brown fox jumps over the lazy dog. Then it sleeps until noon."


class FishSocket:
    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.events: list[dict[str, Any]] = []

    async def send(self, event: str, **fields: Any) -> None:
        await self.socket.send(ormsgpack.packb({"event": event, **fields}))

    async def start(self, **request: Any) -> None:
        request = {"text": "", "format": "pcm", "sample_rate": 24_000} | request
        await self.send("start", request=request)

    async def next(self) -> dict[str, Any]:
        event = ormsgpack.unpackb(await asyncio.wait_for(self.socket.recv(), TIMEOUT_S))
        self.events.append(event)
        return event

    async def until(self, name: str) -> dict[str, Any]:
        while (event := await self.next())["event"] != name:
            pass
        return event

    async def until_bytes(self, num_bytes: int) -> bytes:
        """Exactly so much audio, and not a byte more."""
        audio = b""
        while len(audio) < num_bytes:
            audio += (await self.until("audio"))["audio"]
        assert len(audio) == num_bytes
        return audio

    async def until_finish(self, reason: str = "stop") -> bytes:
        """The audio up to the end."""
        audio = b""
        while (event := await self.next())["event"] != "finish":
            audio += event.get("audio", b"")
        assert event["reason"] == reason, event
        return audio


@contextlib.asynccontextmanager
async def live(served: Served, path: str = LIVE) -> AsyncIterator[FishSocket]:
    url = f"ws://127.0.0.1:{served.port}{path}"
    async with connect(url, proxy=None, close_timeout=0.2) as socket:
        yield FishSocket(socket)


def decode(data: bytes) -> tuple[np.ndarray, int]:
    """Any container as f32 mono."""
    with av.open(io.BytesIO(data)) as container:
        frames = [frame.to_ndarray() for frame in container.decode(audio=0)]
        rate = container.streams.audio[0].rate
    pcm = np.concatenate([frame.reshape(-1) for frame in frames])
    return (pcm / 32768.0 if pcm.dtype == np.int16 else pcm).astype(np.float32), rate


def pcm_of(data: bytes) -> np.ndarray:
    return np.frombuffer(data, "<i2").astype(np.float32) / 32767.0


def assert_same(got: np.ndarray, sent: np.ndarray, in_rate: int, out_rate: int) -> None:
    """Sample by sample what the engine said, resampled."""
    expected = soxr.resample(sent, in_rate, out_rate) if in_rate != out_rate else sent
    assert abs(len(got) - len(sent) * out_rate / in_rate) <= 1
    num = min(len(got), len(expected))
    assert np.abs(got[:num] - expected[:num]).max() < 3 / 32767


def spoken(engine: FakeEngine) -> str:
    """All text that the engine was given to speak, in order."""
    closed = [c for c in engine.seen(SetText) if isinstance(c, SetText) and c.is_closed]
    return " ".join(command.text.strip() for command in closed)


def said(engine: FakeEngine, *turn_ids: int) -> np.ndarray:
    return np.concatenate([engine.pcm(0, turn_id) for turn_id in turn_ids])
