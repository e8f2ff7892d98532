"""Bounded queues between threads, and the steps that travel through them."""

import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Many writers, one reader. What a full mailbox does is chosen by the call: `offer` refuses,
    `put` waits. All under one lock."""

    def __init__(self, max_items: int) -> None:
        self._items: deque[T] = deque()
        self._max_items = max_items
        self._changed = threading.Condition()
        self._is_closed = False
        self._was_poked = False

    def __len__(self) -> int:
        return len(self._items)

    def offer(self, item: T) -> bool:
        """Add without waiting; False when full or closed."""
        with self._changed:
            if self._is_closed or len(self._items) >= self._max_items:
                return False
            self._items.append(item)
            self._changed.notify_all()
            return True

    def put(self, item: T) -> None:
        """Add; waits while full. Dropped when the mailbox is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or len(self._items) < self._max_items)
            if not self._is_closed:
                self._items.append(item)
                self._changed.notify_all()

    def poke(self) -> None:
        """Wake the reader although nothing was added (shared state changed)."""
        with self._changed:
            self._was_poked = True
            self._changed.notify_all()

    def take_all(self, timeout_s: float | None = 0.0) -> list[T]:
        """Everything there is; waits up to `timeout_s` (None: forever) for an item, poke or close."""
        with self._changed:
            self._changed.wait_for(
                lambda: bool(self._items) or self._was_poked or self._is_closed, timeout_s
            )
            self._was_poked = False
            items = list(self._items)
            self._items.clear()
            if items:
                self._changed.notify_all()
            return items

    def take(self) -> T | None:
        """The oldest item; waits. None once the mailbox is closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._items) or self._is_closed)
            if not self._items:
                return None
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
