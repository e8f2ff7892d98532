"""When a lost connection is opened again, and after what time. No socket, no task, no clock."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from clients.checks import expect, is_from
from realtime.errors import (
    CLOSE_CODE,
    CapacityError,
    ConnectionFailed,
    ConnectionLost,
    PlosiveError,
)

# Going away, no code, broken, internal error, restart, try again later. Whatever else a server
# closes with (protocol errors, policy, 4xxx) would only happen again.
RETRYABLE_CLOSE_CODES = frozenset({1001, 1005, 1006, 1011, 1012, 1013})
RETRYABLE_STATUSES = frozenset({429, 502, 503, 504})
_MAX_DOUBLINGS = 64  # beyond 1,023 a float overflows


@dataclass(frozen=True)
class Reconnect:
    """Open a lost connection again: `connect(url, reconnect=Reconnect())`.

    Attempt n waits `initial_delay_s * 2**(n-1)`, at most `max_delay_s`, of which a random half is
    taken off, so that a thousand clients do not come back at once. A server's `Retry-After` is
    waited for whole. After `max_attempts` without anything said in between, the session fails.

    Example:
        async with connect(url, reconnect=Reconnect(max_attempts=8)) as session:
            ...
    """

    max_attempts: float = 5  # math.inf: for ever
    initial_delay_s: float = 0.5
    max_delay_s: float = 8.0
    also_first: bool = False  # the first opening too, where the server answers that it is busy

    def __post_init__(self) -> None:
        """Raises SessionError `invalid_option`."""
        for name in ("max_attempts", "initial_delay_s", "max_delay_s"):
            value = getattr(self, name)
            expect(is_from(0, value), name, value, "a number from 0 on")


@dataclass
class Attempts:
    """Counts the attempts of one session."""

    policy: Reconnect
    draw: Callable[[], float] = field(default=random.random)  # 0..1
    num_made: int = 0

    def next_delay_s(self, error: PlosiveError) -> float | None:
        """Seconds to wait before the next attempt, counting it; None: do not try."""
        if self.num_made >= self.policy.max_attempts or not is_retryable(error):
            return None
        doubled_s = self.policy.initial_delay_s * 2.0 ** min(self.num_made, _MAX_DOUBLINGS)
        self.num_made += 1
        delay_s = min(doubled_s, self.policy.max_delay_s) * (1.0 - 0.5 * self.draw())
        return delay_s + (getattr(error, "retry_after_s", None) or 0.0)

    def spoke(self) -> None:
        """A turn got something: the connection works. That it was accepted proves nothing yet."""
        self.num_made = 0


def is_retryable(error: PlosiveError) -> bool:
    """Whether what ended a session, or kept it from opening, may be gone in a moment.

    Example:
        >>> is_retryable(ConnectionLost("gone", close_code=1012))
        True
        >>> is_retryable(ConnectionFailed("wrong key", status=401))
        False
    """
    match error:
        case CapacityError() | ConnectionFailed(status=None):
            return True
        case ConnectionFailed(status=status):
            return status in RETRYABLE_STATUSES
        case ConnectionLost(close_code=None):
            return True
        case ConnectionLost(close_code=close_code):
            return close_code in RETRYABLE_CLOSE_CODES
    return error.fatal and CLOSE_CODE.get(error.code) in RETRYABLE_CLOSE_CODES
