"""The turns of a session in the order of their ids: one spoken, some waiting, some still heard."""

from collections.abc import Callable, Iterator

from realtime.errors import SessionError
from realtime.session.limits import SessionLimits
from realtime.session.turn import Turn

_NS_PER_MS = 1_000_000


class TurnQueue:
    def __init__(self, limits: SessionLimits) -> None:
        self._limits = limits
        self._turns: list[Turn] = []  # the front one is with the engine
        self._playing: list[Turn] = []  # done, but perhaps not heard to the end
        self._last_turn_id = -1  # of the newest turn ever opened

    def __len__(self) -> int:
        return len(self._turns)

    def __iter__(self) -> Iterator[Turn]:
        """Over those that have not ended; they may be removed meanwhile."""
        return iter(self._turns.copy())

    @property
    def front(self) -> Turn | None:
        return self._turns[0] if self._turns else None

    def is_old(self, turn_id: int) -> bool:
        return turn_id <= self._last_turn_id

    def check_new(self, turn_id: int) -> None:
        """Whether `open` may follow.

        Raises:
            SessionError: code `turn_id_used` or `too_many_turns`.
        """
        if self.is_old(turn_id):
            raise SessionError(
                "turn_id_used",
                f"turn {turn_id} is over or was skipped; "
                f"the next turn_id is at least {self._last_turn_id + 1}",
                param="turn_id",
                turn_id=turn_id,
            )
        if len(self._turns) > self._limits.max_queued_turns:
            raise SessionError(
                "too_many_turns",
                f"{len(self._turns)} turns wait; send turn {turn_id} after one of them has ended",
                turn_id=turn_id,
            )

    def open(self, turn_id: int, make_turn: Callable[[int], Turn]) -> Turn:
        """Append a new turn."""
        turn = make_turn(turn_id)
        self._turns.append(turn)
        self._last_turn_id = turn_id
        return turn

    def find(self, turn_id: int) -> Turn | None:
        """A turn that has not ended."""
        return next((turn for turn in self._turns if turn.turn_id == turn_id), None)

    def find_playing(self, turn_id: int, now_ns: int) -> Turn | None:
        """A turn that is done, but is still being heard."""
        self._forget_played(now_ns)
        return next((turn for turn in self._playing if turn.turn_id == turn_id), None)

    def playing_until_ns(self, now_ns: int) -> int:
        """When the turns that are done will have been heard: one after another, so with the last."""
        return self._playing[-1].playback_end_ns(now_ns) if self._playing else now_ns

    def finish(self, turn: Turn, now_ns: int) -> None:
        """The turn is done; while it is heard it can still be found."""
        self._turns.remove(turn)
        self._forget_played(now_ns)
        if turn.has_audio:
            self._playing.append(turn)

    def remove(self, turn: Turn) -> None:
        (self._turns if turn in self._turns else self._playing).remove(turn)

    def clear(self) -> None:
        self._turns.clear()
        self._playing.clear()

    def _forget_played(self, now_ns: int) -> None:
        since_ns = now_ns - self._limits.cancel_grace_ms * _NS_PER_MS
        self._playing = [t for t in self._playing if t.playback_end_ns(now_ns) > since_ns]
