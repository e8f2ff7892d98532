"""E-mail addresses, links, handles, host names, versions and phone numbers."""

import re
from collections.abc import Callable

from model.text.numbers import cardinal, code, digits, hundreds, number
from model.text.rules import Rule, any_of, rule, words
from model.text.spelled import spell

Knows = Callable[[str], bool]
"""Whether the lexicon has a word."""

_DOMAINS = words(
    "com org net edu gov mil int info biz io co ai dev app me tv us uk ca de fr es it nl eu jp cn "
    "in au ch at be dk se no fi pl ru br mx nz ie kr tech shop site online store blog cloud xyz"
)
_FILES = words(
    "js ts py md txt pdf csv json html css jpg jpeg png gif mp3 mp4 wav zip doc docx xls xlsx ppt "
    "pptx exe sh yaml yml toml xml log cpp rs go java rb php sql"
)
_SIGNS = {
    ".": "dot", "-": "dash", "_": "underscore", "/": "slash", "?": "question mark",
    "=": "equals", "&": "and", "#": "hash", "+": "plus", "%": "percent", "~": "tilde",
    ":": "colon", "@": "at", "\\": "backslash", ",": "comma", "!": "exclamation mark",
    "*": "star", "$": "dollar", ";": "semicolon", "|": "pipe", "(": "open parenthesis",
    ")": "close parenthesis", "[": "open bracket", "]": "close bracket", "^": "caret",
    "{": "open brace", "}": "close brace", "<": "less than", ">": "greater than",
}  # fmt: skip
_READ_AS = {
    "gmail": f"{spell('G')} mail", "hotmail": "hot mail", "ymail": f"{spell('Y')} mail",
    "gov": "gov", "edu": f"{spell('EDU')}", "info": "info", "biz": "biz", "mil": "mill",
    "youtube": "you tube", "github": "git hub", "linkedin": "linked in", "io": spell("IO"),
    "org": "org", "com": "com", "app": "app", "json": "jason", "doc": "doc", "exe": spell("EXE"),
    "jpeg": "jay peg", "zip": "zip", "wav": "wave", "yaml": "yammle", "toml": "tommle",
    "me": "me", "co": "co", "dev": "dev", "faq": spell("FAQ"), "id": spell("ID"), "us": spell("US"),
    "it": spell("IT"), "in": "in", "api": spell("API"),
}  # fmt: skip
_SHORT = words("an as at be by do go he hi if in is it me my no of on or so to up we")
_PIECE = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+|[^\sA-Za-z\d]")


def literal(text: str, knows: Knows) -> str:
    """A token read as it is written: its words, its letters where they form none, its signs."""
    return " ".join(filter(None, (_piece(piece, knows) for piece in _PIECE.findall(text))))


def _piece(piece: str, knows: Knows) -> str:
    if piece[0].isdigit():
        return code(piece) if len(piece) != 4 or piece[0] == "0" else hundreds(piece)
    if not piece[0].isalpha():
        return _SIGNS.get(piece, "")
    lower = piece.lower()
    if lower in _READ_AS:
        return _READ_AS[lower]
    vowels = sum(c in "aeiouy" for c in lower)
    word = (len(lower) > 2 and knows(lower)) or (len(lower) > 3 and vowels) or lower in _SHORT
    return lower if word else spell(lower)


def _host(text: str) -> str:
    return re.sub(r"^(?:[a-z][a-z0-9+.-]*://)?(?:www\.)?", "", text, flags=re.IGNORECASE)


def _spoken_group(group: str) -> str:
    """A group of a phone number; "eight hundred" is read as a number."""
    if len(group) == 3 and group.endswith("00") and group[0] != "0":
        return cardinal(int(group))
    return digits(group)


def _phone(match: re.Match[str]) -> str:
    groups = re.findall(r"\d+", match[0])
    if len(groups) == 1 and len(groups[0]) == 10:
        groups = [groups[0][:3], groups[0][3:6], groups[0][6:]]
    elif len(groups) == 1 and len(groups[0]) == 11:
        text = groups[0]
        groups = [text[:1], text[1:4], text[4:7], text[7:]]
    spoken = ", ".join(_spoken_group(group) for group in groups)
    return f"plus {spoken}" if match[0].lstrip().startswith("+") else spoken


def _octets(match: re.Match[str]) -> str:
    address, _, port = match[0].partition(":")
    octets = address.split(".")
    if any(int(octet) > 255 for octet in octets):
        return match[0]
    spoken = " dot ".join(hundreds(octet) for octet in octets)
    return f"{spoken} colon {hundreds(port)}" if port else spoken


def _version(match: re.Match[str]) -> str:
    name = "version " if match["v"] else ""
    return name + " point ".join(number(part) for part in match["parts"].split("."))


def _vanity(match: re.Match[str]) -> str:
    return f"one, {_spoken_group(match[1])}, {match[2].lower()}"


PHONE_RULES = (
    rule(r"(?<![\w-])1[ -](8\d\d)-([A-Z]{3,}(?:-[A-Z]+)*)(?!\w)", _vanity),
    rule(
        r"(?<![\w.+-])\+\d{1,3}[ .-]?(?:\(\d{1,4}\)[ .-]?)?\d{2,4}(?:[ .-]?\d{2,4}){1,4}(?![\w-])",
        _phone,
    ),
    rule(r"(?<![\w.+-])(?:1[ .-]?)?\(\d{3}\) ?\d{3}[ .-]?\d{4}(?![\w-])", _phone),
    rule(r"(?<![\w.+$-])(?:1[ .-])?\d{3}([ .-])\d{3}\1\d{4}(?![\w-])", _phone),
    rule(r"(?<![\w.+$-])\d{3}-\d{4}(?![\w-])", _phone),
    rule(r"(?<![\w.,+$-])(?:1?[2-9]\d{2}[2-9]\d{6})(?![\w-]|[.,]\d)", _phone),
    rule(r"(?<![\w-])(?:\d{3}-\d{2}|\d{5})-\d{4}(?![\w-])", _phone),
)
VERSION_RULES = (
    rule(
        r"(?<![\w.])(?:[1-9]?\d|[12]\d\d)(?:\.(?:[1-9]?\d|[12]\d\d)){3}(:\d+)?(?![\w]|\.\d)",
        _octets,
    ),
    rule(r"(?<![\w.])(?P<v>[vV]\.? ?)(?P<parts>\d{1,4}(?:\.\d+)+)(?!\w)", _version),
    rule(
        r"\b(?i:(?<=version )|(?<=python )|(?<=release ))(?P<v>)(?P<parts>\d+\.\d+)(?!\w|\.\d)",
        _version,
    ),
    rule(r"(?<![\w.])(?P<v>v)(?P<parts>\d{1,2})(?!\w)", _version),
    rule(r"(?<![\w.,])(?P<v>)(?P<parts>\d+(?:\.\d+){2,})(?!\w|\.\d)", _version),
)


def web_rules(knows: Knows) -> tuple[Rule, ...]:
    """Rules for addresses; which of their pieces are words is for the lexicon to say."""

    def read(match: re.Match[str]) -> str:
        return literal(_host(match[0]).rstrip("/"), knows)

    def handle(match: re.Match[str]) -> str:
        return "at " + literal(match[1], knows)

    def hashtag(match: re.Match[str]) -> str:
        return "hashtag " + literal(match[1], knows).replace(" underscore ", " ")

    label = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,62})"
    return (
        rule(
            r"(?<![\w.+-])[\w.+%-]{1,64}@(?:[\w-]{1,63}\.){1,8}[A-Za-z]{2,24}(?![\w@])",
            read,
            re.ASCII,
        ),
        rule(
            r"(?<!\w)(?:https?|ftp|wss?|file)://[^\s<>\"”]{0,2000}[^\s<>\"”.,;:!?)\]'’*]",
            read,
            re.IGNORECASE,
        ),
        rule(r"(?<![\w.@])www\.[^\s<>\"”]{0,2000}[^\s<>\"”.,;:!?)\]'’*]", read, re.IGNORECASE),
        rule(
            rf"(?<![\w.@/-])(?:{label}\.){{1,6}}(?:{any_of(_DOMAINS + _FILES)})(?![\w@-]|\.\w)"
            r"(?::\d{2,5}(?!\w))?(?:/[^\s<>\"”]{0,500}[^\s<>\"”.,;:!?)\]'’*])?/?",
            read,
        ),
        rule(r"(?<![\w.@])@([A-Za-z_]\w{0,39})", handle, re.ASCII),
        rule(r"(?<![\w&#])#([A-Za-z]{2}[A-Za-z_]\w{0,99})", hashtag, re.ASCII),
        rule(r"(?<![\w.~])~?(?:/[\w.-]{1,100}){2,20}/?(?!\w)", read, re.ASCII),
    )
