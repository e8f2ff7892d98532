"""Abbreviations that a reader says in full, and Roman numerals."""

import re

from model.text.numbers import MONTHS, cardinal, digits, ordinal
from model.text.rules import STARTERS, any_of, ends_sentence, rule, words
from model.text.spelled import spell

# Titles before a name; the period is part of the abbreviation.
_TITLES = {
    "Mr": "Mister", "Mrs": "Missus", "Ms": "Ms.", "Prof": "Professor", "Rev": "Reverend",
    "Gen": "General", "Capt": "Captain", "Lt": "Lieutenant", "Sgt": "Sergeant",
    "Col": "Colonel", "Cmdr": "Commander", "Maj": "Major", "Gov": "Governor", "Sen": "Senator",
    "Rep": "Representative", "Pres": "President", "Hon": "Honorable", "Mt": "Mount",
    "Ft": "Fort", "Fr": "Father", "Supt": "Superintendent", "Messrs": "Messers",
}  # fmt: skip
# Said in full wherever they stand with their period.
_WORDS = {
    "Jr.": "Junior", "Sr.": "Senior", "Ave.": "Avenue", "Blvd.": "Boulevard", "Rd.": "Road",
    "Ln.": "Lane", "Hwy.": "Highway", "Pkwy.": "Parkway", "Apt.": "Apartment", "apt.": "apartment",
    "Ste.": "Suite", "Dept.": "Department", "dept.": "department", "Inc.": "Incorporated",
    "Corp.": "Corporation", "Ltd.": "Limited", "Bros.": "Brothers", "Univ.": "University",
    "approx.": "approximately", "Approx.": "Approximately", "est.": "established",
    "govt.": "government", "Govt.": "Government", "misc.": "miscellaneous", "attn.": "attention",
    "Attn.": "Attention", "tel.": "telephone", "Tel.": "Telephone", "incl.": "including",
    "excl.": "excluding", "ext.": "extension", "Ext.": "Extension", "max.": "maximum",
    "temp.": "temperature", "avg.": "average", "assoc.": "associate", "appt.": "appointment",
    "etc.": "et cetera", "vs.": "versus", "e.g.": "for example", "i.e.": "that is",
    "E.g.": "For example", "I.e.": "That is", "et al.": "et al", "cf.": "compare",
    "viz.": "namely", "ca.": "circa", "esp.": "especially", "Esq.": "Esquire",
    "mfg.": "manufacturing", "Intl.": "International", "intl.": "international",
}  # fmt: skip
# Without a period.
_BARE = {
    "vs": "versus", "etc": "et cetera", "approx": "approximately", "w/o": "without",
    "w/": "with ", "b/c": "because", "c/o": "care of", "n/a": spell("NA"), "N/A": spell("NA"),
    "Mr": "Mister", "Mrs": "Missus", "Blvd": "Boulevard", "dept": "department",
    "Dept": "Department", "a/c": spell("AC"), "A/C": spell("AC"), "and/or": "and or",
    "eg": "for example", "aka": spell("AKA"), "a.k.a.": spell("AKA"), "lol": spell("LOL"),
    "btw": "by the way", "BTW": "by the way", "PhD": spell("PHD"),
    "Ph.D.": spell("PHD"), "PhDs": spell("PHD") + "s", "pls": "please", "thx": "thanks",
    "tbsp": "tablespoon", "tsp": "teaspoon", "govt": "government", "MSc": spell("MSC"),
    "BSc": spell("BSC"), "TBD": spell("TBD"), "i.e": "that is", "e.g": "for example",
    "km/h": "kilometers per hour", "mph": "miles per hour", "m/s": "meters per second",
    "°C": "degrees Celsius", "°F": "degrees Fahrenheit",
}  # fmt: skip
# Before a number.
_COUNTED = {
    "No.": "Number", "no.": "number", "Nos.": "Numbers", "nos.": "numbers",
    "Nr.": "Number", "nr.": "number", "Vol.": "Volume", "vol.": "volume", "Fig.": "Figure",
    "fig.": "figure", "Figs.": "Figures", "Ch.": "Chapter", "ch.": "chapter", "Sec.": "Section",
    "sec.": "section", "pp.": "pages", "p.": "page", "Art.": "Article", "art.": "article",
    "Eq.": "Equation", "eq.": "equation", "Ext": "Extension", "ext": "extension",
    "Apt": "Apartment", "apt": "apartment", "Ste": "Suite", "Rm.": "Room", "Bldg.": "Building",
    "Pt.": "Part", "Rt.": "Route", "Rte.": "Route", "v.": "verse",
}  # fmt: skip

_SAINTS = frozenset(
    words(
        "Louis Paul Petersburg John Johns Patrick Mary Helens Thomas Lucia Kitts George James "
        "Peter Joseph Andrew Andrews Bernard Nicholas Francis Augustine Catherine Croix "
        "Martin Vincent Moritz Luke Mark Matthew Michael Cloud Charles Albans Anthony Barts "
        "Pancras Jude"
    )
)
# Capitalised words that come before a name without being the name of a street.
_NOT_STREETS = frozenset(
    words(
        "In On At To From By The And Or For With Near Visit Of A Is Ask See Call Meet Hi "
        "Hello Hey Dear Thanks Yes No Okay So But If When Mount Port Fort Lake Our Your My "
        "His Her Their This That Good Morning Afternoon Evening While Tell Sorry Sure Well "
        "Then Now Both Even After Before As Monday Tuesday Wednesday Thursday Friday Saturday "
        "Sunday Please Contact"
    )
)


def _before(match: re.Match[str]) -> str:
    """The few words before a match within its sentence."""
    return re.split(r"[.!?]\s", match.string[max(0, match.start() - 40) : match.start()])[-1]


def _after(match: re.Match[str]) -> str:
    found = re.match(r" ([A-Z][\w'’]*)", match.string[match.end() : match.end() + 30])
    return found[1] if found else ""


def _numbered(before: str) -> bool:
    """Whether "123 Main", "5th" or the like precedes: the number and name of a street."""
    return re.search(r"\d+(?:st|nd|rd|th)?(?: [A-Z]\w*){0,3} $", before) is not None


def _named(before: str) -> bool:
    """Whether a capitalised word that can name a street comes just before."""
    found = re.search(r"([A-Z]\w+) $", before)
    return found is not None and found[1] not in _NOT_STREETS


def _saint_or_street(match: re.Match[str]) -> str:
    before, following = _before(match), _after(match)
    street = _numbered(before) or (_named(before) and following not in _SAINTS)
    if not street and following:
        return "Saint"
    return "Street" + (
        "." if street and not following and not match.string[match.end() :].strip() else ""
    )


def _doctor_or_drive(match: re.Match[str]) -> str:
    before, following = _before(match), _after(match)
    if _numbered(before) or (_named(before) and not following):
        ends = not match.string[match.end() :].strip() and match[0].endswith(".")
        return "Drive." if ends else "Drive"
    return "Doctor"


def _initials(match: re.Match[str]) -> str:
    """Initials of a name, as in "John F. Kennedy", end no sentence."""
    before = _before(match).rstrip()
    name = re.split(r"\W", match.string[match.end() : match.end() + 16])[0]
    opens = not before or re.search(r"(?:\b[A-Z][a-z]+|[,(\"“])$", before) is not None
    if not opens or name in STARTERS or before.endswith(_LETTERED):
        return match[0]
    return " ".join(spell(letter) for letter in re.findall("[A-Z]", match[0])) + " "


_LETTERED = ("Plan", "Vitamin", "Option", "Group", "Grade", "Class", "Section", "Team", "Type")


def _word(match: re.Match[str]) -> str:
    """An abbreviation in full; at the end of the text its period also ends the sentence."""
    spoken = _WORDS[match[0]]
    return spoken + ("." if ends_sentence(match) else "")


def _dotted(match: re.Match[str]) -> str:
    """A dotted initialism ("U.S.A.") by its letters; its last period may also end the sentence."""
    ends = match[0].endswith(".") and ends_sentence(match)
    return spell(match[0].replace(".", "")) + ("." if ends else "")


# States of the U.S.A., after the name of a city ------------------------------------------------

_STATES = dict(
    pair.split(":")
    for pair in words(
        "AL:Alabama AK:Alaska AZ:Arizona AR:Arkansas CA:California CO:Colorado CT:Connecticut "
        "DE:Delaware FL:Florida GA:Georgia HI:Hawaii ID:Idaho IL:Illinois IN:Indiana IA:Iowa "
        "KS:Kansas KY:Kentucky LA:Louisiana ME:Maine MD:Maryland MA:Massachusetts MI:Michigan "
        "MN:Minnesota MS:Mississippi MO:Missouri MT:Montana NE:Nebraska NV:Nevada "
        "NH:New_Hampshire NJ:New_Jersey NM:New_Mexico NY:New_York NC:North_Carolina "
        "ND:North_Dakota OH:Ohio OK:Oklahoma OR:Oregon PA:Pennsylvania RI:Rhode_Island "
        "SC:South_Carolina SD:South_Dakota TN:Tennessee TX:Texas UT:Utah VT:Vermont VA:Virginia "
        "WA:Washington WV:West_Virginia WI:Wisconsin WY:Wyoming"
    )
)
_ALSO_WORDS = frozenset(words("HI ID IN ME OH OK OR PA MA LA AL DE"))


def _state(match: re.Match[str]) -> str:
    state, code = match["state"], match["zip"]
    if not code and state in _ALSO_WORDS:
        return match[0]
    name = _STATES[state].replace("_", " ")
    return f"{name} {digits(code)}" if code else name


# Roman numerals ---------------------------------------------------------------------------------

_ROMAN = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100}
_RULERS = any_of(
    words(
        "Henry Louis George Elizabeth Edward Richard William Charles James Pius John Paul "
        "Benedict Philip Napoleon Catherine Peter Nicholas Alexander Leo Francis Frederick Ivan "
        "Gregory Mary Innocent Clement Urban Ramses Ramesses Xerxes Darius Ptolemy Otto Wilhelm "
        "Albert Harald Gustav Christian Margaret Ferdinand Alfonso Robert David Malcolm Murad "
        "Mehmed Selim Thutmose Felipe Sixtus Boniface Constantine Theodosius Rama Stephen Pope "
        "King Queen"
    )
)
_NUMBERED = any_of(
    words(
        "Chapter Part Act Scene Volume Book Section Article Type Phase Stage Class Level Grade "
        "War Bowl Title Appendix Figure Table Unit Episode Season Mark Rocky Fantasy Scrolls "
        "Fighter Division Group Round Step Schedule Apollo Saturn Wrestlemania WrestleMania Cup "
        "Games GTA chapter part act scene volume book section article type phase stage class level "
        "grade factor Factor"
    )
)
_NUMERAL = r"(?=[IVXLC])(?:XC|XL|L?X{0,3})(?:IX|IV|V?I{0,3})"
_CERTAIN = any_of(words("II III VII VIII XII XIII XIV XVI XVII XVIII XIX XXI"))


def roman(text: str) -> int:
    total = 0
    for letter, following in zip(text, text[1:] + " ", strict=True):
        value = _ROMAN[letter]
        total += -value if _ROMAN.get(following, 0) > value else value
    return total


ABBREVIATION_RULES = (
    rule(
        rf"(?<=[a-z],) (?P<state>{any_of(_STATES)})(?!\w)(?:,? (?P<zip>\d{{5}})(?![\w]|-\d))?",
        lambda m: " " + _state(m).lstrip(),
    ),
    rule(
        rf"(?<!\w)(?P<title>{any_of(_TITLES)})\.(?= ?[A-Z])(?! (?:{any_of(MONTHS)})\b) ?",
        lambda m: _TITLES[m["title"]] + " ",
    ),
    rule(r"(?<!\w)(Mr|Mrs|Ms)\.", lambda m: _TITLES[m[1]]),
    rule(r"(?<!\w)Drs\.", "Doctors"),
    rule(r"(?<!\w)St\.", _saint_or_street),
    rule(r"(?<!\w)St(?= [A-Z])(?!\w)", _saint_or_street),
    rule(r"(?<=[a-z0-9] )St(?=,|$|\n)", "Street"),
    rule(r"(?<!\w)Dr(?:\.|(?= [A-Z]))", _doctor_or_drive),
    rule(r"(?<=[A-Z][a-z]{2} )Dr(?=,|$)|(?<=[a-z]{4} )Dr(?=,|$)", "Drive"),
    rule(r"(?<!\w)(?:Ave|Av)(?=,|$|\s)", "Avenue"),
    rule(r"(?<=\w )Rd(?=,|$|\s)", "Road"),
    rule(
        rf"(?<!\w)(?P<word>{any_of(_COUNTED)}) ?(?=#?\d|[VX][IVX]*\b|I[IVX]+\b)",
        lambda m: _COUNTED[m["word"]] + " ",
    ),
    rule(r"№ ?", "number "),
    rule(r"(?<=\w )v\.(?= [A-Z])", "versus"),
    rule(rf"(?<![\w.])(?:{any_of(_WORDS)})(?!\w|\.\w)", _word),
    rule(r"(?<=[A-Z]\w{2} )Co\.(?!\w)|(?<=\w{4} )Co\.(?!\w)", "Company"),
    rule(
        rf"(?<![\w.°/])(?<!\d )(?P<word>{any_of(_BARE)})(?![\w/]|\.\w)", lambda m: _BARE[m["word"]]
    ),
    rule(r"(?<!\w)w/ ?(?=\w)", "with "),
    rule(r"(?<![\w.'])(?:[A-Z]\. ?){1,3}(?=[A-Z][a-z])", _initials),
    rule(r"(?<![\w.])(?<!\d )(?:[A-Za-z]\.){2,}(?!\w)", _dotted),
    rule(r"(?<![\w.])[A-Za-z](?:\.[A-Za-z]){2,}(?![\w.])", _dotted),
    rule(
        rf"\b(?P<name>{_RULERS}) (?P<roman>{_NUMERAL})(?!\w|[.']\w)",
        lambda m: f"{m['name']} the {ordinal(roman(m['roman']))}" if m["roman"] else m[0],
    ),
    rule(
        rf"\b(?P<name>{_NUMBERED}) (?P<roman>{_NUMERAL})(?!\w|[.']\w)",
        lambda m: f"{m['name']} {cardinal(roman(m['roman']))}" if m["roman"] else m[0],
    ),
    rule(
        rf"(?<![\w.-])(?P<roman>{_CERTAIN})(?![\w.-]\w|\w)", lambda m: cardinal(roman(m["roman"]))
    ),
)
