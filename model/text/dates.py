"""Dates and times of day."""

import re

from model.text.numbers import MONTHS, cardinal, ordinal, year
from model.text.rules import any_of, rule
from model.text.spelled import spell

_MONTH_BY_NAME = (
    {name: name for name in MONTHS}
    | {short: full for full in MONTHS for short in (full[:3], full[:3] + ".") if full != "May"}
    | {"Sept": "September", "Sept.": "September"}
)
_MONTH = any_of(_MONTH_BY_NAME)
_DAYS = {
    "Mon": "Monday", "Tue": "Tuesday", "Tues": "Tuesday", "Wed": "Wednesday", "Thu": "Thursday",
    "Thur": "Thursday", "Thurs": "Thursday", "Fri": "Friday", "Sat": "Saturday", "Sun": "Sunday",
}  # fmt: skip
_YEAR = r"(?P<year>1\d{3}|20\d\d|2100)(?!\d|[.,/:-]\d)"


def _two_digit_year(text: str) -> int:
    value = int(text)
    return value if len(text) == 4 else value + (2000 if value < 70 else 1900)


def _full(month: int, day: int, year_text: str | None) -> str | None:
    if not (1 <= month <= 12 and 1 <= day <= 31):
        return None
    spoken = f"{MONTHS[month - 1]} {ordinal(day)}"
    return f"{spoken}, {year(_two_digit_year(year_text))}" if year_text else spoken


def _iso(match: re.Match[str]) -> str:
    spoken = _full(int(match["month"]), int(match["day"]), match["year"])
    if spoken is None:
        return match[0]
    return f"{spoken}, at {match['time']}" if match["time"] else spoken


def _american(match: re.Match[str]) -> str:
    first, second = int(match["first"]), int(match["second"])
    spoken = _full(first, second, match["year"]) or _full(second, first, match["year"])
    return spoken or match[0]


def _continental(match: re.Match[str]) -> str:
    return _full(int(match["month"]), int(match["day"]), match["year"]) or match[0]


def _month_day(match: re.Match[str]) -> str:
    day = int(match["day"])
    if not 1 <= day <= 31:
        return match[0]
    spoken = f"{_MONTH_BY_NAME[match['month']]} {ordinal(day)}"
    if match["last"]:
        spoken += f" to {ordinal(int(match['last']))}"
    return f"{spoken}, {year(int(match['year']))}" if match["year"] else spoken


def _day_month(match: re.Match[str]) -> str:
    day = int(match["day"])
    if not 1 <= day <= 31:
        return match[0]
    article = "" if match["the"] else "the "
    spoken = f"{match['the'] or article}{ordinal(day)} of {_MONTH_BY_NAME[match['month']]}"
    return f"{spoken}, {year(int(match['year']))}" if match["year"] else spoken


def _month_year(match: re.Match[str]) -> str:
    return f"{_MONTH_BY_NAME[match['month']]} {year(int(match['year']))}"


DATE_RULES = (
    rule(
        r"\b(?P<lead>[Ee]xp(?:ires|ired|iry|iration|\.)?(?: date)?(?: on| in| is|:)? )"
        r"(?P<month>0[1-9]|1[0-2])/(?P<year>\d\d)(?![\w/])",
        lambda m: f"{m['lead']}{MONTHS[int(m['month']) - 1]} {year(2000 + int(m['year']))}",
    ),
    rule(
        r"(?<![\w-])(?P<year>[12]\d{3})-(?P<month>\d\d)-(?P<day>\d\d)"
        r"(?:[T ](?P<time>\d\d:\d\d)(?::\d\d(?:\.\d+)?)?(?:Z|[+-]\d\d:?\d\d)?)?(?![\w-])",
        _iso,
    ),
    rule(
        r"(?<![\w/.])(?P<year>[12]\d{3})/(?P<month>\d\d?)/(?P<day>\d\d?)(?![\w/])",
        _continental,
    ),
    rule(
        r"(?<![\w/.])(?P<first>\d\d?)/(?P<second>\d\d?)/(?P<year>[12]\d{3}|\d\d)(?![\w/])",
        _american,
    ),
    rule(
        r"(?<![\w-])(?P<first>\d\d?)-(?P<second>\d\d?)-(?P<year>[12]\d{3})(?![\w-])",
        _american,
    ),
    rule(
        r"(?<![\w.])(?P<day>\d\d?)\.(?P<month>\d\d?)\.(?P<year>[12]\d{3})(?![\w]|\.\d)",
        _continental,
    ),
    rule(
        rf"(?<!\w)(?P<month>{_MONTH}) ?(?P<day>\d\d?)(?:st|nd|rd|th)?"
        rf"(?: ?[-–] ?(?P<last>[12]\d|3[01]|\d)(?:st|nd|rd|th)?)?(?![\w:/]|[.,]\d|-\d)"
        rf"(?! ?(?:%|percent|[ap]\.?m\b))(?:,? {_YEAR})?",
        _month_day,
    ),
    rule(
        rf"(?<![\w.,$])(?P<the>[Tt]he )?(?P<day>\d\d?)(?:st|nd|rd|th)?(?: of)? (?P<month>{_MONTH})"
        rf"(?!\w)(?:,? {_YEAR})?",
        _day_month,
    ),
    rule(rf"(?<!\w)(?P<month>{_MONTH}),? {_YEAR}", _month_year),
    rule(
        # "11/29" is a date when its second number cannot be a denominator that people use.
        r"(?<![\w/.,])(?P<first>0?[1-9]|1[0-2])/(?P<second>1[13-57-9]|2[1-9]|3[01])(?P<year>)"
        r"(?![\w/]|\.\d)",
        _american,
    ),
    rule(
        r"\b(?P<lead>(?:[Oo]n|[Bb]y|[Bb]efore|[Uu]ntil|[Ss]ince|[Dd]ue|[Aa]fter) )"
        r"(?P<first>[1-9]|1[0-2])/(?P<second>[1-9]|[12]\d|3[01])(?P<year>)(?![\w/]|\.\d)",
        lambda m: m["lead"] + _american(m).removeprefix(m["lead"]),
    ),
)

DAY_AND_MONTH_RULES = (
    # "Sat." and "Sun." may be words that end a sentence, so what follows has to go on.
    rule(
        rf"(?<!\w)(?P<month>{any_of(m for m in _MONTH_BY_NAME if m.endswith('.'))})(?= [a-z0-9]|,)",
        lambda m: _MONTH_BY_NAME[m["month"]],
    ),
    rule(
        rf"(?<!\w)({any_of(_DAYS)})\.? ?[-–] ?({any_of(_DAYS)})(?!\w)",
        lambda m: f"{_DAYS[m[1]]} to {_DAYS[m[2]]}",
    ),
    rule(
        rf"(?<!\w)(?P<day>{any_of(_DAYS)})(?:\.(?= [a-z0-9]|,| (?:{_MONTH})(?!\w))"
        rf"|(?=,? (?:{_MONTH})(?!\w)))",
        lambda m: _DAYS[m["day"]],
    ),
)

# Times ------------------------------------------------------------------------------------------

_HALF = r"(?P<half>[AaPp])\.?[Mm](?:(?P<stop>\.)|(?![\w.]))"
_GOES_ON = re.compile(r" *(?:[a-z0-9(]|(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun|[ECMP][SD]?T\b|UTC|GMT|,|-))")
_ENDS = re.compile(r"\s*(?:$|[\"”)]|[A-Z])")


def _half(match: re.Match[str]) -> str:
    """The words "A M" or "P M"; a period that also ends the sentence is kept."""
    name = " " + spell(match["half"] + "M")
    after = match.string[match.end() : match.end() + 8]
    ends = match["stop"] and _ENDS.match(after) and not _GOES_ON.match(after)
    return name + ("." if ends else "")


def clock(hour: int, minute: int, half: str) -> str:
    """A time of day; `half` is "" on a twenty-four hour clock or without a.m. and p.m."""
    if hour == 0 and not half:
        hour, half = 12, " " + spell("AM")
    if minute == 0:
        if half:
            return cardinal(hour) + half
        return f"{cardinal(hour)} o'clock" if hour <= 12 else f"{cardinal(hour)} hundred"
    spoken = f"oh {cardinal(minute)}" if minute < 10 else cardinal(minute)
    return f"{cardinal(hour)} {spoken}{half}"


def _time(match: re.Match[str]) -> str:
    hour, minute = int(match["hour"]), int(match["minute"])
    if hour > 24 or minute > 59:
        return match[0]
    groups = match.groupdict()
    half = _half(match) if groups.get("half") else ""
    return clock(hour, minute, half)


def _hour(match: re.Match[str]) -> str:
    return cardinal(int(match["hour"])) + _half(match)


def _seconds(match: re.Match[str]) -> str:
    hour, minute, second = (int(match[k]) for k in ("hour", "minute", "second"))
    if minute > 59 or second > 59:
        return match[0]
    unit = "second" if second == 1 else "seconds"
    return f"{clock(hour, minute, '')} and {cardinal(second)} {unit}"


def _ratio(match: re.Match[str]) -> str:
    return f"{cardinal(int(match[1]))} to {cardinal(int(match[2]))}"


TIME_RULES = (
    rule(
        r"(?<![\w:.])(\d{1,2}(?::\d\d)?) ?[-–—] ?(?=\d{1,2}(?::\d\d)? ?[AaPp]\.?[Mm]\b)", r"\1 to "
    ),
    rule(
        r"(?<![\w:.])(\d{1,2}(?::\d\d)? ?[AaPp]\.?[Mm]\.?|\d{1,2}:\d\d)"
        r" ?[-–—] ?(?=\d{1,2}[: AaPp])",
        r"\1 to ",
    ),
    rule(
        r"(?<![\w:.])(?P<hour>\d{1,2}):(?P<minute>\d\d):(?P<second>\d\d)(?![\w:])",
        _seconds,
    ),
    rule(rf"(?<![\w:.])(?P<hour>\d{{1,2}}):(?P<minute>\d\d) ?{_HALF}", _time),
    rule(r"(?<![\w:.])(?P<hour>\d{1,2}):(?P<minute>\d\d)(?!\w|:\d)", _time),
    rule(rf"(?<![\w:.,])(?P<hour>1[0-2]|0?[1-9]) ?{_HALF}", _hour),
    rule(r"(?<![\w:.])(\d{1,3}):(\d{1,3})(?![\w:])", _ratio),
    rule(r"(?<= )([AaPp])\.[Mm]\.(?=\s|$|[,;:!?)])", lambda m: spell(m[1] + "m")),
)
