"""Cuts the text of a turn into segments while it arrives.

The closed segments depend on the text and on where it was flushed, never on how it was split into
appends. Spans follow each other without a gap; what cannot be spoken (space, stray punctuation)
belongs to the span of the segment after it.
"""

import re
import unicodedata
from dataclasses import dataclass

from realtime.session.boundaries import SPEAKER_TAG, Kind, Mark, marks
from realtime.session.script import CJK, clean, is_speakable

_WORD_BORDER = re.compile(rf"\s+|(?<=[{CJK}])")
_NEXT = " A"  # how the sentence after it begins
_JOINERS = "\u200d\ufe0e\ufe0f"
_NUM_DIGIT_LETTERS = 6  # "1,234" is read as 36 letters, "555" as 14


@dataclass(frozen=True, slots=True)
class SegmentPolicy:
    max_chars: int  # letters; a digit counts as several, since it is read as a word
    min_chars: int = 16  # a shorter sentence is joined with the next, unless it is the first
    first_clause_chars: int = 40  # the first segment may end with a clause of this length
    has_speakers: bool = False  # a segment begins with the tag of whoever is speaking

    def __post_init__(self) -> None:
        assert self.max_chars > 0, self


@dataclass(frozen=True, slots=True)
class Segment:
    """`text` is what is to be spoken; it lies within the turn's characters up to `end`, from the
    end of the segment before it. (A speaker's tag may come from further back.)"""

    end: int
    text: str


class Segmenter:
    def __init__(self, policy: SegmentPolicy) -> None:
        self._policy = policy
        self._rest = ""  # not closed yet, without leading space
        self._offset = 0  # of `_rest` within the turn
        self._has_closed = False
        self._speaker = ""  # the tag of the last one in what is closed

    def append(self, text: str) -> list[Segment]:
        """Add text; returns the segments that it closes."""
        self._rest += text
        return self._close(is_final=False)

    def flush(self) -> list[Segment]:
        """Close everything that has arrived as if the text ended here."""
        segments = self._close(is_final=True)
        return segments + self._cut(len(self._rest))

    @property
    def open_text(self) -> str:
        """What has arrived of the next segment, up to a word border; it may close shorter."""
        text = self._rest[: _num_fitting(self._rest, self._policy.max_chars)]
        text = clean(text[: _stable_end(text)])
        return self._tagged(text) if text else ""

    @property
    def ends_a_sentence(self) -> bool:
        """Whether what has arrived and is not closed yet would be over if another sentence began."""
        text = self._rest.rstrip()
        going_on = self._rest + _NEXT  # an empty line ends one too
        found = marks(going_on, False, len(self._rest))
        ends = [mark.end for mark in found if mark.kind is Kind.SENTENCE]
        return bool(ends) and ends[-1] == len(text) and is_speakable(text)

    def _close(self, is_final: bool) -> list[Segment]:
        segments: list[Segment] = []
        while True:
            self._skip_space()
            end = self._find_end(is_final)
            if end is None:
                return segments
            segments += self._cut(end)

    def _cut(self, end: int) -> list[Segment]:
        piece = self._rest[:end]
        self._rest = self._rest[end:]
        self._offset += end
        text = self._tagged(clean(piece))
        if self._policy.has_speakers and (tags := SPEAKER_TAG.findall(piece)):
            self._speaker = tags[-1]
        if not is_speakable(piece):
            return []
        self._has_closed = True
        return [Segment(self._offset, text)]

    def _tagged(self, text: str) -> str:
        return text if SPEAKER_TAG.match(text) else self._speaker + text

    def _skip_space(self) -> None:
        rest = self._rest.lstrip()
        self._offset += len(self._rest) - len(rest)
        self._rest = rest

    def _find_end(self, is_final: bool) -> int | None:
        """Where the first segment of `_rest` ends; None while that is open."""
        max_chars = _num_fitting(self._rest, self._policy.max_chars)
        last_clause: Mark | None = None
        tags: list[Mark] = []
        for mark in marks(self._rest, is_final, max_chars):
            if mark.kind is Kind.UNDECIDED:
                return None
            if mark.kind is Kind.NONE:
                tags.append(mark)
            elif mark.end <= max_chars:
                if self._is_end(mark):
                    return mark.end
                if mark.end >= self._policy.min_chars:
                    last_clause = mark
        if len(self._rest.rstrip()) <= max_chars:
            return None
        return last_clause.end if last_clause else _last_word_end(self._rest, max_chars, tags)

    def _is_end(self, mark: Mark) -> bool:
        policy = self._policy
        if mark.kind is Kind.SENTENCE:
            is_long_enough = mark.end >= policy.min_chars or not self._has_closed
        else:
            is_long_enough = mark.end >= policy.first_clause_chars and not self._has_closed
        return is_long_enough and is_speakable(self._rest[: mark.end])


def _num_fitting(text: str, max_letters: int) -> int:
    """How many characters of `text` take no longer to say than `max_letters` letters."""
    num_letters = 0
    for i, char in enumerate(text[:max_letters]):
        num_letters += _NUM_DIGIT_LETTERS if char.isdigit() else 1
        if num_letters > max_letters:
            return max(1, i)
    return max_letters


def _last_word_end(text: str, max_chars: int, tags: list[Mark]) -> int:
    """The last border between words at or before `max_chars`; inside a word if there is none."""
    for tag in tags:
        if tag.start < max_chars < tag.end and tag.start > 0:
            max_chars = tag.start
    end = max_chars
    for border in _WORD_BORDER.finditer(text, 1, max_chars + 1):
        end = min(border.start(), max_chars)
    start = end
    while start > 1 and _belongs_to_previous(text[start]):
        start -= 1
    return start if start > 1 else end  # nothing but marks: one cut is as good as another


def _belongs_to_previous(char: str) -> bool:
    return unicodedata.combining(char) > 0 or char in _JOINERS or "\udc00" <= char <= "\udfff"


def _stable_end(text: str) -> int:
    """Up to where the text will not change: before the word or tag that is still growing."""
    limit = len(text)
    for mark in marks(text, is_final=False, max_start=len(text)):
        if mark.kind is Kind.UNDECIDED:
            limit = mark.start
    end = 0
    for border in _WORD_BORDER.finditer(text, 0, limit):
        end = border.end()
    return end
