"""Where attention keeps its keys and values: the pages of the slow AR and the fast AR's scratch.

A transformer block does not know which memory it runs on. It hands queries, keys and values of one
layer to an `Attend` function, which stores what must be stored and answers with the attention. One
function per way of running: a span of one slot (prefill), single positions of many slots (decode),
a whole sequence without memory (full forward), the short sequence inside a frame (fast AR).

Slots are independent memory: one thread may write a slot while another writes a different one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from model.config import DualARConfig, StackConfig
from model.pages import PageTable
from ops import reference, reference_paged
from ops.attention_launch import Scratch
from ops.attention_plans import most_parts_of
from ops.fp8_rows import Fp8Rows, KvRows, dequantized
from ops.reference_fp8 import ceil_div

# (layer index, q [R, H, D], kv [R, 2, H_kv, D]) -> [R, H, D]
Attend = Callable[[int, Tensor, Tensor], Tensor]

KvFormat = Literal["bf16", "fp8"]  # "bf16": the model's dtype, fp32 on a CPU
CUDA_PAGE = 32  # positions; kernels know it


def default_page_size(device: torch.device, max_len: int) -> int:
    """32 positions on CUDA. Elsewhere the whole context: reads are views."""
    return CUDA_PAGE if device.type == "cuda" else max_len


def position_bytes(config: DualARConfig, dtype: torch.dtype, kv_format: KvFormat) -> int:
    """Keys and values of a position, in all layers."""
    slow = config.slow
    row = slow.head_dim + 2 if kv_format == "fp8" else slow.head_dim * dtype.itemsize
    return 2 * slow.num_layers * slow.num_kv_heads * row


def has_kernels(stack: StackConfig) -> bool:
    """Whether attention's kernels take heads like these."""
    return stack.head_dim in (64, 128) and stack.num_groups <= 8


def _scratch(slow: StackConfig, num_positions: int, device: torch.device) -> Scratch | None:
    """Of decoding with kernels."""
    if device.type != "cuda" or not has_kernels(slow):
        return None
    most_parts = most_parts_of(ceil_div(num_positions, 16))
    return Scratch(slow.num_kv_heads, slow.num_groups, slow.head_dim, most_parts, device)


class KVCache:
    """Keys and values of the slow AR for all slots, in pages of `page_size` positions.

    State schema: `kv` [L, P, 2, H_kv, PAGE, D], index 2 selects keys (0) or values (1), in the
    model's dtype or, with format "fp8", as `Fp8Rows`;
    `page_table` i32 [num_slots + 1, max_pages]: position p of a slot is in page
    page_table[slot, p // PAGE] at p % PAGE. Page 0 belongs to nobody and is the table's value where
    a slot has no page; the last row of the table, the dummy slot, never has one.

    `history` i32 [num_slots + 1, max_len, 1+K], if it is kept: the inputs that keys and values were
    made from, by position, so that they can be made again somewhere else. Decode writes it, and
    whoever prefills may (`remember`).

    `scratch`, if kernels decode: for `ops.attention.decode_attention`, of one stream at a time.

    How many positions of a slot are valid is the caller's integer: what lies behind is garbage (it
    may be NaN) that nothing reads and the next write replaces, so rolling back needs no call.
    """

    def __init__(  # noqa: PLR0913 - sizes of one piece of memory
        self,
        config: DualARConfig,
        num_slots: int,
        max_len: int,
        device: torch.device | str,
        dtype: torch.dtype,
        *,
        page_size: int | None = None,
        num_pages: int | None = None,
        has_history: bool = False,
        kv_format: KvFormat = "bf16",
    ) -> None:
        """Without `num_pages` every slot has pages for `max_len` positions, for ever; with it no
        slot has any until `assign`."""
        slow, device = config.slow, torch.device(device)
        assert 0 < max_len <= slow.max_len, (max_len, slow.max_len)
        self.num_slots = num_slots
        self.max_len = max_len
        self.page_size = page_size or default_page_size(device, max_len)
        self.max_pages = self.num_pages_of(max_len)
        self.num_pages = num_pages or 1 + num_slots * self.max_pages
        shape = (slow.num_layers, self.num_pages, 2, slow.num_kv_heads, self.page_size)
        self._dtype = dtype
        # Not zeroed: on the CPU memory that is never written is never taken from the system.
        self.kv: KvRows
        if kv_format == "fp8":
            self.kv = Fp8Rows.empty(*shape, slow.head_dim, device=device)
        else:
            self.kv = torch.empty(*shape, slow.head_dim, device=device, dtype=dtype)
        self.scratch = _scratch(slow, self.max_pages * self.page_size, device)
        self.history: Tensor | None = None
        if has_history:
            rows = (num_slots + 1, max_len, 1 + config.num_codebooks)
            self.history = torch.zeros(rows, device=device, dtype=torch.int32)
        self._table = PageTable(num_slots, self.max_pages, device)
        if num_pages is None:
            for slot in range(num_slots):
                first = 1 + slot * self.max_pages
                self.assign(slot, range(first, first + self.max_pages))

    @property
    def page_table(self) -> Tensor:
        """i32 [num_slots + 1, max_pages], on the device."""
        return self._table.on_device

    def num_pages_of(self, num_positions: int) -> int:
        """Pages that hold as many positions."""
        return ceil_div(num_positions, self.page_size)

    def pages(self, slot: int) -> tuple[int, ...]:
        """The pages of a slot, in the order of their positions."""
        return self._table.of(slot)

    def assign(self, slot: int, pages: Sequence[int]) -> None:
        """Give a slot its pages, in stream order; called by one thread alone."""
        self._table.assign(slot, pages)

    def copy_page(self, source: int, target: int, num_positions: int) -> None:
        """Copy the first positions of a page."""
        assert 0 < num_positions <= self.page_size, (num_positions, self.page_size)
        for part in self._parts():
            part[:, target, :, :, :num_positions].copy_(part[:, source, :, :, :num_positions])

    def _parts(self) -> tuple[Tensor, ...]:
        """The tensors of `kv`; pages are their second dimension."""
        return (self.kv.data, self.kv.scale) if isinstance(self.kv, Fp8Rows) else (self.kv,)

    def remember(self, slot: int, start: int, rows: Tensor) -> None:
        """Rows i32 [1+K, T] are what positions from `start` on are made from."""
        if self.history is not None:
            self.history[slot, start : start + rows.shape[1]] = rows.t()

    def move_history(self, slot: int, start: int, stop: int, target: int) -> None:
        """What positions start..stop-1 were made from is now that of positions from `target` on."""
        self.remember(slot, target, self.recall(slot, start, stop).clone())

    def recall(self, slot: int, start: int, stop: int) -> Tensor:
        """What positions start..stop-1 were made from, i32 [1+K, T]."""
        assert self.history is not None
        return self.history[slot, start:stop].t().contiguous()

    def read(self, slot: int, length: int) -> Tensor:
        """Positions 0..length-1 of a slot, copied: [L, 2, H_kv, length, D] in the model's dtype."""
        table = self.page_table[slot : slot + 1, : self.num_pages_of(length)]
        layers = [self._gather(pages, table) for pages in self.kv.unbind(0)]
        return torch.cat(layers)[:, :, :, :length].clone()

    def span(self, slot: int, start: int, num_positions: int) -> Attend:
        """Prefill: consecutive positions of one slot, each reading all before it."""
        stop = start + num_positions
        assert 0 <= start < stop <= self.max_len, (start, stop, self.max_len)
        num_pages = self.num_pages_of(stop)
        assert num_pages <= len(self.pages(slot)), (slot, stop, self.pages(slot))
        if num_pages > 1:
            return self._span_over_pages(slot, start, stop)
        layers = self.kv[:, self.pages(slot)[0], :, :, :stop].unbind(0)

        def attend(layer: int, q: Tensor, kv: Tensor) -> Tensor:
            memory = layers[layer]
            memory[:, :, start:] = kv.permute(1, 2, 0, 3)
            k, v = dequantized(memory, self._dtype).unbind(0)
            return reference.causal_attention(q, k, v)

        return attend

    def _span_over_pages(self, slot: int, start: int, stop: int) -> Attend:
        table = self.page_table[slot : slot + 1, : self.num_pages_of(stop)]
        positions = torch.arange(start, stop, device=self.kv.device)
        pages, offsets = table[0, positions // self.page_size], positions % self.page_size

        def attend(layer: int, q: Tensor, kv: Tensor) -> Tensor:
            memory = self.kv[layer]
            memory[pages, :, :, offsets] = kv
            k, v = self._gather(memory, table)[0, :, :, :stop].unbind(0)
            return reference.causal_attention(q, k, v)

        return attend

    def steps(self, slots: Tensor, positions: Tensor) -> Attend:
        """Decode: one position of each slot.

        Args:
            slots, positions: i64 [B], on the cache's device.
        """
        if self.kv.device.type != "cpu":
            return self._steps_masked(slots, positions)
        if int(positions.max()) < self.page_size:
            return self._steps_by_row(slots.tolist(), positions.tolist())
        where = self.page_table, slots, positions

        def attend(layer: int, q: Tensor, kv: Tensor) -> Tensor:
            reference_paged.append(kv, self.kv[layer], *where)
            return reference_paged.paged_attention(q, self.kv[layer], *where)

        return attend

    def _steps_masked(self, slots: Tensor, positions: Tensor) -> Attend:
        """Elsewhere values are not at hand without waiting, so no shape may depend on them."""
        tables = self.page_table[slots].long()
        pages = tables.gather(1, (positions // self.page_size)[:, None])[:, 0]
        offsets = positions % self.page_size
        reach = torch.arange(self.max_pages * self.page_size, device=self.kv.device)
        is_valid = reach <= positions[:, None]

        def attend(layer: int, q: Tensor, kv: Tensor) -> Tensor:
            memory = self.kv[layer]
            memory[pages, :, :, offsets] = kv
            read = self._gather(memory, tables)
            # A mask alone does not do: 0 times a NaN that lies behind is NaN.
            k, v = torch.where(is_valid[:, None, None, :, None], read, 0).unbind(1)
            return reference.grouped_attention(q, k, v, is_valid)

        return attend

    def _steps_by_row(self, slots: list[int], positions: list[int]) -> Attend:
        """On the CPU values are at hand, so each slot is read up to its own length: less to read,
        and the bits of a row cannot depend on how long the other rows are."""
        rows = [
            self.kv[:, self._table.page_at(slot, 0), :, :, : position + 1].unbind(0)
            for slot, position in zip(slots, positions, strict=True)
        ]

        def attend(layer: int, q: Tensor, kv: Tensor) -> Tensor:
            outputs, num_rows = [], len(rows)
            for row, (q_row, kv_row) in enumerate(
                zip(q.chunk(num_rows), kv.unbind(0), strict=True)
            ):
                memory = rows[row][layer]
                memory[:, :, -1] = kv_row
                k, v = dequantized(memory, self._dtype).unsqueeze(1).unbind(0)
                outputs.append(reference.grouped_attention(q_row, k, v))
            return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

        return attend

    def _gather(self, memory: KvRows, tables: Tensor) -> Tensor:
        """Whole pages of one layer [P, 2, H_kv, PAGE, D] in the order of tables [B, n], copied:
        [B, 2, H_kv, n * PAGE, D]."""
        pages = dequantized(memory[tables.long()], self._dtype)
        return pages.permute(0, 2, 3, 1, 4, 5).flatten(3, 4)


class FrameCache:
    """Keys and values of the fast AR inside one frame; its content never outlives the frame.

    State schema: `layers`, of each [2, N, H_kv, K, D]; row b of the batch, not the slot, is the
    index into N.
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
        self.layers = [
            torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.num_layers)
        ]

    def steps(self, start: int, num_positions: int) -> Attend:
        """Positions start..start+num_positions-1 of every row; rows are laid out [B, positions]."""

        def attend(layer: int, q: Tensor, kv: Tensor) -> Tensor:
            memory = self.layers[layer]
            return reference_paged.attend_in_frame(q, kv, memory, start, num_positions)

        return attend


def attend_sequence(layer: int, q: Tensor, kv: Tensor) -> Tensor:
    """Full forward: a whole sequence that leaves no memory behind."""
    k, v = kv.permute(1, 2, 0, 3).unbind(0)
    return reference.causal_attention(q, k, v)
