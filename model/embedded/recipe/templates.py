"""What voice agents say: the sentences of templates.txt with random names, numbers, dates and money."""

import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path

TEMPLATES_PATH = Path(__file__).with_name("templates.txt")


def _words(text: str) -> list[str]:
    return text.split()


NAMES = _words(
    """
    James Mary Robert Patricia John Jennifer Michael Linda David Elizabeth William Barbara Richard
    Susan Joseph Jessica Thomas Sarah Charles Karen Christopher Lisa Daniel Nancy Matthew Betty
    Anthony Sandra Mark Ashley Donald Emily Steven Kimberly Andrew Margaret Paul Donna Joshua
    Michelle Kenneth Carol Kevin Amanda Brian Melissa George Deborah Timothy Stephanie Ronald
    Rebecca Jason Laura Edward Helen Jeffrey Sharon Ryan Cynthia Jacob Amy Gary Anna Nicholas Angela
    Eric Ruth Jonathan Brenda Priya Wei Fatima Carlos Sofia Ahmed Yuki Olga Ivan Chloe Mateo Aisha
    Liam Noah Emma Olivia Grace Henry Lucy Oscar Ella Victor Julia Martin Claire Felix Nora Hugo
    Alice Samuel
    """
)
SURNAMES = _words(
    """
    Smith Johnson Williams Brown Jones Garcia Miller Davis Rodriguez Martinez Hernandez Lopez Wilson
    Anderson Thomas Taylor Moore Jackson Martin Lee Perez Thompson White Harris Sanchez Clark Lewis
    Robinson Walker Young Allen King Wright Scott Torres Nguyen Hill Green Adams Nelson Baker Hall
    Campbell Mitchell Carter Roberts Murphy Cooper Reed Bailey Howard Ward Cox Richardson Watson
    Brooks Kelly Price Wood Barnes Ross Henderson Coleman Powell Long Patterson Hughes Washington
    Simmons Foster Bryant Russell Griffin Hayes
    """
)
MONTHS = _words(
    """
    January February March April May June July August September October November December
    """
)
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
CITIES = _words(
    """
    London Paris Berlin Madrid Rome Chicago Boston Denver Seattle Austin Dallas Toronto Sydney Tokyo
    Dublin Phoenix Atlanta Houston Miami Portland Oakland Vienna Lisbon Oslo Cairo Mumbai Singapore
    Glasgow Prague Athens Nairobi Brussels Zurich Vancouver Melbourne Istanbul Helsinki Amsterdam
    Bristol Nashville Orlando Detroit
    """
)
STREETS = _words(
    "Main Oak Park Maple Cedar Lake Hill Church High Station Elm Garden River Spring Bridge Mill"
)
THINGS = _words(
    """
    order package booking reservation appointment refund payment subscription account ticket flight
    invoice delivery prescription claim policy application password meeting table room loan card
    statement request complaint contract membership insurance voucher repair lesson passport
    """
)
VERBS = _words(
    "check confirm update cancel change review open find verify reschedule send renew extend"
)
DIGITS = _words("zero one two three four five six seven eight nine")
MINUTES = ["oh five", "ten", "fifteen", "twenty", "twenty five", "thirty", "forty", "fifty"]
# "A" alone is read as the article.
LETTERS = "BCDEFGHIJKLMNOPQRSTUVWXYZ"
WORD_SLOTS = {
    "name": NAMES,
    "surname": SURNAMES,
    "city": CITIES,
    "thing": THINGS,
    "verb": VERBS,
    "digit": DIGITS,
    "praise": _words("great perfect good lovely fine wonderful excellent awesome"),
    "past": _words(
        "checked confirmed updated cancelled changed reviewed found sent renewed extended"
    ),
    "opening": [
        "Yes",
        "No",
        "Okay",
        "Sure",
        "Right",
        "Of course",
        "Great",
        "Hello",
        "Well",
        "So",
        "Actually",
        "All right",
    ],
}
DIGIT_SLOTS = {
    "digits": (4, 8),
    "few_digits": (3, 4),
    "three_digits": (3, 3),
    "four_digits": (4, 4),
}


class Templates:
    """Utterances of voice agents with random fillings."""

    def __init__(self, path: Path, rng: random.Random) -> None:
        from sanotts.nano_g2p import cardinal_words, ordinal_words, year_words

        lines = path.read_text(encoding="utf-8").splitlines()
        self.templates = [line for line in lines if line and not line.startswith("#")]
        self.rng = rng
        self.cardinal: Callable[[int], str] = cardinal_words
        self.ordinal: Callable[[int], str] = ordinal_words
        self.year: Callable[[int], str] = year_words

    def sample(self, count: int) -> list[str]:
        return list(dict.fromkeys(self.fill(self.pick(self.templates)) for _ in range(count)))

    def fill(self, template: str) -> str:
        chosen = re.sub(r"\[([^]]+)\]", lambda match: self.pick(match[1].split("|")), template)
        filled = re.sub(r"\{(\w+)\}", lambda match: self.slot(match[1]), chosen)
        return filled[0].upper() + filled[1:]

    def slot(self, name: str) -> str:
        match name:
            case "date":
                return self.date()
            case "clock":
                return self.clock()
            case "money":
                return self.money()
            case "number":
                return self.number(*self.rng.choice([(1, 99), (100, 999), (1000, 250_000)]))
            case "small":
                return self.number(2, 99)
            case "hundreds":
                return self.number(1, 500)
            case "nth":
                return self.nth(40)
            case "year":
                return self.plain(self.year(self.rng.randint(1700, 2039)))
            case "place":
                kind = self.pick(["Street", "Avenue", "Road", "Lane"])
                return f"{self.number(1, 300)} {self.pick(STREETS)} {kind}"
            case "full_name":
                return f"{self.pick(NAMES)} {self.pick(SURNAMES)}"
            case "letters":
                return " ".join(self.pick(LETTERS) for _ in range(self.rng.randint(2, 3)))
        if name in DIGIT_SLOTS:
            return " ".join(self.pick(DIGITS) for _ in range(self.rng.randint(*DIGIT_SLOTS[name])))
        return self.pick(WORD_SLOTS[name])

    def pick(self, options: Sequence[str]) -> str:
        return self.rng.choice(options)

    def plain(self, number: str) -> str:
        """In words alone, with or without the "and" that only some speakers say."""
        words = number.replace("-", " ").replace(",", "")
        return words if self.rng.random() < 0.5 else words.replace(" and ", " ")

    def number(self, low: int, high: int) -> str:
        return self.plain(self.cardinal(self.rng.randint(low, high)))

    def nth(self, high: int) -> str:
        return self.plain(self.ordinal(self.rng.randint(1, high)))

    def clock(self) -> str:
        hour, minute = self.number(1, 12), self.pick(MINUTES)
        forms = [
            f"{hour} {minute}",
            f"{hour} {minute} in the {self.pick(['morning', 'afternoon', 'evening'])}",
            f"{hour} o'clock",
            f"half past {hour}",
            f"quarter {self.pick(['past', 'to'])} {hour}",
            self.pick(["noon", "midnight"]),
        ]
        return self.pick(forms)

    def date(self) -> str:
        month, day = self.pick(MONTHS), self.nth(31)
        forms = [
            f"{month} {day}",
            f"{self.pick(DAYS)}, {month} {day}",
            f"the {day} of {month}",
            f"{month} {day}, {self.slot('year')}",
            f"{self.pick(['', 'next '])}{self.pick(DAYS)}",
            "tomorrow",
        ]
        return self.pick(forms)

    def money(self) -> str:
        forms = [
            f"{self.number(2, 999)} dollars",
            f"{self.number(2, 99)} dollars and {self.number(2, 99)} cents",
            f"{self.number(2, 99)} {self.pick(['cents', 'pounds', 'euros'])}",
            f"{self.number(1000, 90_000)} dollars",
        ]
        return self.pick(forms)
