"""Barge-in over all turns of a session: what was heard of them, and what was not."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from clients.turn import Turn
from realtime.errors import ConnectionLost
from realtime.wire import TurnCancelled


@dataclass(frozen=True)
class Interruption:
    """What an interruption stopped; nothing, if `turns` is empty."""

    turns: tuple[TurnCancelled, ...] = ()  # the server's account of each, in speaking order

    @property
    def spoken_text(self) -> str:
        """What was heard."""
        return _joined([turn.spoken_text for turn in self.turns])

    @property
    def remaining_text(self) -> str:
        """What was not heard."""
        return _joined([turn.remaining_text for turn in self.turns])


async def interrupt(turns: Sequence[tuple[Turn, float | None]]) -> Interruption:
    """Cancel turns, given in speaking order with their played milliseconds.

    The last one goes first, so that none begins because the one before it has ended. One that had
    failed, or got no text, has no account.

    Raises:
        ConnectionLost: before all accounts came.
        PlosiveError: what ended them otherwise, if it ended all.
    """
    cancels = [turn.cancel(played_ms) for turn, played_ms in reversed(turns)]
    ends = (await asyncio.gather(*cancels, return_exceptions=True))[::-1]
    accounts = [
        end
        for (turn, _), end in zip(turns, ends, strict=True)
        if isinstance(end, TurnCancelled) and not turn.is_empty
    ]
    failures = [end for end in ends if isinstance(end, BaseException)]
    for failure in failures:
        if not accounts or isinstance(failure, ConnectionLost):
            raise failure
    return Interruption(tuple(accounts))


def _joined(texts: list[str]) -> str:
    return " ".join(text for text in texts if text)
