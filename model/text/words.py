"""Single words that are not plain English words: initialisms, mixed case, code, letters."""

import re
from collections.abc import Callable

from model.text.numbers import code, hundreds
from model.text.rules import words
from model.text.spelled import RUNE, spell

Kind = Callable[[str], str]
"""What the lexicon says of a word: "word" when it is read as one, "either" when a capitalised
initialism and a word are written alike, "" when it is unknown."""

_TOKEN = re.compile(rf"(?<!{RUNE})[A-Za-z0-9]+(?:['-][A-Za-z0-9]+)*'?")
_WITH_DIGITS = re.compile(
    r"(?<![\w.,])(?:[A-Za-z]+-?[0-9]+|[0-9]+-?[A-Za-z]+)[A-Za-z0-9]*(?:-[A-Za-z0-9]+)*"
)
_WORD_AND_NUMBER = re.compile(r"[A-Za-z][a-z]{2,}-\d+|\d+(?:-[a-z]{2,})+")
_NAME_AND_NUMBER = re.compile(r"([A-Za-z]*[a-z])(\d+)")
_PARTS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")
_VOWEL = re.compile(r"[aeiouy]|^h?m+$|sh|z{3}|s{3}|r{3}")
_CAPITALS = re.compile(r"([A-Z]{2,})('?s)?$")
_LETTER_S = re.compile(r"([A-Z])'s$")

_PRODUCTS = {
    "iPhone": "iPhone", "iPad": "iPad", "iPod": "iPod", "iMac": "iMac", "iCloud": "iCloud",
    "iOS": f"{spell('I')} {spell('OS')}", "macOS": f"mac {spell('OS')}", "eBay": "eBay",
    "MySQL": f"My {spell('SQL')}", "McDonald's": "McDonald's", "JSON": "Jason",
    "LaTeX": "lah tech", "OAuth": "oh auth", "WiFi": "Wi-Fi", "wifi": "Wi-Fi", "PhD": spell("PHD"),
    "MHz": "megahertz", "GHz": "gigahertz", "kHz": "kilohertz", "Hz": "hertz",
    "OK": "OK", "ok": "OK", "Ok": "OK", "JPEG": "JPEG", "PostgreSQL": f"postgress {spell('QL')}",
    "HTTPS": spell("HTTPS"), "YAML": "yammle", "B2B": f"{spell('B')} to {spell('B')}",
    "B2C": f"{spell('B')} to {spell('C')}", "P2P": f"{spell('P')} to {spell('P')}",
    "WWI": "World War one", "WWII": "World War two", "AIDS": "AIDS", "ZIP": "zip",
    "US": spell("US"), "USA": spell("USA"), "UK": spell("UK"), "TV": spell("TV"),
    "sudo": "sue doo", "nginx": "engine X", "kubectl": "kube control",
}  # fmt: skip
_LETTERS = frozenset(
    words(
        "IT AI PM AM EST LED ER GI ID LA PA MA MI MO OS OD RE VAT ISO WHO IMAP POW RIP COO "
        "CIS CAL DOE SEC DOB ETA FAQ ATM CEO CFO CTO API URL USB FBI CIA IRS DIY RSVP FYI EU "
        "UN TBA UPS SMS GPS VIP VPN DNS HTML CSS HTTP PDF CPU GPU SSN PST MST CST EDT PDT UTC "
        "GMT BBC CNN NBA NFL MLB NHL KPI HR PR QA UI UX ML NLP TTS SDK CLI SSH SSL AWS GCP "
        "NYC DC BMW IBM NBC MBA MRI DNA RNA HIV CT ICU EMT IPO ROI GDP SUV RV AC DVD CD DJ IQ "
        "JJ HM SOB IP ISP ADHD OCD PTSD CPR EKG LGBTQ NYU UCLA MIT LOL OMG IDK TBH NSA EPA "
        "FDA FCC AA AD AG BA BO JS"
    )
)
_SHOUTED = frozenset(
    words(
        "NO YES NOT ALL AND THE FOR YOU ARE NEW NOW OUT OFF ON IN IS AT TO BE WE HE OF OR IF "
        "IT SO UP MY ME DO GO BY AN AS CAN GET HAS HAD HER HIS HIM HOW ITS LET MAY OUR OWN "
        "PUT SAY SEE SHE TOO TOP TRY TWO USE WAY WHY ANY BIG BAD BUT BUY DAY DID END FAR FEW "
        "FUN HOT JOB LOW MAN OH HI OLD ONE RED RUN SET SIX TEN WAS WON WOW YET AGO ADD ASK "
        "BAG BED BOX BOY CAR CUT DOG EAT EYE FIX FREE WIN BYE HEY STOP"
    )
)


class WordReader:
    """Rewrites the words that the lexicon would not read as a person does."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind

    def __call__(self, text: str) -> str:
        return _TOKEN.sub(self._token, text)

    def with_digits(self, text: str) -> str:
        """Only the tokens that mix letters and digits: "B12", "iPhone15", "F-16"."""
        return _WITH_DIGITS.sub(lambda match: self._apart(match[0]), text)

    def _apart(self, word: str) -> str:
        if _WORD_AND_NUMBER.fullmatch(word):
            return word.replace("-", " ")
        return self._mixed(word)

    def _token(self, match: re.Match[str]) -> str:
        word = match[0]
        if word in _PRODUCTS:
            return _PRODUCTS[word]
        if word.islower() and word.isalpha():
            return self._lower(word, match)
        if word == "A":
            return self._capital_a(match)
        if len(word) == 1:
            return word if word == "I" else spell(word)
        if word.isalpha() and word[1:].islower():
            return word
        return self._unusual(word, match)

    def _unusual(self, word: str, match: re.Match[str]) -> str:
        capitals = _CAPITALS.match(word)
        if capitals:
            return self._capitals(capitals[1], match) + (capitals[2] or "")
        letter = _LETTER_S.match(word)
        if letter:
            return spell(letter[1]) + "'s"
        if self._kind(word) or (word[0] + word[1:].lower()) == word and word.count("-") < 4:
            return word
        if "-" in word:
            return " ".join(self._again(part) for part in word.split("-"))
        if "'" in word:
            return word if _plain(word) else self._mixed(word)
        return self._mixed(word)

    def _again(self, part: str) -> str:
        return _TOKEN.sub(self._token, part)

    def _capitals(self, word: str, match: re.Match[str]) -> str:
        """An initialism by its letters, an acronym or a shouted word as a word."""
        if word in _LETTERS and not (word in _SHOUTED and _shouting(match)):
            return spell(word)
        kind = self._kind(word)
        if kind == "word":
            return word
        lower = word.lower()
        if word in _SHOUTED or (_shouting(match) and self._kind(lower)):
            return lower
        if len(word) > 3 and self._kind(lower):
            return lower
        return lower if len(word) > 5 and re.search("[AEIOUY]", word) else spell(word)

    def _mixed(self, word: str) -> str:
        """Letters of mixed case and digits: each part as a word, a number or letters."""
        if word in _PRODUCTS:
            return _PRODUCTS[word]
        if self._kind(word):
            return word
        split = _NAME_AND_NUMBER.fullmatch(word)
        if split and split[1] in _PRODUCTS:
            return f"{_PRODUCTS[split[1]]} {self._part(split[2])}"
        return " ".join(self._part(part) for part in _PARTS.findall(word))

    def _part(self, part: str) -> str:
        if part[0].isdigit():
            return hundreds(part) if len(part) == 3 and part[0] != "0" else code(part)
        if part in _PRODUCTS:
            return _PRODUCTS[part]
        if part.isupper() and len(part) > 1:
            return part if self._kind(part) == "word" else spell(part)
        if len(part) > 2 or (self._kind(part) and len(part) > 1):
            return part
        return spell(part)

    def _lower(self, word: str, match: re.Match[str]) -> str:
        """A word in small letters; letters without a vowel are spelled if no word has them."""
        if len(word) > 1:
            return word if _VOWEL.search(word) or self._kind(word) else spell(word)
        if word == "a":
            return word
        before = match.string[max(0, match.start() - 1) : match.start()]
        return word if before == "'" else spell(word)

    def _capital_a(self, match: re.Match[str]) -> str:
        """The article at the start of a sentence and in titles, the letter elsewhere."""
        before = match.string[: match.start()].rstrip(" \"“('")[-1:]
        after = match.string[match.end() : match.end() + 12]
        if re.match(r" [A-Za-z][a-z]", after) and (
            before in ("", ".", "!", "?", ":", ",") or re.match(r" [A-Z]", after)
        ):
            return "a" if before not in ("", ".", "!", "?") else "A"
        return spell("A")


def _plain(word: str) -> bool:
    """A word with an apostrophe whose letters are lower case but for its capitals: O'Brien."""
    return all(part[1:].islower() or len(part) < 2 for part in word.split("'"))


def _shouting(match: re.Match[str]) -> bool:
    """Whether a neighbouring word is a shouted one too."""
    before = re.search(
        r"\b([A-Z]{2,})[^\w]*$", match.string[max(0, match.start() - 30) : match.start()]
    )
    after = re.match(r"[^\w]*\b([A-Z]{2,})\b", match.string[match.end() : match.end() + 30])
    neighbours = [found[1] for found in (before, after) if found]
    return any(word in _SHOUTED or len(word) > 3 for word in neighbours)
