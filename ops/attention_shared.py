"""Attention of rows whose neighbours begin with the same pages: streams of one voice, rows of one prompt.

What four neighbours share is read once for them. Found on the device, by their slots' tables, so that a
launch can be captured. For rows that share nothing `ops.attention.decode_attention` is faster: of 64 rows
of 720 positions 29 us on an H200, if 640 are in pages that all share, and here 19 us with `rope_append`;
of 600 of their own 41 and 45 us.
"""

from __future__ import annotations

from torch import Tensor

from ops import reference_paged
from ops.attention_launch import (
    MAX_GROUP,
    Output,
    check_tensors,
    ints,
    is_fp8,
    memory_arguments,
    paged_kernel,
    scale_of,
    sizes,
    span_bytes,
)
from ops.fp8_rows import KvRows
from ops.quantize import Activation, Kind, quantize_rows

_BATCHES = 2  # mma that share what a warp reads
_MOST_CTAS = 132  # of eight warps: an SM has registers for one of them, or for two of four warps


def shared_attention(
    q: Tensor,
    pages: KvRows,
    page_table: Tensor,
    slots: Tensor,
    positions: Tensor,
    kind: Kind,
    *,
    is_chained: bool = False,
) -> Activation:
    """Row m reads positions 0..positions[m] of slots[m]. A row of a slot without a page reads nothing;
    what it gets is finite. Slots, positions and table are older than the kernel before this one.

    Args:
        q: [M, H, D], the rest as in `ops.attention.rope_append`.
        is_chained: the kernel before this one in the stream is the `rope_append` of these rows, all of
            them of distinct slots. Then past keys are fetched while it still runs.

    Returns:
        [M, H * D].
    """
    if q.device.type != "cuda":
        made = reference_paged.paged_attention(q, pages, page_table, slots, positions).flatten(1)
        return made if kind == "bf16" else quantize_rows(made)
    check_tensors(q)
    num_rows, num_heads, num_kv_heads, head_dim = sizes(q, pages)
    group = num_heads // num_kv_heads
    rows_per_cta = _BATCHES * (MAX_GROUP // group)
    grid = (num_kv_heads, -(-num_rows // rows_per_cta))
    warps = 8 if grid[0] * grid[1] <= _MOST_CTAS else 4
    out = Output(q, num_rows, num_heads * head_dim, kind)
    cut = {"WARPS": warps, "BATCHES": _BATCHES, "IS_CHAINED": int(is_chained)}
    paged_kernel("attention_shared", pages, group, **cut).launch(
        grid,
        (32 * warps,),
        [
            *(q, *memory_arguments((pages, page_table, slots, positions)), *out.arguments),
            scale_of(head_dim),
            *ints(page_table.shape[1], num_rows),
        ],
        shared_bytes=span_bytes(warps, _BATCHES, 1, group, head_dim, is_fp8=is_fp8(pages)),
    )
    return out.finish()
