"""Which text a session takes: how much in a message, in a turn, and in a second."""

import math

from realtime.errors import CapacityError, PlosiveError, SessionError
from realtime.session.limits import SessionLimits
from realtime.session.turn import Turn
from realtime.wire import TextAppend

_NS_PER_S = 1_000_000_000


class TextIntake:
    """One per session. What is refused changes nothing: its turn stays as it is."""

    def __init__(self, limits: SessionLimits) -> None:
        self._limits = limits
        self._paid_off_ns = 0  # when the text so far would have come at the permitted rate

    def check(self, message: TextAppend, turn: Turn | None, now_ns: int) -> None:
        """Count the text of a message for `turn` (None: one that it opens).

        Raises:
            SessionError: `text_too_long`, `turn_too_long` or `turn_committed`.
            CapacityError: `text_rate_exceeded`, with the time after which it would be taken.
        """
        num_chars, limits = len(message.text), self._limits
        if num_chars > limits.max_text_chars:
            raise _too_long("text_too_long", message, num_chars, limits.max_text_chars)
        num_turn_chars = num_chars + (turn.num_chars if turn else 0)
        if num_turn_chars > limits.max_turn_chars:
            raise _too_long("turn_too_long", message, num_turn_chars, limits.max_turn_chars)
        if turn is not None and turn.is_committed:
            raise _committed(turn.turn_id)
        if limits.max_text_chars_per_s:
            self._pay(message, now_ns)

    def _pay(self, message: TextAppend, now_ns: int) -> None:
        per_s, burst = self._limits.max_text_chars_per_s, self._limits.text_burst_chars
        ns_per_char = _NS_PER_S / per_s
        paid_off_ns = max(self._paid_off_ns, now_ns) + round(len(message.text) * ns_per_char)
        wait_s = (paid_off_ns - now_ns - burst * ns_per_char) / _NS_PER_S
        if wait_s > 0:
            raise CapacityError(
                f"a session may send {per_s:,} characters of text a second, after the first "
                f"{burst:,}; nothing of this message was taken: send it again in "
                f"{math.ceil(10 * wait_s) / 10:g} s",
                code="text_rate_exceeded",
                param="text",
                turn_id=message.turn_id,
                retry_after_s=wait_s,
            )
        self._paid_off_ns = paid_off_ns


def _committed(turn_id: int) -> PlosiveError:
    why = f"turn {turn_id} is committed; send more text in a new turn"
    return SessionError("turn_committed", why, param="turn_id", turn_id=turn_id)


def _too_long(code: str, message: TextAppend, num_chars: int, max_chars: int) -> PlosiveError:
    return SessionError(
        code,
        f"turn {message.turn_id}: got {num_chars:,} characters, the limit is {max_chars:,}; "
        "nothing of this message was taken",
        param="text",
        turn_id=message.turn_id,
    )
