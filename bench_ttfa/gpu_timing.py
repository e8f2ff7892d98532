"""Timing of device work: medians of replays of one CUDA graph, with cold weights."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from model.embedded import embedded_path
from model.random_model import is_random

_MIN_CALLS = 24  # per graph: its start is then little of the time
_REPLAYS = 30

Call = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """One op at one number of rows.

    Attributes:
        us: per call.
        gb_per_s: of weight bytes.
    """

    op: str
    variant: str
    rows: int
    us: float
    gb_per_s: float


def need_cuda(parser: argparse.ArgumentParser, device: str = "cuda") -> None:
    """Exit with status 2 and a sentence if `device` is no device, or one that is not there."""
    try:
        wanted = torch.device(device)
    except RuntimeError:
        parser.error(f"device {device!r} is none of cpu, cuda, cuda:0, ...")
    if wanted.type == "cuda" and not torch.cuda.is_available():
        parser.error(f"this needs a CUDA device, and torch {torch.__version__} finds none here")
    if wanted.type == "cuda" and (wanted.index or -1) >= torch.cuda.device_count():
        parser.error(f"device {device!r}: torch finds {torch.cuda.device_count()} here")


def need_model(parser: argparse.ArgumentParser, model: str) -> Path:
    """Where it lies; exit with status 2 and a sentence if it is nowhere."""
    path = embedded_path() if model == "embedded" else Path(model)
    if not is_random(model) and not path.is_dir():
        parser.error(
            f"argument --model: {model!r} is no directory; expected that of a checkpoint, embedded or random:..."
        )
    return path


def graph_us(calls: Sequence[Call], replays: int = _REPLAYS) -> float:
    """Microseconds per call: the median of replays of a graph that makes all the calls in turn."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(3):
        graph.replay()
    times: list[float] = []
    for _ in range(replays):
        start, end = _event(), _event()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000)
    return statistics.median(times) / len(calls)


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def num_copies(num_bytes: int) -> int:
    """How many copies of the weights exceed the L2 twice."""
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    return min(256, -(-2 * l2_bytes // num_bytes) + 1)


def rotated(make: Callable[[int], Call], copies: int) -> list[Call]:
    """Calls that use copy 0, 1, ... in turn, at least once each."""
    made = [make(i) for i in range(copies)]
    count = -(-_MIN_CALLS // copies) * copies
    return [made[i % copies] for i in range(count)]


def copy_bandwidth() -> float:
    """GB/s of large copies on the device, counting bytes read and written."""
    source = torch.empty(2**32, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    times: list[float] = []
    for _ in range(5):
        start, end = _event(), _event()
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return 2 * source.numel() / statistics.median(times) / 1e6
