"""Pages of the KV cache: who uses which, and which page holds which positions of a slot.

Page 0 belongs to nobody. Where a slot has no page its table says 0, so that a write by a row that
nobody reads (padding of a graph, a surplus step) lands there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

_NUM_STAGED = 64  # uploads in flight before one has to wait for the oldest


class PageAllocator:
    """Free pages, and how many users each of the others has. One thread, the one that prefills."""

    def __init__(self, num_pages: int) -> None:
        assert num_pages > 1, num_pages
        self._free = list(range(num_pages - 1, 0, -1))
        self._num_users = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._num_users) - 1 - len(self._free)

    def take(self, num_pages: int) -> list[int]:
        """Pages with one user each. Their content is garbage."""
        assert 0 <= num_pages <= len(self._free), (num_pages, len(self._free))
        pages = [self._free.pop() for _ in range(num_pages)]
        for page in pages:
            self._num_users[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more user of each."""
        for page in pages:
            assert self._num_users[page] > 0, page
            self._num_users[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One user of each is gone; a page without users is free."""
        for page in pages:
            assert self._num_users[page] > 0, page
            self._num_users[page] -= 1
            if not self._num_users[page]:
                self._free.append(page)

    def num_users(self, page: int) -> int:
        return self._num_users[page]


class PageTable:
    """The pages of every slot, in the order of their positions: the truth on the host, and a copy
    for kernels.

    State schema: `on_device` i32 [num_slots + 1, max_pages], 0 where there is no page. Row
    `num_slots` is a slot that never has one, for rows that only pad a batch.
    One thread writes it, prefill's in a server: rows that are under way share pinned memory.
    """

    def __init__(self, num_slots: int, max_pages: int, device: torch.device) -> None:
        self.on_device = torch.zeros(num_slots + 1, max_pages, dtype=torch.int32, device=device)
        self._pages: list[tuple[int, ...]] = [()] * (num_slots + 1)
        self._uploads = _Uploads(max_pages) if device.type == "cuda" else None

    def of(self, slot: int) -> tuple[int, ...]:
        """The pages of a slot."""
        return self._pages[slot]

    def page_at(self, slot: int, idx: int) -> int:
        """The page of a slot's positions idx * PAGE and following, 0 if it has none."""
        pages = self._pages[slot]
        return pages[idx] if idx < len(pages) else 0

    def assign(self, slot: int, pages: Sequence[int]) -> None:
        """Give a slot its pages. On the device they change in the order of the current stream; the
        host does not wait."""
        num_slots, max_pages = self.on_device.shape[0] - 1, self.on_device.shape[1]
        assert 0 <= slot < num_slots and len(pages) <= max_pages, (slot, pages, max_pages)
        if self._pages[slot] == tuple(pages):
            return
        self._pages[slot] = tuple(pages)
        row = torch.zeros(max_pages, dtype=torch.int32)
        row[: len(pages)] = torch.tensor(pages, dtype=torch.int32)
        if self._uploads is None:
            self.on_device[slot].copy_(row)
        else:
            self._uploads(row, self.on_device[slot])


class _Uploads:
    """Rows to the device through pinned buffers in turn, each reused only after its copy has run."""

    def __init__(self, max_pages: int) -> None:
        self._host = torch.empty(_NUM_STAGED, max_pages, dtype=torch.int32, pin_memory=True)
        self._copied = [torch.cuda.Event() for _ in range(_NUM_STAGED)]  # type: ignore[no-untyped-call]
        self._turn = 0

    def __call__(self, row: Tensor, target: Tensor) -> None:
        turn, self._turn = self._turn, (self._turn + 1) % _NUM_STAGED
        self._copied[turn].synchronize()  # long done unless the device is 64 uploads behind
        self._host[turn].copy_(row)
        target.copy_(self._host[turn], non_blocking=True)
        self._copied[turn].record()
