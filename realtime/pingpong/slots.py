"""Which slots are free, and the generation number that makes stale work recognisable."""

from typing import Protocol

from realtime.pingpong.messages import SlotRef


class Generations(Protocol):
    """A list or a shared array of 64-bit integers."""

    def __len__(self) -> int: ...
    def __getitem__(self, idx: int, /) -> int: ...
    def __setitem__(self, idx: int, value: int, /) -> None: ...


class Slots:
    """Fixed table of slots. One writer, the event loop; any thread may call `is_current`.

    A slot is acquired, bumped any number of times, and released once its closing is acknowledged.
    Nothing is ever revoked: work carries the generation it was made for and is dropped by
    comparison wherever it arrives late.
    """

    def __init__(self, num_slots: int, generations: Generations | None = None) -> None:
        """`generations`: zeros in memory that several processes share; one of them writes."""
        assert num_slots > 0, num_slots
        assert generations is None or len(generations) == num_slots, num_slots
        self.is_shared = generations is not None
        self._generation: Generations = [0] * num_slots if generations is None else generations
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def generations(self) -> Generations:
        return self._generation

    @property
    def num_slots(self) -> int:
        return len(self._generation)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_lost(self) -> int:
        return 0

    def acquire(self) -> SlotRef | None:
        if not self._free:
            return None
        idx = self._free.pop()
        self._generation[idx] += 1
        return SlotRef(idx, self._generation[idx])

    def bump(self, slot: SlotRef) -> SlotRef:
        assert self.is_current(slot), (slot, self._generation[slot.idx])
        self._generation[slot.idx] += 1
        return SlotRef(slot.idx, self._generation[slot.idx])

    def is_current(self, slot: SlotRef) -> bool:
        return self._generation[slot.idx] == slot.generation

    def release(self, slot: SlotRef) -> None:
        assert self.is_current(slot), (slot, self._generation[slot.idx])
        assert slot.idx not in self._free, slot
        self._generation[slot.idx] += 1
        self._free.append(slot.idx)
