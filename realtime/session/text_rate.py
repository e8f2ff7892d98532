"""How much text may come in a second: accounts of sessions, and of clients over all their sessions."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from realtime.errors import CapacityError
from realtime.wire import MAX_PROMPT_CHARS, MAX_TURN_CHARS

_NS_PER_S = 1_000_000_000
_BURST_S = 60
_NUM_FEW = 1_000  # accounts that are not worth looking through for those that are settled


def burst_chars(chars_per_s: int) -> int:
    """What may come at once: a minute's worth, and a prompt with a whole turn in any case."""
    return max(MAX_PROMPT_CHARS + MAX_TURN_CHARS, _BURST_S * chars_per_s)


class TextRates:
    """One rule, and an account for each owner, which outlives the owner's connections.

    Args:
        who: as the sentence that refuses begins.
        chars_per_s: on average; 0: any number.
        burst_chars: that may come at once, after a silence.
    """

    def __init__(self, who: str, chars_per_s: int, burst_chars: int) -> None:
        self._who = who
        self._chars_per_s = chars_per_s
        self._burst_chars = burst_chars
        # When all that an owner sent would have come at the permitted rate; in the past: not kept.
        self._paid_off_ns: dict[str, int] = {}
        self._num_few = _NUM_FEW

    def __len__(self) -> int:
        return len(self._paid_off_ns)

    @property
    def most_at_once(self) -> float:
        return self._burst_chars if self._chars_per_s else math.inf

    def account(self, owner: str) -> "TextAccount":
        return TextAccount(self, owner)

    def wait_s(self, owner: str, num_chars: int, now_ns: int) -> float:
        """After how long so many characters would be taken; 0: now. Takes nothing."""
        if not self._chars_per_s:
            return 0.0
        wait_ns = self._after(owner, num_chars, now_ns) - now_ns - self._cost_ns(self._burst_chars)
        return max(0.0, wait_ns / _NS_PER_S)

    def pay(self, owner: str, num_chars: int, now_ns: int) -> None:
        if not self._chars_per_s:
            return
        self._paid_off_ns[owner] = self._after(owner, num_chars, now_ns)
        if len(self) > self._num_few:
            self._paid_off_ns = {o: t for o, t in self._paid_off_ns.items() if t > now_ns}
            self._num_few = _NUM_FEW + 2 * len(self)

    def why_not(self, wait_s: float) -> str:
        return (
            f"{self._who} may send {self._chars_per_s:,} characters of text a second, after the "
            f"first {self._burst_chars:,}; nothing of this was taken: send it again in "
            f"{math.ceil(10 * wait_s) / 10:g} s"
        )

    def _after(self, owner: str, num_chars: int, now_ns: int) -> int:
        start_ns = max(self._paid_off_ns.get(owner, 0), now_ns)
        return start_ns + self._cost_ns(num_chars)

    def _cost_ns(self, num_chars: int) -> int:
        """Rounded down: what fits into the burst fits also in pieces."""
        return num_chars * _NS_PER_S // self._chars_per_s


class TextAccount(NamedTuple):
    rates: TextRates
    owner: str


def charge(
    accounts: Sequence[TextAccount],
    num_chars: int,
    now_ns: int,
    *,
    param: str = "text",
    turn_id: int | None = None,
) -> None:
    """To all of the accounts, or to none.

    Raises:
        CapacityError: `text_rate_exceeded`, with the time after which all would take it.
    """
    refusals = [(rates.wait_s(owner, num_chars, now_ns), rates) for rates, owner in accounts]
    wait_s, slowest = max(refusals, key=lambda refusal: refusal[0])
    if wait_s > 0:
        raise CapacityError(
            slowest.why_not(wait_s),
            code="text_rate_exceeded",
            param=param,
            turn_id=turn_id,
            retry_after_s=wait_s,
        )
    for rates, owner in accounts:
        rates.pay(owner, num_chars, now_ns)
