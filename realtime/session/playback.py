"""The server's estimate of what the listener has heard, for clients that do not say."""

_NS_PER_MS = 1e6


class PlaybackEstimate:
    """A listener that plays one turn as it arrives, after what came before it.

    Audio that arrives when nothing is left to play is heard from its arrival on: within the turn, the
    gap before it is an underrun, unless its text was not there when the gap began.
    """

    def __init__(self, not_before_ns: int) -> None:
        self._end_ns = not_before_ns  # when all audio that was sent will have been heard
        self._sent_ms = 0.0
        self.num_underruns = 0
        self.worst_gap_ms = 0.0

    @property
    def end_ns(self) -> int:
        return self._end_ns

    def sent(self, audio_ms: float, now_ns: int, text_ns: int) -> None:
        """`audio_ms` of the turn have been sent in all; the last of it says a text that was
        complete at `text_ns`."""
        if self._sent_ms and text_ns <= self._end_ns < now_ns:
            self.num_underruns += 1
            self.worst_gap_ms = max(self.worst_gap_ms, (now_ns - self._end_ns) / _NS_PER_MS)
        added_ns = round((audio_ms - self._sent_ms) * _NS_PER_MS)
        self._end_ns = max(self._end_ns, now_ns) + added_ns
        self._sent_ms = audio_ms

    def played_ms(self, now_ns: int) -> float:
        left_ms = max(0, self._end_ns - now_ns) / _NS_PER_MS
        return max(0.0, self._sent_ms - left_ms)
