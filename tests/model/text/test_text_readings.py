"""Every line of readings.txt: text as written => words as a person reads them."""

from pathlib import Path

import pytest

from model.text import EnglishFrontEnd

TABLE = Path(__file__).with_name("readings.txt").read_text(encoding="utf-8")
CASES = [
    tuple(line.split(" => ", 1))
    for line in TABLE.splitlines()[2:]
    if line and not line.startswith("== ")
]
read = EnglishFrontEnd()


def test_the_table_is_large() -> None:
    assert len(CASES) >= 400
    assert len({text for text, _ in CASES}) == len(CASES)


@pytest.mark.parametrize(("text", "words"), CASES, ids=[text for text, _ in CASES])
def test_reading(text: str, words: str) -> None:
    spoken = read(text)
    assert spoken.words == words
    assert spoken.phonemes
    assert spoken.warnings == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Milk\nEggs\nBread", "Milk, Eggs, Bread"),
        ("I went to\nthe store.", "I went to the store."),
        (
            "# Title\n\nSome text\n- first\n- second\n\n1. third\n2. fourth",
            "Title. Some text. first. second. one. third. two. fourth",
        ),
        ("```python\nprint(x)\n```\nDone.", "print (X). Done."),
        ("| cat | dog |\n|---|---|\n| red | blue |", "cat, dog. red, blue"),
        ("one.\r\nTwo.\r\n", "one. Two."),
        ("tab\there", "tab here"),
        ("a nul\x00 and a bell\x07", "a nul and a bell"),
        ("zero\u200bwidth and soft\u00adhyphen", "zerowidth and softhyphen"),
        ("right \u200fto\u202e left\u202c", "right to left"),
        ("\ufeffmark", "mark"),
        ("non\u00a0breaking\u2009spaces", "non breaking spaces"),
        ("１２３ ＡＢＣ", "one hundred twenty three A B C"),
        ("\U0001d401\U0001d428\U0001d425\U0001d41d", "Bold"),
        ("٣ items", "three items"),
        ("ﬁne coﬀee", "fine coffee"),
        ("café in Zürich", "cafe in Zurich"),
        ("1\ufe0f\u20e3 and 2\ufe0f\u20e3", "one and two"),
    ],
)
def test_unicode_and_layout(text: str, words: str) -> None:
    spoken = read(text)
    assert spoken.words == words
    assert spoken.warnings == ()


def test_quoted_numbers_are_not_inches() -> None:
    assert read('He said "it is 27" twice.').words == 'He said "it is twenty seven" twice.'
