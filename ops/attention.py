"""Attention of rows over paged memory, and the fast AR's attention inside a frame.

A row is one position of one slot. On CUDA these are kernels of `ops/csrc` (bf16, D 64 or 128, up to
eight query heads per key/value head); elsewhere the definitions in `ops/reference_paged.py`. Pages
hold bf16 or `Fp8Rows`; the new position of a row is read as it is written.

Decode of rows that share nothing: one or two are left to the linear after them (attention_split.cu),
up to 49 (of eight key/value heads) are shared by clusters of CTAs each (attention.cu), up to 128 are cut
into parts of any number (attention_parts.cu), more have a CTA each (attention.cu). Prompts, and streams
of one voice: `ops.attention_shared`. The fast AR: frame_attention.cu, or the linear after it.

A launch's shape depends on the number of rows and on `max_pages` alone (`attention_plans`), so it can be
captured; within it, a row is shared by as many warps as its own length asks for. So a row's bits
depend on its own data and on the plan: in two batches of one plan it gets the same bits, whatever its
neighbours, its slot and its pages are; under another plan its sums are rounded in another order.
"""

from __future__ import annotations

import ctypes

from torch import Tensor

from ops import nvrtc, reference_paged
from ops.attention_launch import (
    Output,
    PendingAttention,
    Scratch,
    check_heads,
    check_tensors,
    ints,
    is_fp8,
    launch_parts,
    launch_split,
    launch_whole,
    memory_arguments,
    pending_frame,
    plan_to_pend,
    scale_of,
)
from ops.attention_plans import (
    FP8_SPLIT_PLAN,
    SPLIT_PLAN,
    parts_plan_for,
    plan_for,
)
from ops.fp8_rows import KvRows
from ops.packing import PackedWeight
from ops.quantize import Activation, Kind, quantize_rows

_MAX_HELD = 16  # positions of a frame: rows of an mma
_THREADS = 128  # of rope_append


def rope_append(
    qkv: Tensor,
    qk_norm: Tensor | None,
    eps: float,
    rope: Tensor,
    pages: KvRows,
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
    num_kv_heads = pages.shape[2]
    if qkv.device.type != "cuda":
        turns = rope.index_select(0, positions)
        q, kv = reference_paged.rotate_heads(qkv, qk_norm, eps, turns, num_kv_heads)
        reference_paged.append(kv, pages, page_table, slots, positions)
        return q
    num_rows, num_all, head_dim = qkv.shape
    num_heads = num_all - 2 * num_kv_heads
    check_heads(num_heads, num_kv_heads, head_dim)
    check_tensors(qkv, qk_norm)
    q = qkv.new_empty(num_rows, num_heads, head_dim)
    where = (pages, page_table, slots, positions)
    heads_per_block = _THREADS * 8 // head_dim
    nvrtc.kernel(
        "rope_append.cu",
        "rope_append",
        defines={"HEAD_DIM": head_dim, "PAGE": pages.shape[3], "IS_FP8": int(is_fp8(pages))},
    ).launch(
        (-(-num_all // heads_per_block), num_rows),
        (_THREADS,),
        [
            *(qkv, qk_norm, rope, *memory_arguments(where), q),
            *(ctypes.c_float(eps), *ints(num_heads, num_kv_heads, page_table.shape[1])),
        ],
    )
    return q


def decode_attention(  # noqa: PLR0913 - one launch
    qkv: Tensor,
    qk_norm: Tensor | None,
    eps: float,
    rope: Tensor,
    pages: KvRows,
    page_table: Tensor,
    slots: Tensor,
    positions: Tensor,
    kind: Kind,
    *,
    is_chained: bool = False,
    scratch: Scratch | None = None,
    wo: PackedWeight | None = None,
) -> Activation | PendingAttention:
    """`rope_append`, and row m reads positions 0..positions[m] of slots[m], in one launch: for rows of
    distinct slots (or of the dummy slot), so that a row reads no key that another row writes.

    Args:
        is_chained: the kernel before this one in the stream writes `qkv` and nothing else that this
            one reads, and between it and whatever wrote the rest is a launch of `embed_rows`, a
            sampler or `advance`, which start nothing before all that came before them has ended.
            Then tables and past keys are fetched, and the kernel after this one starts, while the
            kernel before still runs.
        scratch: with one, long rows among many are cut into parts, so that rows of uneven lengths
            take no longer than their sum.
        wo: the linear that alone takes the result and comes next (`ops.attended_linear`): its
            kernel may then merge what a row or two are cut into.

    Returns:
        [M, H * D].
    """
    if qkv.device.type != "cuda":
        q = rope_append(qkv, qk_norm, eps, rope, pages, page_table, slots, positions)
        out = reference_paged.paged_attention(q, pages, page_table, slots, positions)
        return _as_kind(out.flatten(1), kind)
    where, rotary = (pages, page_table, slots, positions), (qk_norm, rope, eps)
    num_rows, num_kv_heads, page_size = len(qkv), *pages.shape[2:4]
    max_pages = page_table.shape[1]
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    linear_plan = plan_to_pend(wo, num_rows, num_heads, num_kv_heads, qkv.shape[2])
    if linear_plan is not None:
        split = FP8_SPLIT_PLAN if is_fp8(pages) else SPLIT_PLAN
        return launch_split(qkv, rotary, where, split, linear_plan, is_chained=is_chained)
    parts = parts_plan_for(num_rows, num_kv_heads, max_pages * page_size // 16)
    if scratch is not None and parts is not None:
        return launch_parts(qkv, rotary, where, kind, parts, scratch, is_chained=is_chained)
    plan = plan_for(num_rows, num_kv_heads, max_pages, page_size, is_fp8=is_fp8(pages))
    return launch_whole(qkv, rotary, where, kind, plan, is_chained=is_chained)


def frame_attention(  # noqa: PLR0913 - one launch
    qkv: Tensor,
    qk_norm: Tensor | None,
    eps: float,
    rope: Tensor,
    memory: Tensor,
    start: int,
    num_positions: int,
    kind: Kind,
    *,
    is_chained: bool = False,
    is_last_only: bool = False,
    wo: PackedWeight | None = None,
) -> Activation | PendingAttention:
    """The fast AR's attention: norm, rotate, append and attend in one launch.

    Args:
        qkv: [R * num_positions, H + 2 H_kv, D], laid out [R, num_positions].
        memory: [2, R or more, H_kv, K, D], K <= 16; overwritten at the new positions.
        start: first position of every row.
        num_positions: 1 or 2.
        is_chained: see `decode_attention`.
        is_last_only: of every row the last position alone attends; all are appended.
        wo: see there; its kernel may do all of it.

    Returns:
        [R * num_positions, H * D], or [R, H * D] if `is_last_only`.
    """
    if qkv.device.type != "cuda":
        args = (qkv, qk_norm, eps, rope, memory, start, num_positions)
        made = reference_paged.frame_attention(*args).flatten(1)
        return _as_kind(made[num_positions - 1 :: num_positions] if is_last_only else made, kind)
    num_rows, num_all, head_dim = qkv.shape
    _, capacity, num_kv_heads, num_held, _ = memory.shape
    num_heads = num_all - 2 * num_kv_heads
    check_heads(num_heads, num_kv_heads, head_dim)
    check_tensors(qkv, qk_norm, memory)
    assert num_positions in (1, 2) and num_rows % num_positions == 0, (num_rows, num_positions)
    assert num_rows // num_positions <= capacity, (num_rows, num_positions, capacity)
    assert start + num_positions <= num_held <= _MAX_HELD, (start, num_positions, num_held)
    linear_plan = plan_to_pend(wo, num_rows, num_heads, num_kv_heads, head_dim)
    if linear_plan is not None and is_chained and not is_last_only:
        rotary = (qk_norm, rope, eps)
        return pending_frame(qkv, rotary, memory, start, num_positions, linear_plan)
    group = num_heads // num_kv_heads
    num_out = num_rows // num_positions if is_last_only else num_rows
    out = Output(qkv, num_out, num_heads * head_dim, kind)
    nvrtc.kernel(
        "frame_attention.cu",
        "frame_attention",
        defines={
            "HEAD_DIM": head_dim,
            "GROUP": group,
            "POSITIONS": num_positions,
            "IS_LAST_ONLY": int(is_last_only),
            "IS_CHAINED": int(is_chained),
        },
    ).launch(
        (num_kv_heads, num_rows // num_positions),
        (-(-num_positions * (group + 2) * head_dim // 8 // 32) * 32,),
        [
            *(qkv, qk_norm, rope, memory, *out.arguments),
            *(ctypes.c_float(eps), scale_of(head_dim), *ints(start, capacity, num_held)),
        ],
    )
    return out.finish()


def _as_kind(out: Tensor, kind: Kind) -> Activation:
    return out if kind == "bf16" else quantize_rows(out)
