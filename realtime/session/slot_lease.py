"""The session's hold on its slot: the generation, and what the engine has been told."""

from dataclasses import replace

from realtime.pingpong.messages import CancelTurn, CloseSlot, OpenSlot, SlotRef
from realtime.session.actions import Action, Bump, Submit
from realtime.session.settings import Settings
from realtime.session.turn import Turn


class SlotLease:
    """Counts the slot's generations and appends its actions to the session's list.

    No command carries a generation older than the last `Bump`.
    """

    def __init__(self, slot: SlotRef, actions: list[Action]) -> None:
        self.slot = slot
        self._actions = actions
        self._settings: Settings | None = None  # that the slot is opened with
        self._opening: OpenSlot | None = None  # not answered by `SlotReady` yet
        self._last_turn: Turn | None = None  # whose frames the KV ends with

    @property
    def settings(self) -> Settings:
        assert self._settings is not None
        return self._settings

    @property
    def is_awaiting_ready(self) -> bool:
        return self._opening is not None

    def is_opened_with(self, settings: Settings) -> bool:
        return self._settings is not None and self._settings.is_same(settings)

    def open(self, settings: Settings, command: OpenSlot) -> None:
        """Only between turns. It is answered by one `SlotReady`, as are several in a row."""
        if self._settings is None or not self._settings.is_same_dialogue(settings):
            self._last_turn = None
        self._settings, self._opening = settings, command
        self._actions.append(Submit(command))

    def ready(self) -> bool:
        """`SlotReady` has come; whether it was waited for."""
        was_awaiting, self._opening = self.is_awaiting_ready, None
        return was_awaiting

    def submit_text(self, turn: Turn) -> None:
        """Tell the engine what is new in the turn; the turn before it must have ended."""
        for command in turn.take_commands(self.slot):
            self._actions.append(Submit(command))
            self._last_turn = turn

    def roll_back(self, turn: Turn, played_ms: float) -> None:
        """Take back what was not heard of the turn; nothing to do unless it is the latest."""
        if turn is not self._last_turn:
            return
        self._last_turn = None
        self._bump()
        heard_frames = turn.ledger.num_heard_frames(played_ms)
        self._actions.append(Submit(CancelTurn(self.slot, turn.turn_id, heard_frames)))
        if self._opening is not None:  # the bump has made it stale
            self._opening = replace(self._opening, slot=self.slot)
            self._actions.append(Submit(self._opening))

    def close(self) -> None:
        self._bump()
        self._actions.append(Submit(CloseSlot(self.slot)))

    def _bump(self) -> None:
        self.slot = self.slot._replace(generation=self.slot.generation + 1)
        self._actions.append(Bump(self.slot))
