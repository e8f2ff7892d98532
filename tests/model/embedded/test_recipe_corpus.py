"""The recipe's corpus: cleaning, what is left out, templates, the held-out sentences, seeds."""

import random
import re
from pathlib import Path

import pytest

from model.embedded.recipe import corpus
from model.embedded.recipe.corpus import key
from model.embedded.recipe.templates import DIGITS, TEMPLATES_PATH, THINGS, Templates

FAMILIAR = "He walked along the river until the lamps were lit."


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "NUM_TEMPLATES", 60)
    monkeypatch.setattr(corpus, "NUM_PAIRS", 40)
    monkeypatch.setattr(corpus, "NUM_TRIPLES", 10)
    monkeypatch.setattr(corpus, "NUM_SHORT_REPEATS", 2)


@pytest.fixture
def sources(tmp_path: Path) -> tuple[Path, Path]:
    """A dictionary and a collection of sayings in the layout of their Debian packages."""
    wordnet, fortunes = tmp_path / "wordnet", tmp_path / "fortunes"
    wordnet.mkdir(), fortunes.mkdir()
    examples = [f"the {noun} was {past} by them" for noun in THINGS for past in ("lost", "met")]
    lines = [
        f'1 n 01 x | a thing; "{a}"; "{b}"'
        for a, b in zip(examples[::2], examples[1::2], strict=True)
    ]
    (wordnet / "data.noun").write_text("\n".join(lines), encoding="latin-1")
    (fortunes / "wisdom").write_text(
        f'{FAMILIAR}\n\t\t-- An Author\n%\nMr. Smith saw it, and then\nhe "slept" all day. I said so.\n'
    )
    (fortunes / "wisdom.dat").write_text("Not a text file at all.\n%\n")
    (fortunes / "off").write_text("Nothing of this file may be said.\n%\n")
    return wordnet, fortunes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("  two   spaces\tand\na break ", "two spaces and a break"),
        ("a `quoted' word", "a 'quoted' word"),
        ("it\u2019s here", "it's here"),
        ('he said "no" twice', "he said no twice"),
        ("well ... perhaps", "well, perhaps"),
        ("one--two", "one, two"),
        ("Mr. and Mrs. Hill met Dr. Wood", "Mister and Missus Hill met Doctor Wood"),
        ("what ?! really", "what? really"),
        ("first ,; second", "first, second"),
        ("- trailing dot.", "trailing dot"),
    ],
)
def test_clean(text: str, expected: str) -> None:
    assert corpus.clean(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "only two",
        "there are 3 of them here",
        "he bought apples etc. for lunch",
        "the U.S. team won the game",
        "this is NOT what we want",
        "they wanted to kill the process",
        "an e-mail to me@example.com today",
        "a word " * 15,
        "unbelievably-long-words " * 9,
    ],
)
def test_what_is_not_said(text: str) -> None:
    assert corpus.accept("this one is fine", 3)
    assert not corpus.accept(text.strip(), 3)


def test_sentence() -> None:
    assert [corpus.sentence(t) for t in ("so it is", "is it?", "it is!")] == [
        "So it is.",
        "Is it?",
        "It is!",
    ]


def test_sources(sources: tuple[Path, Path]) -> None:
    examples = list(corpus.wordnet_examples(sources[0]))
    assert examples[:2] == ["the order was lost by them", "the order was met by them"]
    assert len(examples) == 2 * len(THINGS)
    assert [text for text in corpus.fortune_sentences(sources[1]) if text] == [
        FAMILIAR.rstrip("."),
        "Mister Smith saw it, and then he slept all day",
        "I said so",
    ]


def test_templates_fill_every_slot() -> None:
    templates = Templates(TEMPLATES_PATH, random.Random(0))
    assert len(templates.templates) > 50
    for template in templates.templates:
        slots = re.findall(r"\{(\w+)\}", template)
        for filled in {templates.fill(template) for _ in range(30)}:
            assert corpus.SPEAKABLE.match(filled), filled  # no brackets, bars or digits
            assert filled[0].isupper()
            assert len(filled.split()) >= len(slots)
            assert "  " not in filled and " ," not in filled, filled


def test_templates_vary_and_choose_every_alternative(tmp_path: Path) -> None:
    file = tmp_path / "templates.txt"
    file.write_text("# comment\n\n[one|two|three] {digits}.\n")
    made = Templates(file, random.Random(0)).sample(200)
    assert len(made) == len(set(made)) > 150
    assert {text.split()[0] for text in made} == {"One", "Two", "Three"}
    assert all(4 <= len(text.split()) - 1 <= 8 for text in made)
    assert {word for text in made for word in text[:-1].split()[1:]} == set(DIGITS)


def test_unknown_slots_are_an_error(tmp_path: Path) -> None:
    file = tmp_path / "templates.txt"
    file.write_text("Say {nothing} now.\n")
    with pytest.raises(KeyError, match="nothing"):
        Templates(file, random.Random(0)).sample(1)


def test_same_seed_same_corpus(sources: tuple[Path, Path]) -> None:
    first, heldout = corpus.build(*sources, seed=7)
    again, _ = corpus.build(*sources, seed=7)
    other, _ = corpus.build(*sources, seed=8)
    assert first == again
    assert first != other
    assert len(heldout) == 200
    replies = corpus.SHORT_REPLIES.count("|") + 1
    assert len(first) > 2 * replies + 150
    assert first.count("Okay, thanks.") == 2
    assert sum(text.startswith(FAMILIAR[:-1]) for text in first) >= 1
    assert not any("may be said" in text or "Not a text" in text for text in first)


def test_the_evaluation_list() -> None:
    rows = corpus.read_heldout(corpus.HELDOUT_PATH)
    assert len(rows) == len({key(spoken) for *_, spoken in rows}) == 200
    assert all(corpus.SPEAKABLE.match(spoken) for *_, spoken in rows)
    assert {category for category, *_ in rows} == {
        "agent",
        "names",
        "numbers",
        "prose",
        "questions",
    }
    assert any(written != spoken for _, written, spoken in rows)


def test_held_out_sentences_are_nowhere_in_the_corpus(
    sources: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not as prose, template, reply or pair, however they are written."""
    spoken = [
        FAMILIAR.lower(),
        "Sure - I will check the order.",
        "Good luck!",
        "See it all. See it all.",
    ]
    (tmp_path / "heldout.txt").write_text("".join(f"prose | {text}\n" for text in spoken))
    (tmp_path / "templates.txt").write_text(
        "Sure, I will [check|send] the order.\nSee it all.\nThey [met|saw] {name}, {name} and {name}.\n"
    )
    monkeypatch.setattr(corpus, "HELDOUT_PATH", tmp_path / "heldout.txt")
    monkeypatch.setattr(corpus, "TEMPLATES_PATH", tmp_path / "templates.txt")
    monkeypatch.setattr(corpus.random.Random, "sample", lambda self, pool, k: ["See it all."] * k)
    texts, heldout = corpus.build(*sources, seed=7)
    reserved = {key(text) for text in spoken}
    assert {key(said) for *_, said in heldout} == reserved
    found = {key(text) for text in texts}
    assert not found & reserved
    expected = {
        "sure i will send the order",
        "see it all",
        "good night",
        "see it all see it all see it all",
    }
    assert expected <= found


def test_command(
    sources: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known phonemes are taken from the output; what the alphabet lacks is left out."""
    (tmp_path / "heldout.txt").write_text("numbers | It is 5. | It is five.\n")
    (tmp_path / "vocab.json").write_text('{"a": 1, "b": 2, "q": 3, " ": 4}')
    monkeypatch.setattr(corpus, "HELDOUT_PATH", tmp_path / "heldout.txt")
    out, heldout = tmp_path / "out/corpus.tsv", tmp_path / "out/heldout.tsv"
    out.parent.mkdir()
    out.write_text("Good night.\tqqqq\nYes.\taxa\nOkay.\tab\nNobody says this.\tabab\n")

    def spell(texts, known):
        return (known.get(text, "abba") for text in texts)

    monkeypatch.setattr(corpus, "phonemize", spell)
    corpus.main(
        ["--out", str(out), "--heldout", str(heldout), "--vocab", f"{tmp_path}/vocab.json"]
        + ["--wordnet", str(sources[0]), "--fortunes", str(sources[1])]
    )
    rows = [tuple(line.split("\t")) for line in out.read_text().splitlines()]
    assert ("Good night.", "qqqq") in rows and ("Good evening.", "abba") in rows
    texts = {text for text, _ in rows}
    assert not texts & {
        "Yes.",
        "Okay.",
        "Nobody says this.",
    }  # foreign, too short, not in the corpus
    assert heldout.read_text() == "It is 5.\tabba\tIt is five.\tnumbers\n"


def test_phonemes_are_made_only_for_new_texts() -> None:
    made = list(corpus.phonemize(["Good night.", "Yes."], {"Good night.": "as it was"}))
    assert made == ["as it was", "jˈɛs."]
