"""Plain PyTorch definitions of attention over paged memory and over the fast AR's short memory.

Rows: one row is one position of one slot. `pages` of a layer: [P, 2, H_kv, PAGE, D], keys, then
values, in the rows' dtype or as `Fp8Rows`; position p of a slot lies in page
`page_table[slot, p // PAGE]` at p % PAGE. What lies behind a row's own position is never read,
whatever it holds.

On the CPU each row is read up to its own length, so its bits do not depend on the other rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ops import reference
from ops.fp8_rows import KvRows, dequantized
from ops.reference_fp8 import ceil_div


def rotate_heads(
    qkv: Tensor, qk_norm: Tensor | None, eps: float, turns: Tensor, num_kv_heads: int
) -> tuple[Tensor, Tensor]:
    """Norm queries and keys per head (if the model does) and rotate them.

    Args:
        qkv: [M, H + 2 H_kv, D]: queries, keys, values.
        qk_norm: [H + H_kv, D] or None.
        turns: complex64 [M, 1, D/2], one row of `rope_table` per row.

    Returns:
        q [M, H, D], kv [M, 2, H_kv, D]; new storage.
    """
    heads = qkv[:, :-num_kv_heads]
    if qk_norm is not None:
        heads = reference.rms_norm(heads, qk_norm, eps)
    rotated = torch.empty(heads.shape, dtype=qkv.dtype, device=qkv.device)
    reference.rope(heads, turns, out=rotated)
    q, k = rotated[:, :-num_kv_heads], rotated[:, -num_kv_heads:]
    return q.contiguous(), torch.stack([k, qkv[:, -num_kv_heads:]], dim=1)


def append(kv: Tensor, pages: KvRows, page_table: Tensor, slots: Tensor, positions: Tensor) -> None:
    """Write keys and values [M, 2, H_kv, D] of rows into their pages.

    What is not finite becomes 0, so that memory stays finite: kernels multiply values by weights of 0, and
    what one stream has broken would reach those beside it.
    """
    page_size = pages.shape[3]
    page = page_table[slots, positions // page_size].long()
    pages[page, :, :, positions % page_size] = kv.nan_to_num(0, 0, 0)


def paged_attention(
    q: Tensor, pages: KvRows, page_table: Tensor, slots: Tensor, positions: Tensor
) -> Tensor:
    """Row m reads positions 0..positions[m] of slots[m]: [M, H, D] -> [M, H, D].

    Knows the lengths on the host, so it is for the CPU (and waits for any other device).
    """
    page_size, outputs = pages.shape[3], []
    for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        length = position + 1
        used = page_table[slot, : ceil_div(length, page_size)].long()
        read = dequantized(pages[used], q.dtype)
        kv = read.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]
        k, v = kv.unsqueeze(1).unbind(0)
        outputs.append(reference.grouped_attention(q[row : row + 1], k, v))
    return torch.cat(outputs)


def frame_attention(
    qkv: Tensor,
    qk_norm: Tensor | None,
    eps: float,
    rope: Tensor,
    memory: Tensor,
    start: int,
    num_positions: int,
) -> Tensor:
    """Positions start..start+num_positions-1 of R rows: norm, rotate, append, attend.

    Args:
        qkv: [R * num_positions, H + 2 H_kv, D], laid out [R, num_positions].
        rope: complex64 [n, 1, D/2], the table from position 0.
        memory: [2, R or more, H_kv, K, D]; positions before `start` are read, the new ones written.

    Returns:
        [R * num_positions, H, D].
    """
    num_rows = qkv.shape[0] // num_positions
    turns = rope[start : start + num_positions].repeat(num_rows, 1, 1)
    q, kv = rotate_heads(qkv, qk_norm, eps, turns, num_kv_heads=memory.shape[2])
    return attend_in_frame(q, kv, memory, start, num_positions)


def attend_in_frame(
    q: Tensor, kv: Tensor, memory: Tensor, start: int, num_positions: int
) -> Tensor:
    """`frame_attention` of queries [R * num_positions, H, D] and their [.., 2, H_kv, D]."""
    num_rows = q.shape[0] // num_positions
    held = memory[:, :num_rows]
    new = kv.view(num_rows, num_positions, *kv.shape[1:]).permute(2, 0, 3, 1, 4)
    held[:, :, :, start : start + num_positions].copy_(new)
    outputs = []
    for idx, q_at in enumerate(q.view(num_rows, num_positions, *q.shape[1:]).unbind(1)):
        k, v = held[:, :, :, : start + idx + 1].unbind(0)
        outputs.append(reference.grouped_attention(q_at, k, v))
    return outputs[0] if num_positions == 1 else torch.stack(outputs, dim=1).flatten(0, 1)
