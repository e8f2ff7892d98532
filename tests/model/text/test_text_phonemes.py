"""Phonemes: the trained alphabet only, known readings, and a reading for every token."""

import json
from pathlib import Path

import pytest

import model.embedded
import model.text
from model.text import EnglishFrontEnd
from model.text.phonemes import ALPHABET
from model.text.rules import words

read = EnglishFrontEnd()


@pytest.mark.parametrize(
    ("text", "phonemes"),
    [
        ("Hello world.", "həlˈO wˈɜɹld."),
        # Sentences of the training data, with their phonemes as the model saw them.
        (
            "One of these days someone's gonna go off and kill Thomas a'Becket for me.",
            "wˈʌn ʌv ðiz dˈAz sˈʌmwˌʌnz ɡˈʌnə ɡˌO ˈɔf ænd kˈɪl tˈɑməs əbˈɛkət fɔɹ mˌi.",
        ),
        (
            "There's no use in having a dog and doing your own barking.",
            "ðˌɛɹz nˈO jˈus ɪn hˈævɪŋ ɐ dˈɔɡ ænd dˈuɪŋ jʊɹ ˈOn bˈɑɹkɪŋ.",
        ),
        (
            "The total comes to 7 thousand 595 dollars.",
            "ðə tˈOTᵊl kˈʌmz tə sˈɛvən θˈWzᵊnd fˈIv hˈʌndɹəd nˈIndi fˈIv dˈɑləɹz.",
        ),
        (
            "We usually take the early train because the later one is often full.",
            "wˌi jˈuʒəwəli tˈAk ði ˈɜɹli tɹˈAn bəkˈʌz ðə lˈATəɹ wˈʌn ɪz ˈɔfᵊn fˈʊl.",
        ),
        ("the FBI", "ði ˌɛfbˌiˈI"),
        ("CEOs", "sˌiˌiˈOz"),
        ("NASA", "nˈæsə"),
        ("Plan A is", "plˈæn ˈA ɪz"),
        ("a plan", "ɐ plˈæn"),
        ("the apple, the pear", "ði ˈæpᵊl, ðə pˈɛɹ"),
        ('He said "yes" (twice)!', "hˌi sˈɛd “jˈɛs” (twˈIs)!"),
        ("my iPhone", "mI ˈIfˌOn"),
        ("Sean's friend Naomi", "ʃˈɔnz fɹˈɛnd nAˈOmi"),
        ("Mr. Hernandez", "mˈɪstəɹ həɹnˈændɛz"),
    ],
)
def test_known_phonemes(text: str, phonemes: str) -> None:
    assert read(text).phonemes == phonemes


def test_alphabet_is_in_the_tokenizer_as_single_characters() -> None:
    path = Path(model.embedded.__file__).with_name("tokenizer.json")
    vocabulary = json.loads(path.read_text(encoding="utf-8"))["model"]["vocab"]
    missing = sorted(c for c in ALPHABET if c not in vocabulary)
    assert missing == []


@pytest.mark.parametrize(
    "word",
    words(
        "Blorptastic Siobhan Nguyen Xiaoming O'Shaughnessy kubernetes PostgreSQL nginx eBay "
        "McDonald XKCD bcdfg qwrtp B2B x86_64 getHTTPResponse __init__ camelCase AaBbCc re-Zorble A1-B2 "
        "pneumonoultramicroscopicsilicovolcanoconiosis"
    ),
)
def test_every_token_gets_a_reading(word: str) -> None:
    spoken = read(word)
    assert spoken.phonemes
    assert spoken.warnings == ()
    assert set(spoken.phonemes) <= ALPHABET
    assert any(c in "AIOWYaiuæɑɔəɛɜɪʊʌᵊᵻɐ" for c in spoken.phonemes)


def test_own_readings_are_written_in_the_alphabet() -> None:
    table = Path(model.text.__file__).with_name("readings.tsv").read_text(encoding="utf-8")
    words_of = [line.split("\t") for line in table.splitlines()]
    assert len({word for word, _ in words_of}) == len(words_of) > 250
    for word, phonemes in words_of:
        assert set(phonemes) <= ALPHABET, word
        assert phonemes.count("ˈ") == 1, word
