"""From time stamps to figures. Pure functions; what each figure means is written here."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

DEFINITIONS = {
    "ttfa_ms": "client clock: just before the commit (the last byte of text) is sent -> first "
    "audio packet received; negative if speech began while text was still arriving",
    "ttfa_first_text_ms": "the same from just before the first text is sent",
    "ttfa_audible_ms": "ttfa_ms + leading silence: start of the first 10 ms of decoded audio "
    "whose level reaches -45 dBFS; of a sample of the turns where there are many",
    "server_ttfa_ms": "server clock, turn.done metrics: commit parsed -> first packet handed to "
    "the socket",
    "timeline_ms": "server clock, turn.done metrics: each stage, from the commit",
    "ready_ms": "client clock: connect -> session.ready; cached: the server had the voice's "
    "prefix; cold: it had not",
    "worst_gap_ms": "longest stall of a listener who starts to play at the first packet and plays "
    "what has arrived; per stream. A stream of one packet has none",
    "c50": "share of streams (of more than one packet) whose worst gap is <= 50 ms",
    "c100": "share of streams (of more than one packet) whose worst gap is <= 100 ms",
    "paced": "a level whose sessions listen in real time: the next turn begins when the last one has "
    "been heard; what is under way when the level ends is cut, and counts for continuity alone",
    "ramp_s": "of a timed closed loop: its sessions begin spread over as long before the measured time, "
    "so that streams of one length are not in step; without it all begin at once",
    "host_us_per_packet": "CPU time of the server's threads and child processes, by name, per packet "
    "that the clients received, over the measured window",
    "server_metrics": "the server's /metrics: what counters grew by in the level, gauges at its end",
    "real_time_factor": "(commit sent -> last packet received) / length of the audio, per stream",
    "throughput": "seconds of audio received per second of the measured window, all streams; of a "
    "timed level, per second of its time (without the turns' running out)",
    "frames_per_s": "throughput x the codec's frame rate",
    "load_generation_valid": "the clients were not the bottleneck: p99 of their event-loop lag "
    "and of their lateness is <= 10 ms, and every session of a closed loop was opened",
    "percentiles": "linear interpolation between order statistics; ~ marks one with fewer than "
    "5 samples beyond it",
}
MAX_CLIENT_LAG_MS = 10.0
MIN_SAMPLES_BEYOND = 5


@dataclass(frozen=True)
class Stats:
    """A distribution; `n` says how much its tails are worth."""

    n: int
    p50: float
    p95: float
    p99: float
    min: float
    max: float
    mean: float

    def as_dict(self) -> dict[str, float]:
        return {name: round(value, 3) for name, value in asdict(self).items()}


def stats(values: Sequence[float]) -> Stats | None:
    """None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return Stats(
        n=len(ordered),
        p50=percentile(ordered, 50),
        p95=percentile(ordered, 95),
        p99=percentile(ordered, 99),
        min=ordered[0],
        max=ordered[-1],
        mean=math.fsum(ordered) / len(ordered),
    )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of a sorted sequence, interpolated linearly.

    Example:
        >>> percentile([10.0, 20.0, 30.0], 75)
        25.0
    """
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def worst_gap_ms(arrivals_s: Sequence[float], packet_ms: float) -> float | None:
    """Longest stall of a listener who plays from the first packet on; None for fewer than two.

    Example:
        >>> worst_gap_ms([0.0, 0.0, 0.1], packet_ms=20.0)  # 40 ms are played until 0.1 s
        60.0
    """
    if len(arrivals_s) < 2:
        return None
    played_until_s = arrivals_s[0]
    worst_s = 0.0
    for arrival_s in arrivals_s:
        worst_s = max(worst_s, arrival_s - played_until_s)
        played_until_s = max(played_until_s, arrival_s) + packet_ms / 1000
    return 1000.0 * worst_s


def continuity(gaps_ms: Sequence[float | None], limit_ms: float) -> float | None:
    """Share of the streams that have a gap figure whose gap is within the limit."""
    counted = [gap_ms for gap_ms in gaps_ms if gap_ms is not None]
    return sum(gap_ms <= limit_ms for gap_ms in counted) / len(counted) if counted else None
