"""Attention of rows over paged memory, and the fast AR's attention inside a frame.

A row is one position of one slot. On CUDA these are kernels of `ops/csrc` (bf16, D 64 or 128, up to
eight query heads per key/value head); elsewhere the definitions in `ops/reference_paged.py`.

How many CTAs share a row depends on the number of rows and on `max_pages` alone, so launches can be
captured, and a row's bits depend on its own data and on that number: the same row in two batches of
the same split gives the same bits, whatever its neighbours, its slot and its pages are.
"""

from __future__ import annotations

from torch import Tensor

from ops import reference_paged
from ops.quantize import Activation, Kind, quantize_rows

_GROUP = 128  # values per activation scale


def rope_append(
    qkv: Tensor,
    qk_norm: Tensor | None,
    eps: float,
    rope: Tensor,
    pages: Tensor,
    page_table: Tensor,
    slots: Tensor,
    positions: Tensor,
) -> Tensor:
    """Norm and rotate queries and keys, and write keys and values into their pages.

    Args:
        qkv: [M, H + 2 H_kv, D]: queries, keys, values.
        qk_norm: [H + H_kv, D], or None: no norm.
        rope: complex64 [max_len, 1, D/2], `reference.rope_table`.
        pages: [P, 2, H_kv, PAGE, D] of one layer; overwritten at the rows' positions.
        page_table: i32 [num_slots + 1, max_pages].
        slots, positions: i64 [M].

    Returns:
        q [M, H, D].
    """
    turns = rope.index_select(0, positions)
    q, kv = reference_paged.rotate_heads(qkv, qk_norm, eps, turns, pages.shape[2])
    reference_paged.append(kv, pages, page_table, slots, positions)
    return q


def paged_attention(
    q: Tensor, pages: Tensor, page_table: Tensor, slots: Tensor, positions: Tensor, kind: Kind
) -> Activation:
    """Row m reads positions 0..positions[m] of slots[m]; see `rope_append` for the tensors.

    Returns:
        [M, H * D].
    """
    out = reference_paged.paged_attention(q, pages, page_table, slots, positions)
    return _as_kind(out.flatten(1), kind)


def decode_attention(  # noqa: PLR0913 - one launch
    qkv: Tensor,
    qk_norm: Tensor | None,
    eps: float,
    rope: Tensor,
    pages: Tensor,
    page_table: Tensor,
    slots: Tensor,
    positions: Tensor,
    kind: Kind,
) -> Activation:
    """`rope_append` and `paged_attention` in one launch, for rows of distinct slots (or of the
    dummy slot): a row reads no key that another row of the launch writes.

    Returns:
        [M, H * D].
    """
    q = rope_append(qkv, qk_norm, eps, rope, pages, page_table, slots, positions)
    return paged_attention(q, pages, page_table, slots, positions, kind)


def frame_attention(
    qkv: Tensor,
    qk_norm: Tensor | None,
    eps: float,
    rope: Tensor,
    memory: Tensor,
    start: int,
    num_positions: int,
    kind: Kind,
) -> Activation:
    """The fast AR's attention: norm, rotate, append and attend in one launch.

    Args:
        qkv: [R * num_positions, H + 2 H_kv, D], laid out [R, num_positions].
        memory: [2, R or more, H_kv, K, D], K <= 16; overwritten at the new positions.
        start: first position of every row.
        num_positions: 1 or 2.

    Returns:
        [R * num_positions, H * D].
    """
    args = (qkv, qk_norm, eps, rope, memory, start, num_positions)
    return _as_kind(reference_paged.frame_attention(*args).flatten(1), kind)


def _as_kind(out: Tensor, kind: Kind) -> Activation:
    return out if kind == "bf16" else quantize_rows(out)
