"""What crosses the border between the event loop and the engine's threads.

Commands go in, events come out. Both are small frozen values without tensors of any device, so that
neither side can touch what the other owns.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class SlotRef(NamedTuple):
    """A row of the decode batch, as seen by one tenant. Anything whose generation is not the
    slot's current one is stale and is dropped by comparison."""

    idx: int
    generation: int


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Complete sampling parameters of one stream (defaults already resolved)."""

    temperature: float
    top_p: float
    top_k: int
    seed: int


@dataclass(frozen=True, slots=True)
class VoicePrompt:
    """A speaker reference: its text and its codes i32 [K, T] (host)."""

    name: str
    text: str
    codes: NDArray[np.int32]


# ---------------------------------------------------------------------------- commands


@dataclass(frozen=True, slots=True)
class OpenSlot:
    """Prefill speaker reference and prompt (or take them from the prefix cache). A slot that is
    open already gets the new sampling and lead; its dialogue goes on if voice and prompt stay."""

    slot: SlotRef
    voices: tuple[VoicePrompt, ...]
    prompt: str
    sampling: SamplingParams
    max_lead_ms: int


@dataclass(frozen=True, slots=True)
class SetText:
    """The text of one segment so far, whole (not a delta), so that the engine may prefill it while
    it grows. Closed: complete, speak it. Segments of a turn count from 0 and close in order."""

    slot: SlotRef
    turn_id: int
    segment: int
    text: str
    is_closed: bool


@dataclass(frozen=True, slots=True)
class EndTurn:
    """The turn has exactly `num_segments` segments (all closed). Zero: nothing to say."""

    slot: SlotRef
    turn_id: int
    num_segments: int


@dataclass(frozen=True, slots=True)
class CancelTurn:
    """Forget the turn. `slot` carries the NEW generation (the table was bumped before this was
    sent); the KV is rolled back to the first `heard_frames` frames of the turn."""

    slot: SlotRef
    turn_id: int
    heard_frames: int


@dataclass(frozen=True, slots=True)
class CloseSlot:
    """The tenant is gone; `slot` carries the new generation. Answered by `SlotClosed`."""

    slot: SlotRef


Command = OpenSlot | SetText | EndTurn | CancelTurn | CloseSlot


# ---------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class SlotReady:
    """Answer to `OpenSlot`."""

    slot: SlotRef
    prefill_ms: float
    cached: bool


@dataclass(frozen=True, slots=True)
class FramePcm:
    """PCM of one or more consecutive frames of a turn, at the codec's rate.

    pcm: f32 [num_frames * frame_samples] (host), owned by the receiver.
    """

    slot: SlotRef
    turn_id: int
    segment: int
    first_frame: int  # counted within the turn, over segments
    num_frames: int
    pcm: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TurnBegin:
    """The first frame of the turn comes next. Stamps as in `TurnEnd`, which a cancelled turn never
    gets."""

    slot: SlotRef
    turn_id: int
    stamps_ns: dict[str, int]


@dataclass(frozen=True, slots=True)
class SegmentEnd:
    """All frames of the segment have been delivered; `num_frames` of them in this segment."""

    slot: SlotRef
    turn_id: int
    segment: int
    num_frames: int


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """All audio of the turn has been delivered. Stamps are `time.perf_counter_ns` values."""

    slot: SlotRef
    turn_id: int
    num_frames: int
    stamps_ns: dict[str, int]  # prefill_done, first_step, first_pcm


@dataclass(frozen=True, slots=True)
class EngineWarning:
    """The text was read otherwise than written, a segment ran into the frame limit, ..."""

    slot: SlotRef
    turn_id: int | None
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class SlotFailed:
    """The slot cannot go on; close the session with an error."""

    slot: SlotRef
    message: str


@dataclass(frozen=True, slots=True)
class SlotClosed:
    """Answer to `CloseSlot`: no thread touches the slot any more, it may be acquired again."""

    slot: SlotRef


Event = (
    SlotReady
    | TurnBegin
    | FramePcm
    | SegmentEnd
    | TurnEnd
    | EngineWarning
    | SlotFailed
    | SlotClosed
)
