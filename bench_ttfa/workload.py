"""What is said and when: texts that never repeat, and arrival times. All of it from one seed.

Repeated texts let a server answer from its caches; so a source never gives the same text twice,
and warm-up texts come from the same source as the measured ones.
"""

import itertools
import random
from collections.abc import Callable
from typing import Literal

_MAX_TRIES = 100
Kind = Literal["agent", "prose", "numbers", "mixed"]
KINDS: tuple[Kind, ...] = ("agent", "prose", "numbers", "mixed")


def _words(text: str) -> list[str]:
    return text.split()


def _phrases(text: str) -> list[str]:
    return text.split(", ")


_NAMES = _words(
    "Anna Ben Carla David Elena Frank Grace Hugo Ida James Katrin Liam Maria Noah Olivia Paul "
    "Quinn Rosa Samuel Tara Umar Vera William Yara"
)
_DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
_MONTHS = _words("January March April May July August October November December")
_ADJECTIVES = _words("quiet early narrow warm distant careful bright heavy patient sudden")
_PLACES = _phrases(
    "the harbour, the old mill, the river bank, the market square, the north station, "
    "the garden gate, the library steps, the long bridge, the hill above the town, "
    "the quiet street behind the church"
)
_THINGS = _phrases(
    "the blue kettle, a pair of boots, the garden chair, two tickets, the small radio, "
    "a winter coat, the desk lamp, a box of tea, the spare key, a new battery, the travel bag, "
    "the kitchen scale"
)
_SUBJECTS = _phrases(
    "the baker, an old sailor, the youngest sister, a tired clerk, the night nurse, "
    "her neighbour, the piano teacher, a boy with a dog, the gardener, the woman from the ferry"
)
_ACTIONS = _phrases(
    "waited for the rain to stop, counted the lights across the water, opened the door without "
    "a sound, carried the letters home, spoke of the winter before, found the path again, laughed "
    "at the broken clock, read the last page twice, set the table for three, closed the window "
    "slowly"
)
_AGENT = (
    "Sure, {name}. I can book a table for {small} on {day} at {time}. Shall I go ahead?",
    "Thanks for waiting, {name}. I found {thing}, and it can be with you by {day}.",
    "I am sorry about that, {name}. Let me check {thing} for you, it takes about {small} minutes.",
    "Your appointment is on {day}, {month} {date}, at {time}. Would you like a reminder?",
    "No problem at all. I have moved {thing} to your address near {place}. Anything else, {name}?",
    "Good news, {name}! {thing} is back in stock, and we can hold it until {day} at {time}.",
    "I hear you, {name}. If {day} does not work, how about {month} {date} at {time} instead?",
)
_NUMBERS = (
    "Order {order} comes to ${money}, and it ships on {month} {date}.",
    "The meter reads {order}, which is {percent} percent more than in {month}.",
    "Please call 555-0{small}{percent} before {time} and quote the number {order}.",
    "That makes {small} of {percent}, at {money} euros each, due on {month} {date}.",
)


class TextSource:
    """An endless supply of texts, each given once.

    Example:
        >>> source = TextSource(seed=1, kind="agent")
        >>> len(set(source.take(1000)))
        1000
    """

    def __init__(self, seed: int, kind: Kind = "mixed") -> None:
        self._random = random.Random(seed)
        self._given: set[str] = set()
        makers: dict[str, Callable[[], str]] = {
            "agent": self._agent,
            "prose": self._prose,
            "numbers": self._numbers,
        }
        self._makers = itertools.cycle(makers.values() if kind == "mixed" else [makers[kind]])

    def take(self, count: int, num_chars: int | None = None) -> list[str]:
        """Of about `num_chars` characters each, where that is given."""
        return [self._next() if num_chars is None else self._long(num_chars) for _ in range(count)]

    def _long(self, num_chars: int) -> str:
        """Sentences until it is long enough, cut at a word."""
        for _ in range(_MAX_TRIES):
            if (text := self._cut(num_chars, self._next())) not in self._given:
                break
        else:  # so short that there are no more: they are counted
            text = self._cut(num_chars, f"Number {len(self._given)}: {text}")
        self._given.add(text)
        return text

    def _cut(self, num_chars: int, text: str) -> str:
        while len(text) < num_chars:
            text += " " + self._next()
        if len(text) == num_chars:
            return text
        return text[: num_chars + 1].rpartition(" ")[0].rstrip(" ,.;?!") + "."

    def _next(self) -> str:
        make = next(self._makers)
        while (text := make()) in self._given:
            pass
        self._given.add(text)
        return text

    def _agent(self) -> str:
        return _sentence(self._fill(self._random.choice(_AGENT)))

    def _numbers(self) -> str:
        return self._fill(self._random.choice(_NUMBERS))

    def _prose(self) -> str:
        count = self._random.randint(2, 3)
        return " ".join(self._prose_sentence() for _ in range(count))

    def _prose_sentence(self) -> str:
        pick = self._random.choice
        where, who, what = pick(_PLACES), pick(_SUBJECTS), pick(_ACTIONS)
        return _sentence(f"in the {pick(_ADJECTIVES)} light of {where}, {who} {what}.")

    def _fill(self, template: str) -> str:
        pick, number = self._random.choice, self._random.randint
        return template.format(
            name=pick(_NAMES),
            place=pick(_PLACES),
            day=pick(_DAYS),
            month=pick(_MONTHS),
            thing=pick(_THINGS),
            time=f"{number(1, 12)}:{pick(('00', '15', '30', '45'))} {pick(('a.m.', 'p.m.'))}",
            date=number(1, 28),
            small=number(2, 9),
            percent=number(11, 99),
            order=number(10_000, 99_999),
            money=f"{number(3, 980)}.{number(10, 99)}",
        )


def poisson_arrivals_s(rate_per_s: float, count: int, seed: int) -> list[float]:
    """Times of `count` arrivals with exponential gaps, from the start of the measurement."""
    gaps = random.Random(seed)
    return list(itertools.accumulate(gaps.expovariate(rate_per_s) for _ in range(count)))


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]
