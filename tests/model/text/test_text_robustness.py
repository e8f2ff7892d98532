"""Any string is read or refused with a warning; nothing raises, grows stale or gets lost."""

import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.text import EnglishFrontEnd, SpokenText
from model.text.phonemes import ALPHABET

read = EnglishFrontEnd()
SHOWN = frozenset(map(chr, range(32, 127))) | frozenset("“”")


def check(text: str) -> SpokenText:
    spoken = read(text)
    assert set(spoken.phonemes) <= ALPHABET
    assert set(spoken.words) <= SHOWN
    assert not any(c.isdigit() for c in spoken.words)
    assert bool(spoken.phonemes) == bool(spoken.words)
    for warning in spoken.warnings:
        warning.encode("utf-8")
        assert warning.isprintable()
    return spoken


@settings(max_examples=300, deadline=None, database=None)
@given(st.text(st.characters(), max_size=60))
def test_any_text(text: str) -> None:
    check(text)


SIGNS = "$ % @ # / - ' \" ( ) [ ] | * _ ` & + = < > ~ x : . , ; ! ? \\ { } ^ … – — “ ” € £ ° ² ½"
TOKENS = (
    "12 3.5 1,000 05 2026 a.m. Dr. St. No. http:// IV FBI iPhone é 😊 °F II C++ a A the Mar. 1st"
)
FRAGMENTS = [
    *SIGNS.split(),
    *TOKENS.split(),
    " ", "  ", "\n", "\t", "\x00", "\ud800", "\u200f", "\u0301", "Привет", "שלום", "你好",
]  # fmt: skip


@settings(max_examples=300, deadline=None, database=None)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=40).map("".join))
def test_fragments_in_any_order(text: str) -> None:
    check(text)


def test_every_plane() -> None:
    rng = random.Random(7)
    for start in range(0, 0x110000, 0x800):
        check("".join(chr(start + rng.randrange(0x800)) for _ in range(12)))


@pytest.mark.parametrize(
    "unit",
    [
     "9", "a", "1.1.", "-", "a-", "ab-", "aA", "a1", "(", "a(", '"', 'a"', "*", "**a", "[a", "1-",
     "1,", "$1", "A.", "\n", "a\n", "/a", "http://", "@a", "a@", "<a ", " ", "'", "a'", "1 ", "1/", "1:",
     "é", "ш", "😊", "|", "[a](b", "&amp;", "1'1\"", "Mr. ", "IV "],
)  # fmt: skip
def test_long_repetitions_end_soon(unit: str) -> None:
    """Work grows with the length, not with its square: minutes become a second at the most."""
    started = time.perf_counter()
    check(unit * (5000 // len(unit)))
    assert time.perf_counter() - started < 10


def test_long_text() -> None:
    spoken = check("All of this is read, number 7 and all. " * 500)
    assert spoken.words.count("seven") == 500


@pytest.mark.parametrize("text", ["", " ", "\n\t", "...", "?!", "—", "()", "**", "____", "\u200b"])
def test_signs_alone_are_silent(text: str) -> None:
    """Whether anything is said at all is told of the whole turn, by the session."""
    assert read(text) == SpokenText("", "", ())


@pytest.mark.parametrize(
    ("text", "words", "warning"),
    [
        ("Done 😊!", "Done!", "left out, without a reading: '😊'"),
        ("Привет, Bob", "Privet, Bob", "read by transliteration: 'Привет'"),
        ("Meet 你好 now", "Meet Ni Hao now", "read by transliteration: '你好'"),
        ("hello שלום", "hello", "left out, in a script without a reading: 'שלום'"),
        ("hi \ud83d there", "hi there", "left out, without a reading: '\\ud83d'"),
        ("[laughs] Hello", "Hello", "left out, a tag that this voice does not perform: '[laughs]'"),
        (
            "<|speaker:0|>Hello",
            "Hello",
            "left out, a tag that this voice does not perform: '<|speaker:0|>'",
        ),
    ],
)
def test_what_is_not_heard_is_told(text: str, words: str, warning: str) -> None:
    spoken = check(text)
    assert spoken.words == words
    assert spoken.warnings == (warning,)


def test_emoji_alone_is_told() -> None:
    assert read("👍🏽").warnings == ("left out, without a reading: '👍'",)


TURNS = [
    "Your appointment with Dr. Smith is on March 3 at 10:30 a.m., and the total is $29.50 plus tax.",
    "We live at 12 Main St. near St. Louis, about 5.5 km from the 21st exit, and it takes 15 minutes.",
    "Please call +1 (415) 555-2671 or write to a.b@c.co.uk before 11/29/2026, unless you are in the U.S.",
    "In 1066, William won. In the 1990s, 50% of 10,000 people said yes (see https://example.com/a?b=1).",
    "The FBI and NASA met Henry VIII and Elizabeth II at 9 p.m. on Friday, i.e. late, with 3-5 friends.",
]


@pytest.mark.parametrize("text", TURNS)
def test_growing_text_keeps_its_earlier_words(text: str) -> None:
    """All but the last few written words are read alike, whatever follows."""
    whole = read(text)
    written = text.split(" ")
    for count in range(1, len(written) + 1):
        part = read(" ".join(written[:count])).words.split(" ")
        settled = read(" ".join(written[: max(0, count - 3)])).words.rstrip(".").split(" ")
        keep = len(settled) - 1
        assert part[:keep] == whole.words.split(" ")[:keep], (count, part)


def test_deterministic_and_shared_by_threads() -> None:
    cases = Path(__file__).with_name("readings.txt").read_text(encoding="utf-8").splitlines()
    alone = [read(text) for text in cases]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(read, cases)) == alone
    assert [EnglishFrontEnd()(text) for text in cases[:50]] == alone[:50]


@pytest.mark.parametrize(
    "text",
    [
        "The quick brown fox jumps over ten million lazy dogs, doesn't it?",
        "It costs ten dollars and fifty cents. Really! She said so: no more.",
    ],
)
def test_words_are_read_as_they_are_written(text):
    spoken = EnglishFrontEnd()(text)
    assert spoken.words == text and not spoken.warnings
