"""Any string into plain text: Unicode, other scripts, emoji and markup leftovers."""

import html
import re
import unicodedata
from collections.abc import Callable

from anyascii import anyascii

from model.text.rules import Rule, apply, rule

_KEPT = frozenset("£€¥₹₩₽₺₴₪₫₱₦₿¢°×÷±≈≠≤≥µπ∞√→←§¶©№‰′″−–—…“”≡∑∂∆∫‽")
"""Signs outside ASCII that later rules read."""

_SAME_AS = str.maketrans({
    "’": "'", "‘": "'", "‛": "'", "ʼ": "'", "＇": "'", "`": "`", "´": "'", "ʹ": "'",
    "„": "“", "«": "“", "»": "”", "‟": "“", "‹": "'", "›": "'", "「": "“", "」": "”",
    "『": "“", "』": "”", "‐": "-", "‑": "-", "‒": "–", "―": "—", "⸺": "—", "⁃": "-",
    "。": ". ", "、": ", ", "，": ", ", "！": "! ", "？": "? ", "：": ": ", "；": "; ",
    "؟": "?", "،": ",", "؛": ";", "।": ".", "•": "\n- ", "◦": "\n- ", "▪": "\n- ", "‣": "\n- ",
    "∙": "\n- ", "·": " ", "¿": "", "¡": "", "™": "", "®": "", "℠": "", "℡": " telephone ",
    "²": "^2", "³": "^3", "⁄": "/", "∕": "/", "μ": "µ", "Ω": " ohms", "✓": " check ",
    "✔": " check ", "☑": " check ", "✗": " cross ", "✘": " cross ", "⇒": "→", "➔": "→", "➜": "→",
    "➡": "→", "★": " star ", "∗": "*", "⋅": "×", "✕": "×", "✖": "×", "∼": "~", "¬": " not ",
    "ƒ": "f", "†": "", "‡": "", "ª": "a", "º": "°", "\u00ad": "", "\u2028": "\n", "\u2029": "\n\n",
    "\x85": "\n", "\u000b": "\n", "\u000c": "\n", "\r": "\n", "\t": " ",
})  # fmt: skip
_VULGAR = re.compile(r"(?<=\d)(?=[½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞])")
_RESUME = re.compile(r"\b([rR])ésumé")
_FOREIGN = re.compile(r"[^\x00-\x7f]+")
_BLANKS = re.compile(r" {2,}|\n{3,}")
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f]")
_READ_BY_TRANSLITERATION = (
    "GREEK", "CYRILLIC", "ARMENIAN", "GEORGIAN", "HANGUL", "HIRAGANA", "KATAKANA",
    "CJK", "BOPOMOFO", "IDEOGRAPHIC",
)  # fmt: skip
_SAME_SCRIPT = {"MODIFIER": "LATIN", "KATAKANA-HIRAGANA": "KATAKANA"}
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")
_MAX_LISTED = 8


class Warnings:
    """What a listener will not hear as it was written; each kind is told once."""

    def __init__(self) -> None:
        self._found: dict[str, dict[str, None]] = {}

    def add(self, kind: str, what: str) -> None:
        self._found.setdefault(kind, {})[what] = None

    def told(self) -> tuple[str, ...]:
        return tuple(f"{kind}: {_listed(list(found))}" for kind, found in self._found.items())


def _listed(items: list[str]) -> str:
    shown = ", ".join(ascii_safe(item) for item in items[:_MAX_LISTED])
    more = len(items) - _MAX_LISTED
    return shown + (f" and {more} more" if more > 0 else "")


def ascii_safe(item: str) -> str:
    """An item in quotes that any encoder accepts: no lone surrogates, no controls, bounded."""
    text = "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in item[:40])
    return f"'{text}{'...' if len(item) > 40 else ''}'"


def clean(text: str, warnings: Warnings) -> str:
    """Plain text in ASCII letters and digits, plus the signs that later rules read."""
    if not text.isascii():
        text = _RESUME.sub(r"\1esumay", _VULGAR.sub(" ", text)).translate(_SAME_AS)
        text = _FOREIGN.sub(lambda m: _foreign(m[0], warnings), text)
    text = _CONTROL.sub(lambda m: " " if m[0] in "\t\x0b\x0c\r" else "", text)
    text = _BLANKS.sub(lambda m: m[0][0] * (2 if m[0][0] == "\n" else 1), text)
    if "&" in text and ";" in text:
        text = _ENTITY.sub(_entity, text)
    return text


_ENTITY = re.compile(r"&(?:amp|lt|gt|quot|apos|nbsp|#\d{2,4});")


def _entity(match: re.Match[str]) -> str:
    sign = html.unescape(match[0])
    return sign if sign.isascii() and sign.isprintable() else " "


def _foreign(run: str, warnings: Warnings) -> str:
    """One run outside ASCII, character by character, foreign words as a whole."""
    spoken: list[str] = []
    word: list[str] = []
    script = ""
    for char in [*_compatible(run), ""]:
        kind = _script(char)
        if word and kind != script and not (kind == "MARK" and script):
            spoken.append(_word("".join(word), script, warnings))
            word = []
        if kind == "MARK" and not word:
            continue
        if kind:
            script = script if kind == "MARK" else kind
            word.append(char)
        elif char:
            spoken.append(_sign(char, warnings))
    return "".join(spoken)


def _compatible(run: str) -> str:
    """Compatibility forms folded (full width, ligatures), but not the signs that are read."""
    return "".join(c if c in _KEPT else unicodedata.normalize("NFKC", c) for c in run).replace(
        "\u2044", "/"
    )


def _script(char: str) -> str:
    """The script of a letter, "MARK" for a combining mark, "" for everything else."""
    if not char or char.isascii() or char in _KEPT:
        return ""
    category = unicodedata.category(char)
    if category[0] == "M":
        return "MARK"
    if category[0] != "L":
        return ""
    name = unicodedata.name(char, "UNKNOWN").split(" ", 1)[0]
    return _SAME_SCRIPT.get(name, name)


def _word(word: str, script: str, warnings: Warnings) -> str:
    if script == "LATIN":
        return anyascii(unicodedata.normalize("NFC", word))
    if script in _READ_BY_TRANSLITERATION:
        warnings.add("read by transliteration", word)
        return f" {_CAMEL.sub(' ', anyascii(word))} "
    warnings.add("left out, in a script without a reading", word)
    return " "


def _sign(char: str, warnings: Warnings) -> str:
    if char.isascii() or char in _KEPT:
        return char
    category = unicodedata.category(char)
    if category == "Nd":
        return str(unicodedata.decimal(char))
    if category[0] == "Z":
        return " "
    if category in ("Cc", "Cf"):
        return ""
    if category[0] == "P":
        return {"Ps": "(", "Pe": ")", "Pi": "“", "Pf": "”", "Pd": "—"}.get(category, " ")
    if category[0] == "S" and 0x1F3FB <= ord(char) <= 0x1F3FF:
        return ""  # a skin tone belongs to the emoji before it
    warnings.add("left out, without a reading", char)
    return " "


# Markup -----------------------------------------------------------------------------------------


def _line_end(match: re.Match[str]) -> str:
    """A line break: the end of a sentence at a blank line, a list item or a heading."""
    before, breaks, marker = match["before"], match["breaks"], match["marker"]
    following = match.string[match.end() : match.end() + 1]
    if not before or not following:
        return before + " "
    if before in ".!?:;,…":
        return before + " "
    if breaks.count("\n") > 1 or marker or match["number"]:
        return before + ". "
    return before + (", " if following.isupper() else " ")


def _style_tag(warnings: Warnings) -> Callable[[re.Match[str]], str]:
    def drop(match: re.Match[str]) -> str:
        warnings.add("left out, a tag that this voice does not perform", match[0])
        return " "

    return drop


def _item(match: re.Match[str]) -> str:
    """The number of an item within a line, unless its bracket closes one that is open."""
    before = match.string[: match.start()]
    is_open = before.count("(") > before.count(")")
    return match[0] if is_open else f"{match[1]}, "


_MARKUP: tuple[Rule, ...] = (
    rule(r"(?m)^[ \t]*(?:```|~~~)[\w+-]*[ \t]*$", ""),
    rule(r"(?m)^[ \t]*(?:[-*_] ?){3,}[ \t]*$", "\n"),
    rule(r"(?m)^[ \t]*\|?(?:[ \t]*:?-{2,}:?[ \t]*\|)+(?:[ \t]*:?-{2,}:?)?[ \t]*$", ""),
    rule(r"!?\[([^\[\]\n]{0,300})\]\(([^()\s]{0,2000})\)", r"\1"),
    rule(r"<((?:https?://|mailto:)[^\s<>]{1,2000})>", r"\1"),
    rule(r"</?[A-Za-z][A-Za-z0-9-]*(?:\s[^<>]{0,300})?/?>", " "),
    rule(r"(?m)^([ \t]*)#{1,6}[ \t]+(.+?)[ \t]*#*$", "\n\n\\2\n\n"),
    rule(r"(?m)^[ \t]*>[ \t]?", ""),
    rule(r"(?m)^([ \t]*\d{1,3})\)[ \t]+", r"\1. "),
    rule(r"(\*\*|__|~~)(?=\S)(.{1,500}?)(?<=\S)\1", r"\2"),
    rule(r"(?<![\w*])\*(?=[^\s*])([^*\n]{1,500}?)(?<=[^\s*])\*(?![\w*])", r"\1"),
    rule(r"(?<!\w)_(?=[^\s_])([^_\n]{1,500}?)(?<=[^\s_])_(?!\w)", r"\1"),
    rule(r"(?<=\s)(\d{1,2})\)\s+(?=\w)", _item),
    rule(r"`+", ""),
    rule(r"(?<!\S)(?:[:;=]-?[()DPp]|<3)(?!\S)", " "),  # emoticons
    rule(
        r"(?P<before>^|\S)[ \t]*(?P<breaks>\n\s*)(?P<marker>(?:[-*+][ \t]+)?)"
        r"(?=(?P<number>\d{1,3}\.[ \t])?)",
        _line_end,
    ),
    rule(r"^\s*[-*+][ \t]+", ""),
    rule(r"(?<=\S)[ ]*\|[ ]*(?=[^\s|])", ", "),
    rule(r"\|", " "),
)
_TAG = re.compile(r"<\|[^|<>\n]{1,40}\|>|\[[a-z][a-z' -]{1,40}\](?!\()")


def without_markup(text: str, warnings: Warnings) -> str:
    """The text that a renderer of Markdown or HTML would show, in one line."""
    text = _TAG.sub(_style_tag(warnings), text)
    return apply(_MARKUP, text)
