"""The interruption ledger: which text has been spoken by a given moment of a turn's audio.

Every segment owns a span of the turn's text and a run of its frames; the spans follow each other
without a gap. Inside a segment, frames are shared out over its words by their weight. Until the
segment's frames are known they are estimated from a speaking rate that adapts to the voice.
"""

import math
import re
from bisect import bisect_left
from dataclasses import dataclass

from realtime.session.script import CJK

_WORD = re.compile(rf"<\|[^|\n]*\|>|\[[^\]\n]*\]|[{CJK}]|[^\s{CJK}]+")
_NUM_CJK_CHARS_RATIO = 3.0  # a CJK character lasts about as long as three letters
_NUM_DIGIT_CHARS_RATIO = 3.0
_TYPICAL_CHARS_PER_S = 15.0
_ROUNDING_FRAMES = 0.5  # clients and resamplers round; this much may be missing at an end


class SpeakingRate:
    """Weight spoken per frame, learned from the segments that have ended."""

    def __init__(self, weight_per_frame: float) -> None:
        self._weight_per_frame = weight_per_frame

    @classmethod
    def typical(cls, frame_ms: float) -> "SpeakingRate":
        return cls(_TYPICAL_CHARS_PER_S * frame_ms / 1000.0)

    def num_frames(self, weight: float) -> float:
        return weight / self._weight_per_frame

    def learn(self, weight: float, num_frames: int) -> None:
        if weight > 0 and num_frames > 0:
            self._weight_per_frame += 0.3 * (weight / num_frames - self._weight_per_frame)


@dataclass(slots=True)
class _Word:
    end: int  # within the turn's text
    middle_weight: float  # of the segment, up to the middle of this word


class _Span:
    """One segment: characters `[start, end)` of the turn, and how many frames they took."""

    def __init__(self, start: int, text: str) -> None:
        self.start = start
        self.end = start + len(text)
        self.num_frames = 0  # delivered so far
        self.is_ended = False
        self.words: list[_Word] = []
        self.weight = 0.0
        for match in _WORD.finditer(text):
            weight = _weight(match.group())
            self.words.append(_Word(start + match.end(), self.weight + weight / 2))
            self.weight += weight

    def num_frames_in_all(self, rate: SpeakingRate) -> float:
        if self.is_ended:
            return self.num_frames
        return max(rate.num_frames(self.weight), self.num_frames + 1.0)

    def spoken_end(self, num_heard: float, rate: SpeakingRate) -> int:
        """End of the last word of which at least half is within `num_heard` frames."""
        num_frames = self.num_frames_in_all(rate)
        if self.is_ended and num_heard >= num_frames - _ROUNDING_FRAMES:
            return self.end
        heard_weight = self.weight * num_heard / num_frames
        ends = [word.end for word in self.words if word.middle_weight <= heard_weight]
        return ends[-1] if ends else self.start


class Ledger:
    """Of one turn. Positions are characters of `text`, times are of the turn's own audio, which
    begins with `lead_in_ms` of silence."""

    def __init__(self, frame_ms: float, rate: SpeakingRate, lead_in_ms: int = 0) -> None:
        self._lead_in_ms = lead_in_ms
        self._frame_ms = frame_ms
        self._rate = rate
        self._pieces: list[str] = []
        self._spans: list[_Span] = []
        self._first_frames: list[int] = []  # of the spans that have begun, within the turn
        self._num_frames = 0
        self._is_turn_ended = False

    @property
    def text(self) -> str:
        """The turn's text, verbatim."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    @property
    def num_frames(self) -> int:
        """Delivered so far."""
        return self._num_frames

    def add_text(self, text: str) -> None:
        self._pieces.append(text)

    def add_segment(self, end: int) -> None:
        """The next segment is closed; it owns the text from the one before it up to `end`."""
        start = self._spans[-1].end if self._spans else 0
        self._spans.append(_Span(start, self.text[start:end]))

    def add_frames(self, segment: int, first_frame: int, num_frames: int) -> None:
        """Frames of a segment have been delivered, in order."""
        self._begin(segment, first_frame).num_frames += num_frames
        self._num_frames = first_frame + num_frames

    def end_segment(self, segment: int, num_frames: int) -> None:
        """All frames of the segment have been delivered."""
        span = self._begin(segment, self._num_frames)
        span.num_frames = num_frames
        span.is_ended = True
        self._rate.learn(span.weight, num_frames)

    def end_turn(self) -> None:
        """All frames of the turn have been delivered: at their end all text has been spoken."""
        self._is_turn_ended = True

    def num_heard_frames(self, played_ms: float) -> int:
        """Frames that have been heard, the last one perhaps in part."""
        return min(self._num_frames, math.ceil(self._num_played(played_ms) - 1e-6))

    def num_spoken_chars(self, played_ms: float) -> int:
        """How much of `text` has been spoken after `played_ms` of audio: always whole words."""
        played_frames = self._num_played(played_ms)
        if self._is_turn_ended and 0 < self._num_frames <= played_frames + _ROUNDING_FRAMES:
            return len(self.text)
        idx = bisect_left(self._first_frames, played_frames) - 1
        if idx < 0:
            return 0
        return self._spans[idx].spoken_end(played_frames - self._first_frames[idx], self._rate)

    def _num_played(self, played_ms: float) -> float:
        return max(0.0, played_ms - self._lead_in_ms) / self._frame_ms

    def _begin(self, segment: int, first_frame: int) -> _Span:
        while segment >= len(self._first_frames):
            self._first_frames.append(first_frame)
        return self._spans[segment]


def _weight(word: str) -> float:
    """How long a word takes to say, in letters."""
    if word.startswith("<|"):
        return 0.0
    if re.match(f"[{CJK}]", word):
        return _NUM_CJK_CHARS_RATIO
    num_digits = sum(char.isdigit() for char in word)
    return len(word) + 1.0 + num_digits * (_NUM_DIGIT_CHARS_RATIO - 1.0)
