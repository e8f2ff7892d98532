"""One connection's logic, sans I/O: frames and engine events in, actions out.

It knows no socket, no thread, no clock and no tensor. `now_ns` is `time.perf_counter_ns` of the
moment the input arrived, the clock of the engine's stamps.

    AWAITING_START --session.start--> OPEN --session.close, shut_down--> CLOSING --> CLOSED
    any state --disconnected, fail, SlotFailed--> CLOSED

Turns are spoken in the order of their ids (`realtime.session.conversation`). Each ends in exactly one of
`turn.done`, `turn.cancelled` or an `error` with its `turn_id` (which also refuses a turn) that does not
say `keeps_turn`. A turn that is done can still be cancelled while it plays; that is answered by
`turn.cancelled`.

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
    more text and prompt a second than permitted error: text_rate_exceeded, with retry_after_ms
    too many turns waiting                       error: too_many_turns
    new turn or update while closing             error: session_closing
    cancel of an unknown or finished turn        warning: unknown_turn
    a prompt the model cannot use                warning: prompt_ignored
    a turn without anything to say               warning: nothing_to_speak, then turn.done
"""

from collections.abc import Callable
from enum import Enum, auto

from realtime.errors import CLOSE_CODE, EngineError, PlosiveError, ProtocolError
from realtime.pingpong.api import EngineInfo
from realtime.pingpong.messages import (
    EngineWarning,
    Event,
    SegmentEnd,
    SlotFailed,
    SlotReady,
    SlotRef,
    TurnBegin,
    TurnEnd,
    VoicePrompt,
)
from realtime.session.actions import Action, Close, EncodedAudio, OpenEncoder, Send
from realtime.session.conversation import Conversation, error_message
from realtime.session.limits import SessionLimits
from realtime.session.settings import SettingsResolver
from realtime.session.text_rate import TextAccount
from realtime.wire import (
    AudioFormat,
    ClientMessage,
    EffectiveFormat,
    Error,
    ServerMessage,
    SessionClose,
    SessionClosing,
    SessionStart,
    SessionUpdate,
    TextAppend,
    TextFlush,
    TurnCancel,
    TurnCommit,
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
    return EffectiveFormat(codec=fmt.codec, sample_rate=fmt.sample_rate, lead_in_ms=fmt.lead_in_ms)


class Session:
    """The only user of its slot. Apply the actions of each call, in order, before the next call.

    Args:
        slot: as acquired for this connection; every generation after it is counted here.
        find_voice: raises VoiceError for a name it does not know.
        make_seed: a seed for streams whose client gave none.
        describe_format: the format that will really flow, with the encoder's pre-skip.
        client_text: the account of whoever is at the other end, over all its sessions.
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
        client_text: TextAccount | None = None,
    ) -> None:
        self.session_id = session_id
        self.state = SessionState.AWAITING_START
        self._info = info
        self._limits = limits
        self._resolver = SettingsResolver(info, limits, find_voice)
        self._describe_format = describe_format
        self._close_reason = "session_closed"
        self._actions: list[Action] = []
        self._talk = Conversation(
            session_id, slot, info, limits, make_seed, self._actions, client_text
        )

    @property
    def slot(self) -> SlotRef:
        """With the current generation."""
        return self._talk.slot

    @property
    def is_started(self) -> bool:
        return self.state is not SessionState.AWAITING_START

    @property
    def is_closed(self) -> bool:
        return self.state is SessionState.CLOSED

    @property
    def num_turns(self) -> int:
        """Spoken or waiting to be."""
        return self._talk.num_turns

    @property
    def auto_flush_ns(self) -> int | None:
        """When to call `auto_flush`, unless a text frame comes first; None: not at all."""
        return None if self.is_closed else self._talk.auto_flush_ns

    # ------------------------------------------------------------------ inputs

    def receive_text(self, frame: str, now_ns: int) -> list[Action]:
        """A text frame from the client. Never raises: what is wrong with it becomes an `error`."""
        if not self.is_closed:
            try:
                self._receive(decode_client(frame), now_ns)
            except PlosiveError as error:
                keeps_turn = isinstance(error, ProtocolError) and error.turn_id is not None
                self._send(error_message(error, keeps_turn=keeps_turn))
        return self._take_actions()

    def receive_binary(self, num_bytes: int) -> list[Action]:
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

    def auto_flush(self, now_ns: int) -> list[Action]:
        """A whole sentence that no text has followed for a while is spoken, as if it were flushed."""
        if not self.is_closed:
            self._talk.auto_flush(now_ns)
        return self._take_actions()

    def engine_event(self, event: Event | EncodedAudio, now_ns: int) -> list[Action]:
        """An event of this session's slot, in order. `FramePcm` comes as `EncodedAudio` instead,
        and `SlotClosed` is the server's business. Stale events have no effect."""
        if not self.is_closed and event.slot == self.slot:
            self._handle(event, now_ns)
        return self._take_actions()

    def audio_written(self, turn_id: int, now_ns: int) -> None:
        """The socket has taken the turn's first packet."""
        if not self.is_closed:
            self._talk.audio_written(turn_id, now_ns)

    def shut_down(self, reason: str) -> list[Action]:
        """No new turns; close when those that are open have ended. The client may still commit or
        cancel them. The server closes the socket itself when the announced deadline has passed."""
        if self.state in (SessionState.AWAITING_START, SessionState.OPEN):
            self._send(SessionClosing(reason=reason, deadline_ms=self._limits.drain_deadline_ms))
            self._begin_closing(reason)
        return self._take_actions()

    def fail(self, error: PlosiveError) -> list[Action]:
        """The session cannot go on (the engine refused a command, the client is too slow, ...)."""
        if not self.is_closed:
            self._fail(error)
        return self._take_actions()

    def disconnected(self) -> list[Action]:
        """The socket is gone; afterwards nothing has any effect. Harmless after `Close`."""
        if not self.is_closed:
            self._release_slot()
        return self._take_actions()

    # ------------------------------------------------------------------ client messages

    def _receive(self, message: ClientMessage, now_ns: int) -> None:
        if self.state is SessionState.AWAITING_START:
            self._receive_first(message, now_ns)
            return
        match message:
            case SessionStart():
                raise ProtocolError(
                    "already_started", "the session is open; use session.update to change it"
                )
            case SessionUpdate():
                self._update(message, now_ns)
            case TextAppend():
                self._talk.append(message, now_ns)
            case TextFlush():
                self._talk.flush(message.turn_id, now_ns)
            case TurnCommit():
                self._talk.commit(message.turn_id, now_ns)
            case TurnCancel():
                self._talk.cancel(message, now_ns)
            case SessionClose():
                self._begin_closing("session_closed")
                self._talk.cancel_uncommitted(now_ns)

    def _receive_first(self, message: ClientMessage, now_ns: int) -> None:
        if isinstance(message, SessionStart):
            self._start(message, now_ns)
        elif isinstance(message, SessionClose):
            self._begin_closing("session_closed")
        else:
            raise ProtocolError(
                "not_started", f"got {message.type} before session.start", param="type"
            )

    def _start(self, message: SessionStart, now_ns: int) -> None:
        settings = self._resolver.start(message)
        self._take_prompt(message.prompt, now_ns)
        self.state = SessionState.OPEN
        self._actions.append(OpenEncoder(self.slot, message.format))
        self._talk.open(settings, self._describe_format(message.format))

    def _update(self, message: SessionUpdate, now_ns: int) -> None:
        self._talk.check_takes_turns()
        settings = self._resolver.update(self._talk.settings, message)
        self._take_prompt(message.prompt, now_ns)
        self._talk.update(settings)

    def _take_prompt(self, prompt: str | None, now_ns: int) -> None:
        """Charged like text, unless the model ignores it. Raises CapacityError."""
        if prompt and self._info.has_prompt:
            self._talk.charge_prompt(prompt, now_ns)
        elif prompt:
            message = f"{self._info.model_name} takes no prompt"
            self._send(Warn(code="prompt_ignored", message=message, param="prompt"))

    # ------------------------------------------------------------------ engine events

    def _handle(self, event: Event | EncodedAudio, now_ns: int) -> None:
        match event:
            case EncodedAudio():
                self._talk.take_audio(event, now_ns)
            case SlotReady():
                self._talk.ready(event)
            case TurnBegin():
                self._talk.begin(event)
            case SegmentEnd():
                self._talk.end_segment(event)
            case TurnEnd():
                self._talk.end(event, now_ns)
            case EngineWarning():
                self._send(Warn(code=event.code, message=event.message, turn_id=event.turn_id))
            case SlotFailed():
                self._fail(EngineError("engine_error", event.message))

    # ------------------------------------------------------------------ the end of the session

    def _begin_closing(self, reason: str) -> None:
        if self.state is not SessionState.CLOSING:
            self.state, self._close_reason = SessionState.CLOSING, reason
            self._talk.takes_turns = False

    def _fail(self, error: PlosiveError) -> None:
        self._talk.fail_turns(error)
        self._send(error_message(error, is_fatal=True))
        self._close(CLOSE_CODE.get(error.code, 1011), error.code)

    def _close(self, code: int, reason: str) -> None:
        self._release_slot()
        self._actions.append(Close(code, reason))

    def _release_slot(self) -> None:
        self.state = SessionState.CLOSED
        self._talk.close()

    # ------------------------------------------------------------------ actions

    def _send(self, message: ServerMessage) -> None:
        self._actions.append(Send(message))

    def _take_actions(self) -> list[Action]:
        """Of this input; a session that waited for its last turn closes with its end."""
        if self.state is SessionState.CLOSING and not self._talk.num_turns:
            self._close(CLOSE_CODE.get(self._close_reason, 1001), self._close_reason)
        actions = self._actions.copy()
        self._actions.clear()
        return actions
