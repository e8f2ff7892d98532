"""The summary as a picture. Needs matplotlib, the extra `bench`; the figures are in the JSON anyway."""

import importlib
import importlib.util
from pathlib import Path
from typing import Any

from bench_ttfa.waterfall import CLIENT_STAGE

Level = dict[str, Any]
_COLUMNS = 3
_PERCENTILES = ("p50", "p95", "p99")


def can_plot() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def plot(summary: dict[str, Any], path: Path) -> None:
    """A panel for each kind of level that the run has. Raises ImportError without matplotlib."""
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    levels = summary["levels"]
    panels = [(draw, chosen) for draw, chosen in _panels(levels) if chosen]
    num_columns = max(1, min(_COLUMNS, len(panels)))  # a run of failures has no panel
    num_rows = max(1, -(-len(panels) // num_columns))
    size = (5.2 * num_columns, 4.2 * num_rows)
    figure, axes = pyplot.subplots(num_rows, num_columns, figsize=size, squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    for axis, (draw, chosen) in zip(axes.flat, panels, strict=False):
        draw(axis, chosen)
    figure.suptitle(_title(summary), fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _panels(levels: list[Level]) -> list[tuple[Any, list[Level]]]:
    loads = [level for level in levels if not level["axis"]]
    lengths = [level for level in levels if level["axis"] and level["concurrency"] == 1]
    by_mode = {
        mode: [level for level in loads if level["mode"] == mode and level["ttfa_ms"]]
        for mode in ("closed", "open", "paced")
    }
    return [
        (_draw_closed, by_mode["closed"]),
        (_draw_open, by_mode["open"]),
        (_draw_paced, by_mode["paced"]),
        (_draw_stages, [level for level in levels if level["stages"] and not level["axis"]]),
        (_draw_axis, [level for level in lengths if level["ttfa_ms"]]),
    ]


def _draw_closed(axis: Any, levels: list[Level]) -> None:
    _draw_ttfa(axis, [level["concurrency"] for level in levels], levels)
    _label(axis, "closed loop", "sessions that speak one turn after another", "TTFA, ms")
    axis.set_xscale("log", base=2)
    for level in levels:
        if level["c50"] is not None:
            text = f"C50 {level['c50']:.0%}"
            axis.annotate(text, (level["concurrency"], level["ttfa_ms"]["p99"]), fontsize=6)


def _draw_open(axis: Any, levels: list[Level]) -> None:
    _draw_ttfa(axis, [level["rate_per_s"] for level in levels], levels)
    _label(axis, "open loop (Poisson)", "new turns a second", "TTFA, ms")


def _draw_ttfa(axis: Any, x: list[float], levels: list[Level]) -> None:
    for percentile in _PERCENTILES:
        axis.plot(x, [level["ttfa_ms"][percentile] for level in levels], "o-", label=percentile)
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=7)


def _draw_paced(axis: Any, levels: list[Level]) -> None:
    x = [level["concurrency"] for level in levels]
    for name in ("c50", "c100"):
        axis.plot(x, [100 * (level[name] or 0.0) for level in levels], "o-", label=name.upper())
    _label(axis, "paced real-time streams", "streams", "streams without a longer gap, %")
    axis.set_ylim(0, 105)
    axis.legend(fontsize=7, loc="lower left")
    other = axis.twinx()
    other.plot(x, [level["ttfa_ms"]["p95"] for level in levels], "s--", color="grey")
    other.set_ylabel("TTFA p95, ms (grey)", fontsize=7)
    other.set_ylim(bottom=0)


def _draw_stages(axis: Any, levels: list[Level]) -> None:
    """The medians of what each stage took, stacked."""
    names = list(dict.fromkeys(each["stage"] for level in levels for each in level["stages"]))
    bottoms = [0.0] * len(levels)
    for name in names:
        took = [_took(level, name) for level in levels]
        label = "to the client" if name == CLIENT_STAGE else name
        axis.bar([level["name"] for level in levels], took, bottom=bottoms, label=label)
        bottoms = [bottom + max(0.0, each) for bottom, each in zip(bottoms, took, strict=True)]
    _label(axis, "where the time goes (medians)", "", "ms after the commit")
    axis.tick_params(axis="x", rotation=60, labelsize=7)
    axis.legend(fontsize=6)


def _took(level: Level, name: str) -> float:
    found = [each["took"]["p50"] for each in level["stages"] if each["stage"] == name]
    return float(found[0]) if found else 0.0


def _draw_axis(axis: Any, levels: list[Level]) -> None:
    for name in dict.fromkeys(level["axis"] for level in levels):
        chosen = [level for level in levels if level["axis"] == name]
        is_streamed = "words/s" in name  # speech may begin before the last byte of text
        figure = "ttfa_first_text_ms" if is_streamed else "ttfa_ms"
        x, y = range(len(chosen)), [level[figure]["p50"] for level in chosen]
        since = ", from the first text" if is_streamed else ""
        axis.plot(x, y, "o-", label=f"p50, {name}{since}")
        for at, level in zip(x, chosen, strict=True):
            axis.annotate(f"{level['value']:g}", (at, y[at]), fontsize=7)
    _label(axis, "TTFA against length (c=1)", "from short to long", "TTFA, ms")
    axis.set_xticks([])
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=7)


def _label(axis: Any, title: str, x: str, y: str) -> None:
    axis.set_title(title, fontsize=9)
    axis.set_xlabel(x, fontsize=8)
    axis.set_ylabel(y, fontsize=8)
    axis.grid(visible=True, alpha=0.3)


def _title(summary: dict[str, Any]) -> str:
    machine, software = summary["machine"], summary["software"]
    hardware = ", ".join(machine["gpus"] or [f"{machine['cpu_cores']} x {machine['cpu']}"])
    commit = (software["commit"] or "-")[:9]
    return f"{hardware} · model {summary['model']} · commit {commit} · {summary['stamp']}"
