"""Numbers, ordinals, years, fractions and ranges, as an American reads them."""

import re
from functools import lru_cache

from num2words import num2words

from model.text.rules import END, NUMBER, START, Rule, any_of, rule, words
from model.text.spelled import spell

_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_LONGEST = 36  # digits; a longer run is read digit by digit

MONTHS = words(
    "January February March April May June July August September October November December"
)


def _american(spoken: str) -> str:
    return spoken.replace(" and ", " ").replace(",", "").replace("-", " ")


@lru_cache(maxsize=4096)
def cardinal(value: int) -> str:
    return _american(str(num2words(value)))


@lru_cache(maxsize=1024)
def ordinal(value: int) -> str:
    return _american(str(num2words(value, to="ordinal")))


@lru_cache(maxsize=1024)
def year(value: int) -> str:
    """As in "nineteen oh five"."""
    return _american(str(num2words(value, to="year")))


def digits(text: str) -> str:
    """Each digit by its name; all else is left out."""
    return " ".join(_DIGITS[int(c)] for c in text if "0" <= c <= "9")


def whole(text: str) -> str:
    """An unsigned integer, commas allowed; with leading zeros it is read digit by digit."""
    plain = text.replace(",", "")
    if (len(plain) > 1 and plain[0] == "0") or len(plain) > _LONGEST:
        return digits(plain)
    return cardinal(int(plain))


def number(text: str) -> str:
    """An unsigned number with an optional fraction."""
    before, point, after = text.partition(".")
    head = whole(before) if before else ""
    return f"{head} point {digits(after)}".strip() if point else head


def is_one(text: str) -> bool:
    return text.replace(",", "") == "1"


def plural(spoken: str) -> str:
    """The plural of the last word of a spelled number: "nineties", "sixes"."""
    if spoken.endswith("y"):
        return spoken[:-1] + "ies"
    return spoken + ("es" if spoken.endswith("x") else "s")


def code(text: str) -> str:
    """Digits of a code or a model name: short ones as a number, longer ones digit by digit."""
    return whole(text) if len(text) <= 2 else digits(text)


def hundreds(text: str) -> str:
    """Digits of a room, a flight or a route: "seven forty seven", "twelve oh four"."""
    value = int(text)
    high, low = divmod(value, 100)
    if text[0] == "0" or len(text) not in (3, 4):
        return code(text)
    if low == 0:
        return cardinal(value) if high % 10 == 0 else f"{cardinal(high)} hundred"
    return f"{cardinal(high)} {'oh ' if low < 10 else ''}{cardinal(low)}"


def short_year(text: str) -> str:
    """The year after an apostrophe: '05 and '99."""
    value = int(text)
    return f"oh {cardinal(value)}" if 0 < value < 10 else cardinal(value)


# Fractions --------------------------------------------------------------------------------------

_DENOMINATORS = {2: "half", 4: "quarter"} | dict.fromkeys((3, 5, 6, 7, 8, 9, 12, 16, 32, 64), "")


def fraction(top: int, bottom: int) -> str:
    if bottom == 2:
        return f"{cardinal(top)} {'half' if top == 1 else 'halves'}"
    name = _DENOMINATORS[bottom] or ordinal(bottom)
    return f"{cardinal(top)} {name}{'' if top == 1 else 's'}"


def _mixed(match: re.Match[str]) -> str:
    count, top, bottom = match["whole"], int(match["top"]), int(match["bottom"])
    if bottom not in _DENOMINATORS or not 0 < top < bottom:
        return match[0]
    part = fraction(top, bottom)
    if not count:
        return part
    return f"{whole(count)} and {'a' + part[3:] if top == 1 and bottom in (2, 4) else part}"


def _out_of(match: re.Match[str]) -> str:
    return f"{number(match['top'])} out of {number(match['bottom'])}"


IDIOM_RULES = (
    rule(r"(?<![\d/])24/7/365(?![\d/])", "twenty four seven three sixty five"),
    rule(r"(?<![\d/])24/7(?![\d/])", "twenty four seven"),
    rule(r"(?<![\d:])16:9(?![\d:])", "sixteen by nine"),
    rule(r"(?<![\d/])20/20(?![\d/])", "twenty twenty"),
    rule(r"(?<!\w)401\(?k\)?(?!\w)", f"four oh one {spell('K')}"),
    rule(r"(?<!\w)49ers(?!\w)", "forty niners"),
    rule(r"(?<![\w.,])100s(?!\w)", "hundreds"),
    rule(r"(?<![\w.,])1,?000s(?= of)", "thousands"),
    rule(
        r"(?<![\w.,])(\d{2,3})\.(\d)(?= [AF]M\b)",
        lambda m: f"{hundreds(m[1])} point {digits(m[2])}",
    ),
    rule(r"(?<![\d/])50/50(?![\d/])", "fifty fifty"),
    rule(r"(?<![\d/])9/11(?![\d/])", "nine eleven"),
)
FRACTION_RULES = (
    rule(
        r"(?<![\d/.,])(?:(?P<whole>\d{1,6})[ -])?(?P<top>\d{1,2})/"
        r"(?P<bottom>\d{1,2})(?![\d/]|\.\d)",
        _mixed,
    ),
    rule(r"(?<![\d/.,])(?P<top>\d{1,2}(?:\.\d)?)/(?P<bottom>5|10|20|100)(?![\d/]|\.\d)", _out_of),
)

# Ordinals, decades, years and what is left ------------------------------------------------------

_YEAR_BEFORE = any_of(
    words(
        "in since by until till from of during before after around circa year years class spring "
        "summer fall autumn winter early late mid late- mid- early- between AD A.D. Q1 Q2 Q3 Q4 "
        "c. Christmas season election copyright"
    )
    + MONTHS
    + tuple(f"{month}," for month in MONTHS)
)
_ROOM_BEFORE = any_of(
    words(
        "room suite apartment apt unit flight gate route highway interstate bus train channel "
        "Boeing RTX GTX Airbus building area studio locker bay extension I- US- Route- Porsche"
    )
)
_CODE_BEFORE = any_of(
    words(
        "code PIN pin zip ZIP ID id order account tracking confirmation reference invoice "
        "extension ext serial case ticket booking number ending ends"
    )
)
_NOT_A_YEAR = (
    r"(?! ?(?:people|persons?|men|women|users?|customers?|students?|members?|employees?|dollars?|"
    r"euros?|pounds?|cents?|bucks|yen|miles?|feet|foot|meters?|kilometers?|inches|yards|acres|"
    r"calories|points?|votes?|units?|items?|copies|pages?|words?|times|days?|hours?|minutes?|"
    r"seconds?|weeks?|months?|years?|tons?|degrees?|percent|square|cubic|grams?|kilograms?|"
    r"liters?|gallons?|watts?|volts?|megabytes|gigabytes|steps?|seats?|rooms?|guests?)\b)"
)


def _plain(match: re.Match[str]) -> str:
    """A number that nothing around it explains."""
    text = match[0]
    if "." in text or "," in text or len(text) < 4:
        return number(text)
    if len(text) == 4 and 1900 <= int(text) <= 2099:
        return year(int(text))
    if len(text) >= 7 and not text.endswith("000"):
        return digits(text)
    return whole(text)


def _count(match: re.Match[str]) -> str:
    return number(match[0])


def _decade(match: re.Match[str]) -> str:
    text = match["year"]
    return plural(year(int(text)) if len(text) == 4 else cardinal(int(text)))


def _ordinal(match: re.Match[str]) -> str:
    plain = match["number"].replace(",", "")
    return ordinal(int(plain)) if len(plain) <= _LONGEST else digits(plain)


def _grouped(match: re.Match[str]) -> str:
    return match[0].replace(".", "").replace(",", ".")


# A run this long is no amount; reading it first also bounds the work of every other rule.
LONG_RULES = (rule(rf"\d{{{_LONGEST + 1},}}", lambda m: f" {digits(m[0])} "),)

GROUPING_RULES = (
    # "10.000.000" and "1.234.567,89" as the continent writes them; at least two dots, so that
    # "1.234" stays a decimal.
    rule(rf"{START}(?!0)\d{{1,3}}(?:\.\d{{3}}){{2,}}(?:,\d{{1,2}})?(?![\w]|[.]\d)", _grouped),
    rule(rf"{START}\d{{1,3}}(?: \d{{3}}){{2,}}{END}", lambda m: m[0].replace(" ", "")),
)

RANGE_RULES = (
    # Two or more hyphens join the groups of an identifier; one joins a range or a score.
    rule(
        r"(?<![\w.,-])\d+(?:-\d+){2,}(?![\w-])",
        lambda m: ", ".join(digits(part) for part in m[0].split("-")),
    ),
    rule(rf"(?<![A-Za-z\d.,])({NUMBER}%?) ?[-–—] ?(?={NUMBER})(?!\d[\d.,]* ?=)", r"\1 to "),
)


def _power_of_ten(match: re.Match[str]) -> str:
    power = f"minus {whole(match[3])}" if match[2] == "-" else ordinal(int(match[3]))
    return f"{number(match[1])} times ten to the {power}"


ORDINAL_RULES = (
    rule(r"(?<=[a-z]{2})-(?=\d)", " "),
    rule(rf"{START}(\d+(?:\.\d+)?)[eE]([+-]?)(\d{{1,4}})(?!\w)", _power_of_ten),
    rule(
        r"(?<![\w.])(?P<number>\d{1,3}(?:,\d{3})+|\d+)(?:st|nd|rd|th|ST|ND|RD|TH)(?!\w)", _ordinal
    ),
    rule(r"(?<![\w.,])['’]?(?P<year>\d0)['’]?s(?!\w)", _decade),
    rule(r"(?<![\w.,])(?P<year>1[1-9]\d0|20\d0|1000)['’]?s(?!\w)", _decade),
    rule(r"(?<![\w])['’](?P<year>\d\d)(?!\w)", lambda m: short_year(m["year"])),
    rule(r"(?<![\w.,])(?P<n>\d{1,3})['’]?s(?!\w)", lambda m: plural(cardinal(int(m["n"])))),
)

NUMBER_RULES: tuple[Rule, ...] = (
    rule(r"(\.\d+)-(?=[a-z]{2})", r"\1 "),
    rule(
        rf"\b((?i:{_YEAR_BEFORE})\s)(?P<year>1\d{{3}}|2[01]\d\d)(?![\w]|[.,]\d){_NOT_A_YEAR}",
        lambda m: m[1] + year(int(m["year"])),
    ),
    rule(
        r"(?<![\w.,])(?P<year>[1-9]\d{2,3})(?= (?:BC|BCE|CE|AD|B\.C\.|A\.D\.))",
        lambda m: year(int(m["year"])),
    ),
    rule(
        rf"\b((?i:{_ROOM_BEFORE})\s?(?:number )?)(?P<n>\d{{3,4}}){END}",
        lambda m: m[1] + hundreds(m["n"]),
    ),
    rule(r"(?<!\w)([A-Z]{2} )(\d{3,4})(?![\w-]|[.,]\d)", lambda m: m[1] + hundreds(m[2])),
    rule(
        rf"\b((?:{_CODE_BEFORE})(?: number| code| is| in|:| no\.?)* )(?P<n>\d{{4,}}){END}",
        lambda m: m[1] + digits(m["n"]),
        re.IGNORECASE,
    ),
    rule(r"(?<![\w.,])([9432])11(?!\w|[.,]\d)", lambda m: digits(m[0])),
    rule(rf"{START}(?P<n>1[1-9]00){END}(?! (?:BC|AD))", lambda m: hundreds(m["n"])),
    rule(rf"{START}\d{{4}}{END}(?= ){_NOT_A_YEAR}", _plain),
    rule(rf"{START}\d{{4}}{END}(?= )", _count),
    rule(NUMBER, _plain),
    rule(r"\d+", lambda m: digits(m[0])),
)
