"""Word errors of what was heard against a written text, whose numbers may be read in any usual way."""

import itertools
import re
from typing import NamedTuple

import numpy as np

MAX_READINGS = 64

Words = list[str]

SAME_WORD = {
    "mr": "mister",
    "mrs": "missus",
    "ms": "miss",
    "dr": "doctor",
    "prof": "professor",
    "ok": "okay",
    "alright": "all right",
    "neighbour": "neighbor",
    "harbour": "harbor",
    "theatre": "theater",
    "grey": "gray",
    "colour": "color",
    "favourite": "favorite",
    "honour": "honor",
    "kilometres": "kilometers",
    "cheque": "check",
    "goodbye": "good bye",
    "whilst": "while",
    "programme": "program",
    "travelled": "traveled",
    "percents": "percent",
    "street": "st",
    "st": "st",
    "road": "rd",
    "rd": "rd",
    "avenue": "ave",
    "gonna": "going to",
    "ya": "you",
}


def _cardinal(value: int) -> Words:
    from sanotts.nano_g2p import cardinal_words

    return str(cardinal_words(value)).replace("-", " ").replace(",", "").split()


def _ordinal(value: int) -> Words:
    from sanotts.nano_g2p import ordinal_words

    return str(ordinal_words(value)).replace("-", " ").split()


def _pair(value: str) -> Words:
    """Two digits as in years and times: 05 is "oh five"."""
    if value == "00":
        return ["hundred"]
    return ["oh", *_cardinal(int(value))] if value[0] == "0" else _cardinal(int(value))


def _decimal(whole: str, digits: str) -> Words:
    return [*_cardinal(int(whole)), "point", *(w for d in digits for w in _cardinal(int(d)))]


def _readings(token: str) -> list[Words]:
    """The usual ways to read a token with digits."""
    if match := re.fullmatch(r"\$([\d,]+)(?:\.(\d\d))?", token):
        dollars = [*_cardinal(int(match[1].replace(",", ""))), "dollars"]
        return [dollars + ([*_cardinal(int(match[2])), "cents"] if match[2] else [])]
    if match := re.fullmatch(r"(\d+):(\d\d)", token):
        hour = _cardinal(int(match[1]))
        return [hour, [*hour, "o'clock"]] if match[2] == "00" else [hour + _pair(match[2])]
    if match := re.fullmatch(r"(\d{1,2})\.(\d\d)", token):
        return [*_readings(f"{match[1]}:{match[2]}"), _decimal(match[1], match[2])]
    if match := re.fullmatch(r"(\d+)(st|nd|rd|th)", token):
        return [_ordinal(int(match[1]))]
    if match := re.fullmatch(r"(\d[\d,.]*)%", token):
        return [[*words, "percent"] for words in _readings(match[1])]
    if match := re.fullmatch(r"(\d+)\.(\d+)", token):
        return [_decimal(match[1], match[2])]
    if re.fullmatch(r"\d[\d,]*", token):
        plain = token.replace(",", "")
        spelled = [word for digit in plain for word in _cardinal(int(digit))]
        if len(plain) > 6:
            return [spelled]
        readings = [_cardinal(int(plain)), spelled, _ordinal(int(plain))]
        if len(plain) in (3, 4):
            readings.append(_cardinal(int(plain[:-2])) + _pair(plain[-2:]))
        return readings
    pieces = re.findall(r"\d+|[a-z']+", token)
    return [[word for p in pieces for word in (_readings(p)[0] if p[0].isdigit() else [p])]]


def _normal(words: Words) -> Words:
    same = (SAME_WORD.get(word, word).split() for word in words)
    return [word for word in itertools.chain.from_iterable(same) if word != "and"]


def all_readings(text: str) -> list[Words]:
    """The word sequences that a written text may stand for, at most `MAX_READINGS`."""
    text = text.lower().replace("\u2019", "'").replace("a.m.", "am").replace("p.m.", "pm")
    text = re.sub(r"(?<=\d)-(?=\d)", " ", text).replace("-", " ").replace("&", " and ")
    options: list[list[Words]] = []
    for token in re.findall(r"[$\w',.:%]+", text):
        token = token.strip("',.:")
        if any(char.isdigit() for char in token):
            options.append([_normal(words) for words in _readings(token)])
        elif word := re.sub(r"[^a-z']", "", token):
            options.append([_normal([word])])
        if token == "%":
            options.append([["percent"]])
    return [
        list(itertools.chain.from_iterable(choice))
        for choice in itertools.islice(itertools.product(*options), MAX_READINGS)
    ]


class Alignment(NamedTuple):
    """Word errors of a hypothesis, and how many reference words at the end have no counterpart."""

    num_errors: int
    num_words: int
    num_lost_at_end: int


def align(reference: Words, hypothesis: Words) -> Alignment:
    rows, columns = len(reference) + 1, len(hypothesis) + 1
    cost = np.zeros((rows, columns), np.int32)
    cost[:, 0], cost[0] = np.arange(rows), np.arange(columns)
    for i, word in enumerate(reference, start=1):
        for j, other in enumerate(hypothesis, start=1):
            best = min(cost[i - 1, j - 1] + (word != other), cost[i - 1, j] + 1, cost[i, j - 1] + 1)
            # "knock down" and "knockdown" are the same words.
            if i > 1 and reference[i - 2] + word == other:
                best = min(best, cost[i - 2, j - 1])
            if j > 1 and hypothesis[j - 2] + other == word:
                best = min(best, cost[i - 1, j - 2])
            cost[i, j] = best
    i, j, lost = len(reference), len(hypothesis), 0
    while i > 0 and cost[i, j] == cost[i - 1, j] + 1:
        i, lost = i - 1, lost + 1
    return Alignment(int(cost[-1, -1]), len(reference), lost)


def best_alignment(spoken: str, heard: str) -> tuple[Alignment, Words]:
    references = all_readings(spoken)
    pairs = itertools.product(references, all_readings(heard))
    return min(
        ((align(reference, words), words) for reference, words in pairs),
        key=lambda result: result[0].num_errors,
    )


def has_repeats(reference: Words, hypothesis: Words) -> bool:
    """Whether two words or more are heard twice in a row that the text has once."""

    def repeats(words: Words) -> set[tuple[str, ...]]:
        return {
            tuple(words[start : start + size])
            for size in range(2, 7)
            for start in range(len(words) - 2 * size + 1)
            if words[start : start + size] == words[start + size : start + 2 * size]
        }

    return bool(repeats(hypothesis) - repeats(reference))
