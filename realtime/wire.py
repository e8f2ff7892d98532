"""The native protocol `plosive.v1`: every message, its fields and limits, and the binary audio header.

Text frames are JSON control messages, binary frames are audio. This file is the one definition of
both; servers and clients import it. It knows no socket, no session and no tensor.
"""

import json
import struct
from enum import IntEnum, IntFlag
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from realtime.errors import ProtocolError, fault

SUBPROTOCOL = "plosive.v1"
PATH = "/v1/realtime"

MAX_TEXT_CHARS = 20_000  # of one text.append
MAX_TURN_CHARS = 60_000  # of one turn
MAX_PROMPT_CHARS = 4_000
MAX_MESSAGE_BYTES = 256 * 1024  # of one JSON frame
PACKET_MS = 20
OPUS_SAMPLE_RATES_HZ = (24_000, 48_000)
PCM_SAMPLE_RATES_HZ = (8_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000)

TurnId = Annotated[int, Field(ge=0, le=0xFFFF_FFFF, strict=True)]


class _Message(BaseModel):
    """Frozen; unknown fields are ignored, so that either side may be newer than the other."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class AudioFormat(_Message):
    """What the binary frames carry: 20 ms Opus packets, or 20 ms of headerless PCM."""

    codec: Literal["opus", "pcm_s16le"] = "opus"
    sample_rate: int = 24_000
    # Opus only, bits per second: a target. VBR spends 1.2 times as much on speech, on average, and up
    # to 1.8 times on steady tones of many harmonics (figures: `realtime/opus.py`).
    bitrate: int = Field(default=64_000, ge=6_000, le=256_000)
    # Silence before each turn's audio, and part of it, for receivers that swallow a beginning.
    lead_in_ms: int = Field(default=0, ge=0, le=2_000, multiple_of=PACKET_MS)

    @model_validator(mode="after")
    def _rate_fits_codec(self) -> "AudioFormat":
        valid = OPUS_SAMPLE_RATES_HZ if self.codec == "opus" else PCM_SAMPLE_RATES_HZ
        if self.sample_rate not in valid:
            raise ValueError(
                f"sample_rate {self.sample_rate} does not exist for {self.codec}; use one of "
                + ", ".join(map(str, valid))
            )
        return self


class Sampling(_Message):
    """Sampling of one stream; `None` means the model's own default. Same seed, same codes."""

    temperature: float | None = Field(default=None, ge=0.0, le=2.0)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    top_k: int | None = Field(default=None, ge=1, le=128)
    seed: int | None = Field(default=None, ge=0, le=2**63 - 1)


# ---------------------------------------------------------------------------- client -> server


class SessionStart(_Message):
    """First message: opens the session; the server prefills voice and prompt at once."""

    type: Literal["session.start"] = "session.start"
    voice: str | None = Field(default=None, max_length=256)  # None: the server's default voice
    prompt: str = Field(default="", max_length=MAX_PROMPT_CHARS)  # style, where the model has one
    format: AudioFormat = AudioFormat()
    sampling: Sampling = Sampling()
    max_lead_ms: int | None = Field(default=None, ge=40, le=600_000)


class SessionUpdate(_Message):
    """Changes what turns opened after it use; fields left out stay, `sampling` is replaced whole.
    Answered by `session.ready`."""

    type: Literal["session.update"] = "session.update"
    voice: str | None = Field(default=None, max_length=256)
    prompt: str | None = Field(default=None, max_length=MAX_PROMPT_CHARS)
    sampling: Sampling | None = None
    max_lead_ms: int | None = Field(default=None, ge=40, le=600_000)


class TextAppend(_Message):
    """Text of a turn, in pieces of any size, concatenated verbatim. Opens the turn if it is new."""

    type: Literal["text.append"] = "text.append"
    turn_id: TurnId
    text: str


class TextFlush(_Message):
    """Speak what has arrived although no clause has ended; the turn stays open. A sentence that no
    text follows for half a second (the server's `auto_flush_ms`) is spoken without it."""

    type: Literal["text.flush"] = "text.flush"
    turn_id: TurnId


class TurnCommit(_Message):
    """No more text comes for this turn."""

    type: Literal["turn.commit"] = "turn.commit"
    turn_id: TurnId


class TurnCancel(_Message):
    """Barge-in: stop now. `played_ms` is the client's playback clock within the turn."""

    type: Literal["turn.cancel"] = "turn.cancel"
    turn_id: TurnId
    played_ms: float | None = Field(default=None, ge=0.0)  # None: the server's own estimate


class SessionClose(_Message):
    """Finish what is committed, then close."""

    type: Literal["session.close"] = "session.close"


# ---------------------------------------------------------------------------- server -> client


class EffectiveFormat(_Message):
    """The format that really flows, and what a decoder needs to be sample-exact."""

    codec: Literal["opus", "pcm_s16le"]
    sample_rate: int = Field(ge=8_000, le=192_000)
    channels: int = Field(default=1, ge=1, le=8)
    packet_ms: int = Field(default=PACKET_MS, ge=1, le=120)
    # Of every turn, to be dropped after decoding.
    pre_skip_samples: int = Field(default=0, ge=0, le=192_000)
    lead_in_ms: int = Field(default=0, ge=0, le=2_000)


class SessionReady(_Message):
    """Voice and prompt are prefilled; text may have been sent before this."""

    type: Literal["session.ready"] = "session.ready"
    session_id: str
    model: str
    voice: str
    format: EffectiveFormat
    prefill_ms: float
    cached: bool
    frame_rate_hz: float
    max_lead_ms: int


class TurnStarted(_Message):
    """The first packet comes next. What is known by then of `TurnMetrics.timeline_ms`, but in
    milliseconds from the turn's first text, since its commit may still be to come."""

    type: Literal["turn.started"] = "turn.started"
    turn_id: TurnId
    timeline_ms: dict[str, float] = {}


class TurnText(_Message):
    """Sent with the audio: `text` is what has been spoken by the end of the audio sent so far."""

    type: Literal["turn.text"] = "turn.text"
    turn_id: TurnId
    text: str
    audio_ms: float


class TurnMetrics(_Message):
    """Server-side account of one turn. Times are milliseconds from the commit (0 = commit parsed),
    negative for what happened before it; of a turn cancelled before its commit, from its first text.
    """

    num_samples: int  # at the format's rate, lead-in included, without pre-skip and padding
    num_packets: int
    num_frames: int
    audio_ms: float
    num_segments: int
    server_ttfa_ms: float | None = None  # commit -> first packet handed to the socket
    # first_text, prefill_done, first_step, first_pcm, encoded, first_packet (given to the socket or,
    # where that is behind, to what waits for it), written (the socket has taken it)
    timeline_ms: dict[str, float] = {}
    num_underruns: int = 0  # by the server's playback clock; text that came late is none
    worst_gap_ms: float = 0.0


class TurnDone(_Message):
    type: Literal["turn.done"] = "turn.done"
    turn_id: TurnId
    metrics: TurnMetrics


class TurnCancelled(_Message):
    """The turn is over; also the answer to the cancel of a turn that is done but still plays.
    `spoken_text + remaining_text` is the turn's text as sent."""

    type: Literal["turn.cancelled"] = "turn.cancelled"
    turn_id: TurnId
    spoken_text: str
    remaining_text: str
    played_ms: float
    metrics: TurnMetrics | None = None  # of what was sent until then


class Warn(_Message):
    """Something was ignored or read differently; nothing was lost that the client must resend."""

    type: Literal["warning"] = "warning"
    code: str
    message: str
    param: str | None = None
    turn_id: TurnId | None = None


class Error(_Message):
    """`fatal` errors are followed by the close; others leave the session usable. An error about a
    turn has its `turn_id`: the turn is ended or refused, unless `keeps_turn`, with which only the
    message was refused and the turn is as it was before it."""

    type: Literal["error"] = "error"
    code: str
    message: str
    param: str | None = None
    fatal: bool = False
    turn_id: TurnId | None = None
    keeps_turn: bool = False
    retry_after_ms: int | None = None  # the same would be taken then


class SessionClosing(_Message):
    type: Literal["session.closing"] = "session.closing"
    reason: str
    deadline_ms: int = 0


ClientMessage = (
    SessionStart | SessionUpdate | TextAppend | TextFlush | TurnCommit | TurnCancel | SessionClose
)
ServerMessage = (
    SessionReady | TurnStarted | TurnText | TurnDone | TurnCancelled | Warn | Error | SessionClosing
)

_M = TypeVar("_M")
_TURN_ID: TypeAdapter[int] = TypeAdapter(TurnId)
_CLIENT: TypeAdapter[ClientMessage] = TypeAdapter(
    Annotated[ClientMessage, Field(discriminator="type")]
)
_SERVER: TypeAdapter[ServerMessage] = TypeAdapter(
    Annotated[ServerMessage, Field(discriminator="type")]
)


def encode(message: ClientMessage | ServerMessage) -> str:
    """One JSON text frame. Lone surrogates, which UTF-8 cannot carry, become U+FFFD."""
    text = json.dumps(message.model_dump(exclude_none=True), ensure_ascii=False)
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def decode_client(frame: str) -> ClientMessage:
    """Parse what a client sent.

    Raises:
        ProtocolError: code `invalid_json`, `unknown_type`, `invalid_message` or
            `message_too_large`, with the field's path as `param`. None is fatal.
    """
    return _decode(frame, _CLIENT)


def decode_server(frame: str) -> ServerMessage:
    """Parse what a server sent. Raises ProtocolError like `decode_client`."""
    return _decode(frame, _SERVER)


def _decode(frame: str, adapter: TypeAdapter[_M]) -> _M:
    if len(frame) > MAX_MESSAGE_BYTES:
        raise ProtocolError(
            "message_too_large",
            f"got a message of {len(frame):,} characters; the limit is {MAX_MESSAGE_BYTES:,}. "
            "Send long text in several text.append messages.",
        )
    try:
        data: Any = json.loads(frame, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("invalid_json", f"not a JSON message: {error}") from error
    if not isinstance(data, dict) or not isinstance(data.get("type"), str):
        raise ProtocolError(
            "invalid_message", 'expected a JSON object with a string "type"', param="type"
        )
    try:
        return adapter.validate_python(data)
    except ValidationError as error:
        raise _protocol_error(data, error) from error


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _protocol_error(message: dict[str, Any], error: ValidationError) -> ProtocolError:
    first = error.errors(include_url=False, include_context=False)[0]
    message_type: str = message["type"]
    if first["type"] == "union_tag_invalid":
        return ProtocolError(
            "unknown_type", f"unknown message type {message_type[:80]!r}", param="type"
        )
    path = ".".join(str(part) for part in first["loc"][1:]) or "type"
    return ProtocolError(
        "invalid_message",
        f"{message_type}: {path}: {fault(first)}",
        param=path,
        turn_id=_turn_id(message),
    )


def _turn_id(message: dict[str, Any]) -> int | None:
    try:
        return _TURN_ID.validate_python(message.get("turn_id"))
    except ValidationError:
        return None


# ---------------------------------------------------------------------------- binary frames


class AudioKind(IntEnum):
    OPUS = 1
    PCM_S16LE = 2


class AudioFlags(IntFlag):
    NONE = 0
    LAST = 1  # last packet of the turn


class AudioPacket(NamedTuple):
    """One packet of a turn. `pts_samples` counts the turn's samples before it, pre-skip included,
    at the format's rate; `seq` counts its packets from 0."""

    kind: AudioKind
    flags: AudioFlags
    turn_id: int
    seq: int
    pts_samples: int
    payload: bytes

    @property
    def is_last(self) -> bool:
        return bool(self.flags & AudioFlags.LAST)


_HEADER = struct.Struct("<BBHIII")  # version, kind, flags, turn, seq, pts_samples
HEADER_BYTES = _HEADER.size
HEADER_VERSION = 1


def pack_audio(packet: AudioPacket) -> bytes:
    """16-byte little-endian header, then the payload."""
    return (
        _HEADER.pack(
            HEADER_VERSION,
            packet.kind,
            packet.flags,
            packet.turn_id,
            packet.seq,
            packet.pts_samples & 0xFFFF_FFFF,
        )
        + packet.payload
    )


def unpack_audio(frame: bytes) -> AudioPacket:
    """Inverse of `pack_audio`.

    Raises:
        ProtocolError: code `invalid_audio` for a short frame, another version or kind.
    """
    if len(frame) < HEADER_BYTES:
        raise ProtocolError(
            "invalid_audio", f"got {len(frame)} bytes, an audio frame has at least {HEADER_BYTES}"
        )
    version, kind, flags, turn_id, seq, pts_samples = _HEADER.unpack_from(frame)
    if version != HEADER_VERSION or kind not in (1, 2):
        raise ProtocolError("invalid_audio", f"unknown audio frame version {version}, kind {kind}")
    return AudioPacket(
        AudioKind(kind), AudioFlags(flags), turn_id, seq, pts_samples, frame[HEADER_BYTES:]
    )
