"""Where attention keeps its keys and values: the slots of the slow AR and the fast AR's scratch.

A transformer block does not know which memory it runs on. It hands queries, keys and values of one
layer to an `Attend` function, which stores what must be stored and answers with the attention. One
function per way of running: a span of one slot (prefill), single positions of many slots (decode),
a whole sequence without memory (full forward), the short sequence inside a frame (fast AR).

Slots are independent memory: one thread may write a slot while another writes a different one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from model.config import DualARConfig, StackConfig
from ops import reference

# (layer index, q [R, H, D], kv [R, 2, H_kv, D]) -> [R, H, D]
Attend = Callable[[int, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Prefix:
    """Keys and values of a prompt's first positions, in storage of its own."""

    kv: Tensor  # [L, 2, H_kv, length, D]

    @property
    def length(self) -> int:
        """Positions held."""
        return self.kv.shape[3]

    @property
    def nbytes(self) -> int:
        """Memory held."""
        return self.kv.nbytes


class KVCache:
    """Keys and values of the slow AR for all slots.

    State schema: `kv` [L, N, 2, H_kv, max_len, D], index 2 selects keys (0) or values (1). How many
    positions of a slot are valid is the caller's integer: what lies behind is garbage that the next
    write replaces, so rolling back needs no call.
    """

    def __init__(
        self,
        config: DualARConfig,
        num_slots: int,
        max_len: int,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        slow = config.slow
        assert 0 < max_len <= slow.max_len, (max_len, slow.max_len)
        shape = (slow.num_layers, num_slots, 2, slow.num_kv_heads, max_len, slow.head_dim)
        # Zeros, not garbage: masked attention multiplies what lies behind a slot's length by 0.
        self.kv = torch.zeros(shape, device=device, dtype=dtype)
        self.num_slots = num_slots
        self.max_len = max_len

    def copy_prefix(self, prefix: Prefix, slot: int) -> None:
        """Write positions 0..prefix.length-1 of a slot."""
        assert prefix.length <= self.max_len, (prefix.length, self.max_len)
        self.kv[:, slot, :, :, : prefix.length].copy_(prefix.kv)

    def snapshot(self, slot: int, length: int) -> Prefix:
        """Copy positions 0..length-1 of a slot."""
        assert 0 < length <= self.max_len, (length, self.max_len)
        return Prefix(self.kv[:, slot, :, :, :length].clone())

    def span(self, slot: int, start: int, num_positions: int) -> Attend:
        """Prefill: consecutive positions of one slot, each reading all before it."""
        stop = start + num_positions
        assert 0 <= start < stop <= self.max_len, (start, stop, self.max_len)
        layers = self.kv[:, slot, :, :, :stop].unbind(0)

        def attend(layer: int, q: Tensor, kv: Tensor) -> Tensor:
            memory = layers[layer]
            memory[:, :, start:].copy_(kv.permute(1, 2, 0, 3))
            return reference.causal_attention(q, memory[0], memory[1])

        return attend

    def steps(self, slots: Tensor, positions: Tensor) -> Attend:
        """Decode: one position of each slot.

        Args:
            slots, positions: i64 [B], on the cache's device.
        """
        if self.kv.device.type == "cpu":
            return self._steps_by_row(slots.tolist(), positions.tolist())
        return self._steps_masked(slots, positions)

    def _steps_masked(self, slots: Tensor, positions: Tensor) -> Attend:
        """Elsewhere values are not at hand without waiting, so no shape may depend on them."""

        def attend(layer: int, q: Tensor, kv: Tensor) -> Tensor:
            memory = self.kv[layer]
            memory[slots, :, :, positions] = kv
            return reference.slot_attention(q, memory, slots, positions)

        return attend

    def _steps_by_row(self, slots: list[int], positions: list[int]) -> Attend:
        """On the CPU values are at hand, so each slot is read up to its own length: less to read,
        and the bits of a row cannot depend on how long the other rows are."""
        rows = [
            self.kv[:, slot, :, :, : position + 1].unbind(0)
            for slot, position in zip(slots, positions, strict=True)
        ]

        def attend(layer: int, q: Tensor, kv: Tensor) -> Tensor:
            outputs, num_rows = [], len(rows)
            for row, (q_row, kv_row) in enumerate(
                zip(q.chunk(num_rows), kv.unbind(0), strict=True)
            ):
                memory = rows[row][layer]
                memory[:, :, -1].copy_(kv_row)
                k, v = memory.unsqueeze(1).unbind(0)
                outputs.append(reference.grouped_attention(q_row, k, v))
            return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

        return attend


class FrameCache:
    """Keys and values of the fast AR inside one frame; its content never outlives the frame.

    State schema: `kv` [L, 2, N, H_kv, K, D], row b of the batch, not the slot, is the index into N.
    """

    def __init__(
        self,
        config: StackConfig,
        num_rows: int,
        num_positions: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        shape = (2, num_rows, config.num_kv_heads, num_positions, config.head_dim)
        self._layers = [
            torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.num_layers)
        ]

    def steps(self, start: int, num_positions: int) -> Attend:
        """Positions start..start+num_positions-1 of every row; rows are laid out [B, positions]."""

        def attend(layer: int, q: Tensor, kv: Tensor) -> Tensor:
            num_rows = q.shape[0] // num_positions
            memory = self._layers[layer][:, :num_rows]
            new = kv.view(num_rows, num_positions, *kv.shape[1:]).permute(2, 0, 3, 1, 4)
            memory[:, :, :, start : start + num_positions].copy_(new)
            if num_positions == 1:
                return _attend_up_to(memory, q, start)
            by_position = q.view(num_rows, num_positions, *q.shape[1:]).unbind(1)
            outputs = [_attend_up_to(memory, q, start + i) for i, q in enumerate(by_position)]
            return torch.stack(outputs, dim=1).flatten(0, 1)

        return attend


def _attend_up_to(memory: Tensor, q: Tensor, position: int) -> Tensor:
    k, v = memory[:, :, :, : position + 1].unbind(0)
    return reference.grouped_attention(q, k, v)


def attend_sequence(layer: int, q: Tensor, kv: Tensor) -> Tensor:
    """Full forward: a whole sequence that leaves no memory behind."""
    k, v = kv.permute(1, 2, 0, 3).unbind(0)
    return reference.causal_attention(q, k, v)
