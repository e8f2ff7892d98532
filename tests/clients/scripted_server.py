"""A small WebSocket server that follows a script, for tests of what talks to a server.

`talker` is the script of a well-behaved server: it says each committed turn as a tone, 60 ms of
audio per word of ASCII. It warns of a `?!`, and takes no prompt. As a program (`python -m tests.clients.scripted_server`) it takes the options that
clients give to `plosive serve`.
"""

import argparse
import asyncio
import contextlib
import http
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import av
import numpy as np
from numpy.typing import NDArray
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.typing import Subprotocol

from clients import Session, connect
from realtime.wire import (
    PACKET_MS,
    SUBPROTOCOL,
    AudioFlags,
    AudioFormat,
    AudioKind,
    AudioPacket,
    ClientMessage,
    EffectiveFormat,
    ServerMessage,
    SessionClose,
    SessionClosing,
    SessionReady,
    SessionStart,
    SessionUpdate,
    TextAppend,
    TurnCancel,
    TurnCancelled,
    TurnCommit,
    TurnDone,
    TurnMetrics,
    TurnStarted,
    Warn,
    decode_client,
    encode,
    pack_audio,
)

SAMPLE_RATE_HZ = 24_000
PACKET_SAMPLES = SAMPLE_RATE_HZ * PACKET_MS // 1000
PACKETS_PER_WORD = 3
PCM_FORMAT = AudioFormat(codec="pcm_s16le")
PACKET = b"\0\0" * PACKET_SAMPLES  # of silence
OPUS = EffectiveFormat(codec="opus", sample_rate=SAMPLE_RATE_HZ, pre_skip_samples=156)
PCM = EffectiveFormat(codec="pcm_s16le", sample_rate=SAMPLE_RATE_HZ)

M = TypeVar("M")
Script = Callable[["Peer"], Awaitable[None]]


@dataclass
class Peer:
    """The server's end of one connection."""

    socket: ServerConnection
    received: list[ClientMessage] = field(default_factory=list)
    format: EffectiveFormat = PCM

    async def next(self) -> ClientMessage:
        frame = await self.socket.recv()
        assert isinstance(frame, str), frame
        message = decode_client(frame)
        self.received.append(message)
        return message

    async def expect(self, kind: type[M]) -> M:
        message = await self.next()
        assert isinstance(message, kind), f"expected {kind.__name__}, got {message}"
        return message

    async def expect_turn(self) -> None:
        """A turn whose text comes in one message."""
        await self.expect(TextAppend)
        await self.expect(TurnCommit)

    async def send(self, *messages: ServerMessage) -> None:
        for message in messages:
            await self.socket.send(encode(message))

    async def send_raw(self, frame: str | bytes) -> None:
        await self.socket.send(frame)

    async def accept(self) -> SessionStart:
        """Expect `session.start`, answer `session.ready`."""
        start = await self.expect(SessionStart)
        self.format = OPUS if start.format.codec == "opus" else PCM
        await self.send(ready(self.format, start.voice or "default"))
        return start

    async def audio(
        self, turn_id: int, payloads: list[bytes], first_seq: int = 0, is_last: bool = False
    ) -> None:
        """Send packets of a turn; `is_last` flags the last one given."""
        for seq, payload in enumerate(payloads, first_seq):
            is_flagged = is_last and seq == first_seq + len(payloads) - 1
            sent = packet(turn_id, seq, payload, self.format, is_flagged)
            await self.socket.send(pack_audio(sent))

    async def done(self, turn_id: int, num_packets: int, num_samples: int | None = None) -> None:
        await self.send(done(turn_id, num_packets, num_samples))

    async def until_closed(self) -> None:
        with contextlib.suppress(ConnectionClosed):
            while True:
                await self.next()


@dataclass
class ScriptedServer:
    url: str
    peers: list[Peer] = field(default_factory=list)
    failures: list[BaseException] = field(default_factory=list)
    refusal: Response | None = None  # given instead of the upgrade
    refusals: list[Response] = field(default_factory=list)  # given once each, before that

    @property
    def received(self) -> list[ClientMessage]:
        return [message for peer in self.peers for message in peer.received]


@asynccontextmanager
async def scripted_server(
    script: Script, *, refusal: Response | None = None, port: int = 0
) -> AsyncIterator[ScriptedServer]:
    """Run `script` for every connection, then wait until the client closes it; a script that fails
    fails the test that runs it."""
    scripted = ScriptedServer(url="", refusal=refusal)

    async def handle(socket: ServerConnection) -> None:
        peer = Peer(socket)
        scripted.peers.append(peer)
        try:
            await script(peer)
            await peer.until_closed()
        except ConnectionClosed:
            pass
        except Exception as error:  # noqa: BLE001 - raised in the test
            scripted.failures.append(error)

    def answer_http(socket: ServerConnection, request: Request) -> Response | None:
        if request.path == "/v1/voices":
            voices = [{"name": name, "is_builtin": True} for name in ("ann", "bob")]
            return respond(200, json.dumps({"voices": voices, "default": "ann"}))
        if request.path == "/ready":
            return respond(200, json.dumps({"ready": True}))
        return scripted.refusals.pop(0) if scripted.refusals else scripted.refusal

    server: Server = await serve(
        handle,
        "127.0.0.1",
        port,
        subprotocols=[Subprotocol(SUBPROTOCOL)],
        process_request=answer_http,
        compression=None,
    )
    async with server:
        scripted.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield scripted
    if scripted.failures:
        raise scripted.failures[0]


@asynccontextmanager
async def session_with(script: Script) -> AsyncIterator[Session]:
    """A session in PCM whose server does what the script says."""
    async with (
        scripted_server(script) as server,
        connect(server.url, format=PCM_FORMAT) as session,
    ):
        yield session


def respond(status: int, body: str = "", headers: dict[str, str] | None = None) -> Response:
    data = body.encode()
    fields = Headers({"Content-Length": str(len(data)), "Connection": "close", **(headers or {})})
    return Response(status, http.HTTPStatus(status).phrase, fields, data)


def ready(format: EffectiveFormat = PCM, voice: str = "default") -> SessionReady:
    return SessionReady(
        session_id="s1",
        model="scripted",
        voice=voice,
        format=format,
        prefill_ms=1.5,
        cached=voice == "default",
        frame_rate_hz=12.5,
        max_lead_ms=1000,
    )


def done(turn_id: int, num_packets: int, num_samples: int | None = None) -> TurnDone:
    if num_samples is None:
        num_samples = num_packets * PACKET_SAMPLES
    metrics = TurnMetrics(
        num_samples=num_samples,
        num_packets=num_packets,
        num_frames=num_packets,
        audio_ms=1000.0 * num_samples / SAMPLE_RATE_HZ,
        num_segments=1,
        server_ttfa_ms=2.0,
        timeline_ms={"prefill_done": 0.5, "first_packet": 2.0},
    )
    return TurnDone(turn_id=turn_id, metrics=metrics)


def packet(
    turn_id: int, seq: int, payload: bytes, format: EffectiveFormat = PCM, is_last: bool = False
) -> AudioPacket:
    kind = AudioKind.OPUS if format.codec == "opus" else AudioKind.PCM_S16LE
    flags = AudioFlags.LAST if is_last else AudioFlags.NONE
    return AudioPacket(kind, flags, turn_id, seq, seq * PACKET_SAMPLES, payload)


def tone(num_samples: int, num_silent: int = 0) -> NDArray[np.int16]:
    """A 220 Hz tone after `num_silent` samples of silence, s16."""
    samples = 8000 * np.sin(2 * np.pi * 220 / SAMPLE_RATE_HZ * np.arange(num_samples))
    samples[:num_silent] = 0
    return samples.astype(np.int16)


def pcm_payloads(samples: NDArray[np.int16]) -> list[bytes]:
    """20 ms packets; the last may be shorter."""
    return [
        samples[i : i + PACKET_SAMPLES].tobytes() for i in range(0, len(samples), PACKET_SAMPLES)
    ]


def opus_payloads(samples: NDArray[np.int16]) -> list[bytes]:
    """20 ms packets that hold all samples behind `OPUS.pre_skip_samples` of pre-skip."""
    encoder = av.CodecContext.create("libopus", "w")
    assert isinstance(encoder, av.AudioCodecContext)
    encoder.sample_rate, encoder.layout, encoder.format = SAMPLE_RATE_HZ, "mono", "s16"
    encoder.bit_rate = 64_000
    num_padding = -(len(samples) + OPUS.pre_skip_samples) % PACKET_SAMPLES
    padded = np.pad(samples, (0, num_padding + OPUS.pre_skip_samples))
    payloads = []
    for i in range(0, len(padded), PACKET_SAMPLES):
        frame = av.AudioFrame.from_ndarray(
            padded[None, i : i + PACKET_SAMPLES], format="s16", layout="mono"
        )
        frame.sample_rate = SAMPLE_RATE_HZ
        payloads += [bytes(encoded) for encoded in encoder.encode(frame)]
    return payloads


async def talker(peer: Peer) -> None:
    """Says every committed turn, one after another; cancels what it is told to cancel."""
    start = await peer.accept()
    if start.prompt:
        await peer.send(Warn(code="prompt_ignored", message="scripted takes no prompt"))
    texts: dict[int, str] = {}
    while True:
        match await peer.next():
            case TextAppend(turn_id=turn_id, text=text):
                texts[turn_id] = texts.get(turn_id, "") + text
                if "?!" in text:
                    message = "text: left out\n'?!'"
                    await peer.send(Warn(code="odd_text", message=message, turn_id=turn_id))
            case TurnCommit(turn_id=turn_id):
                await _talk(peer, turn_id, texts[turn_id])
            case TurnCancel(turn_id=turn_id, played_ms=played_ms):
                text = texts.pop(turn_id, "")
                await peer.send(
                    TurnCancelled(
                        turn_id=turn_id,
                        spoken_text="",
                        remaining_text=text,
                        played_ms=played_ms or 0.0,
                    )
                )
            case SessionUpdate(voice=voice):
                await peer.send(ready(peer.format, voice or "default"))
            case SessionClose():
                await peer.send(SessionClosing(reason="session_closed"))
                await peer.socket.close()
                return


async def _talk(peer: Peer, turn_id: int, text: str) -> None:
    num_samples = sum(map(str.isascii, text.split())) * PACKETS_PER_WORD * PACKET_SAMPLES
    samples = tone(num_samples, num_silent=PACKET_SAMPLES)
    payloads = (opus_payloads if peer.format is OPUS else pcm_payloads)(samples)
    await peer.send(TurnStarted(turn_id=turn_id))
    await peer.audio(turn_id, payloads, is_last=True)
    await peer.done(turn_id, len(payloads), num_samples)


async def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--announce-fd", type=int)
    parser.add_argument("--lifeline-fd", type=int)
    parser.add_argument("--model", help='"broken" cannot be loaded')
    parser.add_argument("--mute", help="never speak; write the process id to this fifo instead")
    args, _ = parser.parse_known_args()
    if args.model == "broken":
        raise SystemExit("cannot load the model: it is broken")

    async def mute(peer: Peer) -> None:
        await peer.accept()
        await peer.expect(TextAppend)
        Path(args.mute).write_text(str(os.getpid()))  # noqa: ASYNC240 - nothing else runs

    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    async with scripted_server(mute if args.mute else talker, port=args.port) as server:
        if args.announce_fd is not None:
            with os.fdopen(args.announce_fd, "w") as announce:
                announce.write(json.dumps({"url": server.url, "ready_s": 0.1}) + "\n")
        if args.lifeline_fd is not None:
            asyncio.get_running_loop().add_reader(args.lifeline_fd, stopped.set)
        await stopped.wait()


if __name__ == "__main__":
    asyncio.run(_main())
