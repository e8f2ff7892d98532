"""What a session asks of its server, and the encoded audio it is given. Values only.

The server applies the actions of one call in order, before it makes the next call.
"""

from dataclasses import dataclass
from typing import NamedTuple

from realtime.pingpong.messages import Command, SlotRef
from realtime.wire import AudioFormat, AudioPacket, ServerMessage


class EncodedPacket(NamedTuple):
    """One packet before its header; `pts_samples` as in `wire.AudioPacket`."""

    pts_samples: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class EncodedAudio:
    """What the encoder made of one `FramePcm`, or, with `is_last`, of the turn's tail.

    An input of the session, in order with the slot's events: after the frames of a turn are in,
    one with `is_last` (its last packet becomes the flagged one), then `TurnEnd`. A turn without
    frames needs none. `packets` may be empty while the encoder still collects samples.
    """

    slot: SlotRef
    turn_id: int
    segment: int
    first_frame: int  # counted within the turn, as in `FramePcm`
    num_frames: int  # 0 for packets of frames that were told before, as those of the tail are
    packets: tuple[EncodedPacket, ...]
    is_last: bool
    num_samples: int  # real audio of the turn in all packets so far, at the format's rate
    encoded_ns: int | None = None  # when the packets were ready, on the engine's clock


# ---------------------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class OpenEncoder:
    """The format is known: make the slot's encoder. Once per session, before its first `Submit`.
    The encoder starts afresh with every turn and whenever the generation changes."""

    slot: SlotRef
    format: AudioFormat


@dataclass(frozen=True, slots=True)
class Bump:
    """Make everything in flight for the slot stale, synchronously, before the next action.
    `slot` carries the new generation, one above the old: the table's `bump` must return it."""

    slot: SlotRef


@dataclass(frozen=True, slots=True)
class Submit:
    """Hand the command to the engine; if it refuses, call `Session.fail`."""

    command: Command


@dataclass(frozen=True, slots=True)
class Send:
    """Put the message on the socket, in order with `SendAudio`."""

    message: ServerMessage


@dataclass(frozen=True, slots=True)
class SendAudio:
    """Put the packets on the socket, in order with `Send`; never empty."""

    turn_id: int
    packets: tuple[AudioPacket, ...]


@dataclass(frozen=True, slots=True)
class Drop:
    """Discard the turn's audio and `turn.text` messages that still wait for the socket."""

    turn_id: int


@dataclass(frozen=True, slots=True)
class Close:
    """Send what is queued, then close the socket with this code. The last action of a session;
    the slot is released when the engine answers the `CloseSlot` submitted before."""

    code: int
    reason: str


Action = OpenEncoder | Bump | Submit | Send | SendAudio | Drop | Close
