"""Rows over paged memory as the attention tests need them: everything that must not be read is NaN."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ops import reference
from ops.fp8_rows import Fp8Rows, KvRows, dequantized

EPS = 1e-6


@dataclass
class Paged:
    """Rows of slots whose pages lie in random order."""

    qkv: Tensor  # [M, H + 2 H_kv, D]
    qk_norm: Tensor  # [H + H_kv, D]
    rope: Tensor
    pages: KvRows
    page_table: Tensor
    slots: Tensor
    positions: Tensor

    @property
    def q(self) -> Tensor:
        """Queries as if they were normed and rotated."""
        return self.qkv[:, : -2 * self.pages.shape[2]].contiguous()

    @property
    def where(self) -> tuple[KvRows, Tensor, Tensor, Tensor]:
        return self.pages, self.page_table, self.slots, self.positions

    @property
    def rotary(self) -> tuple[Tensor, float, Tensor]:
        return self.qk_norm, EPS, self.rope

    def rows(self, chosen: list[int]) -> Paged:
        """Some of the rows, over a copy of the same memory."""
        parts = (self.qkv[chosen], self.qk_norm, self.rope, copied(self.pages), self.page_table)
        return Paged(*parts, self.slots[chosen], self.positions[chosen])

    def dense(self, row: int) -> Tensor:
        """[2, H_kv, n, D], what a row may read; exact."""
        length = int(self.positions[row]) + 1
        page_size = self.pages.shape[3]
        used = self.page_table[self.slots[row], : -(-length // page_size)].long()
        pages = dequantized(self.pages[used], torch.float32)
        return pages.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]

    def expected(self, q: Tensor) -> Tensor:
        """Attention of q [M, H, D] in fp32, [M, H * D]."""
        outputs = []
        for row in range(len(q)):
            k, v = self.dense(row).float().unsqueeze(1).unbind(0)
            outputs.append(reference.grouped_attention(q[row : row + 1].float(), k, v))
        return torch.cat(outputs).flatten(1)


def paged(
    lengths: list[int],
    heads: tuple[int, int, int],
    *,
    page_size: int = 32,
    num_slots: int | None = None,
    max_len: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    seed: int = 0,
    kv_format: str = "bf16",
) -> Paged:
    """Rows that have read `lengths` positions once their own is in: one row of each of random slots.

    Args:
        heads: H, H_kv, D.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    num_heads, num_kv_heads, head_dim = heads
    num_rows = len(lengths)
    num_slots = num_slots or num_rows + 2
    max_pages = -(-(max_len or max(lengths)) // page_size)
    needed = [-(-length // page_size) for length in lengths]
    shape = (sum(needed) + 3, 2, num_kv_heads, page_size, head_dim)
    pages = torch.full(shape, torch.nan, device=device, dtype=dtype)
    shuffled = torch.randperm(sum(needed) + 2, generator=generator, device=device) + 1
    page_table = torch.zeros(num_slots + 1, max_pages, dtype=torch.int32, device=device)
    slots = torch.randperm(num_slots, generator=generator, device=device)[:num_rows]
    begin = 0
    for slot, length, num_pages in zip(slots.tolist(), lengths, needed, strict=True):
        used = shuffled[begin : begin + num_pages]
        begin += num_pages
        page_table[slot, :num_pages] = used.int()
        values = normal(num_pages, 2, num_kv_heads, page_size, head_dim)
        values[-1, :, :, length - (num_pages - 1) * page_size :] = torch.nan
        pages[used] = values
    return Paged(
        qkv=normal(num_rows, num_heads + 2 * num_kv_heads, head_dim),
        qk_norm=(1 + 0.2 * normal(num_heads + num_kv_heads, head_dim).float()).to(dtype),
        rope=reference.rope_table(max_pages * page_size, head_dim, 1e6, torch.device(device)),
        pages=quantised(pages) if kv_format == "fp8" else pages,
        page_table=page_table,
        slots=slots,
        positions=torch.tensor(lengths, device=device) - 1,
    )


def quantised(pages: Tensor) -> Fp8Rows:
    """Rows of NaN are NaN, in data and scale."""
    rows, is_poison = Fp8Rows.of(pages.nan_to_num()), pages.isnan().any(-1)
    rows.data.view(torch.uint8)[is_poison] = 0x7F
    rows.scale[is_poison] = torch.nan
    return rows


def copied(pages: KvRows) -> KvRows:
    """In memory of its own."""
    if isinstance(pages, Fp8Rows):
        return Fp8Rows(pages.data.clone(), pages.scale.clone())
    return pages.clone()


def overwrite(pages: KvRows, source: KvRows) -> None:
    if isinstance(pages, Fp8Rows) and isinstance(source, Fp8Rows):
        pages.data.copy_(source.data)
        pages.scale.copy_(source.scale)
    else:
        assert isinstance(pages, Tensor) and isinstance(source, Tensor)
        pages.copy_(source)


def relative_error(out: Tensor, expected: Tensor) -> float:
    """Largest error of a row over the norm of the row; NaN counts as infinite."""
    error = (out.float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1)
    return float(error.nan_to_num(nan=torch.inf).max())


def bits(rows: KvRows) -> Tensor:
    """For comparing what may hold NaN."""
    if isinstance(rows, Fp8Rows):
        return torch.cat([bits(rows.data), bits(rows.scale[..., None])], dim=-1)
    return rows.contiguous().view(torch.uint8)
