"""Launches of the attention kernels over paged memory by plans of one's own: what `ops.attention` calls,
and benches and tests.

`where` is pages, page_table, slots, positions, `rotary` is qk_norm, rope, eps: see
`ops.attention.rope_append`.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ops import nvrtc
from ops.attention_plans import MAX_PARTED_ROWS, MAX_PARTS, PartsPlan, Plan, SplitPlan
from ops.fp8_rows import Fp8Rows, KvRows
from ops.linear_plans import Plan as LinearPlan
from ops.linear_plans import plan_for as linear_plan_for
from ops.packing import PackedWeight
from ops.quantize import Activation, Kind, empty_block_scaled, quantize_rows

MAX_GROUP = 8  # query heads per key/value head: columns of an mma
_MAX_PENDING_ROWS = 2

Where = tuple[KvRows, Tensor, Tensor, Tensor]
Rotary = tuple[Tensor | None, Tensor, float]


def launch_whole(
    heads: Tensor,
    rotary: Rotary,
    where: Where,
    kind: Kind,
    plan: Plan,
    *,
    is_chained: bool = False,
) -> Activation:
    """`decode_attention` by a plan of one's own, for benches and tests.

    Args:
        heads: [M, H + 2 H_kv, D].
    """
    pages, page_table, *_ = where
    qk_norm, rope, eps = rotary
    check_tensors(heads, qk_norm)
    num_rows, num_heads, num_kv_heads, head_dim = sizes(heads, pages, is_fused=True)
    out = Output(heads, num_rows, num_heads * head_dim, kind)
    cut = {"SPLITS": plan.splits, "IS_CHAINED": int(is_chained)}
    _decode_kernel("attention", pages, num_heads // num_kv_heads, plan, **cut).launch(
        (plan.splits, num_kv_heads, num_rows),
        (32 * plan.warps,),
        [
            *(heads, qk_norm, rope, *memory_arguments(where), *out.arguments),
            *(ctypes.c_float(eps), scale_of(head_dim)),
            *ints(page_table.shape[1], plan.min_tiles),
        ],
        shared_bytes=_fp8_ring_bytes(plan.warps, head_dim, pages),
        cluster=(plan.splits, 1, 1),
    )
    return out.finish()


@dataclass(frozen=True)
class PendingAttention:
    """Attention of few rows that the kernel of the linear after it makes, or merges: see
    `ops.attended_linear`. It is for that linear alone, which comes next.

    Attributes:
        plan: of that linear.
        defines: that its kernel takes besides.
        argument: where its rows come from.
        scratch_bytes: shared memory that this takes.
        tensors: what `argument` points to.
    """

    num_rows: int
    plan: LinearPlan
    defines: Mapping[str, int]
    argument: ctypes.Structure
    scratch_bytes: int
    tensors: tuple[Tensor | None, ...]


def plan_to_pend(
    wo: PackedWeight | None, num_rows: int, num_heads: int, num_kv_heads: int, head_dim: int
) -> LinearPlan | None:
    """The plan of the linear after attention, if its kernel can take so many heads that are not ready."""
    if wo is None or num_rows > _MAX_PENDING_ROWS or head_dim != 128:
        return None
    plan = linear_plan_for(wo.kind, num_rows, wo.out_features, wo.in_features)
    if not isinstance(plan, LinearPlan) or num_kv_heads % plan.split != 0:
        return None
    warps, heads = 4 * plan.warpgroups, num_heads // plan.split
    fits = heads % (2 * warps) == 0 and num_rows * num_kv_heads // plan.split <= warps
    return plan if fits else None


class _Parts(ctypes.Structure):
    """`RowInput` of linear_merge.cuh."""

    _fields_ = (
        ("sums", ctypes.c_void_p),
        ("states", ctypes.c_void_p),
        ("num_heads", ctypes.c_int32),
    )


def launch_split(
    heads: Tensor,
    rotary: Rotary,
    where: Where,
    plan: SplitPlan,
    linear_plan: LinearPlan,
    *,
    is_chained: bool = False,
) -> PendingAttention:
    """`decode_attention` of few rows, which the linear after it merges."""
    pages, page_table, *_ = where
    qk_norm, rope, eps = rotary
    check_tensors(heads, qk_norm)
    num_rows, num_heads, num_kv_heads, head_dim = sizes(heads, pages, is_fused=True)
    shape = (num_rows, num_heads, plan.splits)
    sums = torch.empty(*shape, head_dim, device=heads.device)
    states = torch.empty(*shape, 2, device=heads.device)
    group = num_heads // num_kv_heads
    _decode_kernel("attention_split", pages, group, plan, IS_CHAINED=int(is_chained)).launch(
        (plan.splits, num_kv_heads, num_rows),
        (32 * plan.warps,),
        [
            *(heads, qk_norm, rope, *memory_arguments(where), sums, states),
            *(ctypes.c_float(eps), scale_of(head_dim), *ints(page_table.shape[1])),
        ],
        shared_bytes=_fp8_ring_bytes(plan.warps, head_dim, pages),
    )
    defines = {"MERGE": 1, "HEADS": num_heads // linear_plan.split, "SPLITS": plan.splits}
    argument = _Parts(sums.data_ptr(), states.data_ptr(), num_heads)
    return PendingAttention(num_rows, linear_plan, defines, argument, 0, (sums, states))


class _Frame(ctypes.Structure):
    """`RowInput` of linear_attend.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("qkv", "qk_norm", "rope", "memory")),
        *((name, ctypes.c_float) for name in ("eps", "scale_log2")),
        *((name, ctypes.c_int32) for name in ("start", "capacity", "num_held", "num_kv_heads")),
    )


def pending_frame(
    qkv: Tensor,
    rotary: Rotary,
    memory: Tensor,
    start: int,
    num_positions: int,
    plan: LinearPlan,
) -> PendingAttention:
    """`frame_attention`, all of which is left to the linear after it."""
    num_rows, num_all, head_dim = qkv.shape
    _, capacity, num_kv_heads, num_held, _ = memory.shape
    group = (num_all - 2 * num_kv_heads) // num_kv_heads
    qk_norm, rope, eps = rotary
    tensors = (qkv, qk_norm, rope, memory)
    argument = _Frame(
        *(None if tensor is None else tensor.data_ptr() for tensor in tensors),
        *(eps, scale_of(head_dim).value, start, capacity, num_held, num_kv_heads),
    )
    kv_heads = num_kv_heads // plan.split
    defines = {"ATTEND": 1, "GROUP": group, "KV_HEADS": kv_heads, "POSITIONS": num_positions}
    # `Heads` of linear_attend.cuh, and what aligns it.
    scratch_bytes = 16 + num_rows * kv_heads * 2 * (group * (head_dim + 32) + 2 * head_dim)
    return PendingAttention(num_rows, plan, defines, argument, scratch_bytes, tensors)


class Scratch:
    """Where the parts of up to `MAX_PARTED_ROWS` rows meet. Kernels that use the same one run one
    after the other, as those of one stream do."""

    def __init__(
        self, num_kv_heads: int, group: int, head_dim: int, most_parts: int, device: torch.device
    ) -> None:
        """`group` query heads per key/value head; no row has more than `most_parts`."""
        assert 0 < most_parts <= MAX_PARTS, most_parts
        self.most_parts = most_parts
        num_pairs = MAX_PARTED_ROWS * num_kv_heads
        shape = (num_pairs, most_parts, group)
        self.sums = torch.empty(*shape, head_dim, device=device)
        self.states = torch.empty(*shape, 2, device=device)
        self.counts = torch.zeros(num_pairs, dtype=torch.int32, device=device)


def launch_parts(
    heads: Tensor,
    rotary: Rotary,
    where: Where,
    kind: Kind,
    plan: PartsPlan,
    scratch: Scratch,
    *,
    is_chained: bool = False,
) -> Activation:
    """`decode_attention` of many rows by a plan of one's own, see `launch_whole`."""
    pages, page_table, *_ = where
    qk_norm, rope, eps = rotary
    check_tensors(heads, qk_norm)
    num_rows, num_heads, num_kv_heads, head_dim = sizes(heads, pages, is_fused=True)
    group = num_heads // num_kv_heads
    most_parts = -(-page_table.shape[1] * pages.shape[3] // (16 * plan.part_tiles))
    assert plan.part_tiles >= 16 and most_parts <= scratch.most_parts, (plan, page_table.shape)
    assert num_rows <= MAX_PARTED_ROWS, num_rows
    assert scratch.sums.shape[2:] == (group, head_dim), scratch.sums.shape
    assert len(scratch.counts) == MAX_PARTED_ROWS * num_kv_heads, scratch.counts.shape
    out = Output(heads, num_rows, num_heads * head_dim, kind)
    _decode_kernel("attention_parts", pages, group, plan, IS_CHAINED=int(is_chained)).launch(
        (plan.blocks * _num_sms(heads.get_device()),),
        (32 * plan.warps,),
        [
            *(heads, qk_norm, rope, *memory_arguments(where), *out.arguments),
            *(scratch.sums, scratch.states, scratch.counts),
            *(ctypes.c_float(eps), scale_of(head_dim)),
            *ints(page_table.shape[1], num_rows, num_kv_heads),
            *ints(plan.part_tiles, scratch.most_parts),
        ],
        shared_bytes=_fp8_ring_bytes(plan.warps, head_dim, pages),
    )
    return out.finish()


def paged_kernel(name: str, pages: KvRows, group: int, **defines: int) -> nvrtc.Kernel:
    """The kernel of that name over such pages, for `group` query heads per key/value head."""
    page_size, head_dim = pages.shape[3:]
    shared = {
        "HEAD_DIM": head_dim,
        "GROUP": group,
        "PAGE": page_size,
        "IS_FP8": int(is_fp8(pages)),
    }
    return nvrtc.kernel(f"{name}.cu", name, defines={**shared, **defines})


def _decode_kernel(
    name: str, pages: KvRows, group: int, plan: Plan | SplitPlan | PartsPlan, **defines: int
) -> nvrtc.Kernel:
    """A kernel whose warps each have a row and key/value head at a time."""
    cut = {"WARPS": plan.warps, "BLOCKS": plan.blocks, "DEPTH": plan.depth}
    return paged_kernel(name, pages, group, **cut, **defines)


def sizes(heads: Tensor, pages: KvRows, *, is_fused: bool = False) -> tuple[int, int, int, int]:
    """Rows, query heads, key/value heads and head_dim, checked.

    Args:
        heads: [M, H, D], or if `is_fused`, [M, H + 2 H_kv, D].
    """
    num_kv_heads, page_size = pages.shape[2:4]
    num_rows, num_heads, head_dim = heads.shape
    if is_fused:
        num_heads -= 2 * num_kv_heads
    check_heads(num_heads, num_kv_heads, head_dim)
    assert page_size % 16 == 0, page_size
    return num_rows, num_heads, num_kv_heads, head_dim


@functools.cache
def _num_sms(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _fp8_ring_bytes(warps: int, head_dim: int, pages: KvRows) -> int:
    """bf16 goes straight into registers."""
    return ring_bytes(warps, head_dim, is_fp8=True) if is_fp8(pages) else 0


def ring_bytes(warps: int, head_dim: int, *, is_fp8: bool) -> int:
    """Shared memory of rings of `warps`, see `Ring` of ring.cuh: two tiles of 16 keys and values each, and
    their scales."""
    return warps * 2 * (2 * 16 * head_dim + 128 if is_fp8 else 2 * 16 * head_dim * 2)


class Output:
    """Attention output for a kernel to write, of either kind."""

    def __init__(self, like: Tensor, num_rows: int, num_columns: int, kind: Kind) -> None:
        self._is_quantised_after = kind == "bsfp8" and like.shape[-1] != 128
        self._out: Activation
        self.arguments: tuple[Tensor | None, Tensor | None, Tensor | None]
        if kind == "bf16" or self._is_quantised_after:
            values = like.new_empty(num_rows, num_columns)
            self._out, self.arguments = values, (values, None, None)
        else:
            scaled = empty_block_scaled(num_rows, num_columns, like.device)
            self._out, self.arguments = scaled, (None, scaled.data, scaled.scale)

    def finish(self) -> Activation:
        """Once the kernel is launched. A group of scales is two heads of 64: another launch."""
        if self._is_quantised_after:
            assert isinstance(self._out, Tensor)
            return quantize_rows(self._out)
        return self._out


def check_heads(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    assert head_dim in (64, 128), head_dim
    assert num_heads % num_kv_heads == 0, (num_heads, num_kv_heads)
    assert num_heads // num_kv_heads <= MAX_GROUP, (num_heads, num_kv_heads)


def check_tensors(*tensors: Tensor | None) -> None:
    for tensor in tensors:
        if tensor is None:
            continue
        assert tensor.dtype == torch.bfloat16 and tensor.is_contiguous(), (
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
        )


def is_fp8(pages: KvRows) -> bool:
    return isinstance(pages, Fp8Rows)


def memory_arguments(where: Where) -> tuple[Tensor | None, ...]:
    """Rows, scales, page table, slots and positions, as the kernels take them."""
    pages, *places = where
    if isinstance(pages, Tensor):
        check_tensors(pages)
        return pages, None, *places
    assert pages.data.is_contiguous() and pages.scale.is_contiguous(), pages.data.stride()
    return pages.data, pages.scale, *places


def scale_of(head_dim: int) -> ctypes.c_float:
    """Scores are powers of two in the kernels."""
    return ctypes.c_float(math.log2(math.e) / math.sqrt(head_dim))


def ints(*values: int) -> list[nvrtc.Argument]:
    return [ctypes.c_int32(value) for value in values]
