"""What a stream carries from frame to frame, for all slots, and how a stream is started in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.config import DualARConfig
from model.kv_cache import FrameCache
from model.sampling import Sampling
from ops.sampling import MAX_TOP_K, Carried, Draws

RAS_WINDOW = 10  # last tokens of a stream (W), see `ops.sampling`
_ALIGN_WORDS = 64  # fields begin at multiples of 256 bytes, as kernels like them


class Frame(NamedTuple):
    """What one decode step made."""

    codes: Tensor  # i32 [B, K]; meaningless where is_end
    is_end: Tensor  # bool [B], True: the stream is over and this frame is not part of it


class Riders(NamedTuple):
    """Prompt rows that go through the slow AR together with a frame, which may read what they
    write: so a prompt costs no pass over the weights of its own."""

    rows: Tensor  # i32 [P, 1+K]
    slots: Tensor  # i64 [P]; the dummy slot's are padding
    positions: Tensor  # i64 [P]


class StartWords(NamedTuple):
    """The state that streams start with, as 32-bit words and where in `FrameState.words` they go."""

    places: NDArray[np.int64]
    words: NDArray[np.int32]


class FrameState:
    """Everything a stream carries from frame to frame, as tensors indexed by slot.

    State schema (N slots, and one more: the dummy slot, which the padding rows of a batch use):
        rows         i32 [N+1, 1+K]   next input: the last prompt row, or the frame sampled before
        position     i64 [N+1]        where that input goes in the KV cache; of the dummy always 0
        window       i32 [N+1, W, 1]  last row-0 tokens, oldest first; 0 = none yet
        frame_idx    i32 [N+1]        frames sampled since the stream started
        temperature  f32 [N+1]
        top_p        f32 [N+1]
        top_k        i32 [N+1]
        seed         i64 [N+1]
        fast         scratch of the fast AR, valid inside one frame
    All but `fast` are parts of one tensor, `words` i32, so that any number of streams starts with
    one copy and one indexed write. One thread, the one that decodes, may touch it.
    """

    def __init__(
        self, config: DualARConfig, num_slots: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.num_slots = num_slots
        self._begins: dict[str, tuple[int, int]] = {}  # first word, words of a slot
        num_rows, num_words = num_slots + 1, 0
        for name, width in _widths(config).items():
            self._begins[name] = (num_words, width)
            num_words += math.ceil(num_rows * width / _ALIGN_WORDS) * _ALIGN_WORDS
        self.words = torch.zeros(num_words, dtype=torch.int32, device=device)
        self.seed = self._field("seed", torch.int64)
        self.position = self._field("position", torch.int64)
        self.rows = self._field("rows").view(num_rows, -1)
        self.window = self._field("window").view(num_rows, RAS_WINDOW, 1)
        self.frame_idx = self._field("frame_idx")
        self.temperature = self._field("temperature", torch.float32)
        self.top_p = self._field("top_p", torch.float32)
        self.top_k = self._field("top_k")
        self.top_k.fill_(1)
        self._num_ranks = min(MAX_TOP_K, config.num_semantic, config.codebook_size)
        self.fast = FrameCache(config.fast, num_slots, config.num_codebooks, device, dtype)

    @property
    def dummy_slot(self) -> int:
        """The slot that is nobody's."""
        return self.num_slots

    def start_words(
        self, slot: int, row: Sequence[int], position: int, sampling: Sampling
    ) -> StartWords:
        """State of a stream whose first frame reads `row` at `position`, with an empty window.

        Args:
            row: the last prompt row, 1+K numbers.
        """
        assert 0 <= slot < self.num_slots, (slot, self.num_slots)
        assert len(row) == self.rows.shape[1], (len(row), self.rows.shape)
        words = np.concatenate(
            [
                np.array([sampling.seed, position], np.int64).view(np.int32),
                np.array(row, np.int32),
                np.zeros(RAS_WINDOW + 1, np.int32),  # window, frame_idx
                np.array([sampling.temperature, sampling.top_p], np.float32).view(np.int32),
                np.array([sampling.top_k], np.int32),
            ]
        )
        places = [
            np.arange(begin + slot * width, begin + (slot + 1) * width)
            for begin, width in self._begins.values()
        ]
        return StartWords(np.concatenate(places), words)

    def write(self, places: Tensor, words: Tensor) -> None:
        """Start the streams of several `start_words`, concatenated, on the state's device."""
        self.words.index_copy_(0, places, words)

    def draws(self, slots: Tensor, *, is_chained: bool = False) -> Draws:
        """What the samplers read of the given slots' streams, see `Draws`."""
        return Draws(
            slots,
            *(self.temperature, self.top_p, self.top_k, self.seed, self.frame_idx),
            num_ranks=self._num_ranks,
            is_chained=is_chained,
        )

    def carried(self, history: Tensor | None) -> Carried:
        """What `ops.sampling.advance` moves on. `history`: the KV cache's."""
        return Carried(self.rows, self.position, self.window, self.frame_idx, history)

    def _field(self, name: str, dtype: torch.dtype = torch.int32) -> Tensor:
        begin, width = self._begins[name]
        return self.words[begin : begin + (self.num_slots + 1) * width].view(dtype)


def _widths(config: DualARConfig) -> dict[str, int]:
    """32-bit words of a slot, field by field, in the order of `FrameState.start_words`."""
    return {
        "seed": 2,
        "position": 2,
        "rows": 1 + config.num_codebooks,
        "window": RAS_WINDOW,
        "frame_idx": 1,
        "temperature": 1,
        "top_p": 1,
        "top_k": 1,
    }
