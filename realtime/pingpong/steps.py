"""What the engine's threads hand to each other."""

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from realtime.pingpong.device import Event
from realtime.pingpong.messages import SamplingParams, SlotRef
from realtime.pingpong.prefill_rows import Piece


@dataclass(frozen=True, slots=True)
class Join:
    """prefill -> decode: the slot is prefilled up to `position`, or will be once the riders are
    written, by the first step at the latest; decode owns it from here."""

    slot: SlotRef
    turn_id: int
    segment: int
    first_frame: int  # of this segment, counted within the turn
    row: tuple[int, ...]  # 1+K numbers, the last prompt row, which the first step feeds
    position: int
    sampling: SamplingParams
    max_frames: int
    max_lead_ns: int
    stamps_ns: dict[str, int]  # of the turn; each key is written once, by one thread
    prefilled: Event  # but for the riders
    riders: Piece | None = None
    ends_turn: bool = False  # no segment comes after it


@dataclass(frozen=True, slots=True)
class Returned:
    """decode -> prefill: decode does not touch the slot any more.

    first_kv: position of the segment's first frame; the frames follow one another.
    kv_length: positions of the slot that are written: the prompt, and the frames fed back so far.
    """

    slot: SlotRef
    turn_id: int
    segment: int
    num_frames: int
    first_kv: int
    kv_length: int
    stepped: Event  # the last step that may still write to the slot's KV or history; or never set


class StepRow(NamedTuple):
    """One slot's part in a step."""

    slot: SlotRef
    turn_id: int
    segment: int
    first_frame: int
    frame: int  # within the segment
    is_limit: bool  # the segment ends with this frame, whatever the model says
    stamps_ns: dict[str, int]
    ends_turn: bool = False  # the segment does


@dataclass(slots=True)
class StepBuffer:
    """Fixed memory of one step. Free -> filled by decode, which hands it on as soon as the ends are
    known, while the device still works on the codes -> read by vocode -> freed by vocode.

    codes: i32 [num_slots, K] (device), valid after `stepped`; vocode has them after `copied`
    is_end: of each row, whether the stream ended before this frame
    """

    codes: Tensor
    started: Event
    stepped: Event
    copied: Event
    rows: list[StepRow] = field(default_factory=list)
    is_end: list[bool] = field(default_factory=list)
    _views: dict[int, Tensor] = field(default_factory=dict)

    def first_codes(self, num_rows: int) -> Tensor:
        """The first rows of `codes`; made once, for making it gives the GIL away."""
        if num_rows not in self._views:
            self._views[num_rows] = self.codes[:num_rows]
        return self._views[num_rows]
