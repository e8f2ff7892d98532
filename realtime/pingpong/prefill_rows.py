"""Prefill of several slots in one call, from graphs: what the prefill thread launches.

A packed model runs rows of any slots together, so that the texts of many sessions are one pass over
the weights, captured once per number of rows. Other models take the pieces one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from model.dual_ar import DualAR
from model.kv_cache import KVCache
from ops.graphs import GraphSet, Progress
from realtime.pingpong.device import PREFILL_PRIORITY, Event, Upload, host_buffer

SIZES = (8, 16, 32, 64, 128, 256, 512)  # rows of a call, as far as the model takes them
_MAX_ROWS_ALONE = 128  # of a model that takes the pieces one by one


class Piece(NamedTuple):
    """Consecutive positions of a slot."""

    slot: int
    start: int
    rows: Tensor | None  # i32 [1+K, T] (host); None: those that the cache's history has
    num_rows: int  # T

    @classmethod
    def of(cls, slot: int, start: int, rows: Tensor) -> Piece:
        return cls(slot, start, rows, rows.shape[1])


class RowInput:
    """Prompt rows where graphs read them: what they are, whose, and at which positions. All of it is
    one copy, from two pinned buffers in turn, each reused only after the copy made from it has run."""

    def __init__(self, max_rows: int, width: int, dummy_slot: int, device: torch.device) -> None:
        """`dummy_slot`: of the padding; `width`: numbers of a row."""
        self._dummy_slot = dummy_slot
        self._max_rows = max_rows
        num_words = max_rows * (4 + width)  # two numbers of 64 bits, the others of 32
        self._words = torch.zeros(num_words, dtype=torch.int32, device=device)
        self.slots, self.positions, self.rows = self._parts(self._words)
        self.slots.fill_(dummy_slot)
        self._host = [host_buffer((num_words,), torch.int32, device) for _ in range(2)]
        self._arrays = [[part.numpy() for part in self._parts(host)] for host in self._host]
        self._copied = [Event(device) for _ in range(2)]
        self._turn = 0

    def _parts(self, words: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        size = 2 * self._max_rows
        slots, positions, rows = words[:size], words[size : 2 * size], words[2 * size :]
        width = len(words) // max(1, self._max_rows) - 4
        return slots.view(torch.int64), positions.view(torch.int64), rows.view(-1, max(1, width))

    def put(self, pieces: Sequence[Piece], size: int) -> None:
        """Fill the first `size` rows; those that only the device has are zeros."""
        self._turn = 1 - self._turn
        self._copied[self._turn].wait_on_host()
        slots, positions, rows = self._arrays[self._turn]
        slots[:size], positions[:size], rows[:size] = self._dummy_slot, 0, 0
        begin = 0
        for piece in pieces:
            stop = begin + piece.num_rows
            slots[begin:stop] = piece.slot
            positions[begin:stop] = np.arange(piece.start, piece.start + piece.num_rows)
            if piece.rows is not None:
                rows[begin:stop] = piece.rows.t().numpy()
            begin = stop
        self._words.copy_(self._host[self._turn], non_blocking=True)
        self._copied[self._turn].record()


class PrefillRunner:
    """One thread, the one that prefills (and start-up)."""

    def __init__(self, model: DualAR, cache: KVCache) -> None:
        device, width = model.device, 1 + model.config.num_codebooks
        self.max_rows = max_rows = model.max_prefill_rows or _MAX_ROWS_ALONE  # of all pieces
        self._model = model
        self._cache = cache
        self._input = RowInput(max_rows, width, cache.num_slots, device)
        self._upload = Upload(max_rows * 4 * width, device)  # of a piece alone
        sizes = [size for size in SIZES if size <= model.max_prefill_rows]
        self._graphs = GraphSet(device, self._run, sizes)

    @property
    def takes_many(self) -> bool:
        """Whether several pieces cost less in one call than one by one."""
        return self._model.max_prefill_rows > 0

    def size_for(self, num_rows: int) -> int:
        """Rows that are computed when so many are wanted."""
        return self._graphs.size_for(num_rows)

    @property
    def graph_bytes(self) -> int:
        """Device memory of the graphs."""
        return self._graphs.nbytes

    def compile(self) -> None:
        """See `GraphSet.compile`."""
        self._graphs.compile()

    def capture(self, progress: Progress) -> None:
        """Capture every size (CUDA and packed models only). No slot may be in use."""
        self._input.put((), self.max_rows)
        self._graphs.capture(progress, priority=PREFILL_PRIORITY)

    def write(self, pieces: Sequence[Piece]) -> None:
        """Enqueue the pieces' keys and values, and remember what they were made from. Pages must be
        there; pieces of one slot must follow one another."""
        if not self.takes_many:
            for piece in pieces:
                self._write_alone(piece)
            return
        num_rows = sum(piece.num_rows for piece in pieces)
        assert 0 < num_rows <= self.max_rows, (num_rows, self.max_rows)
        size = self._graphs.size_for(num_rows)
        self._place(pieces, size)
        self._graphs(size)

    def _write_alone(self, piece: Piece) -> None:
        cache, slot, start, stop = (
            self._cache,
            piece.slot,
            piece.start,
            piece.start + piece.num_rows,
        )
        if piece.rows is None:
            rows = cache.recall(slot, start, stop)
        else:
            (uploaded,) = self._upload(piece.rows.flatten().numpy())
            rows = uploaded.view(piece.rows.shape)
            cache.remember(slot, start, rows)
        self._model.prefill(rows, cache, slot, start)

    def _place(self, pieces: Sequence[Piece], size: int) -> None:
        self._input.put(pieces, size)
        begin = 0
        for piece in pieces:
            stop = begin + piece.num_rows
            if piece.rows is None:
                past = self._cache.recall(piece.slot, piece.start, piece.start + piece.num_rows)
                self._input.rows[begin:stop].copy_(past.t())
            begin = stop

    def _run(self, size: int) -> None:
        given = self._input
        rows, slots, positions = given.rows[:size], given.slots[:size], given.positions[:size]
        if self._cache.history is not None:
            self._cache.history.index_put_((slots, positions), rows)
        self._model.prefill_rows(rows, slots, positions, self._cache)
