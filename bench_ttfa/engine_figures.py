"""What `bench_ttfa.engine` makes of a run: who used the device when, and what the listeners saw."""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bench_ttfa.measure import stats

KINDS = ("decode", "prefill", "codec")
SIZES = (0, 1, 8, 16, 32, 64, 128, 256, 512, 1024)
DEFINITIONS = {
    "frames_per_s": "frames of PCM that left the engine, per second of the measured time",
    "ttfa_ms": "engine's clock: the text is committed -> the first PCM leaves the engine",
    "stages_ms": "of the same, each stage from the one before it",
    "calls": "on the device, between two CUDA events: rows of decode and prefill, frames of the codec",
    "busy": "share of the time in which at least one such call runs",
    "steps": "decode's, by what overlapped them for more than 0.1 ms",
    "between_steps": "share of the time between the end of a step and the next one's begin",
    "host_us": "of the engine's threads, waiting apart: a step of decode, a call of the codec",
}


class Span(NamedTuple):
    """A call on the device, ms since the run began."""

    kind: str
    size: int  # rows, or frames of the codec
    begin: float
    end: float
    has_riders: bool = False

    @property
    def ms(self) -> float:
        return self.end - self.begin


@dataclass
class Turns:
    """What the listeners saw."""

    ttfa_ms: list[float] = field(default_factory=list)
    stages_ms: dict[str, list[float]] = field(default_factory=dict)
    num_frames: int = 0

    def add(self, committed_ns: int, stamps_ns: Mapping[str, int]) -> None:
        before = committed_ns
        for stage in ("prefill_done", "first_step", "first_pcm"):
            self.stages_ms.setdefault(stage, []).append((stamps_ns[stage] - before) / 1e6)
            before = stamps_ns[stage]
        self.ttfa_ms.append((stamps_ns["first_pcm"] - committed_ns) / 1e6)


def figures(
    turns: Turns, spans: Sequence[Span], window_s: float, host_us: Mapping[str, float]
) -> dict[str, Any]:
    """Of a run, as a record has them (`DEFINITIONS`). On a CPU there are no spans."""
    found: dict[str, Any] = {
        "measured_s": round(window_s, 3),
        "frames_per_s": round(turns.num_frames / window_s, 1),
        "turns_per_s": round(len(turns.ttfa_ms) / window_s, 1),
        "ttfa_ms": _stats(turns.ttfa_ms),
        "stages_ms": {stage: _stats(ms) for stage, ms in turns.stages_ms.items()},
        "host_us": {name: round(us) for name, us in host_us.items()},
        "calls": {},
    }
    if spans:
        kinds = [kind for kind in KINDS if any(span.kind == kind for span in spans)]
        found["calls"] = {kind: _calls(kind, spans) for kind in kinds}
        found |= _steps(spans) | {"busy": round(union_ms(spans) / _window_ms(spans), 4)}
    return found


def _calls(kind: str, spans: Sequence[Span]) -> dict[str, Any]:
    mine, window_ms = [span for span in spans if span.kind == kind], _window_ms(spans)
    by_size = [
        {"up_to": high, "calls": len(ms), "ms": round(statistics.mean(ms), 3)}
        for low, high in itertools.pairwise(SIZES)
        if (ms := [span.ms for span in mine if low < span.size <= high])
    ]
    return {
        "per_s": round(1e3 * len(mine) / window_ms, 1),
        "busy": round(union_ms(mine) / window_ms, 4),
        "size": _stats([span.size for span in mine]),
        "by_size": by_size,
    }


def _steps(spans: Sequence[Span]) -> dict[str, Any]:
    steps = sorted((span for span in spans if span.kind == "decode"), key=lambda span: span.begin)
    gaps_ms = sum(max(0.0, b.begin - a.end) for a, b in itertools.pairwise(steps))
    beside: dict[str, list[float]] = {}
    for step in steps:
        names = ["riders"] if step.has_riders else []
        names += [
            kind
            for kind in KINDS[1:]
            if any(span.kind == kind and overlap_ms(step, span) > 0.1 for span in spans)
        ]
        beside.setdefault(" + ".join(names) or "alone", []).append(step.ms)
    return {
        "steps": {
            name: {"steps": len(ms), "ms": round(statistics.mean(ms), 3)}
            for name, ms in beside.items()
        },
        "between_steps": round(gaps_ms / _window_ms(spans), 4),
    }


def _window_ms(spans: Sequence[Span]) -> float:
    return max(span.end for span in spans) - min(span.begin for span in spans)


def overlap_ms(a: Span, b: Span) -> float:
    return max(0.0, min(a.end, b.end) - max(a.begin, b.begin))


def union_ms(spans: Sequence[Span]) -> float:
    """Time in which at least one of them runs."""
    total, until = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.begin):
        total += max(0.0, span.end - max(span.begin, until))
        until = max(until, span.end)
    return total


def _stats(values: Sequence[float]) -> dict[str, float] | None:
    each = stats(values)
    return None if each is None else each.as_dict()


# ---------------------------------------------------------------------------- for people


def told(name: str, run: Mapping[str, Any]) -> str:
    """A run's `figures` in lines: p50/p95 of what the listeners saw, and who ran when."""
    stages = " ".join(f"{stage} {_pair(ms)}" for stage, ms in run["stages_ms"].items())
    host = ", ".join(f"{what} {us}" for what, us in run["host_us"].items())
    lines = [
        f"{name}: {run['frames_per_s']:,.0f} frames/s, {run['turns_per_s']:.0f} turns/s, "
        f"TTFA ms {_pair(run['ttfa_ms'])} = {stages}; host us: {host}"
    ]
    for kind, calls in run["calls"].items():
        sizes = " ".join(
            f"<={each['up_to']}: {each['calls']} x {each['ms']:.2f} ms" for each in calls["by_size"]
        )
        lines.append(
            f"  {kind:8} {calls['per_s']:.0f}/s, busy {calls['busy']:.0%}, "
            f"size {_pair(calls['size'])}, by size {sizes}"
        )
    if run["calls"]:
        steps = ", ".join(f"{n} {s['ms']:.2f} ms ({s['steps']})" for n, s in run["steps"].items())
        shares = f"device busy {run['busy']:.0%}, between steps {run['between_steps']:.1%}"
        lines.append(f"  a step: {steps}; {shares}")
    return "\n".join(lines)


def _pair(each: Mapping[str, float] | None) -> str:
    return "-" if each is None else f"{each['p50']:.1f}/{each['p95']:.1f}"
