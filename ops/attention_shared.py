"""Attention of rows whose neighbours read the same positions: streams of one voice, rows of one prompt.

What four neighbours share is read once for them. Found on the device, by their slots' tables, so that a
launch can be captured. Decode uses it where most streams begin with the pages of their neighbours, and
prompts always do. For rows that share nothing `ops.attention.decode_attention` is faster: of 64 rows of
720 positions 30 us on an H200, if 640 are in pages that all share, and here 16; of 600 of their own 23 and
27 in 8 bits.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from torch import Tensor

from ops import reference_paged
from ops.attention import rope_append
from ops.attention_launch import (
    MAX_GROUP,
    Output,
    Where,
    check_tensors,
    ints,
    is_fp8,
    memory_arguments,
    paged_kernel,
    ring_bytes,
    scale_of,
    sizes,
)
from ops.fp8_rows import KvRows
from ops.quantize import Activation, Kind, quantize_rows

_BATCHES = 2  # mma that share what a warp reads
_MOST_SPLITS = 2


class SharedPlan(NamedTuple):
    """How the positions of a few rows are shared: by `splits` CTAs (1 or 2) of `warps` (8, 6 or 4; an SM
    has registers for twelve)."""

    splits: int
    warps: int


# Pairs of a few rows and a key/value head, and the plan for up to that many, measured on an H200.
_PLANS = (
    (66, SharedPlan(2, 8)),
    (132, SharedPlan(1, 8)),
    (264, SharedPlan(1, 6)),
    (396, SharedPlan(1, 4)),
    (528, SharedPlan(1, 6)),
)
_MANY = SharedPlan(1, 4)


def shared_plan_for(num_pairs: int) -> SharedPlan:
    """The plan for a launch shape."""
    return next((plan for most, plan in _PLANS if num_pairs <= most), _MANY)


def shared_attention(
    q: Tensor,
    pages: KvRows,
    page_table: Tensor,
    slots: Tensor,
    positions: Tensor,
    kind: Kind,
    *,
    plan: SharedPlan | None = None,
) -> Activation:
    """Row m reads positions 0..positions[m] of slots[m]. A row of a slot without a page reads nothing;
    what it gets is finite. Slots, positions and table are older than the kernel before this one.

    Args:
        q: [M, H, D], the rest as in `ops.attention.rope_append`.
        plan: for benches and tests.

    Returns:
        [M, H * D].
    """
    if q.device.type != "cuda":
        made = reference_paged.paged_attention(q, pages, page_table, slots, positions).flatten(1)
        return made if kind == "bf16" else quantize_rows(made)
    return _launch(q, None, (pages, page_table, slots, positions), kind, plan)


def shared_decode_attention(  # noqa: PLR0913 - one launch
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
    plan: SharedPlan | None = None,
) -> Activation:
    """`rope_append` and `shared_attention` in one launch, for rows of distinct slots (or of the dummy
    slot). The kernel before writes `qkv` and nothing else that this one reads."""
    where, rotary = (pages, page_table, slots, positions), (qk_norm, eps, rope)
    if qkv.device.type != "cuda":
        return shared_attention(rope_append(*(qkv, *rotary, *where)), *where, kind)
    return _launch(qkv, rotary, where, kind, plan)


def _launch(
    heads: Tensor,
    rotary: tuple[Tensor | None, float, Tensor] | None,
    where: Where,
    kind: Kind,
    plan: SharedPlan | None,
) -> Activation:
    pages, page_table, *_ = where
    qk_norm, eps, rope = rotary or (None, 0.0, None)
    check_tensors(heads, qk_norm)
    is_fused = rotary is not None
    num_rows, num_heads, num_kv_heads, head_dim = sizes(heads, pages, is_fused=is_fused)
    group = num_heads // num_kv_heads
    num_spans = -(-num_rows // (_BATCHES * (MAX_GROUP // group)))
    plan = plan or shared_plan_for(num_kv_heads * num_spans)
    out = Output(heads, num_rows, num_heads * head_dim, kind)
    paged_kernel("attention_shared", pages, group, WARPS=plan.warps, IS_FUSED=int(is_fused)).launch(
        (plan.splits, num_kv_heads, num_spans),
        (32 * plan.warps,),
        [
            *(heads, qk_norm, rope, *memory_arguments(where), *out.arguments),
            *(ctypes.c_float(eps), scale_of(head_dim)),
            *ints(page_table.shape[1], num_rows),
        ],
        shared_bytes=_shared_bytes(plan.warps, group, head_dim, is_fp8=is_fp8(pages)),
        cluster=(plan.splits, 1, 1),
    )
    return out.finish()


def _shared_bytes(warps: int, group: int, head_dim: int, *, is_fp8: bool) -> int:
    """Shared memory of `Shared` of attention_shared.cu: the rings, in whose place partial results meet
    later (`Exchange` of paged.cuh), then the queries."""
    num_columns = _BATCHES * MAX_GROUP
    most = max(
        active * warps * -(-num_columns // active)
        for active in range(1, _MOST_SPLITS + 1)
        if active * warps <= 32
    )
    first = max(ring_bytes(warps, head_dim, is_fp8=is_fp8), most * (head_dim + 2) * 4)
    num_queries = _BATCHES * (MAX_GROUP // group) * group
    stride = head_dim + (8 if is_fp8 else 32)  # `QUERY_STRIDE` of tile.cuh
    return -(-first // 256) * 256 + num_queries * stride * 2
