"""How far a stream's audio is ahead of its listener, and what follows from it: who runs.

The policies are pure functions of leads and times in nanoseconds; the loops bring the clocks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from realtime.pingpong.messages import SlotRef


@dataclass(slots=True)
class PlaybackClock:
    """Listener model: plays from the moment audio arrives, without pause while there is any.

    `play_end_ns` is when everything delivered so far will have been heard. Audio that arrives after
    it starts a gap; within a turn a gap is an underrun.
    """

    play_end_ns: int = 0
    num_underruns: int = 0
    worst_gap_ns: int = 0

    def lead_ns(self, now_ns: int) -> int:
        """Audio delivered minus audio played; never negative."""
        return max(0, self.play_end_ns - now_ns)

    def add(self, duration_ns: int, now_ns: int, *, is_turn_start: bool) -> None:
        gap_ns = now_ns - self.play_end_ns
        if gap_ns > 0 and not is_turn_start:
            self.num_underruns += 1
            self.worst_gap_ns = max(self.worst_gap_ns, gap_ns)
        self.play_end_ns = max(self.play_end_ns, now_ns) + duration_ns

    def start_turn(self) -> None:
        self.num_underruns = 0
        self.worst_gap_ns = 0


class ClockTable:
    """One clock per slot, fresh for every generation: a tenant or a barge-in starts with no lead."""

    def __init__(self, num_slots: int) -> None:
        self._clocks: list[tuple[SlotRef | None, PlaybackClock]] = [
            (None, PlaybackClock()) for _ in range(num_slots)
        ]

    def of(self, slot: SlotRef) -> PlaybackClock:
        owner, clock = self._clocks[slot.idx]
        if owner != slot:
            clock = PlaybackClock()
            self._clocks[slot.idx] = (slot, clock)
        return clock


class Candidate(NamedTuple):
    """A stream that decode could give one more frame. A stream that nobody listens to in real
    time has a cap it never reaches; it needs no other mark: its lead puts it last."""

    lead_ns: int  # audio decoded ahead of the listener
    max_lead_ns: int  # the stream pauses at this lead


def rows_to_run(
    streams: Sequence[Candidate],
    *,
    frame_ns: int = 0,
    step_ns: int = 0,
    bucket_of: Callable[[int], int] = lambda num_rows: num_rows,
) -> list[int]:
    """Which streams take part in the next step.

    Args:
        frame_ns: duration of a frame's audio.
        step_ns: expected time of a step of all the streams; 0: not known.
        bucket_of: rows that are computed anyway when so many run (the graph's size).

    Returns:
        Indices into `streams`, ascending.
    """
    return [i for i, stream in enumerate(streams) if stream.lead_ns < stream.max_lead_ns]


def pause_ns(streams: Sequence[Candidate]) -> int | None:
    """Time until the first stream's lead is below its cap; None without streams."""
    return max(0, min(s.lead_ns - s.max_lead_ns for s in streams)) if streams else None
