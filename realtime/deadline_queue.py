"""Engine events waiting to be encoded: in order within a slot, the most urgent slot first.

First in, first out would let the first packet of a new turn wait behind seconds of audio that other
streams need only later.
"""

import heapq
import threading
from collections import deque
from collections.abc import Callable

from realtime.pingpong.messages import Event, FramePcm

# Frames that wait are encoded and sent as one piece, so that a host that falls behind does less for
# each of them. 8 of S2's are 370 ms of audio and 2 ms of a core.
_MAX_RUN = 8


class DeadlineQueue:
    """Many writers, one reader. Bounded over all slots. Once closed it takes nothing and gives nothing.

    Args:
        deadline: of the event at the head of its slot's line, in any unit; the lowest goes first. Asked
            when the event gets there, which is after the reader has finished the one before it.
    """

    def __init__(self, maxsize: int, deadline: Callable[[Event], float]) -> None:
        self.maxsize = maxsize
        self._deadline = deadline
        self._lines: dict[int, deque[Event]] = {}  # by slot.idx; empty ones are removed
        self._heads: list[tuple[float, int, int]] = []  # heap: deadline, arrival, slot.idx
        self._num_items = 0
        self._num_heads = 0  # so far: equal deadlines go by arrival
        self._being_read: int | None = None  # slot.idx of the event the reader has
        self._is_closed = False
        self._changed = threading.Condition()

    def close(self) -> None:
        """Nobody waits any more, now or later."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def qsize(self) -> int:
        return self._num_items

    def put(self, event: Event) -> None:
        """Add; waits for room."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_items < self.maxsize or self._is_closed)
            if not self._is_closed:
                self._num_items += 1
                self._append(event)
                self._changed.notify_all()

    def get(self, *, waits: bool = True) -> list[Event]:
        """The most urgent event, and with it the frames that follow it directly, as one piece of audio.
        Empty if there is none. What was got before counts as processed."""
        with self._changed:
            self._finish()
            if waits:
                self._changed.wait_for(lambda: bool(self._heads) or self._is_closed)
            if not self._heads or self._is_closed:
                return []
            _, _, idx = heapq.heappop(self._heads)
            self._being_read = idx
            events = _take_run(self._lines[idx])
            self._num_items -= len(events)
            self._changed.notify_all()
            return events

    def _append(self, event: Event) -> None:
        idx = event.slot.idx
        line = self._lines.setdefault(idx, deque())
        line.append(event)
        if len(line) == 1 and idx != self._being_read:
            self._push(idx)

    def _finish(self) -> None:
        idx, self._being_read = self._being_read, None
        if idx is None:
            return
        if self._lines[idx]:
            self._push(idx)
        else:
            del self._lines[idx]

    def _push(self, idx: int) -> None:
        self._num_heads += 1
        head = (self._deadline(self._lines[idx][0]), self._num_heads, idx)
        heapq.heappush(self._heads, head)


def _take_run(line: deque[Event]) -> list[Event]:
    """The first event; if it is a frame, also those of the same turn and segment that follow, up to
    `_MAX_RUN` frames. A turn's first frame stays alone: nothing may be added to its latency."""
    first = line.popleft()
    run: list[Event] = [first]
    if not isinstance(first, FramePcm) or first.first_frame == 0:
        return run
    num_frames = first.num_frames
    while line and num_frames < _MAX_RUN:
        following = line[0]
        if not isinstance(following, FramePcm) or not _continues(first, following):
            break
        num_frames += following.num_frames
        run.append(line.popleft())
    return run


def _continues(first: FramePcm, following: FramePcm) -> bool:
    is_same_turn = (first.slot, first.turn_id) == (following.slot, following.turn_id)
    return is_same_turn and first.segment == following.segment
