"""A real server on a free port, and a client that is nothing but a socket."""

import asyncio
import contextlib
import ctypes
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import numpy as np
import safetensors.numpy
import uvicorn.server
from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as ws_connect
from websockets.exceptions import InvalidStatus

from realtime import wire
from realtime.auth import ApiKeys
from realtime.cli.serve import DrainingServer, bind, make_server
from realtime.config import ServerConfig
from realtime.hub import Hub
from realtime.opus import load_opuslib
from tests.fakes import NUM_CODEBOOKS, FakeEngine

TIMEOUT_S = 10.0

# uvicorn sleeps for 0.1 s whenever a server ends, which tests do a thousand times.
_IMPATIENT = ModuleType("asyncio")
_IMPATIENT.__dict__.update(vars(asyncio), sleep=lambda seconds: asyncio.sleep(min(seconds, 0.002)))
uvicorn.server.asyncio = _IMPATIENT


@dataclass
class Served:
    port: int
    server: DrainingServer
    hub: Hub
    engine: FakeEngine
    running: asyncio.Task[None]

    @property
    def ws_url(self) -> str:
        return f"ws://127.0.0.1:{self.port}{wire.PATH}"

    def http(self) -> httpx.AsyncClient:
        """Certificates are not loaded, which takes 14 ms."""
        url = f"http://127.0.0.1:{self.port}"
        return httpx.AsyncClient(base_url=url, trust_env=False, verify=False)

    def connect(self, **kwargs: Any) -> "ws_connect":
        kwargs = {"subprotocols": [wire.SUBPROTOCOL], "proxy": None, "close_timeout": 0.2} | kwargs
        return ws_connect(self.ws_url, **kwargs)

    async def stop(self) -> None:
        self.server.stop()
        await self.running

    async def until_free(self) -> None:
        """Every slot back and every encoder gone."""
        num_slots = self.engine.info.num_slots
        async with asyncio.timeout(TIMEOUT_S):
            while self.engine.slots.num_free < num_slots:
                await self.hub.slot_released.wait()
        assert self.hub.egress.num_encoders == 0

    async def until_idle(self) -> None:
        """No request and no socket is being served, whether its client reads or not."""
        async with asyncio.timeout(TIMEOUT_S):
            while tasks := self.server.server_state.tasks.copy():
                await asyncio.wait(tasks)


async def socket_status(served: Served, **kwargs: Any) -> tuple[int, dict[str, str]]:
    """Of the answer to an upgrade; 101 if it was accepted."""
    try:
        async with served.connect(**kwargs) as socket:
            assert socket.subprotocol in (wire.SUBPROTOCOL, None)
            return 101, {}
    except InvalidStatus as refused:
        return refused.response.status_code, dict(refused.response.headers)


def write_voice(folder: Path, name: str = "tone", num_frames: int = 50) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    codes = np.zeros((NUM_CODEBOOKS, num_frames), np.int32)
    safetensors.numpy.save_file({"codes": codes}, folder / f"{name}.safetensors")
    (folder / f"{name}.json").write_text(json.dumps({"text": "a tone"}))


def make_engine(folder: Path, **kwargs: Any) -> FakeEngine:
    write_voice(folder / "builtin")
    return FakeEngine(builtin_voices_path=folder / "builtin", **kwargs)


class Complaints(logging.Handler):
    """What uvicorn logs as errors: faults of the app, by its lights."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []
        self._logger = logging.getLogger("uvicorn.error")
        self._logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))

    def stop(self) -> None:
        self._logger.removeHandler(self)


@contextlib.asynccontextmanager
async def serving(
    folder: Path,
    engine: FakeEngine | None = None,
    *,
    until_ready: bool = True,
    keys: ApiKeys | None = None,
    **options: Any,
) -> AsyncIterator[Served]:
    engine = engine or make_engine(folder)
    config = ServerConfig(port=0, voices_dir=folder / "voices", **({"drain_s": 0.1} | options))
    sock = bind(config.host, 0)
    server, hub = make_server(engine, config, keys)
    complaints = Complaints()
    running = asyncio.create_task(server.serve(sockets=[sock]))
    served = Served(sock.getsockname()[1], server, hub, engine, running)
    try:
        if until_ready:
            await asyncio.wait_for(hub.wait_until_ready(), TIMEOUT_S)
        yield served
    finally:
        engine.warm_up_gate.set()
        engine.encode_gate.set()
        await served.stop()
        complaints.stop()
    assert not complaints.lines  # whatever a client did


@dataclass
class Heard:
    """What one client got, in order."""

    messages: list[wire.ServerMessage] = field(default_factory=list)
    packets: list[wire.AudioPacket] = field(default_factory=list)

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.messages if isinstance(message, kind)]


class Client:
    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.heard = Heard()

    async def send(self, *messages: wire.ClientMessage) -> None:
        for message in messages:
            await self.socket.send(wire.encode(message))

    async def next(self) -> wire.ServerMessage | wire.AudioPacket:
        frame = await asyncio.wait_for(self.socket.recv(), TIMEOUT_S)
        if isinstance(frame, bytes):
            packet = wire.unpack_audio(frame)
            self.heard.packets.append(packet)
            return packet
        message = wire.decode_server(frame)
        self.heard.messages.append(message)
        return message

    async def until(self, kind: type) -> Any:
        while True:
            message = await self.next()
            if isinstance(message, kind):
                return message

    async def start(self, **kwargs: Any) -> wire.SessionReady:
        await self.send(wire.SessionStart(**kwargs))
        return await self.until(wire.SessionReady)

    async def begin(self, text: str, turn_id: int = 1) -> None:
        await self.send(
            wire.TextAppend(turn_id=turn_id, text=text), wire.TurnCommit(turn_id=turn_id)
        )

    async def say(self, text: str, turn_id: int = 1) -> wire.TurnDone:
        await self.begin(text, turn_id)
        return await self.until(wire.TurnDone)


@contextlib.asynccontextmanager
async def session(served: Served, **start: Any) -> AsyncIterator[Client]:
    async with served.connect() as socket:
        client = Client(socket)
        await client.start(**start)
        yield client


def upgrade(path: str) -> bytes:
    """The request that opens a WebSocket."""
    return (
        f"GET {path} HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    ).encode()


async def check_crowd(folder: Path, speak: Callable[[Served], Awaitable[int]]) -> None:
    """300 clients at once and 4 slots. `speak`: how much was heard, 0 for a refusal."""
    async with serving(folder, make_engine(folder, num_slots=4)) as served:
        heard = await asyncio.gather(*(speak(served) for _ in range(300)))
        assert len(set(heard) - {0}) == 1, f"who is served hears everything: {set(heard)}"
        await served.until_free()
        assert await speak(served), "refused, with every slot free"


async def break_off(served: Served, data: bytes, head: bytes = b"") -> None:
    """For every number of bytes a client that is gone when it has sent so many; first it sends the
    head, if any, and waits for the answer."""
    for cut in range(1, len(data) + 1):
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        if head:
            writer.write(head)
            if b" 503 " in await reader.readuntil(b"\r\n\r\n"):
                await served.until_free()  # the ones before are still being cleared away
        writer.write(data[:cut])
        await writer.drain()
        writer.transport.abort()


def decode(packets: list[wire.AudioPacket], fmt: wire.EffectiveFormat) -> np.ndarray:
    """PCM f32 of whole turns' packets, pre-skip dropped."""
    if fmt.codec == "pcm_s16le":
        data = b"".join(packet.payload for packet in packets)
        return np.frombuffer(data, "<i2").astype(np.float32) / 32767.0
    return opus_decode([p.payload for p in packets], fmt.sample_rate)[fmt.pre_skip_samples :]


def opus_decode(payloads: list[bytes], sample_rate: int) -> np.ndarray:
    """libopus's decoder, called directly: opuslib's own decodes to int16 only via array copies."""
    lib = load_opuslib().api.libopus
    create, run, destroy = (
        lib[name] for name in ("opus_decoder_create", "opus_decode_float", "opus_decoder_destroy")
    )
    create.restype = ctypes.c_void_p
    state = ctypes.c_void_p(create(sample_rate, 1, None))
    size = sample_rate // 50
    out = np.zeros(size * len(payloads), np.float32)
    for i, payload in enumerate(payloads):
        part = out[i * size :].ctypes.data_as(ctypes.c_void_p)
        num = run(state, payload, len(payload), part, size, 0)
        assert num == size, num
    destroy(state)
    return out
