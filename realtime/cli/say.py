"""`plosive say`: speak one text through a server, or through one started for it.

It is played where sounddevice is installed and it is not saved.
"""

import argparse
import asyncio
import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from clients import (
    AudioPacket,
    Decoder,
    PlosiveError,
    Sampling,
    SoundCard,
    Speech,
    connect,
    decode_turn,
    save,
)
from clients.decode import Samples
from clients.local_server import LocalServer
from clients.play_buffer import PlayBuffer, Track
from clients.save import SUFFIXES, check_suffix
from clients.silence import leading_silence_ms

# Nobody interrupts it, so nothing is gained by making it at the speed of playback.
MAX_LEAD_MS = 60_000
PREBUFFER_MS = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("text", help='what to say; "-" reads standard input')
    parser.add_argument("--voice", help="name of the voice (default: the server's)")
    parser.add_argument("--prompt", default="", help="how to say it, where the model can be told")
    parser.add_argument("--seed", type=int, help="the same seed gives the same audio")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help=f"save the audio ({', '.join(SUFFIXES)}) "
        "instead of playing it (which needs sounddevice: pip install 'plosive[audio]')",
    )
    parser.add_argument(
        "--url",
        default=os.environ.get("PLOSIVE_URL"),
        help="a running server, like http://localhost:8765 (default: $PLOSIVE_URL, or else "
        "a local server is started and stopped again)",
    )
    parser.add_argument(
        "--api-key",
        default=os.environ.get("PLOSIVE_API_KEY"),
        help="for a server that needs one (default: $PLOSIVE_API_KEY)",
    )
    local = parser.add_argument_group("of the local server")
    local.add_argument("--model", help='"embedded" (default) or the path of a checkpoint')
    local.add_argument("--device", help='"auto" (default), "cpu", "cuda" or "cuda:N"')
    parser.set_defaults(usage_error=parser.error)


def run(args: argparse.Namespace) -> int:
    """0 when it is said, 1 with one sentence on stderr when it cannot be; wrong usage exits 2."""
    text = sys.stdin.read() if args.text == "-" else args.text
    if not text.strip():
        args.usage_error("there is nothing to say: the text is empty")
    if args.out is not None:
        try:
            check_suffix(args.out)
        except ValueError as error:
            args.usage_error(str(error))
        if not args.out.parent.is_dir():
            args.usage_error(f"there is no directory {args.out.parent}")
    try:
        with _terminated_like_interrupted():
            _run(args, text)
    except (PlosiveError, OSError) as error:
        message = error.message if isinstance(error, PlosiveError) else str(error)
        print(f"plosive say: {message}", file=sys.stderr)
        return 1
    return 0


def _run(args: argparse.Namespace, text: str) -> None:
    if args.url:
        if args.model or args.device:
            args.usage_error("--model and --device are for a local server; --url names another")
        said = asyncio.run(_say(args, args.url, text))
    else:
        said = _say_locally(args, text)
    if args.out is not None:
        save(args.out, said.samples, said.sample_rate_hz)
    print(said.summary() + (f" · {args.out}" if args.out else ""))


@dataclass(frozen=True)
class _Said:
    samples: Samples
    sample_rate_hz: int
    ready_ms: float
    ttfa_ms: float | None
    generation_ms: float  # commit sent -> last packet

    def summary(self) -> str:
        audio_ms = 1000.0 * len(self.samples) / self.sample_rate_hz
        silence_ms = leading_silence_ms(self.samples, self.sample_rate_hz)
        parts = [f"ready {self.ready_ms:.0f} ms"]
        if self.ttfa_ms is None:
            return f"{parts[0]} · no audio: the text has nothing that can be spoken"
        parts.append(f"TTFA {self.ttfa_ms:.0f} ms")
        audible = "never" if silence_ms is None else f"{self.ttfa_ms + silence_ms:.0f} ms"
        parts.append(f"audible {audible}")
        parts.append(f"audio {audio_ms / 1000:.2f} s")
        parts.append(f"real-time factor {self.generation_ms / audio_ms:.2f}")
        return " · ".join(parts)


async def _say(args: argparse.Namespace, url: str, text: str) -> _Said:
    async with connect(
        url,
        api_key=args.api_key,
        voice=args.voice,
        prompt=args.prompt,
        sampling=Sampling(seed=args.seed),
        max_lead_ms=MAX_LEAD_MS,
    ) as session:
        speech = session.say(text)
        if _can_play(args):
            packets = await _play(speech, Decoder(session.format))
        else:
            packets = [packet async for packet in speech]
    turn = speech.turn
    samples, sample_rate_hz = np.zeros(0, np.float32), session.format.sample_rate
    generation_ms = 0.0
    if packets:
        assert turn.metrics is not None and turn.timings.commit_s is not None
        samples, sample_rate_hz = decode_turn(packets, session.format, turn.metrics.num_samples)
        generation_ms = 1000.0 * (turn.timings.packets_s[-1] - turn.timings.commit_s)
    return _Said(samples, sample_rate_hz, session.ready_ms, turn.timings.ttfa_ms, generation_ms)


def _can_play(args: argparse.Namespace) -> bool:
    return args.out is None and importlib.util.find_spec("sounddevice") is not None


async def _play(speech: Speech, decoder: Decoder) -> list[AudioPacket]:
    """All packets, once the last of them was heard; an output that cannot be opened is no failure."""
    heard = asyncio.Event()
    track = Track(partial(asyncio.get_running_loop().call_soon_threadsafe, heard.set))
    buffer = PlayBuffer(decoder.sample_rate_hz * PREBUFFER_MS // 1000)
    buffer.add(track)
    device = SoundCard()
    try:
        device.start(decoder.sample_rate_hz, buffer.pull)
    except OSError as error:
        print(f"plosive say: not played: {error}", file=sys.stderr)
        return [packet async for packet in speech]
    packets = []
    try:
        async for packet in speech:
            packets.append(packet)
            buffer.feed(track, decoder.decode(packet))
        buffer.end(track)
        await heard.wait()
    finally:
        device.stop()
    return packets


def _say_locally(args: argparse.Namespace, text: str) -> _Said:
    options = [
        word
        for option, value in (("--model", args.model), ("--device", args.device))
        if value
        for word in (option, value)
    ]
    with ExitStack() as stack:
        try:
            server = stack.enter_context(LocalServer(options, on_wait=_show_wait))
        finally:
            _show_wait(None)
        try:
            return asyncio.run(_say(args, server.url, text))
        except PlosiveError:
            if not server.is_running:
                print(server.last_lines(), file=sys.stderr)
            raise


def _show_wait(waited_s: float | None) -> None:
    """One line that is overwritten, and None removes it; nothing where it cannot be."""
    if sys.stderr.isatty():
        line = "" if waited_s is None else f"starting a local server ({waited_s:.0f} s)"
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM unwinds like Ctrl-C, so that the local server is stopped."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
