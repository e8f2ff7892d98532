"""The client side of `plosive.v1` without I/O: frames in, routed events out; calls in, frames out.

Everything that decides is here: turn ids, what belongs to which turn, what is late and dropped,
which error ends what, and that every turn ends exactly once. It knows no socket, no task and no
clock, so that an asynchronous and a synchronous client can share it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from realtime import wire
from realtime.errors import (
    CapacityError,
    ConnectionLost,
    EngineError,
    PlosiveError,
    ProtocolError,
    SessionError,
    VoiceError,
)

TurnEvent = (
    wire.TurnStarted
    | wire.AudioPacket
    | wire.TurnText
    | wire.TurnDone
    | wire.TurnCancelled
    | wire.Warn
    | PlosiveError
)
SessionEvent = wire.SessionReady | wire.SessionClosing | wire.Warn | PlosiveError

MAX_DONE_TURNS = 16  # kept after their end, because what still plays can still be cancelled

_ERROR_TYPES: dict[str, type[PlosiveError]] = {
    "invalid_json": ProtocolError,
    "invalid_message": ProtocolError,
    "invalid_audio": ProtocolError,
    "unknown_type": ProtocolError,
    "message_too_large": ProtocolError,
    "binary_not_expected": ProtocolError,
    "not_started": ProtocolError,
    "already_started": ProtocolError,
    "voice_not_found": VoiceError,
    "voice_exists": VoiceError,
    "voice_protected": VoiceError,
    "invalid_voice": VoiceError,
    "invalid_clip": VoiceError,
    "clip_too_large": VoiceError,
    "internal_error": EngineError,
}


class ForTurn(NamedTuple):
    turn_id: int
    event: TurnEvent


class ForSession(NamedTuple):
    event: SessionEvent


Routed = ForTurn | ForSession


@dataclass
class _Turn:
    """What the client knows of a turn that the server may still speak of."""

    is_committed: bool = False
    is_cancelled: bool = False  # cancel sent: its audio is stale from here on
    played_ms: float | None = None  # as given with the cancel
    is_done: bool = False  # all its audio is here; only a cancel can still change its account
    num_packets: int = 0
    text: list[str] = field(default_factory=list)
    num_chars: int = 0  # of the text
    spoken: list[wire.TurnText] = field(default_factory=list)


class ClientProtocol:
    """One connection's logic.

    After the constructor, send `start_frame`; give every received frame to `receive` and then send
    what `take_replies` gives; call `connection_lost` once when the socket is closed.
    """

    def __init__(self, start: wire.SessionStart) -> None:
        self.start_frame = wire.encode(start)
        self.num_late_packets = 0  # of cancelled turns, dropped
        self._turns: dict[int, _Turn] = {}
        self._last_turn_id = 0
        self._replies: list[str] = []
        self._closing: wire.SessionClosing | None = None
        self._failure: Callable[[], PlosiveError] | None = None

    # ------------------------------------------------------------------------ calls -> frames

    def open_turn(self) -> int:
        """A new turn's id, to be called just before its first frame: a server takes the turns in
        the order of their ids, and refuses the text of an id that it has passed."""
        self.check_open()
        self._last_turn_id += 1
        self._turns[self._last_turn_id] = _Turn()
        return self._last_turn_id

    def append(self, turn_id: int, text: str) -> list[str]:
        """Frames that carry `text` verbatim, cut to the size that one message may have.

        Raises:
            SessionError: `turn_closed`; or `turn_too_long`, which leaves the turn as it is.
        """
        turn = self._open_for_text(turn_id)
        if not text:
            return []
        if turn.num_chars + len(text) > wire.MAX_TURN_CHARS:
            raise _too_long(turn_id, turn.num_chars, len(text))
        turn.text.append(text)
        turn.num_chars += len(text)
        return [
            wire.encode(wire.TextAppend(turn_id=turn_id, text=text[i : i + wire.MAX_TEXT_CHARS]))
            for i in range(0, len(text), wire.MAX_TEXT_CHARS)
        ]

    def flush(self, turn_id: int) -> list[str]:
        self._open_for_text(turn_id)
        return [wire.encode(wire.TextFlush(turn_id=turn_id))]

    def commit(self, turn_id: int) -> list[str]:
        self._open_for_text(turn_id).is_committed = True
        return [wire.encode(wire.TurnCommit(turn_id=turn_id))]

    def cancel(self, turn_id: int, played_ms: float | None) -> list[str]:
        """From here on no audio of the turn comes out of `receive`. Sends nothing for a turn that
        failed or was cancelled already, or of which the server has heard nothing or hears no more."""
        turn = self._turns.get(turn_id)
        if turn is None or turn.is_cancelled:
            return []
        turn.is_cancelled, turn.played_ms = True, played_ms
        if self._failure is not None or (not turn.text and not turn.is_committed):
            return []
        return [wire.encode(wire.TurnCancel(turn_id=turn_id, played_ms=played_ms))]

    def give_up(self, turn_id: int) -> None:
        """Cancel the turn with the next replies, and hear no more of it: it has failed here."""
        self._replies += self.cancel(turn_id, None)
        self._turns.pop(turn_id, None)

    def account(self, turn_id: int) -> wire.TurnCancelled:
        """The client's own account of a cancelled turn, for when the server has none."""
        turn = self._turns.pop(turn_id, None) or _Turn()
        text, played_ms = "".join(turn.text), turn.played_ms
        heard = [mark for mark in turn.spoken if played_ms is None or mark.audio_ms <= played_ms]
        spoken = heard[-1].text if heard else ""
        if not text.startswith(spoken):  # a quotation that differs cannot be taken off the text
            spoken = ""
        if played_ms is None:
            played_ms = heard[-1].audio_ms if heard else 0.0
        return wire.TurnCancelled(
            turn_id=turn_id,
            spoken_text=spoken,
            remaining_text=text[len(spoken) :],
            played_ms=played_ms,
        )

    def check_open(self) -> None:
        """Raise what ended the session, if something did."""
        if self._failure is not None:
            raise self._failure()

    def _open_for_text(self, turn_id: int) -> _Turn:
        self.check_open()
        turn = self._turns.get(turn_id)
        if turn is None or turn.is_cancelled or turn.is_committed:
            state = "over" if turn is None else "cancelled" if turn.is_cancelled else "committed"
            raise SessionError(
                "turn_closed",
                f"turn {turn_id} is {state} and takes no more text; open another with turn()",
                turn_id=turn_id,
            )
        return turn

    # ------------------------------------------------------------------------ frames -> events

    def receive(self, frame: str | bytes) -> list[Routed]:
        """What one frame means, and for whom. Unknown message types are a newer server's and are
        ignored; a frame that cannot be understood ends the session (`has_failed`)."""
        if self._failure is not None:
            return []
        try:
            if isinstance(frame, str):
                return self._message(wire.decode_server(frame))
            return self._audio(wire.unpack_audio(bytes(frame)))
        except ProtocolError as error:
            if error.code == "unknown_type":
                return []
            code, message = error.code, f"the server sent what cannot be read: {error.message}"
            return self._fail(lambda: ProtocolError(code, message, fatal=True))

    def take_replies(self) -> list[str]:
        """Frames to send because of what was received."""
        replies, self._replies = self._replies, []
        return replies

    def connection_lost(self, close_code: int | None, reason: str = "") -> list[Routed]:
        """The socket is closed: whatever is not over now never will be."""
        if self._failure is not None:
            return []
        why = f"close code {close_code}" if close_code is not None else "no close frame"
        if reason:
            why += f", {reason!r}"
        if self._closing is not None:
            why += f"; the server announced: {self._closing.reason}"
        message = f"the connection closed before all that was asked for had come ({why})"
        return self._fail(lambda: ConnectionLost(message, close_code=close_code))

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    def _message(self, message: wire.ServerMessage) -> list[Routed]:
        match message:
            case wire.Error():
                return self._error(message)
            case wire.Warn(turn_id=int(turn_id)):
                return self._turn_warning(message, turn_id)
            case wire.TurnStarted() | wire.TurnText() | wire.TurnDone() | wire.TurnCancelled():
                return self._turn_message(message)
            case wire.SessionClosing():
                self._closing = message
        return [ForSession(message)]

    def _turn_warning(self, message: wire.Warn, turn_id: int) -> list[Routed]:
        turn = self._turns.get(turn_id)
        if turn is None:
            return []
        if message.code == "unknown_turn" and turn.is_cancelled:
            return [ForTurn(turn_id, self.account(turn_id))]
        return [ForTurn(turn_id, message)]

    def _turn_message(
        self, message: wire.TurnStarted | wire.TurnText | wire.TurnDone | wire.TurnCancelled
    ) -> list[Routed]:
        turn = self._turns.get(message.turn_id)
        if turn is None or (turn.is_done and not isinstance(message, wire.TurnCancelled)):
            return []
        match message:
            case wire.TurnCancelled():
                del self._turns[message.turn_id]
            case wire.TurnText() if not turn.is_cancelled:
                turn.spoken.append(message)
            case wire.TurnDone():
                turn.is_done = True
                expected = message.metrics.num_packets
                if turn.num_packets != expected and not turn.is_cancelled:
                    return self._audio_gap(message.turn_id, expected, turn.num_packets)
                self._forget_oldest_done()
            case _ if turn.is_cancelled:
                return []
        return [ForTurn(message.turn_id, message)]

    def _audio(self, packet: wire.AudioPacket) -> list[Routed]:
        turn = self._turns.get(packet.turn_id)
        if turn is None or turn.is_cancelled or turn.is_done:
            self.num_late_packets += 1
            return []
        if packet.seq != turn.num_packets:
            return self._audio_gap(packet.turn_id, turn.num_packets, packet.seq)
        turn.num_packets += 1
        return [ForTurn(packet.turn_id, packet)]

    def _audio_gap(self, turn_id: int, expected: int, got: int) -> list[Routed]:
        self.give_up(turn_id)
        message = f"audio of turn {turn_id} is incomplete: expected packet {expected}, got {got}"
        return [ForTurn(turn_id, ProtocolError("audio_gap", message, turn_id=turn_id))]

    def _forget_oldest_done(self) -> None:
        done = [turn_id for turn_id, turn in self._turns.items() if turn.is_done]
        if len(done) > MAX_DONE_TURNS:
            del self._turns[done[0]]

    def _error(self, message: wire.Error) -> list[Routed]:
        if message.fatal:
            return self._fail(lambda: error_from(message))
        if message.turn_id is None:
            return [ForSession(error_from(message))]
        if message.turn_id not in self._turns:
            return []
        self.give_up(message.turn_id)  # the server may have kept it open
        return [ForTurn(message.turn_id, error_from(message))]

    def _fail(self, make_error: Callable[[], PlosiveError]) -> list[Routed]:
        """End the session and every turn in it, each with an exception of its own."""
        self._failure = make_error
        ended = {
            turn_id: turn
            for turn_id, turn in self._turns.items()
            if turn.is_cancelled or not turn.is_done
        }
        for turn_id in ended:
            del self._turns[turn_id]
        failed = [
            ForTurn(turn_id, _of_turn(make_error(), turn_id, turn))
            for turn_id, turn in ended.items()
        ]
        return [*failed, ForSession(make_error())]


def _too_long(turn_id: int, num_before: int, num_chars: int) -> SessionError:
    behind = f" behind {num_before:,}" if num_before else ""
    return SessionError(
        "turn_too_long",
        f"turn {turn_id}: got {num_chars:,} characters{behind}, the limit of a turn is "
        f"{wire.MAX_TURN_CHARS:,}; none of them was sent. Say long text in several turns.",
        param="text",
        turn_id=turn_id,
    )


def _of_turn(error: PlosiveError, turn_id: int, turn: _Turn) -> PlosiveError:
    """A lost connection says how far each turn had come."""
    if isinstance(error, ConnectionLost):
        spoken = f", which say {turn.spoken[-1].text!r}" if turn.spoken else ""
        audio_ms = turn.num_packets * wire.PACKET_MS
        error.message += (
            f"; of turn {turn_id}, {turn.num_packets} packets ({audio_ms} ms) had come{spoken}"
        )
        error.args = (error.message,)
        error.turn_id = turn_id
    return error


def error_from(message: wire.Error) -> PlosiveError:
    """The typed exception of a server's `error` message.

    Example:
        >>> error_from(wire.Error(code="voice_not_found", message="no voice 'x'"))
        VoiceError("no voice 'x'")
    """
    if message.retry_after_ms is not None:
        return CapacityError(
            message.message,
            code=message.code,
            param=message.param,
            turn_id=message.turn_id,
            retry_after_s=message.retry_after_ms / 1000.0,
        )
    kind = _ERROR_TYPES.get(message.code)
    if kind is None:
        kind = EngineError if message.code.startswith("engine_") else SessionError
    return kind(
        message.code,
        message.message,
        param=message.param,
        turn_id=message.turn_id,
        fatal=message.fatal,
    )
