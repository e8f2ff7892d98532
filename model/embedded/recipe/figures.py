"""What was measured of single clips, and its means over many with bootstrap intervals."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

NUM_BOOTSTRAP = 2_000


@dataclass
class Measured:
    """All that is known about one clip."""

    voice: str
    row: int
    category: str
    text: str
    heard: str = ""
    num_errors: int = 0
    num_words: int = 0
    duration_s: float = 0.0
    lead_ms: float = 0.0
    distill_mos: float = float("nan")
    dnsmos: float = float("nan")
    nearest: str = ""
    cosine: float = float("nan")
    faults: list[str] = field(default_factory=list)


class Figure(NamedTuple):
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        if np.isnan(self.value):
            return "-"
        return f"{self.value:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"


def bootstrap(
    values: Sequence[float], weights: Sequence[float] | None = None, seed: int = 0
) -> Figure:
    """Sum of values over sum of weights (the mean without weights), resampling clips."""
    over = np.asarray(values, np.float64)
    under = np.ones_like(over) if weights is None else np.asarray(weights, np.float64)
    known = ~np.isnan(over)
    over, under = over[known], under[known]
    if not len(over):
        return Figure(float("nan"), float("nan"), float("nan"))
    index = np.random.default_rng(seed).integers(len(over), size=(NUM_BOOTSTRAP, len(over)))
    ratios = over[index].sum(1) / np.maximum(under[index].sum(1), 1e-9)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return Figure(float(over.sum() / max(under.sum(), 1e-9)), float(low), float(high))


FAULTS = ("silent", "runaway", "truncated", "repeated")


def summarize(clips: Sequence[Measured]) -> dict[str, Any]:
    voiced = [clip for clip in clips if clip.nearest]
    return {
        "num_clips": len(clips),
        "wer_percent": bootstrap(
            [100.0 * clip.num_errors for clip in clips], [clip.num_words for clip in clips]
        ),
        "distill_mos": bootstrap([clip.distill_mos for clip in clips]),
        "dnsmos_ovrl": bootstrap([clip.dnsmos for clip in clips]),
        "nearest_percent": bootstrap([100.0 * (c.nearest == c.voice) for c in voiced]),
        "cosine": bootstrap([clip.cosine for clip in voiced]),
        "lead_ms_median": float(np.median([clip.lead_ms for clip in clips])) if clips else 0.0,
        "faults": {fault: sum(fault in clip.faults for clip in clips) for fault in FAULTS},
        "num_faulty": sum(bool(clip.faults) for clip in clips),
        "audio_s": sum(clip.duration_s for clip in clips),
    }


def print_table(summaries: dict[str, dict[str, Any]]) -> None:
    print(
        "| clips | n | WER % | DistillMOS | DNSMOS OVRL | nearest voice % | cosine |"
        " lead ms, median | faults |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name, s in summaries.items():
        faults = ", ".join(f"{count} {fault}" for fault, count in s["faults"].items() if count)
        cells = [
            name,
            str(s["num_clips"]),
            f"{s['wer_percent']:.1f}",
            f"{s['distill_mos']:.2f}",
            f"{s['dnsmos_ovrl']:.2f}",
            f"{s['nearest_percent']:.1f}",
            f"{s['cosine']:.3f}",
            f"{s['lead_ms_median']:.0f}",
            f"{s['num_faulty']}" + (f" ({faults})" if faults else ""),
        ]
        print("| " + " | ".join(cells) + " |")


def report(clips: Sequence[Measured], out: Path | None) -> None:
    groups: dict[str, list[Measured]] = {"all": list(clips)}
    for attribute in ("category", "voice"):
        for clip in clips:
            if name := getattr(clip, attribute):
                groups.setdefault(name, []).append(clip)
    summaries = {name: summarize(group) for name, group in groups.items()}
    print_table(summaries)
    worst = sorted(clips, key=lambda clip: clip.num_errors / max(1, clip.num_words), reverse=True)
    for clip in [clip for clip in worst[:12] if clip.num_errors or clip.faults]:
        marks = f" {clip.faults}" if clip.faults else ""
        print(f"  {clip.voice}/{clip.row:04d}{marks}: {clip.text!r} heard as {clip.heard!r}")
    if out:
        figures = {
            name: {
                key: figure._asdict() if isinstance(figure, Figure) else figure
                for key, figure in summary.items()
            }
            for name, summary in summaries.items()
        }
        out.parent.mkdir(parents=True, exist_ok=True)
        data = {"summary": figures, "clips": [asdict(clip) for clip in clips]}
        out.write_text(json.dumps(data, indent=1, ensure_ascii=False), encoding="utf-8")
        print(f"-> {out}")
