"""What waits for one client's socket: messages and audio in order, counted in audio time.

Policy: nothing is dropped unless its turn is cancelled. Audio is held back at its source, by pausing
the stream above a high-water mark; messages are held back by not reading from a client whose
replies it does not take.
"""

import asyncio
from collections import deque
from typing import NamedTuple

MAX_MESSAGES = 256  # above this the client is not read from; 64 messages per turn are unusual


class Text(NamedTuple):
    frame: str
    turn_id: int | None  # of a `turn.text`, which is dropped with its turn


class Audio(NamedTuple):
    frames: tuple[bytes, ...]  # consecutive packets, written together
    turn_id: int
    audio_ms: float
    is_first: bool = False  # of its turn


class Closing(NamedTuple):
    code: int
    reason: str


Item = Text | Audio | Closing


class Outbox:
    """Single reader. `audio_ms` includes the packets that the socket is just being given."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._has_items = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._num_texts = 0
        self._audio_ms = 0.0
        self._is_writing = True  # until the reader first asks

    @property
    def audio_ms(self) -> float:
        return self._audio_ms

    @property
    def is_idle(self) -> bool:
        """Nothing waits and nothing is being written: what is written now keeps the order."""
        return not self._items and not self._is_writing

    def put(self, item: Item) -> None:
        self._items.append(item)
        self._count(item, 1)
        self._has_items.set()

    def drop(self, turn_id: int) -> None:
        """Forget the turn's audio and texts."""
        kept: deque[Item] = deque()
        for item in self._items:
            if isinstance(item, Text | Audio) and item.turn_id == turn_id:
                self._count(item, -1)
            else:
                kept.append(item)
        self._items = kept

    async def take(self) -> Item:
        """The oldest item; call `taken` when the socket has it."""
        self._is_writing = False
        while not self._items:
            self._has_items.clear()
            await self._has_items.wait()
        self._is_writing = True
        return self._items.popleft()

    def taken(self, item: Item) -> None:
        self._count(item, -1)

    async def wait_for_room(self) -> None:
        await self._has_room.wait()

    def _count(self, item: Item, sign: int) -> None:
        if isinstance(item, Audio):
            self._audio_ms += sign * item.audio_ms
            return
        self._num_texts += sign
        if self._num_texts < MAX_MESSAGES:
            self._has_room.set()
        else:
            self._has_room.clear()
