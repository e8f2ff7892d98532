"""The front end of the embedded voice: any text to phonemes, with warnings instead of errors."""

from dataclasses import dataclass
from functools import cache

from model.text.clean import Warnings
from model.text.normalize import Normalizer
from model.text.phonemes import Pronouncer
from model.text.spelled import shown


@dataclass(frozen=True)
class SpokenText:
    """How a text is spoken."""

    phonemes: str
    """What the model reads: phonemes, stress marks and punctuation; empty if nothing is said."""
    words: str
    """The text as it is read, in words; "F B I" for letters read by name."""
    warnings: tuple[str, ...] = ()
    """What will not be heard as it was written."""


@cache
def _pronouncer() -> Pronouncer:
    """One lexicon per process: it takes 70 MB and a quarter of a second."""
    return Pronouncer()


class EnglishFrontEnd:
    """English text to phonemes. Never raises on any string; threads may share one."""

    def __init__(self) -> None:
        self._pronounce = _pronouncer()
        self._normalize = Normalizer(self._pronounce)

    def __call__(self, text: str) -> SpokenText:
        warnings = Warnings()
        words = self._normalize(text, warnings)
        phonemes = self._pronounce(words) if any(c.isalpha() for c in words) else ""
        if not any(c.isalpha() for c in phonemes):
            return SpokenText("", "", warnings.told())
        return SpokenText(phonemes, shown(words), warnings.told())
