"""The linear after attention, whose kernel makes what one or two rows of attention leave to it.

A launch, and what stands between two, take longer than what so few rows need: every CTA of the linear does
that for the heads of its part of K.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace

import torch
from torch import Tensor

from ops import nvrtc
from ops.attention_launch import PendingAttention
from ops.linear import NO_TENSOR_MAP, Input, linear, linear_and_norm, output_argument
from ops.packing import PackedWeight
from ops.quantize import Activation, norm_for_linear


def attended_linear(
    x: Activation | PendingAttention,
    weight: PackedWeight,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """`ops.linear.linear` of attention's output, ready or not.

    Args:
        x: if it is not ready, what attention made for this weight.
    """
    if not isinstance(x, PendingAttention):
        return linear(x, weight, bias=bias, residual=residual)
    is_fp8 = weight.kind == "bsfp8"
    plan = replace(x.plan, own_rows=x.num_rows, is_copied=False)
    row_tiles, k_tiles = weight.tiling
    cluster = plan.cluster(is_gate_up=False, is_fp8=is_fp8)
    defines = plan.defines(is_fp8, is_gate_up=False, in_features=weight.in_features)
    shared_bytes = plan.shared_bytes(is_fp8, is_gate_up=False, num_blocks=k_tiles)
    out = torch.empty(x.num_rows, weight.out_features, dtype=torch.bfloat16, device=weight.device)
    nvrtc.kernel("linear.cu", "linear", defines={**defines, **x.defines}).launch(
        (plan.num_ctas(row_tiles, cluster), 1),
        (plan.threads,),
        [
            *(NO_TENSOR_MAP, weight.data, weight.tile_scale, None),
            *(output_argument(out, bias, residual), ctypes.c_int32(k_tiles), x.argument),
        ],
        shared_bytes=shared_bytes + x.scratch_bytes,
        cluster=(cluster, 1, 1),
    )
    return out


def attended_linear_and_norm(
    x: Activation | PendingAttention,
    weight: PackedWeight,
    norm: Tensor,
    eps: float,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> tuple[Tensor, Input]:
    """`ops.linear.linear_and_norm` of attention's output, ready or not."""
    if not isinstance(x, PendingAttention):
        return linear_and_norm(x, weight, norm, eps, bias=bias, residual=residual)
    out = attended_linear(x, weight, bias=bias, residual=residual)
    return out, norm_for_linear(out, norm, eps, weight.kind)
