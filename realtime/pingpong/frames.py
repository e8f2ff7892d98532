"""The frame that decode launches again and again: what goes into it, what comes out, its graphs.

All that a step needs from the host is which slots take part, and that only when it changes; all
that the host needs from a step is who has reached the end. That is known before the fast AR runs,
which is half of the frame, so the host learns it, and launches the next frame, while the device
still has work.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from model.dual_ar import DualAR
from model.dual_ar_cuda import MAX_PREFILL_ROWS
from model.frame_state import Frame, FrameState, Riders, StartWords
from model.kv_cache import KVCache
from ops.graphs import Branch, GraphSet, Progress, bucket_sizes
from realtime.pingpong.device import DECODE_PRIORITY, Event, Upload, host_buffer
from realtime.pingpong.prefill_rows import Piece, RowInput

_MAX_START_BYTES = 1024  # of one stream's state, with where it goes
# Rows of prompts in a frame. Its cost goes in stages: S2 Pro, bf16, H200, 64 streams of one voice 5.24 ms,
# with 64 rows more 5.83, with 128 6.98, with 192 8.19 (of more than 192 in all the products are the vendor's).
MAX_RIDERS = 192
_TOTALS = (32, 64, 128, 192, 256, 384, 512)  # rows of streams and prompts that are worth a graph
_LEAST_RIDERS = 16  # that are worth a graph
_KEY = 4096  # a graph's size is its riders * _KEY + its batch
_SHARED = 1 << 24  # added to it, if pages that neighbours share are read once
# Slots that share pages, to be worth graphs of their own: of 16 attention takes 10.2 us a layer instead of
# 12.8 (S2 Pro, bf16, 640 of 720 positions shared, H200; in 8 bits 10.5 and 10.6).
LEAST_SHARED = 16


def rider_sizes(max_batch: int, max_riders: int = MAX_RIDERS) -> dict[int, list[int]]:
    """Of frames with riders: batches worth a graph, and with how many riders, ascending, the last
    `max_riders`. The rows of both together fill what kernels compute anyway.

    Example:
        >>> rider_sizes(4)
        {1: [31, 63, 127, 192], 2: [30, 62, 126, 192], 4: [28, 60, 124, 192]}
    """
    batches = {1, 2, 4, 8, 16, *range(32, max_batch, 32), max_batch}
    return {
        batch: [
            *(
                total - batch
                for total in _TOTALS
                if _LEAST_RIDERS <= total - batch < max_riders - _LEAST_RIDERS
            ),
            max_riders,
        ]
        for batch in sorted(batch for batch in batches if batch <= max_batch)
    }


class FrameRunner:
    """One thread, the one that decodes."""

    def __init__(
        self,
        model: DualAR,
        cache: KVCache,
        num_slots: int,
        sizes: Sequence[int] | None = None,
    ) -> None:
        """`sizes`: batches worth a graph, if not those of `bucket_sizes`; up to `num_slots`."""
        device = model.device
        self.state: FrameState = model.new_frame_state(num_slots)
        self._model = model
        self._cache = cache
        self._listed = [self.state.dummy_slot] * num_slots  # what `_slots` holds
        self._slots = torch.tensor(self._listed, device=device)
        self._is_end = host_buffer((num_slots,), torch.bool, device)
        self._ends = self._is_end.numpy()  # reading it gives the GIL to nobody
        self._chosen = Event(device, is_external=True)
        self._in_tail = Event(device, is_external=True)
        self._beside = Branch(device)
        self._is_captured = False
        self._upload_slots = Upload(8 * num_slots, device)
        self._upload_starts = Upload(_MAX_START_BYTES * num_slots, device)
        takes_any = model.max_prefill_rows > MAX_PREFILL_ROWS  # in one pass: it has plain matrices
        room = MAX_RIDERS if takes_any else min(MAX_RIDERS, model.max_prefill_rows - num_slots)
        can_ride = sizes is None and room >= _LEAST_RIDERS
        self.max_riders = room if can_ride else 0
        self._rider_sizes = rider_sizes(num_slots, room) if can_ride else {}
        most = max((max(riders) for riders in self._rider_sizes.values()), default=0)
        self._riders = RowInput(most, self.state.rows.shape[1], self.state.dummy_slot, device)
        mixed = [
            riders * _KEY + batch for batch, sizes in self._rider_sizes.items() for riders in sizes
        ]
        plain = sizes or bucket_sizes(num_slots)
        shared = [_SHARED + batch for batch in plain if can_ride and batch >= LEAST_SHARED]
        self._has_shared = bool(shared)
        self._shares_pages = False  # the slots of the last launch
        self._graphs = GraphSet(device, self._run, [*plain, *mixed, *shared])

    @property
    def graph_bytes(self) -> int:
        """Device memory of the graphs."""
        return self._graphs.nbytes

    def compile(self) -> None:
        """See `GraphSet.compile`."""
        self._graphs.compile()

    def capture(self, progress: Progress) -> None:
        """Capture every batch size (CUDA only). No stream may be running."""
        self._list([self.state.dummy_slot] * len(self._listed))
        if self.max_riders:
            self._riders.put((), len(self._riders.rows))
        self._graphs.capture(progress, priority=DECODE_PRIORITY)
        self._is_captured = bool(self._graphs.sizes)

    def size_for(self, num_rows: int) -> int:
        """Rows that are computed when so many slots take part."""
        return self._graphs.size_for(num_rows)

    def start(self, starts: Sequence[StartWords]) -> None:
        """Start streams (`FrameState.start_words`): one copy and one write for all of them."""
        places = np.concatenate([start.places for start in starts])
        words = np.concatenate([start.words for start in starts])
        self.state.write(*self._upload_starts(places, words))

    def launch(self, slots: list[int], riders: Sequence[Piece] = ()) -> Frame:
        """Enqueue a frame of the slots. Its rows are theirs, in order, then padding; its tensors
        are valid until the next launch.

        Args:
            riders: prompt rows that are written with it, `max_riders` at most.
        """
        num_riders = sum(piece.num_rows for piece in riders)
        batch, num_riders = self._sizes_for(len(slots), num_riders)
        if self._list([*slots, *[self.state.dummy_slot] * (batch - len(slots))]):
            self._shares_pages = self._has_shared and self._share_pages(slots)
        if num_riders:
            self._riders.put(riders, num_riders)
        is_shared = self._shares_pages and batch >= LEAST_SHARED and not num_riders
        return self._graphs(num_riders * _KEY + batch + (_SHARED if is_shared else 0))

    def _share_pages(self, slots: list[int]) -> bool:
        """Whether most begin with the page of the next one in the batch."""
        first = [self._cache.pages(slot)[:1] for slot in slots]
        num_same = sum(a == b for a, b in itertools.pairwise(first))
        return 4 * num_same >= 3 * (len(slots) - 1)

    def _sizes_for(self, num_rows: int, num_riders: int) -> tuple[int, int]:
        """Rows and riders that are computed when so many are wanted."""
        if not num_riders:
            return self.size_for(num_rows), 0
        assert num_riders <= self.max_riders, (num_riders, self.max_riders)
        if not self._is_captured:
            return num_rows, num_riders
        batch = next(batch for batch in self._rider_sizes if batch >= num_rows)
        return batch, next(size for size in self._rider_sizes[batch] if size >= num_riders)

    def rider_sizes_for(self, num_rows: int) -> list[int]:
        """Numbers of riders that so many rows can take along at the cost of the number, ascending."""
        return next(sizes for batch, sizes in self._rider_sizes.items() if batch >= num_rows)

    def read_ends(self, num_rows: int) -> list[bool]:
        """Which of the last launch's rows have reached the end. Waits for its slow AR only."""
        self._chosen.wait_on_host()
        ends: list[bool] = self._ends[:num_rows].tolist()
        return ends

    def wait_for_tail(self) -> None:
        """Until little is left of the last launch: whoever is to take part in the next may come until
        then, and the device need not wait for it."""
        self._in_tail.wait_on_host()

    def _list(self, slots: list[int]) -> bool:
        """Make `slots` the first of the device's list; False: they are, as in most steps."""
        if self._listed[: len(slots)] == slots:
            return False
        (uploaded,) = self._upload_slots(np.array(slots, np.int64))
        self._slots[: len(slots)].copy_(uploaded)
        self._listed[: len(slots)] = slots
        return True

    def _run(self, size: int) -> Frame:
        shares_pages, size = divmod(size, _SHARED)
        num_riders, batch = divmod(size, _KEY)
        given = self._riders
        riders = Riders(
            given.rows[:num_riders], given.slots[:num_riders], given.positions[:num_riders]
        )
        frame = self._model.decode_frame(
            self.state,
            self._slots[:batch],
            self._cache,
            self._publish_ends,
            self._mark_tail,
            riders if num_riders else None,
            shares_pages=bool(shares_pages),
        )
        self._beside.join()
        return frame

    def _publish_ends(self, is_end: Tensor) -> None:
        with self._beside.begin():
            self._is_end[: len(is_end)].copy_(is_end, non_blocking=True)
            self._chosen.record()

    def _mark_tail(self) -> None:
        with self._beside.begin():
            self._in_tail.record()
