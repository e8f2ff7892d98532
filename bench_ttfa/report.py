"""The only place that turns results into numbers for people: tables, and one JSON file."""

import json
import re
import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench_ttfa.measure import (
    DEFINITIONS,
    MAX_CLIENT_LAG_MS,
    MIN_SAMPLES_BEYOND,
    continuity,
    stats,
)
from bench_ttfa.run import LevelResult, SweepResult, ThreadTimes, window_s
from bench_ttfa.scrape import difference
from bench_ttfa.system import describe_machine, describe_software
from bench_ttfa.waterfall import draw, stages, timelines
from bench_ttfa.worker import TurnRecord
from realtime.wire import PACKET_MS

RUNS_DIR = Path(__file__).resolve().parent / "runs"  # which git ignores; records are filed by hand
_NO_SESSION = ("connection_failed", "refused_503")
_BUSY_RATIO = 0.5
_DISTRIBUTIONS = (
    "ttfa_ms",
    "ttfa_audible_ms",
    "ttfa_first_text_ms",
    "server_ttfa_ms",
    "ready_ms",
    "worst_gap_ms",
    "real_time_factor",
)


def summarize(result: SweepResult, stamp: str) -> dict[str, Any]:
    """Everything about a run, ready for JSON."""
    return {
        "stamp": stamp,
        "machine": describe_machine(),
        "software": describe_software(),
        "config": _config(result),
        "model": result.model,
        "definitions": DEFINITIONS,
        "load_before": result.load_before,
        "was_interrupted": result.was_interrupted,
        "server_start_s": result.server_start_s,
        "server_peak_mib": result.server_peak_mib,
        "ready_cold_ms": _stats(result.ready_cold_ms),
        "ready_cached_ms": _stats(result.ready_cached_ms),
        "levels": [_level(level, result.frame_rate_hz) for level in result.levels],
    }


def _config(result: SweepResult) -> dict[str, Any]:
    config = asdict(result.config)
    config["connection"]["format"] = result.config.connection.format.model_dump()
    del config["connection"]["api_key"]
    return config


def _level(result: LevelResult, frame_rate_hz: float) -> dict[str, Any]:
    said = [turn for each in result.workers for turn in each.turns]
    turns = [turn for turn in said if not turn.is_early]
    good = [turn for turn in turns if turn.error is None]
    gaps_ms = [turn.worst_gap_ms for turn in good]
    seconds = window_s(result)
    throughput = _throughput(result, [turn for turn in said if turn.error is None])
    reasons = invalid_because(result, turns)
    summary: dict[str, Any] = {
        "name": result.level.name,
        **asdict(result.level),
        "num_processes": len(result.workers),
        "load_generation_valid": not reasons,
        "invalid_because": reasons,
        "errors": dict(Counter(turn.error for turn in turns if turn.error)),
        "window_s": round(seconds, 3),
        "throughput": round(throughput, 3),
        "frames_per_s": round(throughput * frame_rate_hz, 2),
        "turns_per_s": round(len(good) / seconds, 3),
        "audio_s": _stats([turn.audio_ms / 1000 for turn in good]),
        "c50": continuity(gaps_ms, 50.0),
        "c100": continuity(gaps_ms, 100.0),
        "num_without_gap_figure": gaps_ms.count(None),
        "client_lag_ms": _stats([lag for each in result.workers for lag in each.lag_ms]),
        "server_resident_mib": _stats(result.resident_mib),
        "timeline_ms": _timeline(good),
        "num_cut": sum(turn.is_cut for turn in turns),
        "host_us_per_packet": host_us_per_packet(result),
        "server_metrics": difference(result.metrics_before, result.metrics_after),
    }
    for name in _DISTRIBUTIONS:
        values = [_figure(turn, name) for turn in good]
        summary[name] = _stats([value for value in values if value is not None])
    summary["turns"] = [_rounded(asdict(turn)) for turn in turns]
    summary["stages"] = stages(timelines(summary["turns"]))
    return summary


def invalid_because(result: LevelResult, turns: list[TurnRecord]) -> list[str]:
    """Why the figures may be the clients' rather than the server's; empty when they are not."""
    reasons = []
    lag = stats([lag_ms for each in result.workers for lag_ms in each.lag_ms])
    if lag is not None and lag.p99 > MAX_CLIENT_LAG_MS:
        reasons.append(f"the clients' event loops lagged: p99 {lag.p99:.1f} ms")
    late = stats([turn.late_ms for turn in turns])
    if late is not None and late.p99 > MAX_CLIENT_LAG_MS:
        reasons.append(f"turns started late: p99 {late.p99:.1f} ms")
    num_lost = sum(turn.error in _NO_SESSION for turn in turns)
    if num_lost and result.level.mode == "closed":
        reasons.append(f"the load was less than it says: {num_lost} turns had no session")
    return reasons


def _rounded(value: Any) -> Any:
    """Floats to thousandths, in dicts too."""
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return round(value, 3) if isinstance(value, float) else value


def _throughput(result: LevelResult, turns: list[TurnRecord]) -> float:
    """Seconds of audio per second: of a timed level until its end, where turns still run out."""
    if result.level.seconds is None:
        return sum(turn.audio_ms for turn in turns) / 1000 / window_s(result)
    num_packets = sum(turn.num_in_time for turn in turns)
    return num_packets * PACKET_MS / 1000 / result.level.seconds


def host_us_per_packet(result: LevelResult) -> dict[str, dict[str, float]]:
    """CPU time (user, system) of each of the server's threads per packet that the clients got."""
    num_packets = sum(turn.num_packets for each in result.workers for turn in each.turns)
    starts_s = min(each.started_s for each in result.workers)
    ends_s = max(each.ended_s for each in result.workers)
    inside = [(t_s, times) for t_s, times in result.cpu if starts_s <= t_s <= ends_s]
    if len(inside) < 2 or not num_packets:
        return {}
    (first_s, first), (last_s, last) = inside[0], inside[-1]
    in_window = num_packets * (last_s - first_s) / (ends_s - starts_s)
    return {name: _per_packet(first, last, name, in_window) for name in sorted(last)}


def _per_packet(
    first: ThreadTimes, last: ThreadTimes, name: str, num_packets: float
) -> dict[str, float]:
    before = first.get(name, (0.0, 0.0))
    user, system = (1e6 * (last[name][i] - before[i]) / num_packets for i in range(2))
    return {"user": round(user, 2), "system": round(system, 2)}


def _figure(turn: TurnRecord, name: str) -> float | None:
    if name == "real_time_factor":
        if turn.is_cut:
            return None
        return turn.generation_ms / turn.audio_ms if turn.audio_ms else None
    value: float | None = getattr(turn, name)
    return value


def _timeline(turns: list[TurnRecord]) -> dict[str, dict[str, float] | None]:
    stages = {stage: None for turn in turns for stage in turn.timeline_ms}
    by_stage = {
        stage: stats([turn.timeline_ms[stage] for turn in turns if stage in turn.timeline_ms])
        for stage in stages
    }
    ordered = sorted(by_stage.items(), key=lambda item: item[1].p50 if item[1] else 0.0)
    return {stage: each.as_dict() if each else None for stage, each in ordered}


def _stats(values: list[float]) -> dict[str, float] | None:
    each = stats(values)
    return each.as_dict() if each is not None else None


# ---------------------------------------------------------------------------- for people


def make_writable(directory: Path) -> None:
    """Raises OSError where no file can be written, now or later."""
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=directory):
        pass


def write(summary: dict[str, Any], directory: Path = RUNS_DIR) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{summary['stamp']}.json"
    path.write_text(_json(summary) + "\n")
    return path


def _json(summary: dict[str, Any]) -> str:
    """Indented, but for turns and distributions, of which there are thousands: a line each."""
    lines: list[str] = []

    def shortened(value: Any) -> Any:
        if isinstance(value, list):
            return [shortened(each) for each in value]
        if not isinstance(value, dict):
            return value
        if "p50" in value or "num_packets" in value:
            lines.append(json.dumps(value, allow_nan=False, separators=(",", ":")))
            return f"<line {len(lines) - 1}>"
        return {name: shortened(each) for name, each in value.items()}

    text = json.dumps(shortened(summary), indent=1, allow_nan=False)
    return re.sub(r'"<line (\d+)>"', lambda match: lines[int(match[1])], text)


def text(summary: dict[str, Any]) -> str:
    """Everything for the terminal: tables, waterfalls, notes."""
    loads = [level for level in summary["levels"] if not level["axis"]]
    blocks = [table(summary, loads)] if loads else []
    blocks += _axis_tables(summary)
    blocks += [draw(level["name"], level["stages"]) for level in summary["levels"]]
    return "\n\n".join([*blocks, "\n".join([*_most_streams(summary), *_notes(summary)])])


def table(summary: dict[str, Any], levels: list[dict[str, Any]]) -> str:
    """Levels side by side; every latency as p50 / p95 / p99."""
    rows = [["", *(level["name"] for level in levels)]]
    rows.append(["turns (errors)", *(_turns(level) for level in levels)])
    for name in ("ttfa_ms", "ttfa_audible_ms", "server_ttfa_ms", "worst_gap_ms"):
        rows.append([name, *(_triple(level[name]) for level in levels)])
    if any(level["ready_ms"] for level in levels):
        rows.append(["ready_ms", *(_triple(level["ready_ms"]) for level in levels)])
    if summary["config"]["connection"]["words_per_s"]:
        name = "ttfa_first_text_ms"
        rows.append([name, *(_triple(level[name]) for level in levels)])
    rows.append(["C50 / C100", *(_continuity(level) for level in levels)])
    name = "real_time_factor"
    rows.append([name, *(_triple(level[name], digits=3) for level in levels)])
    rows.append(["audio s per s", *(f"{level['throughput']:.2f}" for level in levels)])
    rows.append(["frames per s", *(f"{level['frames_per_s']:.1f}" for level in levels)])
    if any(level["host_us_per_packet"] for level in levels):
        rows.append(["host us per packet", *(_host(level) for level in levels)])
    rows.append(["server MiB", *(_peak(level["server_resident_mib"]) for level in levels)])
    rows.append(["load valid", *(_valid(level) for level in levels)])
    return "\n".join(align(rows))


def _axis_tables(summary: dict[str, Any]) -> list[str]:
    """TTFA against what grows where it is not the load, a table for each."""
    tables = []
    levels = [level for level in summary["levels"] if level["axis"]]
    names = ["ttfa_ms", "server_ttfa_ms"]
    if summary["config"]["connection"]["words_per_s"]:
        names.append("ttfa_first_text_ms")
    for axis in dict.fromkeys(level["axis"] for level in levels):
        rows = [[axis, "turns (errors)", *names, "C50 / C100"]]
        for level in levels:
            if level["axis"] == axis:
                figures = [_triple(level[name]) for name in names]
                row = [f"{level['value']:g}", _turns(level), *figures, _continuity(level)]
                rows.append(row)
        tables.append("\n".join(align(rows)))
    return tables


def _most_streams(summary: dict[str, Any]) -> list[str]:
    """How many paced streams all stayed continuous."""
    paced = [level for level in summary["levels"] if level["mode"] == "paced"]
    good = [level["concurrency"] for level in paced if level["c100"] == 1.0 and not level["errors"]]
    if not paced:
        return []
    return [f"paced real-time streams with C100 = 100 %: {max(good, default=0)} of those tried"]


def align(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[idx]) for row in rows) for idx in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if idx == 0 else cell.rjust(width)
            for idx, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _notes(summary: dict[str, Any]) -> list[str]:
    machine, software = summary["machine"], summary["software"]
    hardware = machine["gpus"] or [f"{machine['cpu_cores']} x {machine['cpu']}"]
    lines = [
        f"latencies are p50 / p95 / p99; ~: fewer than {MIN_SAMPLES_BEYOND} samples beyond it",
        f"ready_ms cold {_triple(summary['ready_cold_ms'])}, "
        f"cached {_triple(summary['ready_cached_ms'])}",
        f"{', '.join(hardware)} · Python {software['python']} · "
        f"torch {software['packages'].get('torch', '-')} · commit {(software['commit'] or '-')[:9]}"
        f" · sources {software['sources']}",
    ]
    if summary["server_start_s"] is not None:
        lines.append(
            f"server ready {summary['server_start_s']:.1f} s after its start, "
            f"at most {summary['server_peak_mib']:.0f} MiB resident"
        )
    load, num_cores = summary["load_before"], machine["cpu_cores"]
    if load > _BUSY_RATIO * num_cores:
        lines.append(f"the machine was busy before the run: load {load:.1f} on {num_cores} cores")
    for level in summary["levels"]:
        lines += [f"{level['name']}: {reason}" for reason in level["invalid_because"]]
    return lines


def _triple(each: dict[str, float] | None, digits: int = 1) -> str:
    if each is None:
        return "-"
    parts = []
    for percent in (50, 95, 99):
        is_thin = each["n"] * (100 - percent) / 100 < MIN_SAMPLES_BEYOND and percent > 50
        parts.append(("~" if is_thin else "") + f"{each[f'p{percent}']:.{digits}f}")
    return " / ".join(parts)


def _turns(level: dict[str, Any]) -> str:
    errors = ", ".join(f"{count} {code}" for code, count in level["errors"].items())
    return f"{len(level['turns'])} ({errors or 0})"


def _continuity(level: dict[str, Any]) -> str:
    shares = [level["c50"], level["c100"]]
    return " / ".join("N/A" if share is None else f"{share:.0%}" for share in shares)


def _host(level: dict[str, Any]) -> str:
    threads = level["host_us_per_packet"].values()
    return f"{sum(each['user'] + each['system'] for each in threads):.0f}" if threads else "-"


def _peak(each: dict[str, float] | None) -> str:
    return "-" if each is None else f"{each['max']:.0f}"


def validity(level: dict[str, Any]) -> str:
    """Whether the clients kept up, and if not, in what they did not."""
    return "; ".join([_valid(level), *level["invalid_because"]])


def _valid(level: dict[str, Any]) -> str:
    return "yes" if level["load_generation_valid"] else "NO"
