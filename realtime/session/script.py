"""Character classes of text that is to be spoken, and its repair."""

import re
import unicodedata

# Scripts written without spaces: kana, Han, and their full-width punctuation.
CJK = "\u3000-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff00-\uffef\U00020000-\U0003ffff"

_CONTROL_TAG = re.compile(r"<\|[^|\n]*\|>")
_CONTROLS = {code: " " for code in [*range(0x20), *range(0x7F, 0xA0)] if chr(code) not in "\t\n\r"}
_SPEAKABLE = ("L", "N", "Sc", "So")  # letters, numbers, currency, pictures


def is_speakable(text: str) -> bool:
    """Whether there is anything to say besides spaces, punctuation and `<|control|>` tags."""
    if text.isascii() and "<|" not in text:
        return any(char.isalnum() or char == "$" for char in text)
    rest = _CONTROL_TAG.sub("", text)
    return any(unicodedata.category(char).startswith(_SPEAKABLE) for char in rest)


def join_surrogates(text: str) -> str:
    """Join surrogate pairs that arrived in two messages; lone halves become U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def whole_chars(text: str, num_chars: int, is_complete: bool) -> int:
    """`num_chars`, or one less where that parts a surrogate pair; of text that is not complete, its
    other half may still come."""
    if not (num_chars > 0 and "\ud800" <= text[num_chars - 1] <= "\udbff"):
        return num_chars
    is_parted = "\udc00" <= text[num_chars : num_chars + 1] <= "\udfff"
    return num_chars - (is_parted or (num_chars == len(text) and not is_complete))


def clean(text: str) -> str:
    """Text fit for a front end: whole characters, control characters as spaces, no outer space."""
    return join_surrogates(text).translate(_CONTROLS).strip()
