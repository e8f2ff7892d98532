"""A slot as the prefill thread knows it: its prefix, its turn, and what is in its KV."""

import time
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from realtime.pingpong.messages import OpenSlot, SamplingParams, SlotRef

# Urgencies, most urgent first: somebody waits for audio; a new voice; text that still grows; the KV
# of a context that was shortened.
AUDIO_WAITS, VOICE_WAITS, TEXT_GROWS, CONTEXT_WAITS, NOTHING_TO_DO = range(5)

_SEED_STRIDE = 0x9E37_79B9_7F4A_7C15  # golden ratio: segments of a turn draw unrelated numbers
_SEED_MASK = (1 << 63) - 1


@dataclass(slots=True)
class Segment:
    text: str = ""
    is_closed: bool = False
    changed_ns: int = 0  # when text or end came last


class Span(NamedTuple):
    """A segment's frames in the KV. The last frame is not in it unless the model read it again."""

    first_kv: int
    end_kv: int
    num_frames: int


@dataclass(slots=True)
class Turn:
    """The turn that the session has given to the engine; there is one at a time."""

    turn_id: int
    start_length: int  # of the KV context before the turn
    segments: list[Segment] = field(default_factory=list)
    num_segments: int | None = None  # known once the turn has ended on the wire
    next_segment: int = 0
    num_frames: int = 0
    spans: list[Span] = field(default_factory=list)
    num_forgotten_frames: int = 0  # the first ones, dropped when the context grew too long
    stamps_ns: dict[str, int] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        return self.num_segments is not None and self.next_segment >= self.num_segments

    @property
    def current(self) -> Segment | None:
        return self.segments[self.next_segment] if self.next_segment < len(self.segments) else None

    def kv_length_heard(self, heard_frames: int) -> int:
        """Length of the KV that ends with the last frame that was heard."""
        length, num_left = self.start_length, heard_frames - self.num_forgotten_frames
        for span in self.spans:
            if num_left <= 0:
                break
            length = min(span.first_kv + num_left, span.end_kv)
            num_left -= span.num_frames
        return length

    def drop_between(self, prefix_length: int, cut: int) -> None:
        """Positions prefix_length..cut-1 of the context are no more."""
        num_dropped = cut - prefix_length
        old = [span for span in self.spans if span.first_kv < cut]
        self.num_forgotten_frames += sum(span.num_frames for span in old)
        self.spans = [
            Span(span.first_kv - num_dropped, span.end_kv - num_dropped, span.num_frames)
            for span in self.spans[len(old) :]
        ]
        self.start_length = max(prefix_length, self.start_length - num_dropped)


@dataclass(slots=True)
class Prefix:
    """What a slot's KV begins with; `rows[:, :num_done]` are there while it is being prefilled."""

    rows: Tensor  # i32 [1+K, T] (host)
    key: bytes
    num_done: int = 0
    was_cached: bool = True

    @property
    def length(self) -> int:
        return self.rows.shape[1]


@dataclass(slots=True)
class Tenant:
    """`rows[:, :num_done]` of the current segment are in the KV from `context_length` on."""

    slot: SlotRef
    sampling: SamplingParams
    max_lead_ns: int = 0
    opening: OpenSlot | None = None  # to be done as soon as it may
    opening_prefix: Prefix | None = None  # made from it
    opening_after: int | None = None  # the turn that was on when it came; it keeps its voice
    opened_at_ns: int = 0
    prefix: Prefix | None = None  # of the voice and prompt that it has
    key_in_kv: bytes | None = None  # of the prefix that the KV begins with now; None: with none
    has_reserved: bool = False  # all pages of the prefix, or of the closed segment, that is next
    context_length: int = 0  # prefix, and in dialogue context the exchanges after it
    exchanges: list[int] = field(default_factory=list)  # where each begins, one per segment
    num_in_kv: int = 0  # positions of the context, if the KV begins with its prefix
    rows: Tensor | None = None  # i32 [1+K, T] (host), what is (partly) prefilled after the context
    num_done: int = 0
    prepared: tuple[str, bool] | None = None  # the (text, is_closed) that `rows` was made from
    is_decoding: bool = False  # decode owns the slot
    cancelled: tuple[Turn, int] | None = None  # while decoding, with the frames heard of it
    is_closing: bool = False
    turn: Turn | None = None
    last_turn: Turn | None = None  # the latest to end; it can be rolled back while it is heard

    @property
    def prefix_length(self) -> int:
        return 0 if self.prefix is None else self.prefix.length

    @staticmethod
    def nobody() -> "Tenant":
        """Of slot 0, while no slot is open."""
        return Tenant(SlotRef(0, 0), SamplingParams(0.0, 1.0, 1, 0))

    def segment_sampling(self, segment: int) -> SamplingParams:
        sampling = self.sampling
        seed = (sampling.seed + segment * _SEED_STRIDE) & _SEED_MASK
        return SamplingParams(sampling.temperature, sampling.top_p, sampling.top_k, seed)

    @property
    def is_under_way(self) -> bool:
        """It has all the pages that it needs and will give some back."""
        return self.is_decoding or self.has_reserved

    @property
    def may_open(self) -> bool:
        is_turn_over = self.turn is None or self.turn.turn_id != self.opening_after
        return self.opening is not None and is_turn_over

    @property
    def is_context_in_work(self) -> bool:
        """It was shortened and is being made again. What was taken away altogether is made again
        when it is needed."""
        return self.key_in_kv is not None and self.num_in_kv < self.context_length

    def settles_in_ns(self, settle_ns: int) -> int:
        """How long text that grows may still change before its prefill is worth a call: who sends a
        text and its commit at once gets one call instead of two that follow each other."""
        segment = self.turn.current if self.turn is not None else None
        if not settle_ns or segment is None or segment.is_closed:
            return 0
        return segment.changed_ns + settle_ns - time.perf_counter_ns()

    def urgency(self) -> int:
        if self.is_decoding:
            return NOTHING_TO_DO
        if self.may_open:
            return VOICE_WAITS
        segment = self.turn.current if self.turn is not None else None
        if segment is None:
            return CONTEXT_WAITS if self.is_context_in_work else NOTHING_TO_DO
        if segment.is_closed:
            return AUDIO_WAITS
        is_stale = self.prepared != (segment.text, False)
        is_behind = self.rows is not None and self.num_done < self.rows.shape[1]
        return TEXT_GROWS if is_stale or is_behind else NOTHING_TO_DO

    def forget_kv(self) -> None:
        """Nothing is in the KV, nor reserved for what is next. The context stays what it is."""
        self.key_in_kv, self.num_in_kv, self.has_reserved = None, 0, False
        for prefix in (self.prefix, self.opening_prefix):
            if prefix is not None:
                prefix.num_done = 0

    def end_dialogue(self) -> None:
        """Another voice or prompt overwrites it from now on."""
        self.prefix, self.exchanges, self.last_turn = None, [], None
        self.forget_kv()
        self.start_context(0)

    def start_context(self, length: int) -> None:
        """The context ends at `length`; nothing of a segment is prefilled behind it."""
        self.context_length, self.has_reserved = length, False
        self.num_in_kv = min(self.num_in_kv, length)
        self.exchanges = [start for start in self.exchanges if start < length]
        if self.prefix is not None:
            self.prefix.num_done = 0
        self.rows, self.num_done, self.prepared = None, 0, None

    def drop_oldest(self, num_kept: int, num_lead: int) -> int:
        """Drop exchanges, oldest first, until `num_kept` positions or fewer are left behind the
        prefix. The first `num_lead` positions of an exchange part it from the one before, so that
        what becomes the first exchange loses them.

        Returns:
            Where what is left was before; it now comes right after the prefix, and is not in the KV.
        """
        prefix_length, end = self.prefix_length, self.context_length
        starts = [
            start
            for start in self.exchanges
            if start > prefix_length and end - (start + num_lead) <= num_kept
        ]
        cut = starts[0] + num_lead if starts else end
        num_dropped = cut - prefix_length
        for turn in (self.turn, self.last_turn):
            if turn is not None:
                turn.drop_between(prefix_length, cut)
        self.exchanges = [max(prefix_length, start - num_dropped) for start in starts]
        self.start_context(end - num_dropped)
        self.num_in_kv = min(self.num_in_kv, prefix_length)
        return cut
