"""The engine alone: streams in a closed loop without sockets, and who uses the device when.

    python -m bench_ttfa.engine --model "random:s2-pro?reference_s=30" --format bf16 --streams 64

Every call that the engine's threads launch, decode's steps, prefill's calls and the codec's, lies
between two CUDA events of its own: so their times on the device are known, which of them overlap,
what a step takes alone and beside others, and where the device has nothing to do. A listener's turn
begins `--delay-ms` after the last one's end, which is what sockets and clients take.
"""

import argparse
import heapq
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench_ttfa.command import exit_status, length_s, positive_float, positive_int
from bench_ttfa.engine_figures import DEFINITIONS, Span, Turns, figures, told
from bench_ttfa.gpu_timing import need_cuda, need_model
from bench_ttfa.system import describe_machine, describe_software
from bench_ttfa.workload import TextSource
from model.kv_cache import KvFormat
from model.speech_model import SpeechModel, load_speech_model
from realtime.pingpong.device import Event as Mark
from realtime.pingpong.engine import EngineConfig, PingPongEngine
from realtime.pingpong.messages import (
    EndTurn,
    Event,
    FramePcm,
    OpenSlot,
    SamplingParams,
    SetText,
    SlotFailed,
    SlotReady,
    SlotRef,
    TurnBegin,
    TurnEnd,
    VoicePrompt,
)

_SPREAD_S = 0.5  # over which streams begin
SKIPPED_S = 0.3  # of a run, once everybody has begun
NUM_CHARS = 42
_KV_FRACTION = 0.15  # leaves room for a second engine


class Probe:
    """Puts events around the calls of an engine's threads. On a CPU there is nothing to see."""

    def __init__(self, engine: PingPongEngine, device: torch.device) -> None:
        self._device = device
        self._base = self._mark()
        self._calls: list[tuple[str, int, Mark, Mark, bool]] = []
        frames, prefill = engine._decode.frames, engine._prefill.kv.runner
        self._wrap(frames, "launch", "decode", lambda slots, riders: len(slots))
        self._wrap(prefill, "write", "prefill", lambda pieces: sum(p.num_rows for p in pieces))
        codec = engine._vocode.runner
        self._wrap(codec, "call", "codec", lambda slots, places, chunk: len(places))

    def restart(self) -> None:
        self._calls.clear()
        self._base = self._mark()

    def spans(self) -> list[Span]:
        if self._device.type != "cuda":
            return []
        calls = list(self._calls)  # more come meanwhile
        torch.cuda.synchronize()
        return [
            Span(kind, size, self._base.ms_until(begun), self._base.ms_until(over), has_riders)
            for kind, size, begun, over, has_riders in calls
        ]

    def _mark(self) -> Mark:
        mark = Mark(self._device, is_timed=True)
        mark.record()
        return mark

    def _wrap(self, owner: Any, name: str, kind: str, size: Callable[..., int]) -> None:
        call = getattr(owner, name)

        def timed(*args: Any, is_urgent: bool = True) -> Any:
            options = {"is_urgent": is_urgent} if kind == "codec" else {}
            scope = nullcontext() if is_urgent else owner.bulk_scope  # the stream that runs it
            with scope:
                begun = self._mark()
            result = call(*args, **options)
            with scope:
                over = self._mark()
            has_riders = kind == "decode" and bool(args[1])
            self._calls.append((kind, size(*args), begun, over, has_riders))
            return result

        setattr(owner, name, timed)


class Listeners:
    """Each says its next turn when the last is over. Commands come from one thread, as in life."""

    def __init__(self, engine: PingPongEngine, voice: VoicePrompt, delay_s: float) -> None:
        self._engine = engine
        self._voice = voice
        self._delay_s = delay_s
        self._texts = TextSource(1, "mixed")
        self._due: list[tuple[float, int]] = []  # heap of (time, slot)
        self._changed = threading.Condition()
        self._slots: dict[int, SlotRef] = {}
        self._turn_ids: dict[int, int] = {}
        self._committed_ns: dict[int, int] = {}
        self._num_ready = 0
        self._is_on = False
        self._num_speaking = 0
        self.turns = Turns()
        threading.Thread(target=self._run, daemon=True).start()

    def open(self, num_streams: int) -> None:
        for i in range(num_streams):
            slot = self._engine.slots.acquire()
            assert slot is not None
            self._slots[slot.idx], self._turn_ids[slot.idx] = slot, 0
            sampling = SamplingParams(0.7, 0.8, 30, i)
            self._engine.submit(OpenSlot(slot, (self._voice,), "", sampling, 600_000))
        with self._changed:
            self._changed.wait_for(lambda: self._num_ready == num_streams)

    def start(self, num_streams: int, spread_s: float) -> None:
        self.turns = Turns()
        with self._changed:
            self._is_on = True
            for i, idx in enumerate(list(self._slots)[:num_streams]):
                due_s = time.perf_counter() + spread_s * i / num_streams
                heapq.heappush(self._due, (due_s, idx))
            self._num_speaking = num_streams
            self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self._is_on = False
            self._changed.wait_for(lambda: self._num_speaking == 0)

    def sink(self, event: Event) -> None:
        assert not isinstance(event, SlotFailed), event
        if isinstance(event, FramePcm):
            self.turns.num_frames += event.num_frames
        elif isinstance(event, TurnBegin):
            self.turns.add(self._committed_ns[event.slot.idx], event.stamps_ns)
        elif isinstance(event, TurnEnd | SlotReady):
            with self._changed:
                if isinstance(event, SlotReady):
                    self._num_ready += 1
                elif self._is_on:
                    heapq.heappush(self._due, (time.perf_counter() + self._delay_s, event.slot.idx))
                else:
                    self._num_speaking -= 1
                self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._due or self._due[0][0] > time.perf_counter():
                    wait_s = self._due[0][0] - time.perf_counter() if self._due else None
                    self._changed.wait(None if wait_s is None else max(0.0, wait_s))
                _, idx = heapq.heappop(self._due)
            self._say(idx)

    def _say(self, idx: int) -> None:
        slot, turn_id = self._slots[idx], self._turn_ids[idx]
        self._turn_ids[idx] += 1
        (text,) = self._texts.take(1, NUM_CHARS)
        submit = self._engine.submit
        submit(SetText(slot, turn_id, 0, text.rpartition(" ")[0], is_closed=False))
        time.sleep(0.0002)
        self._committed_ns[idx] = time.perf_counter_ns()
        submit(SetText(slot, turn_id, 0, text, is_closed=True))
        submit(EndTurn(slot, turn_id, 1))


class Bench:
    """An engine under load, for as many runs as wanted."""

    def __init__(
        self, model: SpeechModel, num_slots: int, delay_s: float, *, kv_format: KvFormat = "bf16"
    ) -> None:
        config = EngineConfig(
            num_slots=num_slots, kv_memory_fraction=_KV_FRACTION, kv_format=kv_format
        )
        self.engine = PingPongEngine(model, config)
        self.engine.warm_up(())
        self.probe = Probe(self.engine, model.device)
        rate = model.codec.sample_rate / model.codec.frame_samples
        num_frames = round((30 if model.device.type == "cuda" else 1) * rate)
        codes = np.random.default_rng(0).integers(
            0, 32, (model.codec.num_codebooks, num_frames), np.int32
        )
        self.listeners = Listeners(self.engine, VoicePrompt("v", "a voice", codes), delay_s)
        self._num_slots = num_slots

    def start(self) -> None:
        self.engine.start(self.listeners.sink)
        self.listeners.open(self._num_slots)

    def run(self, seconds: float, num_streams: int, spread_s: float = _SPREAD_S) -> dict[str, Any]:
        """Streams begin spread over a time, which is not measured. Returns its `figures`."""
        self.listeners.start(num_streams, spread_s)
        time.sleep(spread_s + SKIPPED_S)
        self.listeners.turns = turns = Turns()
        self.probe.restart()
        begun = time.perf_counter()
        time.sleep(seconds)
        window_s = time.perf_counter() - begun
        self.listeners.turns = Turns()
        spans, stats = self.probe.spans(), self.engine.stats()
        self.listeners.stop()
        host_us = {"a step": stats["decode_host_us"], "a codec call": stats["vocode_host_us"]}
        return figures(turns, spans, window_s, host_us)


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    need_cuda(parser, args.device)
    path = need_model(parser, args.model)
    return exit_status("bench_ttfa.engine", partial(_run, args, path))


def _run(args: argparse.Namespace, path: Path) -> int:
    record: dict[str, Any] = {
        "what": "the engine alone: no server, no socket, no Opus",
        "machine": describe_machine(),
        "software": describe_software(),
        "load": {
            "model": args.model,
            "format": args.format,
            "kv_format": args.kv_format,
            "device": args.device,
            "num_chars": NUM_CHARS,
            "delay_ms": args.delay_ms,
        },
        "definitions": DEFINITIONS,
        "runs": {},
    }
    _write(record, args.json)  # before minutes have passed
    model = load_speech_model(path, device=args.device, run_as=args.format)
    bench = Bench(model, max(args.streams), args.delay_ms / 1e3, kv_format=args.kv_format)
    bench.start()
    for num_streams in args.streams:
        for name, spread_s in (("streams", _SPREAD_S), ("that begin at once", 0.0)):
            name = f"{num_streams} {name}"
            record["runs"][name] = run = bench.run(args.seconds, num_streams, spread_s)
            print(told(name, run), flush=True)
            _write(record, args.json)
    bench.engine.stop()
    return 0


def _write(record: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench_ttfa.engine",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    option = parser.add_argument
    option(
        "--model",
        default="random:s2-pro?reference_s=30",
        help="a checkpoint's path, embedded or random:... (default: random:s2-pro?reference_s=30)",
    )
    option("--format", choices=("eager", "bf16", "bsfp8"), help="default: as serve")
    option("--kv-format", choices=("bf16", "fp8"), default="bf16", help="default: bf16")
    option(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="default: cuda where there is one, else cpu",
    )
    option(
        "--streams",
        type=positive_int,
        nargs="+",
        default=[1, 8, 64],
        help="a run each, spread and at once (default: 1 8 64)",
    )
    option("--seconds", type=positive_float, default=2.0, help="of each run (default: 2)")
    option(
        "--delay-ms",
        type=length_s,
        default=10.0,
        help="between two turns of a stream (default: 10)",
    )
    option("--json", type=Path, help="write the record here")
    return parser


if __name__ == "__main__":
    sys.exit(main())
