"""The playback clock: how far a stream's audio is ahead of its listener."""

from dataclasses import dataclass

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
