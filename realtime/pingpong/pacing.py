"""How far a stream's audio is ahead of its listener, and what follows from it: who runs.

The policies are pure functions of leads and times in nanoseconds; the loops bring the clocks.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from realtime.pingpong.messages import SlotRef

_LEAST_LEAD_NS = 20_000_000  # what a call, the encoder and the socket may take; no chunk waits then
_FAR_LEAD_NS = 50_000_000  # of who can wait for a call that runs beside decode
# PCM waits to be said with the next while it is less than this part of what its listener has to hear:
# of a lead that is capped at 500 ms, three quarters are always at the listener.
_HELD_SHARE = 3
# Few short prompts cost a step what some more do (`frames.MAX_RIDERS`); in a step's time one turn of 64
# begins.
RIDERS_WAIT_NS = 6_000_000
_MANY_STREAMS = 32  # whom a step's time costs more than a prompt that waits
_DRY_STEPS = 2  # a listener with less in hand than so many steps take is about to run dry


@dataclass(slots=True)
class PlaybackClock:
    """Listener model: plays from the moment audio arrives, without pause while there is any.

    `play_end_ns` is when everything delivered so far will have been heard.
    """

    play_end_ns: int = 0

    def lead_ns(self, now_ns: int) -> int:
        """Audio delivered minus audio played; never negative."""
        return max(0, self.play_end_ns - now_ns)

    def add(self, duration_ns: int, now_ns: int) -> None:
        self.play_end_ns = max(self.play_end_ns, now_ns) + duration_ns


class ClockTable:
    """One clock per slot, fresh for every generation: a tenant or a barge-in starts with no lead."""

    def __init__(self, num_slots: int) -> None:
        self._clocks: list[tuple[SlotRef | None, PlaybackClock]] = [
            (None, PlaybackClock()) for _ in range(num_slots)
        ]

    def of(self, slot: SlotRef) -> PlaybackClock:
        owner, clock = self._clocks[slot.idx]
        if owner != slot:
            clock = PlaybackClock()
            self._clocks[slot.idx] = (slot, clock)
        return clock


class Candidate(NamedTuple):
    """A stream that decode could give one more frame. A stream that nobody listens to in real
    time has a cap it never reaches; it needs no other mark: its lead puts it last."""

    lead_ns: int  # audio decoded ahead of the listener
    max_lead_ns: int  # the stream pauses at this lead


def rows_to_run(
    streams: Sequence[Candidate],
    *,
    frame_ns: int = 0,
    step_ns: int = 0,
    bucket_of: Callable[[int], int] = lambda num_rows: num_rows,
) -> list[int]:
    """Which streams take part in the next step: all below their cap, while a step of them takes no
    longer than a frame plays. Beyond that the listeners who run dry go first, and those with audio
    in hand only fill up the rows that are computed anyway.

    Args:
        frame_ns: duration of a frame's audio.
        step_ns: time of a step as of late; 0: not known.
        bucket_of: rows that are computed anyway when so many run (the graph's size).

    Returns:
        Indices into `streams`, ascending.
    """
    allowed = [i for i, stream in enumerate(streams) if stream.lead_ns < stream.max_lead_ns]
    if step_ns <= frame_ns or not allowed:
        return allowed
    by_deadline = sorted(allowed, key=lambda i: streams[i].lead_ns)
    num_dry = sum(streams[i].lead_ns < _DRY_STEPS * step_ns for i in allowed)
    if num_dry == 0:
        return allowed
    return sorted(by_deadline[: max(num_dry, bucket_of(num_dry))])


class Rider(NamedTuple):
    """A prompt that would ride with a stream's first step."""

    num_rows: int
    waited_ns: int


def riders_to_board(riders: Sequence[Rider], num_others: int, sizes: Sequence[int]) -> list[int]:
    """Which prompts ride with the next step. Beside few streams all that there is room for. Beside
    many, whom a step's time costs, as many as fill one of the sizes, or wait a little for more.

    Args:
        riders: of the streams that can run, in the order of their coming.
        num_others: streams that can run besides.
        sizes: ascending numbers of rows whose cost a step has anyway; the last is the most.

    Returns:
        Indices into `riders`, ascending.
    """
    if not riders or num_others < _MANY_STREAMS:
        return _first_that_fit(riders, sizes[-1])
    if riders[0].waited_ns >= RIDERS_WAIT_NS:
        sizes = [size for size in sizes if size >= riders[0].num_rows]
    for size in reversed(sizes):
        chosen = _first_that_fit(riders, size)
        # Of 64 one text of 26 characters is enough: 40 rows.
        if 8 * sum(riders[i].num_rows for i in chosen) >= 5 * size:
            return chosen
    return _first_that_fit(riders, sizes[0]) if riders[0].waited_ns >= RIDERS_WAIT_NS else []


def _first_that_fit(riders: Sequence[Rider], num_left: int) -> list[int]:
    chosen = []
    for i, rider in enumerate(riders):
        if rider.num_rows <= num_left:
            chosen.append(i)
            num_left -= rider.num_rows
    return chosen


def pause_ns(streams: Sequence[Candidate]) -> int | None:
    """Time until the first stream's lead is below its cap; None without streams."""
    return max(0, min(s.lead_ns - s.max_lead_ns for s in streams)) if streams else None


class Waiting(NamedTuple):
    """A slot's frames that could be decoded to PCM."""

    num_frames: int
    lead_ns: int  # of what is decoded, or being decoded
    is_last: bool  # nothing is to be waited for: what follows them is an event
    interval_ns: int  # from one frame to the next, as of late
    # The stream is over with them: a call may decode more, which mean nothing.
    is_tail: bool = False


def hold_ns(lead_ns: int, held_ns: int) -> int:
    """How long PCM that is made may wait for more, for a listener with so much to hear."""
    return lead_ns - _HELD_SHARE * held_ns


class CallPlan(NamedTuple):
    """The codec's next call: `chunk` frames of each of `slots`, the most urgent first, and fewer of
    a slot whose tail it is. Without slots nothing is due before `due_in_ns`; None: before there are
    more frames."""

    chunk: int
    slots: list[int]
    due_in_ns: int | None
    is_urgent: bool = True  # somebody has little to hear


def next_call(
    waiting: Mapping[int, Waiting],
    *,
    max_chunk: int,
    max_streams: Callable[[int], int],
    enough: int | None = None,
) -> CallPlan:
    """What the codec decodes next: the slots whose listeners need it first, with those that are due
    for as many frames.

    A slot is due when the frames for a chunk twice as large would come too late for its listener.
    So the first packet leaves after the first frame, and a stream with something in hand soon has
    the largest chunks.

    Where a call costs as much as 35 frames of it (S2's codec on an H200: 0.58 ms and 17 us a frame,
    however they are divided among streams), there are few calls: whoever has frames for one takes
    part, and many frames are called for though nobody is due.

    Args:
        waiting: by slot.
        max_chunk: a power of two.
        max_streams: of one call, by the chunk.
        enough: frames that are worth a call of their own; None: they cost the same in any call.
    """
    due: dict[int, int] = {}  # slot -> chunk
    waits: list[int] = []
    for slot, item in waiting.items():
        chunk, wait_ns = _chunk_of(item, max_chunk)
        if wait_ns <= 0:
            due[slot] = chunk
        else:
            waits.append(wait_ns)
    if due:
        first = min(due, key=lambda slot: waiting[slot].lead_ns)
        is_urgent = waiting[first].lead_ns < _FAR_LEAD_NS
        chunk = due[first] if is_urgent else max(due.values())
    elif enough is not None and sum(item.num_frames for item in waiting.values()) >= enough:
        chunk, is_urgent = _fullest_chunk(waiting.values(), max_chunk, max_streams), False
    else:
        return CallPlan(0, [], min(waits, default=None))
    can_join = enough is not None
    slots = [s for s, item in waiting.items() if _fits(item, due.get(s), chunk, can_join=can_join)]
    slots.sort(key=lambda slot: _order(waiting[slot]))
    return CallPlan(chunk, slots[: max_streams(chunk)], 0, is_urgent)


def _chunk_of(item: Waiting, max_chunk: int) -> tuple[int, int]:
    """Frames that the slot's next call decodes, and how long it may wait for more."""
    chunk = min(max_chunk, _power_of_two(item.num_frames))
    if item.is_tail and chunk < item.num_frames < max_chunk:
        chunk *= 2
    if item.is_last or chunk == max_chunk:
        return chunk, 0
    return chunk, item.lead_ns - _enough_ns(2 * chunk - item.num_frames, item.interval_ns)


def _order(item: Waiting) -> tuple[int, int]:
    """In which a call's PCM is said: whoever hears the end of a turn has the next text ready."""
    if item.lead_ns < _FAR_LEAD_NS:
        return 0, item.lead_ns
    return 1 if item.is_tail else 2, item.lead_ns


def _fits(item: Waiting, wanted: int | None, chunk: int, *, can_join: bool) -> bool:
    """Whether a slot takes part in a call, not being due if nothing is `wanted`. A tail is padded."""
    has_frames = item.num_frames >= chunk if can_join else wanted == chunk
    return has_frames or (item.is_tail and item.num_frames <= chunk)


def _fullest_chunk(
    waiting: Collection[Waiting], max_chunk: int, max_streams: Callable[[int], int]
) -> int:
    """Of the calls that could be made, that of the most frames."""

    def num_frames(chunk: int) -> int:
        num_slots = sum(_fits(item, None, chunk, can_join=True) for item in waiting)
        return chunk * min(num_slots, max_streams(chunk))

    chunks = [1 << i for i in range(max_chunk.bit_length())]
    return max(reversed(chunks), key=num_frames)


def _enough_ns(num_missing: int, interval_ns: int) -> int:
    """The lead with which so many more frames can be waited for, half as long again as they took
    of late."""
    return _LEAST_LEAD_NS + 3 * num_missing * interval_ns // 2


def _power_of_two(number: int) -> int:
    """The largest that is not larger than the number; 1 at least."""
    return 1 << max(0, number.bit_length() - 1)
