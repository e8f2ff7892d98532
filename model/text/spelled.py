"""Letters that are read by name.

"FBI" is read as three letter names and "NASA" as a word, and the two look alike. Inside the front
end a word read by its letters is carried in runes, one for each letter: runes are letters to every
pattern that looks for words, have no case, and never come from outside (cleaning removes them).
"""

import re

_FIRST = 0x16A0
_RUNES = "".join(chr(_FIRST + i) for i in range(26))
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_TO_RUNES = str.maketrans(_LETTERS + _LETTERS.lower(), _RUNES * 2)
_TO_LETTERS = str.maketrans(_RUNES, _LETTERS)

RUNE = f"[{_RUNES[0]}-{_RUNES[-1]}]"
_BETWEEN = re.compile(rf"(?<={RUNE})(?={RUNE})")


def spell(letters: str) -> str:
    """One word that is read as the names of its letters: an initialism."""
    return letters.translate(_TO_RUNES)


def letters_of(word: str) -> str:
    """The capital letters that a spelled word stands for."""
    return word.translate(_TO_LETTERS)


def shown(text: str) -> str:
    """The text for a reader: "F B I" for a spelled word."""
    return _BETWEEN.sub(" ", text).translate(_TO_LETTERS)
