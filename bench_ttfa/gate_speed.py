"""The performance gate: frames/s per stream of a run against a frozen baseline of the same GPU and model.

    python -m bench_ttfa.frames --format bf16,bsfp8 --gate bench_ttfa/baselines/h200-s2-pro.json
    python -m bench_ttfa.gate_speed RECORD.json              # the same for a run's record, anywhere
    python -m bench_ttfa.gate_speed RECORD.json --freeze     # make the run the baseline

A figure may be TOLERANCE below its baseline. Rule for the baseline: whoever makes a frame faster
freezes it anew in the same change, from the record of the run that shows it. A figure that came out
lower, but no slower than the gate allows, stays as it was; it is frozen lower only with --lower and the
reason (a correction that has to cost time, a change of what is measured), which the file keeps.

Exit codes: 1, a figure is slower than that, or would be frozen lower; 2, nothing to compare.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench_ttfa.command import record_of

TOLERANCE = 0.05
BASELINE = Path(__file__).parent / "baselines" / "h200-s2-pro.json"
_RATES = "frames_per_s_per_stream"


def rates_of(record: dict[str, Any]) -> dict[str, float]:
    """Frames/s per stream by figure, of what `bench_ttfa.frames --json` writes."""
    return {
        f"{each['format']} c={each['batch']} context={each['context']}": round(
            each["frames_per_s"] / each["batch"], 2
        )
        for each in record["frames"]
    }


def slower(baseline: dict[str, float], rates: dict[str, float]) -> list[str]:
    """What is slower than the baseline allows, in words."""
    return [
        f"{figure}: {rate:.1f} frames/s per stream, {rate / baseline[figure] - 1:.1%} from the "
        f"baseline's {baseline[figure]:.1f} (allowed: -{TOLERANCE:.0%})"
        for figure, rate in rates.items()
        if figure in baseline and rate < (1 - TOLERANCE) * baseline[figure]
    ]


def gate(record: dict[str, Any], file: Path) -> int:
    """The exit code; says what it found."""
    baseline, rates = _frozen(record, file).get(_RATES, {}), rates_of(record)
    num_compared = len(baseline.keys() & rates.keys())
    if not num_compared:
        print(f"{file} has no baseline for this run of {record['model']} on {record['gpu']}")
        return 2
    slow = slower(baseline, rates)
    print("\n".join(slow) or f"within {TOLERANCE:.0%} of {file}, or faster", end="")
    print(f" ({num_compared} of its {len(baseline)} figures measured)")
    return 1 if slow else 0


def freeze(record: dict[str, Any], file: Path, reason: str | None = None) -> int:
    """The exit code; figures that the run did not measure stay.

    Args:
        reason: why some are lower than before.
    """
    frozen, rates = _frozen(record, file), rates_of(record)
    before: dict[str, float] = frozen.get(_RATES, {})
    lower = {figure: rate for figure, rate in rates.items() if rate < before.get(figure, 0.0)}
    if not reason:
        if slow := slower(before, rates):
            print("\n".join([*slow, "frozen lower only with --lower REASON"]))
            return 1
        rates |= {figure: before[figure] for figure in lower}
        lower = {}
    lowered = frozen.get("lowered", [])
    lowered += [
        {"figure": figure, "from": before[figure], "to": rate, "reason": reason}
        for figure, rate in lower.items()
    ]
    whole = {name: record[name] for name in ("model", "gpu", "software")}
    whole |= {_RATES: before | rates, "lowered": lowered}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    print(f"frozen: {file}")
    return 0


def _frozen(record: dict[str, Any], file: Path) -> dict[str, Any]:
    """Empty: there is none for this model and GPU."""
    if not file.is_file():
        return {}
    frozen: dict[str, Any] = json.loads(file.read_text("utf-8"))
    is_same = all(frozen[name] == record[name] for name in ("model", "gpu"))
    return frozen if is_same else {}


def baseline(text: str) -> Path:
    """A type of options: a file that a run was frozen in, or none yet."""
    if Path(text).exists():
        record_of("model", "gpu", _RATES)(text)
    return Path(text)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench_ttfa.gate_speed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "record",
        type=record_of("model", "gpu", "software", "frames"),
        metavar="RECORD.json",
        help="of bench_ttfa.frames",
    )
    parser.add_argument(
        "--baseline",
        type=baseline,
        default=BASELINE,
        metavar="FILE",
        help=f"default: {BASELINE.name}",
    )
    parser.add_argument("--freeze", action="store_true", help="make the run the baseline")
    parser.add_argument("--lower", metavar="REASON", help="why some figures are frozen lower")
    args = parser.parse_args(argv)
    if args.freeze:
        return freeze(args.record, args.baseline, args.lower)
    return gate(args.record, args.baseline)


if __name__ == "__main__":
    sys.exit(main())
