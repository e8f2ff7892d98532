"""Where a turn's time to first audio goes: the server's stages, one after another."""

from collections.abc import Sequence
from typing import Any

from bench_ttfa.measure import stats

WIDTH = 40  # characters of the longest bar
CLIENT_STAGE = "client"  # the packet has reached the client: its own clock, from its own commit

Timeline = dict[str, float]  # stage -> ms after the commit


def timelines(turns: Sequence[dict[str, Any]]) -> list[Timeline]:
    """Of the turns that were measured whole, the client's figure last."""
    return [
        turn["timeline_ms"] | {CLIENT_STAGE: turn["ttfa_ms"]}
        for turn in turns
        if turn["error"] is None and turn["timeline_ms"] and turn["ttfa_ms"] is not None
    ]


def stages(lines: Sequence[Timeline]) -> list[dict[str, Any]]:
    """Each stage in the order of its median time: when it is reached (`at`) and how long after the
    stage before it in the same turn (`took`), as distributions in ms."""
    names = {name: None for line in lines for name in line}
    ordered = sorted(
        names, key=lambda name: _median([line[name] for line in lines if name in line])
    )
    found = []
    for number, name in enumerate(ordered):
        having = [line for line in lines if name in line]
        took = [line[name] - _before(line, ordered[:number]) for line in having]
        at, spent = stats([line[name] for line in having]), stats(took)
        assert at is not None and spent is not None, name
        found.append({"stage": name, "at": at.as_dict(), "took": spent.as_dict()})
    return found


def draw(name: str, found: Sequence[dict[str, Any]]) -> str:
    """A bar for each stage, on a common scale."""
    if not found:
        return f"{name}: the server told no stages"
    end_ms = max(each["at"]["p50"] for each in found)
    scale = WIDTH / end_ms if end_ms > 0 else 0.0
    width = max(len(each["stage"]) for each in found)
    lines = [f"{name}: median ms after the commit, and since the stage before (p50 / p95)"]
    for each in found:
        at, took = each["at"]["p50"], each["took"]
        length = max(0, round(took["p50"] * scale))
        start = min(WIDTH, max(0, round((at - took["p50"]) * scale)))
        bar = " " * start + "#" * min(length, WIDTH - start)
        figures = f"{at:8.2f}  {took['p50']:+.2f} / {took['p95']:+.2f}"
        lines.append(f"  {each['stage']:<{width}} {figures:<28} |{bar}".rstrip())
    return "\n".join(lines)


def _before(line: Timeline, earlier: Sequence[str]) -> float:
    """When the last of the earlier stages that the turn had was reached; 0, the commit, if none."""
    return next((line[name] for name in reversed(earlier) if name in line), 0.0)


def _median(values: Sequence[float]) -> float:
    each = stats(values)
    assert each is not None
    return each.p50
