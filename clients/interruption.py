"""Barge-in over all turns of a session: what was heard of them, and what was not."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from clients.turn import Turn
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

    The last one goes first, so that none begins because the one before it has ended.

    Raises:
        PlosiveError: what ended one of them otherwise.
    """
    cancels = [turn.cancel(played_ms) for turn, played_ms in reversed(turns)]
    return Interruption(tuple(reversed(await asyncio.gather(*cancels))))


def _joined(texts: list[str]) -> str:
    return " ".join(text for text in texts if text)
