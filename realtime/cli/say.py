"""`plosive say`: speak one text through the server that runs here, or through one started for it.

It is played, or saved with `--out`, or with `--mute` neither; a command that would be heard by nobody
fails before it speaks. What is worth knowing besides the figures goes to stderr, a line each.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from clients import (
    AudioPacket,
    Decoder,
    PlosiveError,
    Sampling,
    SessionError,
    SoundCard,
    Speech,
    Warn,
    connect,
    decode_turn,
    save,
)
from clients.address import DEFAULT_URL, without_password
from clients.decode import Samples
from clients.devices import load_sounddevice
from clients.explain import sentence
from clients.local_server import LocalServer, running_server, stopped_like_interrupted
from clients.play_buffer import PlayBuffer, Track
from clients.save import SUFFIXES, check_suffix
from clients.silence import leading_silence_ms
from realtime.config import DEVICES, is_device
from realtime.wire import EffectiveFormat

# Nobody interrupts it, so nothing is gained by making it at the speed of playback.
MAX_LEAD_MS = 60_000
PREBUFFER_MS = 60
_MAX_SEED = 2**63 - 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("text", help='what to say; "-" reads standard input')
    parser.add_argument("--voice", help="name of the voice (default: the server's)")
    parser.add_argument("--prompt", default="", help="how to say it, where the model can be told")
    parser.add_argument(
        "--seed", type=_seed, metavar="N", help="the same seed gives the same audio"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help=f"save the audio ({', '.join(SUFFIXES)}) "
        "instead of playing it (which needs sounddevice: pip install -e '.[audio]')",
    )
    parser.add_argument(
        "--mute", action="store_true", help="neither play nor save it, only print the figures"
    )
    parser.add_argument(
        "--url",
        help="a running server, like http://localhost:8765 (default: $PLOSIVE_URL, or else "
        f"{DEFAULT_URL} if one is ready there, or else one is started and stopped again)",
    )
    parser.add_argument(
        "--api-key",
        default=os.environ.get("PLOSIVE_API_KEY") or None,
        help="for a server that needs one (default: $PLOSIVE_API_KEY)",
    )
    local = parser.add_argument_group("a server of its own")
    local.add_argument("--local", action="store_true", help="start one even if one is running")
    local.add_argument(
        "--model",
        help='start one with "embedded" (default), a checkpoint\'s path, "random:..." or "tone"',
    )
    local.add_argument("--device", type=_device, help=f"start one on {DEVICES}")
    parser.set_defaults(usage_error=parser.error)


def run(args: argparse.Namespace) -> int:
    """0 when it is said, 1 with one sentence on stderr when it cannot be; wrong usage exits 2."""
    if args.url and _wants_local(args):
        args.usage_error("--local, --model and --device are for a server of its own; --url is not")
    text = (sys.stdin.read() if sys.stdin else "") if args.text == "-" else args.text
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
        with stopped_like_interrupted():
            _run(args, text)
    except (PlosiveError, OSError) as error:
        _tell(sentence(error, is_key_given=bool(args.api_key)))
        return 1
    return 0


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) > _MAX_SEED:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected 0 to {_MAX_SEED} (2^63-1)")
    return int(text)


def _device(text: str) -> str:
    if not is_device(text):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected {DEVICES}")
    return text


def _wants_local(args: argparse.Namespace) -> bool:
    return bool(args.local or args.model or args.device)


def _tell(line: str) -> None:
    print(f"plosive say: {line}", file=sys.stderr)


def _run(args: argparse.Namespace, text: str) -> None:
    if _is_played(args):
        _check_output(load_sounddevice)
    url = args.url or _find_server(args)
    said = asyncio.run(_say(args, url, text)) if url else _say_locally(args, text)
    if not len(said.samples):
        unwritten = f"; {args.out} is not written" if args.out else ""
        why = f"the text has nothing that can be spoken{unwritten}"
        raise SessionError("nothing_to_speak", why)
    if args.out is not None:
        save(args.out, said.samples, said.sample_rate_hz)
    print(said.summary() + (f" · {args.out}" if args.out else ""))


def _find_server(args: argparse.Namespace) -> str | None:
    """The one that the environment names or that runs here; None: start one."""
    if _wants_local(args):
        return None
    if url := os.environ.get("PLOSIVE_URL"):
        _tell(f"using the server at {without_password(url)} (PLOSIVE_URL)")
        return url
    if url := running_server():
        _tell(f"using the server at {url} (--local starts another)")
    else:
        _tell(f"no server is ready at {DEFAULT_URL}; starting one for this text")
    return url


@dataclass(frozen=True)
class _Said:
    samples: Samples
    sample_rate_hz: int
    ready_ms: float
    ttfa_ms: float
    generation_ms: float  # commit sent -> last packet

    def summary(self) -> str:
        audio_ms = 1000.0 * len(self.samples) / self.sample_rate_hz
        silence_ms = leading_silence_ms(self.samples, self.sample_rate_hz)
        parts = [f"ready {self.ready_ms:.0f} ms", f"TTFA {self.ttfa_ms:.0f} ms"]
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
        packets: list[AudioPacket] = []
        try:
            if _is_played(args):
                await _play(speech, Decoder(session.format), packets)
            else:
                await _collect(speech, packets)
        except PlosiveError as error:
            if args.out is not None and packets:
                raise _cut_short(args.out, packets, session.format, error) from error
            raise
        finally:
            for warning in session.warnings:
                _warn(warning)
    metrics, timings = speech.turn.metrics, speech.turn.timings
    if not packets:
        return _Said(np.zeros(0, np.float32), session.format.sample_rate, session.ready_ms, 0, 0)
    assert metrics is not None and timings.ttfa_ms is not None and timings.commit_s is not None
    samples, sample_rate_hz = decode_turn(packets, session.format, metrics.num_samples)
    generation_ms = 1000.0 * (timings.packets_s[-1] - timings.commit_s)
    return _Said(samples, sample_rate_hz, session.ready_ms, timings.ttfa_ms, generation_ms)


def _cut_short(
    path: Path, packets: list[AudioPacket], format: EffectiveFormat, error: PlosiveError
) -> SessionError:
    """Save what had come before the error, which the one that is returned tells with it."""
    samples, sample_rate_hz = decode_turn(packets, format)
    save(path, samples, sample_rate_hz)
    held_s = len(samples) / sample_rate_hz
    why = f"{path} holds the first {held_s:.2f} s; the rest is missing: {sentence(error)}"
    return SessionError("cut_short", why)


async def _collect(speech: Speech, packets: list[AudioPacket]) -> None:
    """Append the packets as they come: an error leaves those that came before it."""
    async for packet in _packets(speech):
        packets.append(packet)


async def _packets(speech: Speech) -> AsyncGenerator[AudioPacket, None]:
    """The packets of the speech; its warnings are told as they come."""
    async with aclosing(speech.events()) as events:
        async for event in events:
            match event:
                case AudioPacket():
                    yield event
                case Warn():
                    _warn(event)


def _warn(warning: Warn) -> None:
    if warning.code != "nothing_to_speak":  # that is how the command ends
        _tell(f"warning: {' '.join(warning.message.split())}")


def _is_played(args: argparse.Namespace) -> bool:
    return args.out is None and not args.mute


def _check_output(use: Callable[[], object]) -> None:
    """Raises SessionError `not_heard` where the sound output cannot be used, with what to do."""
    try:
        use()
    except OSError as error:
        way_out = "--out FILE saves it instead, --mute says it to nobody"
        raise SessionError("not_heard", f"it would not be heard: {error}. {way_out}") from error


async def _play(speech: Speech, decoder: Decoder, packets: list[AudioPacket]) -> None:
    """As `_collect`, until the last was heard."""
    heard = asyncio.Event()
    track = Track(partial(asyncio.get_running_loop().call_soon_threadsafe, heard.set))
    buffer = PlayBuffer(decoder.sample_rate_hz * PREBUFFER_MS // 1000)
    buffer.add(track)
    device = SoundCard()
    _check_output(partial(device.start, decoder.sample_rate_hz, buffer.pull))
    try:
        async for packet in _packets(speech):
            packets.append(packet)
            buffer.feed(track, decoder.decode(packet))
        buffer.end(track)
        await heard.wait()
    finally:
        device.stop()


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
