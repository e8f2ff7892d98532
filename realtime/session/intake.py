"""Which text a session takes: how much in a message, in a turn, and, with prompts, in a second."""

from realtime.errors import PlosiveError, SessionError
from realtime.session.limits import SessionLimits
from realtime.session.text_rate import TextAccount, TextRates, charge
from realtime.session.turn import Turn
from realtime.wire import TextAppend


class TextIntake:
    """One per session. What is refused changes nothing: its turn stays as it is.

    Args:
        client: charged as well, with all that the client sends through other sessions.
    """

    def __init__(self, limits: SessionLimits, client: TextAccount | None = None) -> None:
        own = TextRates("a session", limits.max_text_chars_per_s, limits.text_burst_chars)
        self._limits = limits
        self._accounts = [own.account("")] + ([client] if client is not None else [])

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
        charge(self._accounts, num_chars, now_ns, turn_id=message.turn_id)

    def charge_prompt(self, prompt: str, now_ns: int) -> None:
        """Raises CapacityError `text_rate_exceeded`."""
        charge(self._accounts, len(prompt), now_ns, param="prompt")


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
