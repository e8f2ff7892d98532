"""Text as it is written to words as they are read."""

import re

from model.text.abbreviations import ABBREVIATION_RULES
from model.text.clean import Warnings, clean, without_markup
from model.text.dates import DATE_RULES, DAY_AND_MONTH_RULES, TIME_RULES
from model.text.money import MONEY_RULES
from model.text.numbers import (
    FRACTION_RULES,
    GROUPING_RULES,
    IDIOM_RULES,
    LONG_RULES,
    NUMBER_RULES,
    ORDINAL_RULES,
    RANGE_RULES,
)
from model.text.phonemes import Pronouncer
from model.text.rules import apply
from model.text.spelled import RUNE
from model.text.symbols import SIGN_RULES, TIDY_RULES
from model.text.units import UNIT_RULES
from model.text.web import PHONE_RULES, VERSION_RULES, web_rules
from model.text.words import WordReader

_NUMERIC_RULES = (
    *LONG_RULES,
    *PHONE_RULES,
    *IDIOM_RULES,
    *DATE_RULES,
    *TIME_RULES,
    *GROUPING_RULES,
    *VERSION_RULES,
    *MONEY_RULES,
    *FRACTION_RULES,
    *ORDINAL_RULES,
    *RANGE_RULES,
    *UNIT_RULES,
)
_DIGIT = re.compile(r"\d")
_WEB_SIGN = re.compile(r"[@#/.]\w")
_PLAIN = re.compile(rf"(?:[A-Za-z0-9\s,.;:!?'\"()-]|{RUNE})*\Z")


class Normalizer:
    """Rewrites text topic by topic, from the most specific form to the plainest.

    The result holds words in ASCII letters, words spelled by their letters (in runes, see
    `spelled`), and the punctuation that the phoneme alphabet keeps.
    """

    def __init__(self, pronouncer: Pronouncer) -> None:
        self._web_rules = web_rules(pronouncer.knows)
        self._read_words = WordReader(pronouncer.kind)

    def __call__(self, text: str, warnings: Warnings) -> str:
        text = without_markup(clean(text, warnings), warnings)
        if _WEB_SIGN.search(text):
            text = apply(self._web_rules, text)
        text = apply(DAY_AND_MONTH_RULES, text)
        text = apply(ABBREVIATION_RULES, text)
        if _DIGIT.search(text):
            text = apply(_NUMERIC_RULES, text)
        if not _PLAIN.match(text):
            text = apply(SIGN_RULES, text)
        text = self._numbers_and_words(text)
        return apply(TIDY_RULES, text).strip()

    def _numbers_and_words(self, text: str) -> str:
        if _DIGIT.search(text):
            text = apply(NUMBER_RULES, self._read_words.with_digits(text))
        return self._read_words(text)
