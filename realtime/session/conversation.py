"""The turns of one session between its client and its engine: text in, audio and accounts out.

The front turn is with the engine, later ones wait here; those that are done can still be cancelled
while they play.
"""

import math
from collections.abc import Callable

from realtime.errors import PlosiveError, SessionError
from realtime.pingpong.api import EngineInfo
from realtime.pingpong.messages import SegmentEnd, SlotReady, SlotRef, TurnBegin, TurnEnd
from realtime.session.actions import Action, Drop, EncodedAudio, Send, SendAudio
from realtime.session.intake import TextIntake
from realtime.session.ledger import SpeakingRate
from realtime.session.limits import SessionLimits
from realtime.session.settings import Settings
from realtime.session.slot_lease import SlotLease
from realtime.session.text_rate import TextAccount
from realtime.session.turn import Turn
from realtime.session.turn_queue import TurnQueue
from realtime.wire import (
    EffectiveFormat,
    Error,
    ServerMessage,
    SessionReady,
    TextAppend,
    TurnCancel,
    TurnDone,
    Warn,
)


class Conversation:
    """Appends to the session's actions. Nothing is said before `open`.

    Args:
        slot: as acquired; every generation after it is counted here.
        make_seed: a seed for streams whose client gave none.
        client_text: charged for text and prompts beside the session's own limit.
    """

    def __init__(
        self,
        session_id: str,
        slot: SlotRef,
        info: EngineInfo,
        limits: SessionLimits,
        make_seed: Callable[[], int],
        actions: list[Action],
        client_text: TextAccount | None = None,
    ) -> None:
        self.takes_turns = True  # new ones
        self._session_id = session_id
        self._info = info
        self._limits = limits
        self._make_seed = make_seed
        self._actions = actions
        self._lease = SlotLease(slot, actions)
        self._turns = TurnQueue(limits)
        self._intake = TextIntake(limits, client_text)
        self._rate = SpeakingRate.typical(info.frame_ms)
        self._format: EffectiveFormat | None = None
        self._settings: Settings | None = None  # of the next new turn

    @property
    def slot(self) -> SlotRef:
        """With the current generation."""
        return self._lease.slot

    @property
    def settings(self) -> Settings:
        """Of the next new turn."""
        assert self._settings is not None
        return self._settings

    @property
    def num_turns(self) -> int:
        """Spoken or waiting to be."""
        return len(self._turns)

    # ------------------------------------------------------------------ settings

    def open(self, settings: Settings, audio_format: EffectiveFormat) -> None:
        self._settings, self._format = settings, audio_format
        self._open_slot(settings)

    def update(self, settings: Settings) -> None:
        """What turns use that are opened from now on; answered by one `session.ready`."""
        self.check_takes_turns()
        self._settings = settings
        if self._lease.is_opened_with(settings):
            if not self._lease.is_awaiting_ready:
                self._send_ready(prefill_ms=0.0, cached=True)
        elif not self._turns:
            self._open_slot(settings)

    def charge_prompt(self, prompt: str, now_ns: int) -> None:
        """Raises CapacityError `text_rate_exceeded`."""
        self._intake.charge_prompt(prompt, now_ns)

    def ready(self, event: SlotReady) -> None:
        if self._lease.ready():
            self._send_ready(event.prefill_ms, event.cached)

    def _send_ready(self, prefill_ms: float, cached: bool) -> None:
        assert self._format is not None
        settings = self._lease.settings
        self._send(
            SessionReady(
                session_id=self._session_id,
                model=self._info.model_name,
                voice=settings.voice.name,
                format=self._format,
                prefill_ms=prefill_ms,
                cached=cached,
                frame_rate_hz=self._info.frame_rate_hz,
                max_lead_ms=settings.max_lead_ms,
            )
        )

    # ------------------------------------------------------------------ text in

    def append(self, message: TextAppend, now_ns: int) -> None:
        turn = self._turns.find(message.turn_id)
        if turn is None:  # what is refused is not charged
            self._check_new(message.turn_id)
        try:
            self._intake.check(message, turn, now_ns)
        except PlosiveError as error:
            self._send(error_message(error, keeps_turn=True))
            return
        turn = turn or self._open_turn(message.turn_id)
        turn.append(message.text, now_ns)
        self._advance()

    def flush(self, turn_id: int, now_ns: int) -> None:
        turn = self._turns.find(turn_id)
        if turn is not None and not turn.is_committed:
            turn.flush(now_ns)
            self._advance()

    @property
    def auto_flush_ns(self) -> int | None:
        """When `auto_flush` has something to look at, unless text comes."""
        gap_ns = self._limits.auto_flush_ms * 1_000_000
        idle_ns = [turn.idle_since_ns for turn in self._turns if turn.idle_since_ns is not None]
        return min(idle_ns) + gap_ns if gap_ns and idle_ns else None

    def auto_flush(self, now_ns: int) -> None:
        due_ns = now_ns - self._limits.auto_flush_ms * 1_000_000
        for turn in self._turns:
            if turn.idle_since_ns is not None and turn.idle_since_ns <= due_ns:
                turn.flush_sentence(now_ns)
        self._advance()

    def commit(self, turn_id: int, now_ns: int) -> None:
        turn = self._turns.find(turn_id)
        if turn is None and self._turns.is_old(turn_id):
            return
        turn = turn or self._open_turn(turn_id)
        turn.commit(now_ns)
        self._advance()

    def check_takes_turns(self, turn_id: int | None = None) -> None:
        if not self.takes_turns:
            message = "the session is closing; open a new one"
            raise SessionError("session_closing", message, turn_id=turn_id)

    def _check_new(self, turn_id: int) -> None:
        self.check_takes_turns(turn_id)
        self._turns.check_new(turn_id)

    def _open_turn(self, turn_id: int) -> Turn:
        self._check_new(turn_id)
        return self._turns.open(turn_id, self._make_turn)

    def _make_turn(self, turn_id: int) -> Turn:
        assert self._format is not None
        lead_in_ms = self._format.lead_in_ms
        return Turn(turn_id, self.settings, self._info, self._limits, self._rate, lead_in_ms)

    def _advance(self) -> None:
        """Give the front turn to the engine, or settle what waited for the last one to end."""
        front = self._turns.front
        if front is not None:
            if not front.is_in_engine and not self._lease.is_opened_with(front.settings):
                self._open_slot(front.settings)
            self._lease.submit_text(front)
        elif self.takes_turns and not self._lease.is_opened_with(self.settings):
            self._open_slot(self.settings)

    def _open_slot(self, settings: Settings) -> None:
        command = settings.open_slot(self.slot, self._info, self._make_seed())
        self._lease.open(settings, command)

    # ------------------------------------------------------------------ audio out

    def begin(self, event: TurnBegin) -> None:
        turn = self._turns.find(event.turn_id)
        if turn is not None:
            turn.stamps_ns = event.stamps_ns

    def take_audio(self, audio: EncodedAudio, now_ns: int) -> None:
        turn = self._turns.find(audio.turn_id)
        if turn is None:
            return
        assert self._format is not None
        is_first = not turn.has_audio
        playing_until_ns = self._turns.playing_until_ns(now_ns)
        packets = turn.take_audio(audio, self._format, playing_until_ns, now_ns)
        if packets:
            if is_first:
                self._send(turn.started_message())
            self._actions.append(SendAudio(turn.turn_id, packets))
        self._finish_if_over(turn, now_ns)

    def audio_written(self, turn_id: int, now_ns: int) -> None:
        turn = self._turns.find(turn_id)
        if turn is not None:
            turn.written(now_ns)

    def end_segment(self, event: SegmentEnd) -> None:
        turn = self._turns.find(event.turn_id)
        if turn is not None:
            turn.ledger.end_segment(event.segment, event.num_frames)

    def end(self, event: TurnEnd, now_ns: int) -> None:
        turn = self._turns.find(event.turn_id)
        if turn is not None:
            turn.engine_end, turn.stamps_ns = event, event.stamps_ns
            self._finish_if_over(turn, now_ns)

    def _finish_if_over(self, turn: Turn, now_ns: int) -> None:
        if turn.is_over:
            turn.ledger.end_turn()
        text_message = turn.text_message()
        if text_message is not None:
            self._send(text_message)
        if turn.is_over:
            self._finish(turn, now_ns)

    def _finish(self, turn: Turn, now_ns: int) -> None:
        self._turns.finish(turn, now_ns)
        if not turn.has_audio:
            self._send(turn.started_message())
        metrics = turn.metrics()
        if not metrics.num_frames:
            message = "the turn gave no audio: its text has nothing that can be spoken"
            self._send(Warn(code="nothing_to_speak", message=message, turn_id=turn.turn_id))
        self._send(TurnDone(turn_id=turn.turn_id, metrics=metrics))
        self._advance()

    # ------------------------------------------------------------------ other ends of turns

    def cancel(self, message: TurnCancel, now_ns: int) -> None:
        turn = self._turns.find(message.turn_id) or self._turns.find_playing(
            message.turn_id, now_ns
        )
        if turn is None:
            why = f"turn {message.turn_id} is not open; nothing was cancelled"
            self._send(Warn(code="unknown_turn", message=why, turn_id=message.turn_id))
            return
        self._stop(turn, turn.played_ms(message.played_ms, now_ns))
        self._advance()

    def cancel_uncommitted(self, now_ns: int) -> None:
        for turn in self._turns:
            if not turn.is_committed:
                self._stop(turn, turn.played_ms(None, now_ns))
        self._advance()

    def fail_turns(self, error: PlosiveError) -> None:
        """Tell of each that is not over that it failed; `close` follows."""
        for turn in self._turns:
            self._send(Error(code=error.code, message=error.message, turn_id=turn.turn_id))

    def close(self) -> None:
        """Give the slot up, whatever is under way."""
        self._turns.clear()
        self._lease.close()

    def _stop(self, turn: Turn, played_ms: float) -> None:
        self._turns.remove(turn)
        self._lease.roll_back(turn, played_ms)
        if turn.has_audio:
            self._actions.append(Drop(turn.turn_id))
        self._send(turn.cancelled_message(played_ms))

    def _send(self, message: ServerMessage) -> None:
        self._actions.append(Send(message))


def error_message(
    error: PlosiveError, *, is_fatal: bool = False, keeps_turn: bool = False
) -> Error:
    retry_after_s: float | None = getattr(error, "retry_after_s", None)
    return Error(
        code=error.code,
        message=error.message,
        param=error.param,
        fatal=error.fatal or is_fatal,
        turn_id=error.turn_id,
        keeps_turn=keeps_turn,
        retry_after_ms=None if retry_after_s is None else math.ceil(1000.0 * retry_after_s),
    )
