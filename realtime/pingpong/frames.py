"""The frame that decode launches again and again: what goes into it, what comes out, its graphs.

All that a step needs from the host is which slots take part, and that only when it changes; all
that the host needs from a step is who has reached the end. That is known before the fast AR runs,
which is half of the frame, so the host learns it, and launches the next frame, while the device
still has work.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from model.dual_ar import DualAR
from model.frame_state import Frame, FrameState, StartWords
from model.kv_cache import KVCache
from ops.graphs import GraphSet, Progress, bucket_sizes
from realtime.pingpong.device import DECODE_PRIORITY, Event, Upload, host_buffer

_MAX_START_BYTES = 1024  # of one stream's state, with where it goes


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
        self._upload_slots = Upload(8 * num_slots, device)
        self._upload_starts = Upload(_MAX_START_BYTES * num_slots, device)
        self._graphs = GraphSet(device, self._run, sizes or bucket_sizes(num_slots))

    @property
    def graph_bytes(self) -> int:
        """Device memory of the graphs."""
        return self._graphs.nbytes

    def capture(self, progress: Progress) -> None:
        """Capture every batch size (CUDA only). No stream may be running."""
        self._list([self.state.dummy_slot] * len(self._listed))
        self._graphs.capture(progress, priority=DECODE_PRIORITY)

    def size_for(self, num_rows: int) -> int:
        """Rows that are computed when so many slots take part."""
        return self._graphs.size_for(num_rows)

    def start(self, starts: Sequence[StartWords]) -> None:
        """Start streams (`FrameState.start_words`): one copy and one write for all of them."""
        places = np.concatenate([start.places for start in starts])
        words = np.concatenate([start.words for start in starts])
        self.state.write(*self._upload_starts(places, words))

    def launch(self, slots: list[int]) -> Frame:
        """Enqueue a frame of the slots. Its rows are theirs, in order, then padding; its tensors
        are valid until the next launch."""
        size = self.size_for(len(slots))
        self._list([*slots, *[self.state.dummy_slot] * (size - len(slots))])
        return self._graphs(size)

    def read_ends(self, num_rows: int) -> list[bool]:
        """Which of the last launch's rows have reached the end. Waits for its slow AR only."""
        self._chosen.wait_on_host()
        ends: list[bool] = self._ends[:num_rows].tolist()
        return ends

    def _list(self, slots: list[int]) -> None:
        """Make `slots` the first of the device's list; most steps are of the same as before."""
        if self._listed[: len(slots)] != slots:
            (uploaded,) = self._upload_slots(np.array(slots, np.int64))
            self._slots[: len(slots)].copy_(uploaded)
            self._listed[: len(slots)] = slots

    def _run(self, size: int) -> Frame:
        return self._model.decode_frame(
            self.state, self._slots[:size], self._cache, self._publish_ends
        )

    def _publish_ends(self, is_end: Tensor) -> None:
        self._is_end[: len(is_end)].copy_(is_end, non_blocking=True)
        self._chosen.record()
