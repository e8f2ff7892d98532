"""Where a sentence or a clause ends: rules with look-ahead, for text that is still arriving.

A mark is judged by the text around it alone, never by how the text was split. When the text does
not reach far enough to tell, the answer is `UNDECIDED`, and it stays so until more text decides it
or the text is known to end.
"""

import re
from collections.abc import Iterator
from enum import Enum, auto
from typing import NamedTuple

from realtime.session.script import CJK

_CLOSERS = "\"'\u2019\u201d\u00bb)\\]}\u300d\u300f\uff09\u3011\u300b"
_STOPS = ".!?\u2026\u3002\uff01\uff1f\uff0e\uff61\u061f\u06d4\u0964\u0965\u0589"
_SELF_SUFFICIENT_STOPS = frozenset("\u3002\uff01\uff1f\uff0e\uff61\u061f\u06d4\u0964\u0965\u0589")
_ELLIPSIS = frozenset(".\u2026")
_MAX_TAG_CHARS = 64

# A tag that has begun may still become one; a whole tag is never cut, and nothing in it is a mark.
_MARK = re.compile(
    rf"(?P<tag><\|[^|\n]{{0,{_MAX_TAG_CHARS}}}\|>|\[[^\[\]\n]{{1,{_MAX_TAG_CHARS}}}\])"
    rf"|(?P<begun_tag><(?:\|[^|\n]{{0,{_MAX_TAG_CHARS}}}\|?)?\Z|\[[^\[\]\n]{{0,{_MAX_TAG_CHARS}}}\Z)"
    rf"|(?P<stop>[{_STOPS}]+[{_CLOSERS}]*)"
    rf"|(?P<pause>[,;:\u2013\u060c\u061b][{_CLOSERS}]*|[\u2014\uff0c\uff1b\uff1a\u3001])"
    r"|(?P<newline>\n\s*)"
)
SPEAKER_TAG = re.compile(r"<\|speaker:\d+\|>")
_NON_SPACE = re.compile(r"\S")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_LEADING = _words(  # abbreviations that a name, a number or an example follows
    """
    mr mrs ms mx dr prof st rev fr hon gen col maj capt cmdr lt sgt gov sen rep pres messrs mme mlle
    vs v cf e.g i.e viz approx ca est dept univ assn ave blvd rd hwy mt ft fig figs eq vol ed eds pp
    p op al nos tel ext incl excl resp min max avg temp jan feb mar apr jun jul aug sep sept oct nov
    dec mon tue tues wed thu thur thurs fri bzw ggf usw z.b d.h u.a nr sra dra ud uds
    """
)
_NUMBERED = _words("no sec ch art pt")  # abbreviations before a number, words otherwise
_EITHER = _words("a.m p.m am pm etc inc ltd co corp jr sr bros esq ph.d m.d b.c a.d")


class Kind(Enum):
    NONE = auto()
    CLAUSE = auto()
    SENTENCE = auto()
    UNDECIDED = auto()


class Mark(NamedTuple):
    """The text may be cut at `end`, which lies behind closing quotes and before any space."""

    kind: Kind
    start: int
    end: int


def marks(text: str, is_final: bool, max_start: int) -> Iterator[Mark]:
    """The marks that start before `max_start`, in order; nothing after an undecided one.
    `is_final`: no text follows. The cost does not grow with text that lies far behind."""
    pos, horizon = 0, max_start + _MAX_TAG_CHARS + 4
    while (found := _MARK.search(text, pos, horizon)) and found.start() < max_start:
        match = _MARK.match(text, found.start())
        if match is None:  # the horizon made it look like the end of the text
            pos = found.start() + 1
            continue
        if found.start() and SPEAKER_TAG.match(text, found.start()):  # another one speaks on
            yield Mark(Kind.SENTENCE, found.start(), found.start())
        mark = _judge(text, match, is_final)
        yield mark
        if mark.kind is Kind.UNDECIDED:
            return
        pos = match.end()


def _judge(text: str, match: re.Match[str], is_final: bool) -> Mark:
    start, end = match.span()
    match match.lastgroup:
        case "tag":
            return Mark(Kind.NONE, start, end)
        case "begun_tag":
            return Mark(Kind.NONE if is_final else Kind.UNDECIDED, start, end)
        case "newline":
            kind = _newline_kind(match.group(), text[end : end + 4])
            end = len(text[:start].rstrip())
        case "pause":
            kind = _pause_kind(match.group(), text[end : end + 1])
        case _:
            kind = _stop_kind(text, start, end, match.group())
    if kind is Kind.UNDECIDED and is_final:
        kind = Kind.SENTENCE
    return Mark(kind, start, end)


def _newline_kind(space: str, following: str) -> Kind:
    """An empty line or a list item ends a sentence, a line break alone may be a hard wrap."""
    if space.count("\n") > 1:
        return Kind.SENTENCE
    if not following:
        return Kind.UNDECIDED
    is_item = following[0] in "-*\u2022\u2013\u2014#>|" or following[0].isdigit()
    return Kind.SENTENCE if is_item else Kind.CLAUSE


def _pause_kind(mark: str, following: str) -> Kind:
    if mark[0] in "\u2014\uff0c\uff1b\uff1a\u3001":
        return Kind.CLAUSE
    if not following:
        return Kind.UNDECIDED
    return Kind.CLAUSE if following.isspace() else Kind.NONE


def _stop_kind(text: str, start: int, end: int, mark: str) -> Kind:
    if end == len(text):
        return Kind.UNDECIDED
    if not _SELF_SUFFICIENT_STOPS.isdisjoint(mark):
        return Kind.SENTENCE
    if not text[end].isspace():
        return Kind.SENTENCE if _is_glued(text, start, end) else Kind.NONE
    first = _NON_SPACE.search(text, end)
    following = first.group() if first else ""
    stop = mark.rstrip(_CLOSERS.replace("\\", ""))
    if stop != "." and set(stop) <= _ELLIPSIS:
        return _by_following(following, if_lower=Kind.CLAUSE)
    if stop == ".":
        kind = _abbreviation_kind(text, start, following)
        if kind is not Kind.SENTENCE:
            return kind
    if stop != mark:  # "Go." he said.
        return _by_following(following, if_lower=Kind.NONE)
    return Kind.SENTENCE


def _by_following(following: str, if_lower: Kind) -> Kind:
    if not following:
        return Kind.UNDECIDED
    return if_lower if following.islower() else Kind.SENTENCE


def _is_glued(text: str, start: int, end: int) -> bool:
    """The space after a sentence is missing ("assistant.How"), and it is no address or name."""
    word = _word_before(text, start)
    is_plain = len(word) > 1 and word.isalpha() and word[-2:].islower()
    return is_plain and (text[end].isupper() or re.match(f"[{CJK}]", text[end]) is not None)


def _abbreviation_kind(text: str, start: int, following: str) -> Kind:
    """Whether the period at `start` ends a sentence, judged by the word before it."""
    word = _word_before(text, start)
    lower = word.lower()
    is_initial = len(word) == 1 and word.isupper() and word != "I"
    if lower in _LEADING or is_initial or _is_list_number(text, start, word):
        return Kind.NONE
    if lower in _NUMBERED:
        if not following:
            return Kind.UNDECIDED
        return Kind.NONE if following.isdigit() else Kind.SENTENCE
    if lower in _EITHER:
        return _by_following(following, if_lower=Kind.NONE)
    return Kind.NONE if re.fullmatch(r"(?:[a-z]\.)+[a-z]", lower) else Kind.SENTENCE


def _is_list_number(text: str, start: int, word: str) -> bool:
    """ "1." at the start of a line."""
    if not (word.isdigit() and len(word) < 3):
        return False
    before = text[: start - len(word)].rstrip(" \t")
    return not before or before.endswith("\n")


def _word_before(text: str, end: int) -> str:
    """The unspaced run before `end`, without opening quotes and brackets."""
    run = re.search(r"\S*\Z", text[max(0, end - 32) : end])
    assert run is not None
    return run.group().lstrip("\"'\u2018\u201c\u00ab([{<*_-\u2014")
