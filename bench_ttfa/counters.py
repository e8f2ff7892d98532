"""Hardware counters of the kernels of one S2 Pro layer and of a sampler, by NVIDIA Nsight Compute.

    python -m bench_ttfa.counters [--rows 1,16,64,128] [--format bsfp8] [--json FILE]

Tells why a kernel takes its time: how busy memory, L2 and tensor cores are, how often a scheduler
issues, and what its warps wait for (warps waiting for each reason per issued instruction, the largest
three). Needs `ncu` on the PATH and the right to read counters. Each kernel runs alone, replayed with
the L2 flushed before it, so what dependent launches overlap in a frame is not seen here; times are for
comparison with each other, at the clocks as they are found.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bench_ttfa.command import file_to_write, positive_ints
from bench_ttfa.gpu_timing import need_cuda
from bench_ttfa.kernels_attention import Layers
from bench_ttfa.kernels_layer import Weights, layer_calls
from bench_ttfa.system import describe_machine, describe_software
from ops.nvrtc import Kernel
from ops.quantize import Kind
from ops.sampling import Draws, draw_codebook

_CONTEXT = 512
_SECTIONS = ("SpeedOfLight", "WarpStateStats", "SchedulerStats", "Occupancy")
_COLUMNS = {  # first of the names that there is
    "us": ("gpu__time_duration.sum", "gpu__time_duration.avg"),
    "dram_percent": (
        "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
        "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    ),
    "l2_percent": ("lts__throughput.avg.pct_of_peak_sustained_elapsed",),
    "sm_percent": ("sm__throughput.avg.pct_of_peak_sustained_elapsed",),
    "issue_percent": ("smsp__issue_active.avg.pct_of_peak_sustained_active",),
    "warps_percent": ("sm__warps_active.avg.pct_of_peak_sustained_active",),
}
_NS_PER = {"nsecond": 1, "ns": 1, "usecond": 1e3, "us": 1e3, "msecond": 1e6, "ms": 1e6}
_STALL = re.compile(r"issue_stalled_(\w+?)_per_issue_active")
_NUM_STALLS = 3


@dataclass(frozen=True, slots=True)
class Counters:
    """Of one launch; percent of what the hardware can sustain, None where it was not read."""

    part: str
    kernel: str
    us: float | None
    dram_percent: float | None
    l2_percent: float | None
    sm_percent: float | None
    issue_percent: float | None
    warps_percent: float | None
    stalls: dict[str, float]  # the largest; warps waiting per issued instruction


def parts(rows: Sequence[int], kind: Kind) -> dict[str, Callable[[], object]]:
    """What is looked at, by name."""
    weights = [Weights.random(kind)]
    found: dict[str, Callable[[], object]] = {}
    for num_rows in rows:
        caches = Layers([_CONTEXT] * num_rows)
        found[f"layer, {num_rows} rows"] = layer_calls(weights, caches, num_rows, kind)[0]
    ones = torch.ones(rows[-1], device="cuda")
    whole = torch.arange(rows[-1], device="cuda")
    draws = Draws(whole, ones * 0.8, ones * 0.8, ones.int() * 30, whole, ones.int())
    logits = torch.randn(rows[-1], 4096, device="cuda").bfloat16()
    table = torch.randn(4096, 2560, device="cuda").bfloat16()
    codes = torch.zeros(rows[-1], 10, device="cuda", dtype=torch.int32)
    found[f"sampler, {rows[-1]} rows"] = lambda: draw_codebook(logits, 1, draws, table, codes)
    return found


def run_inside(rows: Sequence[int], kind: Kind, counts_file: Path) -> None:
    """Under the profiler: every part once, and how many launches each was."""
    num_launched = 0
    launch = Kernel.launch

    def counted(self: Kernel, *args: Any, **options: Any) -> None:
        nonlocal num_launched
        num_launched += 1
        launch(self, *args, **options)

    looked_at = parts(rows, kind)
    for call in looked_at.values():
        call()  # compiles
    torch.cuda.synchronize()
    Kernel.launch = counted  # type: ignore[method-assign]
    counts = {}
    torch.cuda.cudart().cudaProfilerStart()  # type: ignore[no-untyped-call]
    for name, call in looked_at.items():
        before = num_launched
        call()
        counts[name] = num_launched - before
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()  # type: ignore[no-untyped-call]
    counts_file.write_text(json.dumps(counts), encoding="utf-8")


def profile(rows: Sequence[int], kind: str) -> list[Counters]:
    """Run this module under ncu.

    Raises:
        RuntimeError: ncu cannot read the counters; what it says.
    """
    with tempfile.TemporaryDirectory() as folder:
        log, counts_file = Path(folder) / "log.csv", Path(folder) / "counts.json"
        sections = [word for name in _SECTIONS for word in ("--section", name)]
        command = ["ncu", "--csv", "--page", "raw", "--log-file", str(log), *sections]
        command += ["--clock-control", "none", "--profile-from-start", "off"]
        command += [sys.executable, "-m", "bench_ttfa.counters", "--inside", str(counts_file)]
        result = subprocess.run(
            [*command, "--rows", ",".join(map(str, rows)), "--format", kind],
            capture_output=True,
            text=True,
            check=False,
        )
        told = log.read_text("utf-8") if log.is_file() else ""
        if result.returncode != 0 or not counts_file.is_file():
            raise RuntimeError(f"ncu: {told[-800:]}{result.stderr[-800:]}")
        return read(told, json.loads(counts_file.read_text("utf-8")))


def read(told: str, counts: dict[str, int]) -> list[Counters]:
    """ncu's raw page, a launch a row, in the order of the parts.

    Raises:
        RuntimeError: other launches than those counted.
    """
    lines = [line for line in told.splitlines() if line.startswith('"')]
    table = list(csv.DictReader(lines))
    units, launches = (table[0], table[1:]) if table else ({}, [])
    names = [name for name, count in counts.items() for _ in range(count)]
    if len(names) != len(launches):
        raise RuntimeError(f"ncu saw {len(launches)} launches of {len(names)}: {told[-800:]}")
    return [_counters(name, row, units) for name, row in zip(names, launches, strict=True)]


def _counters(part: str, row: dict[str, str], units: dict[str, str]) -> Counters:
    values: dict[str, float | None] = {}
    for field, names in _COLUMNS.items():
        name = next((name for name in names if row.get(name)), None)
        values[field] = None if name is None else _number(row[name])
        if field == "us" and name is not None:
            values[field] = round(_number(row[name]) * _NS_PER[units[name]] / 1000, 2)
    stalls = {match[1]: name for name in row if row[name] and (match := _STALL.search(name))}
    waits = {reason: _number(row[name]) for reason, name in stalls.items()}
    largest = sorted(waits, key=lambda reason: -waits[reason])[:_NUM_STALLS]
    shown = {reason: round(waits[reason], 2) for reason in largest}
    return Counters(part, row["Kernel Name"].partition("(")[0], **values, stalls=shown)


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def table_of(counters: Sequence[Counters]) -> str:
    fields = list(_COLUMNS)
    lines = [f"{'part':18} {'kernel':26} " + " ".join(f"{field:>13}" for field in fields)]
    for each in counters:
        shown = asdict(each)
        numbers = ("-" if shown[field] is None else f"{shown[field]:.1f}" for field in fields)
        stalls = ", ".join(f"{reason} {value:g}" for reason, value in each.stalls.items())
        cells = " ".join(f"{number:>13}" for number in numbers)
        lines.append(f"{each.part:18} {each.kernel[:26]:26} {cells}  {stalls}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench_ttfa.counters",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--rows",
        type=positive_ints,
        default=[1, 16, 64, 128],
        help="numbers of rows (default: 1,16,64,128)",
    )
    parser.add_argument(
        "--format", default="bsfp8", choices=("bf16", "bsfp8"), help="default: bsfp8"
    )
    parser.add_argument("--json", type=file_to_write, help="also write the figures to this file")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.inside:
        run_inside(args.rows, args.format, args.inside)
        return 0
    need_cuda(parser)
    if shutil.which("ncu") is None:
        parser.error("this needs ncu of NVIDIA Nsight Compute, and it is not on the PATH")
    try:
        counters = profile(args.rows, args.format)
    except RuntimeError as error:
        parser.error(str(error))
    print(table_of(counters))
    if args.json:
        record = {"machine": describe_machine(), "software": describe_software()}
        whole = record | {"format": args.format, "counters": [asdict(each) for each in counters]}
        args.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
