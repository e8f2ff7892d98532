"""Engine events waiting to be encoded: in order within a slot, the most urgent slot first.

First in, first out would let the first packet of a new turn wait behind seconds of audio that other
streams need only later.
"""

import heapq
import threading
from collections import deque
from collections.abc import Callable

from realtime.pingpong.messages import Event


class DeadlineQueue:
    """Many writers, one reader. Bounded over all slots.

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
        self._changed = threading.Condition()

    def qsize(self) -> int:
        return self._num_items

    def put(self, event: Event, timeout_s: float) -> bool:
        """Add; waits up to `timeout_s` for room. False if there was none."""
        with self._changed:
            has_room = self._changed.wait_for(lambda: self._num_items < self.maxsize, timeout_s)
            if has_room:
                self._num_items += 1
                self._append(event)
                self._changed.notify_all()
            return has_room

    def get(self, timeout_s: float) -> Event | None:
        """The most urgent event; waits up to `timeout_s` for one. The last one counts as processed."""
        with self._changed:
            self._finish()
            if not self._changed.wait_for(lambda: bool(self._heads), timeout_s):
                return None
            _, _, idx = heapq.heappop(self._heads)
            self._being_read = idx
            self._num_items -= 1
            self._changed.notify_all()
            return self._lines[idx].popleft()

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
