"""A rewriting rule and the patterns that several topics share."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple


class Rule(NamedTuple):
    """Where `pattern` matches, the text becomes what `read` returns."""

    pattern: re.Pattern[str]
    read: Callable[[re.Match[str]], str]


def rule(pattern: str, read: Callable[[re.Match[str]], str] | str, flags: int = 0) -> Rule:
    """A rule from its pattern and a function, or a replacement with \\1-style references."""
    compiled = re.compile(pattern, flags)
    if isinstance(read, str):
        template = read
        return Rule(compiled, lambda match: match.expand(template))
    return Rule(compiled, read)


def apply(rules: Iterable[Rule], text: str) -> str:
    for pattern, read in rules:
        text = pattern.sub(read, text)
    return text


def words(text: str) -> tuple[str, ...]:
    """A table of words from one line of text."""
    return tuple(text.split())


def any_of(words: Iterable[str] | Mapping[str, object]) -> str:
    """An alternation that prefers the longest word."""
    return "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))


NUMBER = r"(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
"""An unsigned number as Americans write it."""

START = r"(?<![\w.,])"
"""A place where a number may begin: not inside a word or another number."""

END = r"(?![\w]|[.,]\d)"
"""A place where a number may end."""

STARTERS = frozenset(
    words(
        "The It He She We I They This That These Those There Our But And In On At Then If When My "
        "Your You His Her Its Their So Now What Who Where Why How Do Did Is Are Was Please Yes No "
        "As For Also"
    )
)
"""Capitalised words that start sentences rather than names."""
_NEXT_WORD = re.compile(r"\s+([A-Z][a-z]*)\b")
_REST = re.compile(r"\s*\Z")


_NOUN_NEXT = re.compile(r" (?!(?:of|in|for|to|and|or|on|at|by|per|from|is|was|off)\b)[a-z]{3}")


def is_adjective(match: re.Match[str]) -> bool:
    """Whether a measure stands between "a" and a noun: "a 3.5mm jack", "a $1.2M home"."""
    article = match.string[max(0, match.start() - 3) : match.start()].lower()
    is_after_article = article.endswith((" a ", "an ")) or article == "a "
    return is_after_article and _NOUN_NEXT.match(match.string, match.end()) is not None


def ends_sentence(match: re.Match[str]) -> bool:
    """Whether the period of a matched abbreviation also ends a sentence."""
    following = _NEXT_WORD.match(match.string, match.end())
    if following:
        return following[1] in STARTERS
    return _REST.match(match.string, match.end()) is not None
