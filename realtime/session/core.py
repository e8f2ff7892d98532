"""One connection's logic, sans I/O: frames and engine events in, actions out.

It knows no socket, no thread, no clock and no tensor. `now_ns` is `time.perf_counter_ns` of the
moment the input arrived, the clock of the engine's stamps.

    AWAITING_START --session.start--> OPEN --session.close, shut_down--> CLOSING --> CLOSED
    any state --disconnected, fail, SlotFailed--> CLOSED

Turns are spoken in the order of their ids. The front one is with the engine, later ones wait here.
Each ends in exactly one of `turn.done`, `turn.cancelled` or an `error` with its `turn_id` (which
also refuses a turn) that does not say `keeps_turn`.
A turn that is done can still be cancelled while it plays; that is answered by `turn.cancelled`.

What a client does wrong, and what it gets. Nothing in this table is fatal, nothing is lost but the
message itself:

    malformed JSON, unknown or invalid message   error: invalid_json, unknown_type, invalid_message
    binary frame                                 error: binary_not_expected
    anything before session.start                error: not_started
    second session.start                         error: already_started
    unknown voice                                error: voice_not_found; the session stays as it was
    append, flush or commit with an old id       error: turn_id_used (flush, commit: no-op)
    append after the commit                      error: turn_committed
    append too long, turn too long               error: text_too_long, turn_too_long
    too many turns waiting                       error: too_many_turns
    new turn or update while closing             error: session_closing
    cancel of an unknown or finished turn        warning: unknown_turn
    a prompt the model cannot use                warning: prompt_ignored
    a turn without anything to say               warning: nothing_to_speak, then turn.done
"""

from collections.abc import Callable
from enum import Enum, auto

from realtime.errors import CLOSE_CODE, EngineError, PlosiveError, ProtocolError, SessionError
from realtime.pingpong.api import EngineInfo
from realtime.pingpong.messages import (
    EngineWarning,
    Event,
    SegmentEnd,
    SlotFailed,
    SlotReady,
    SlotRef,
    TurnEnd,
    VoicePrompt,
)
from realtime.session.actions import (
    Action,
    Close,
    Drop,
    EncodedAudio,
    OpenEncoder,
    Send,
    SendAudio,
)
from realtime.session.ledger import SpeakingRate
from realtime.session.limits import SessionLimits
from realtime.session.settings import Settings, SettingsResolver
from realtime.session.slot_lease import SlotLease
from realtime.session.turn import Turn
from realtime.session.turn_queue import TurnQueue
from realtime.wire import (
    AudioFormat,
    ClientMessage,
    EffectiveFormat,
    Error,
    ServerMessage,
    SessionClose,
    SessionClosing,
    SessionReady,
    SessionStart,
    SessionUpdate,
    TextAppend,
    TextFlush,
    TurnCancel,
    TurnCommit,
    TurnDone,
    TurnStarted,
    Warn,
    decode_client,
)


class SessionState(Enum):
    AWAITING_START = auto()
    OPEN = auto()
    CLOSING = auto()  # no new turns; closes when the last one is over
    CLOSED = auto()  # inputs have no effect any more


def plain_format(fmt: AudioFormat) -> EffectiveFormat:
    """The format of an encoder without delay."""
    return EffectiveFormat(codec=fmt.codec, sample_rate=fmt.sample_rate)


class Session:
    """The only user of its slot. Apply the actions of each call, in order, before the next call.

    Args:
        slot: as acquired for this connection; every generation after it is counted here.
        find_voice: raises VoiceError for a name it does not know.
        make_seed: a seed for streams whose client gave none.
        describe_format: the format that will really flow, with the encoder's pre-skip.
    """

    def __init__(
        self,
        session_id: str,
        slot: SlotRef,
        info: EngineInfo,
        find_voice: Callable[[str], VoicePrompt],
        limits: SessionLimits,
        make_seed: Callable[[], int],
        describe_format: Callable[[AudioFormat], EffectiveFormat] = plain_format,
    ) -> None:
        self.session_id = session_id
        self.state = SessionState.AWAITING_START
        self._info = info
        self._limits = limits
        self._make_seed = make_seed
        self._resolver = SettingsResolver(info, limits, find_voice)
        self._describe_format = describe_format
        self._format: EffectiveFormat | None = None
        self._settings: Settings | None = None  # of the next new turn
        self._rate = SpeakingRate.typical(info.frame_ms)
        self._turns = TurnQueue(limits)
        self._close_reason = "session_closed"
        self._actions: list[Action] = []
        self._lease = SlotLease(slot, self._actions)

    @property
    def slot(self) -> SlotRef:
        """With the current generation."""
        return self._lease.slot

    @property
    def is_started(self) -> bool:
        return self.state is not SessionState.AWAITING_START

    @property
    def is_closed(self) -> bool:
        return self.state is SessionState.CLOSED

    @property
    def num_turns(self) -> int:
        """Spoken or waiting to be."""
        return len(self._turns)

    # ------------------------------------------------------------------ inputs

    def receive_text(self, frame: str, now_ns: int) -> list[Action]:
        """A text frame from the client. Never raises: what is wrong with it becomes an `error`."""
        if not self.is_closed:
            try:
                self._receive(decode_client(frame), now_ns)
            except PlosiveError as error:
                keeps_turn = isinstance(error, ProtocolError) and error.turn_id is not None
                self._send(_error_message(error, keeps_turn=keeps_turn))
        return self._take_actions()

    def receive_binary(self, num_bytes: int, now_ns: int) -> list[Action]:
        """A binary frame from the client: clients send none."""
        if not self.is_closed:
            self._send(
                Error(
                    code="binary_not_expected",
                    message=f"got a binary frame of {num_bytes:,} bytes; "
                    "clients send JSON text frames only",
                )
            )
        return self._take_actions()

    def engine_event(self, event: Event | EncodedAudio, now_ns: int) -> list[Action]:
        """An event of this session's slot, in order. `FramePcm` comes as `EncodedAudio` instead,
        and `SlotClosed` is the server's business. Stale events have no effect."""
        if not self.is_closed and event.slot == self.slot:
            self._handle(event, now_ns)
        return self._take_actions()

    def shut_down(self, reason: str, now_ns: int) -> list[Action]:
        """No new turns; close when those that are open have ended. The client may still commit or
        cancel them. The server closes the socket itself when the announced deadline has passed."""
        if self.state in (SessionState.AWAITING_START, SessionState.OPEN):
            self._send(SessionClosing(reason=reason, deadline_ms=self._limits.drain_deadline_ms))
            self._begin_closing(reason)
        return self._take_actions()

    def fail(self, error: PlosiveError, now_ns: int) -> list[Action]:
        """The session cannot go on (the engine refused a command, the client is too slow, ...)."""
        if not self.is_closed:
            self._fail(error)
        return self._take_actions()

    def disconnected(self, now_ns: int) -> list[Action]:
        """The socket is gone; afterwards nothing has any effect. Harmless after `Close`."""
        if not self.is_closed:
            self._release_slot()
        return self._take_actions()

    # ------------------------------------------------------------------ client messages

    def _receive(self, message: ClientMessage, now_ns: int) -> None:
        if self.state is SessionState.AWAITING_START:
            self._receive_first(message)
            return
        match message:
            case SessionStart():
                raise ProtocolError(
                    "already_started", "the session is open; use session.update to change it"
                )
            case SessionUpdate():
                self._update(message)
            case TextAppend():
                self._append(message)
            case TextFlush():
                self._flush(message.turn_id)
            case TurnCommit():
                self._commit(message.turn_id, now_ns)
            case TurnCancel():
                self._cancel(message, now_ns)
            case SessionClose():
                self._cancel_uncommitted(now_ns)
                self._begin_closing("session_closed")

    def _receive_first(self, message: ClientMessage) -> None:
        if isinstance(message, SessionStart):
            self._start(message)
        elif isinstance(message, SessionClose):
            self._begin_closing("session_closed")
        else:
            raise ProtocolError(
                "not_started", f"got {message.type} before session.start", param="type"
            )

    def _start(self, message: SessionStart) -> None:
        settings = self._resolver.start(message)
        self._warn_of_prompt(message.prompt)
        self._settings = settings
        self._format = self._describe_format(message.format)
        self.state = SessionState.OPEN
        self._actions.append(OpenEncoder(self.slot, message.format))
        self._open_slot(settings)

    def _update(self, message: SessionUpdate) -> None:
        self._check_not_closing()
        assert self._settings is not None
        self._settings = new = self._resolver.update(self._settings, message)
        self._warn_of_prompt(message.prompt)
        if self._lease.is_opened_with(new):
            if not self._lease.is_awaiting_ready:
                self._send_ready(prefill_ms=0.0, cached=True)
        elif not self._turns:
            self._open_slot(new)

    def _warn_of_prompt(self, prompt: str | None) -> None:
        if prompt and not self._info.has_prompt:
            message = f"{self._info.model_name} takes no prompt"
            self._send(Warn(code="prompt_ignored", message=message, param="prompt"))

    # ------------------------------------------------------------------ turns: text in

    def _append(self, message: TextAppend) -> None:
        num_chars = len(message.text)
        if num_chars > self._limits.max_text_chars:
            limit = self._limits.max_text_chars
            return self._refuse(_too_long("text_too_long", message, num_chars, limit))
        turn = self._turns.find(message.turn_id)
        num_turn_chars = num_chars + (turn.num_chars if turn else 0)
        if num_turn_chars > self._limits.max_turn_chars:
            limit = self._limits.max_turn_chars
            return self._refuse(_too_long("turn_too_long", message, num_turn_chars, limit))
        if turn is not None and turn.is_committed:
            return self._refuse(_committed(turn.turn_id))
        turn = turn or self._open_turn(message.turn_id)
        turn.append(message.text)
        return self._advance()

    def _refuse(self, error: SessionError) -> None:
        """The message; its turn stays as it is."""
        self._send(_error_message(error, keeps_turn=True))

    def _flush(self, turn_id: int) -> None:
        turn = self._turns.find(turn_id)
        if turn is not None and not turn.is_committed:
            turn.flush()
            self._advance()

    def _commit(self, turn_id: int, now_ns: int) -> None:
        turn = self._turns.find(turn_id)
        if turn is None and self._turns.is_old(turn_id):
            return
        turn = turn or self._open_turn(turn_id)
        turn.commit(now_ns)
        self._advance()

    def _open_turn(self, turn_id: int) -> Turn:
        self._check_not_closing(turn_id)
        return self._turns.open(turn_id, self._make_turn)

    def _make_turn(self, turn_id: int) -> Turn:
        assert self._settings is not None
        return Turn(turn_id, self._settings, self._info, self._limits, self._rate)

    def _check_not_closing(self, turn_id: int | None = None) -> None:
        if self.state is SessionState.CLOSING:
            message = "the session is closing; open a new one"
            raise SessionError("session_closing", message, turn_id=turn_id)

    # ------------------------------------------------------------------ turns: towards the engine

    def _advance(self) -> None:
        """Give the front turn to the engine, or settle what waited for the last one to end."""
        front = self._turns.front
        if front is not None:
            if not front.is_in_engine and not self._lease.is_opened_with(front.settings):
                self._open_slot(front.settings)
            self._lease.submit_text(front)
        elif self.state is SessionState.CLOSING:
            self._close(CLOSE_CODE.get(self._close_reason, 1001), self._close_reason)
        elif self._settings is not None and not self._lease.is_opened_with(self._settings):
            self._open_slot(self._settings)

    def _open_slot(self, settings: Settings) -> None:
        command = settings.open_slot(self.slot, self._info, self._make_seed())
        self._lease.open(settings, command)

    # ------------------------------------------------------------------ turns: their end

    def _cancel(self, message: TurnCancel, now_ns: int) -> None:
        turn = self._turns.find(message.turn_id) or self._turns.find_playing(
            message.turn_id, now_ns
        )
        if turn is None:
            self._send(
                Warn(
                    code="unknown_turn",
                    message=f"turn {message.turn_id} is not open; nothing was cancelled",
                    turn_id=message.turn_id,
                )
            )
            return
        self._stop(turn, turn.played_ms(message.played_ms, now_ns))
        self._advance()

    def _stop(self, turn: Turn, played_ms: float) -> None:
        self._turns.remove(turn)
        self._lease.roll_back(turn, played_ms)
        if turn.has_audio:
            self._actions.append(Drop(turn.turn_id))
        self._send(turn.cancelled_message(played_ms))

    def _cancel_uncommitted(self, now_ns: int) -> None:
        for turn in self._turns:
            if not turn.is_committed:
                self._stop(turn, turn.played_ms(None, now_ns))

    # ------------------------------------------------------------------ engine events

    def _handle(self, event: Event | EncodedAudio, now_ns: int) -> None:
        match event:
            case EncodedAudio():
                self._take_audio(event, now_ns)
            case SlotReady():
                if self._lease.ready():
                    self._send_ready(event.prefill_ms, event.cached)
            case SegmentEnd():
                turn = self._turns.find(event.turn_id)
                if turn is not None:
                    turn.ledger.end_segment(event.segment, event.num_frames)
            case TurnEnd():
                turn = self._turns.find(event.turn_id)
                if turn is not None:
                    turn.engine_end = event
                    self._finish_if_over(turn, now_ns)
            case EngineWarning():
                self._send(Warn(code=event.code, message=event.message, turn_id=event.turn_id))
            case SlotFailed():
                self._fail(EngineError("engine_error", event.message))

    def _take_audio(self, audio: EncodedAudio, now_ns: int) -> None:
        turn = self._turns.find(audio.turn_id)
        if turn is None:
            return
        assert self._format is not None
        if audio.packets and not turn.has_audio:
            self._send(TurnStarted(turn_id=turn.turn_id))
        playing_until_ns = self._turns.playing_until_ns(now_ns)
        packets = turn.take_audio(audio, self._format, playing_until_ns, now_ns)
        if packets:
            self._actions.append(SendAudio(turn.turn_id, packets))
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
            self._send(TurnStarted(turn_id=turn.turn_id))
        metrics = turn.metrics()
        if not metrics.num_frames:
            message = "the turn gave no audio: its text has nothing that can be spoken"
            self._send(Warn(code="nothing_to_speak", message=message, turn_id=turn.turn_id))
        self._send(TurnDone(turn_id=turn.turn_id, metrics=metrics))
        self._advance()

    def _send_ready(self, prefill_ms: float, cached: bool) -> None:
        assert self._format is not None
        settings = self._lease.settings
        self._send(
            SessionReady(
                session_id=self.session_id,
                model=self._info.model_name,
                voice=settings.voice.name,
                format=self._format,
                prefill_ms=prefill_ms,
                cached=cached,
                frame_rate_hz=self._info.frame_rate_hz,
                max_lead_ms=settings.max_lead_ms,
            )
        )

    # ------------------------------------------------------------------ the end of the session

    def _begin_closing(self, reason: str) -> None:
        if self.state is not SessionState.CLOSING:
            self.state, self._close_reason = SessionState.CLOSING, reason
        self._advance()

    def _fail(self, error: PlosiveError) -> None:
        for turn in self._turns:
            self._send(Error(code=error.code, message=error.message, turn_id=turn.turn_id))
        self._send(_error_message(error, is_fatal=True))
        self._close(CLOSE_CODE.get(error.code, 1011), error.code)

    def _close(self, code: int, reason: str) -> None:
        self._release_slot()
        self._actions.append(Close(code, reason))

    def _release_slot(self) -> None:
        self.state = SessionState.CLOSED
        self._turns.clear()
        self._lease.close()

    # ------------------------------------------------------------------ actions

    def _send(self, message: ServerMessage) -> None:
        self._actions.append(Send(message))

    def _take_actions(self) -> list[Action]:
        actions = self._actions.copy()
        self._actions.clear()
        return actions


def _error_message(
    error: PlosiveError, *, is_fatal: bool = False, keeps_turn: bool = False
) -> Error:
    return Error(
        code=error.code,
        message=error.message,
        param=error.param,
        fatal=error.fatal or is_fatal,
        turn_id=error.turn_id,
        keeps_turn=keeps_turn,
    )


def _committed(turn_id: int) -> SessionError:
    why = f"turn {turn_id} is committed; send more text in a new turn"
    return SessionError("turn_committed", why, param="turn_id", turn_id=turn_id)


def _too_long(code: str, message: TextAppend, num_chars: int, max_chars: int) -> SessionError:
    return SessionError(
        code,
        f"turn {message.turn_id}: got {num_chars:,} characters, the limit is {max_chars:,}; "
        "nothing of this message was taken",
        param="text",
        turn_id=message.turn_id,
    )
