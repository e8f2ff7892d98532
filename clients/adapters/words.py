"""From a turn's "spoken up to here" to words with times, as frameworks want them."""

import re
from typing import NamedTuple

from realtime.wire import TurnText

_WORD = re.compile(r"\s*\S+")


class TimedWord(NamedTuple):
    """A word with the space before it: joined, the words are the text as it was sent."""

    text: str
    start_s: float  # of the turn's audio
    end_s: float


class WordTimes:
    """Of one turn.

    Example:
        >>> times = WordTimes()
        >>> times.words(TurnText(turn_id=1, text="One two", audio_ms=600.0))
        [TimedWord(text='One', start_s=0.0, end_s=0.257...), TimedWord(text=' two', ...)]
    """

    def __init__(self, lead_in_ms: int = 0) -> None:
        """`lead_in_ms`: of silence before the first word."""
        self._text = ""
        self._end_s = lead_in_ms / 1000.0

    def words(self, mark: TurnText) -> list[TimedWord]:
        """The words that are new in `mark`, sharing its new audio by their length."""
        start_s, end_s = self._end_s, max(self._end_s, mark.audio_ms / 1000.0)
        if not mark.text.startswith(self._text):  # not what was sent: it cannot be aligned
            return []
        pieces = _WORD.findall(mark.text, len(self._text))
        num_chars = sum(map(len, pieces))
        words = []
        for piece in pieces:
            word_end_s = start_s + (end_s - self._end_s) * len(piece) / num_chars
            words.append(TimedWord(piece, start_s, word_end_s))
            start_s = word_end_s
        if pieces:
            self._text, self._end_s = self._text + "".join(pieces), end_s
        return words
