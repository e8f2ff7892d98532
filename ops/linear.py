"""Linear layers for few rows, over weights laid out for the kernels that stream them.

On CUDA (sm_90) these are kernels; elsewhere they are their PyTorch definitions.

A row's result depends on no other row. It does depend on the plan (how K is cut into partial sums),
which the number of rows selects: rows of one plan agree bit for bit, rows of two in the last bits.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ops import nvrtc, reference, reference_fp8
from ops.linear_plans import Plan, WidePlan, plan_for
from ops.packing import PackedWeight as PackedWeight
from ops.packing import pack_bf16 as pack_bf16
from ops.packing import pack_fp8 as pack_fp8
from ops.packing import unpack as unpack
from ops.quantize import (
    Activation,
    BlockScaled,
    Kind,
    PendingNorm,
    UnscaledNorm,
    empty_block_scaled,
    empty_unscaled_norm,
    norm_for_linear,
    quantize_rows,
    unscaled_norm,
)
from ops.reference_fp8 import ceil_div

_BOX_BYTES = 128  # of K, fetched at once

Input = Activation | PendingNorm | UnscaledNorm


def linear(
    x: Input,
    weight: PackedWeight,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """x @ weight.T + bias + residual: [M, K] -> bf16 [M, N].

    The product with its bias is rounded to bf16, then the residual is added and rounded again.

    Args:
        x: bf16 for a weight of kind "bf16", `BlockScaled` for "bsfp8"; or a norm of that kind.
        bias: [N].
        residual: [M, N].
    """
    assert not weight.is_gate_up, "gate and up rows are interleaved: gate_up_swiglu"
    _check_input(x, weight)
    if x.device.type != "cuda":
        product = _product(x, weight, bias)
        return product if residual is None else product + residual
    out = torch.empty(x.shape[0], weight.out_features, dtype=torch.bfloat16, device=x.device)
    _check_added(out, bias, residual)
    launch(x, weight, out, bias=bias, residual=residual)
    return out


def linear_and_norm(
    x: Activation,
    weight: PackedWeight,
    norm: Tensor,
    eps: float,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> tuple[Tensor, Input]:
    """`linear`, and its RMSNorm as the next linear of a weight of the same kind takes it.

    Args:
        norm: weight of the norm, [N].
    """
    num_rows, num_features = x.shape[0], weight.out_features
    plan = plan_for(weight.kind, num_rows, num_features, weight.in_features)
    is_fp8 = weight.kind == "bsfp8"
    if not (isinstance(plan, WidePlan) and plan.can_norm(is_fp8, num_features)):
        out = linear(x, weight, bias=bias, residual=residual)
        return out, norm_for_linear(out, norm, eps, weight.kind)
    if x.device.type != "cuda":
        out = linear(x, weight, bias=bias, residual=residual)
        return out, unscaled_norm(out, norm, eps)
    _check_input(x, weight)
    out = torch.empty(num_rows, num_features, dtype=torch.bfloat16, device=x.device)
    _check_added(out, bias, residual)
    assert norm.dtype == torch.bfloat16 and norm.shape == out.shape[1:], (norm.dtype, norm.shape)
    normed = empty_unscaled_norm(num_rows, num_features, eps, x.device)
    plan = replace(plan, norms=True)
    launch(x, weight, out, bias=bias, residual=residual, plan=plan, norm=(norm, normed))
    return out, normed


def gate_up_swiglu(x: Input, weight: PackedWeight) -> Activation:
    """silu(x @ gate.T) * (x @ up.T): [M, K] -> [M, F], of the weight's kind ("bsfp8": quantised).

    Rounded to bf16 where separate ops would: gate, up, silu, and the product before it is quantised.
    """
    assert weight.is_gate_up, "packed without is_gate_up"
    _check_input(x, weight)
    num_features = weight.out_features // 2
    if x.device.type != "cuda":
        activated = reference.swiglu(_product(x, weight, None))
        return activated if weight.kind == "bf16" else quantize_rows(activated)
    if weight.kind == "bf16":
        out = torch.empty(x.shape[0], num_features, dtype=torch.bfloat16, device=x.device)
        launch(x, weight, out)
        return out
    scaled = empty_block_scaled(x.shape[0], num_features, x.device)
    launch(x, weight, scaled)
    return scaled


def _product(x: Input, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """The definition: fp32 sums of the dequantised values, rounded once."""
    if isinstance(x, PendingNorm):
        x = x.run()
    if isinstance(x, Tensor):
        return reference.linear(x, weight.data, bias)
    assert weight.scale is not None
    matrix = reference_fp8.dequantize_weight(weight.data, weight.scale)
    return F.linear(x.dequantize(), matrix, None if bias is None else bias.float()).to(weight.dtype)


def launch(
    x: Input,
    weight: PackedWeight,
    out: Activation,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    plan: Plan | WidePlan | None = None,
    norm: tuple[Tensor, UnscaledNorm] | None = None,
) -> None:
    """Enqueue the kernel, with the plan for this shape unless another is given.

    Args:
        norm: the weight of the norm that a plan with `norms` makes, and where it goes.
    """
    has_norm = isinstance(x, PendingNorm)
    shape = (x.shape[0], weight.out_features, weight.in_features)
    variant = _variant(weight.kind, weight.is_gate_up, shape, weight.tiling, has_norm, plan)
    plan = variant.plan
    if isinstance(x, PendingNorm) and not (isinstance(plan, Plan) and plan.own_rows):
        x = x.run()
    if isinstance(x, UnscaledNorm):
        assert isinstance(plan, WidePlan), plan
        if not plan.scales_rows:
            plan = replace(plan, scales_rows=True)
            variant = _variant(weight.kind, weight.is_gate_up, shape, weight.tiling, False, plan)
    norms = _norms(x, norm)
    tensor_map, rows, scale = _rows(x, plan)
    row_tiles, k_tiles = map(ctypes.c_int32, weight.tiling)
    variant.kernel.launch(
        variant.grid,
        (plan.threads,),
        [
            tensor_map,
            weight.data,
            weight.tile_scale,
            scale,
            output_argument(out, bias, residual),
            k_tiles,
            *([rows] if isinstance(plan, Plan) else [row_tiles, norms]),
        ],
        shared_bytes=variant.shared_bytes,
        cluster=(variant.cluster, 1, 1),
    )


class _Variant(NamedTuple):
    """A kernel and its launch for one shape."""

    plan: Plan | WidePlan
    kernel: nvrtc.Kernel
    grid: tuple[int, int]
    shared_bytes: int
    cluster: int


@functools.lru_cache(maxsize=4096)
def _variant(
    kind: Kind,
    is_gate_up: bool,
    shape: tuple[int, int, int],
    tiling: tuple[int, int],
    has_norm: bool,
    plan: Plan | WidePlan | None,
) -> _Variant:
    """For x [M, K] and a weight [N, K], `shape` (M, N, K), in `tiling` (row tiles, K tiles)."""
    is_fp8 = kind == "bsfp8"
    if plan is None:
        plan = plan_for(kind, *shape, is_gate_up=is_gate_up, has_norm=has_norm)
    num_rows, _, num_columns = shape
    row_tiles, k_tiles = tiling
    cluster = plan.cluster(is_gate_up, is_fp8)
    defines = plan.defines(is_fp8, is_gate_up, num_columns)
    return _Variant(
        plan,
        nvrtc.kernel(f"{plan.kernel}.cu", plan.kernel, defines=defines),
        (plan.num_ctas(row_tiles, cluster), ceil_div(num_rows, plan.rows)),
        plan.shared_bytes(is_fp8, is_gate_up, k_tiles),
        cluster,
    )


class _Copied(ctypes.Structure):
    """`RowInput` of linear_copy.cuh."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("row_bytes", ctypes.c_int32),
        ("scale_stride", ctypes.c_int32),
    )


class _Norm(ctypes.Structure):
    """`RowInput` of linear_norm.cuh."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("num_rows", ctypes.c_int32),
        ("num_columns", ctypes.c_int32),
    )


class _Output(ctypes.Structure):
    """`Output` of linear_common.cuh."""

    _fields_ = (
        ("bias", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("num_rows", ctypes.c_int32),
        ("num_features", ctypes.c_int32),
        ("residual_stride", ctypes.c_int32),
        ("scale_stride", ctypes.c_int32),
    )


class _Norms(ctypes.Structure):
    """`Norms` of linear_wide_norm.cuh."""

    _fields_ = (
        ("squares", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("weight", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("new_squares", ctypes.c_void_p),
        ("stride", ctypes.c_int32),
    )


_NO_NORM, _NO_NORMS = _Norm(), _Norms()
NO_TENSOR_MAP = (ctypes.c_uint64 * 16)()


def output_argument(out: Activation, bias: Tensor | None, residual: Tensor | None) -> _Output:
    values, scale = (out.data, out.scale) if isinstance(out, BlockScaled) else (out, None)
    pointers = [None if t is None else t.data_ptr() for t in (bias, residual, values, scale)]
    num_rows, num_features = values.shape
    stride = 0 if residual is None else residual.stride(0)
    return _Output(*pointers, num_rows, num_features, stride, ceil_div(num_rows, 4) * 4)


def _norms(x: Input, norm: tuple[Tensor, UnscaledNorm] | None) -> _Norms:
    if norm is None and not isinstance(x, UnscaledNorm):
        return _NO_NORMS
    norms = _Norms(stride=ceil_div(x.shape[0], 4) * 4)
    if isinstance(x, UnscaledNorm):
        norms.squares, norms.eps = x.squares.data_ptr(), x.eps
    if norm is not None:
        weight, new = norm
        norms.weight, norms.values = weight.data_ptr(), new.rows.data.data_ptr()
        norms.scales, norms.new_squares = new.rows.scale.data_ptr(), new.squares.data_ptr()
    return norms


def _rows(
    x: Input, plan: Plan | WidePlan
) -> tuple[ctypes.Array[ctypes.c_uint64], _Norm | _Copied, Tensor | None]:
    """x as the kernel takes it: for the copy engine, or for the CTAs themselves; and its scales."""
    if isinstance(x, PendingNorm):
        norm = _Norm(x.x.data_ptr(), x.weight.data_ptr(), x.eps, *x.shape)
        return NO_TENSOR_MAP, norm, None
    if isinstance(x, UnscaledNorm):
        x = x.rows
    values, scale = (x.data, x.scale) if isinstance(x, BlockScaled) else (x, None)
    if isinstance(plan, Plan) and plan.is_copied:
        row_bytes = values.shape[1] * values.element_size()
        scales = (None, 0) if scale is None else (scale.data_ptr(), scale.shape[1])
        return NO_TENSOR_MAP, _Copied(values.data_ptr(), scales[0], row_bytes, scales[1]), None
    box_rows = plan.box_rows(len(values))
    tensor_map = _tensor_map(values.data_ptr(), *values.shape, values.element_size(), box_rows)
    return tensor_map, _NO_NORM, scale


@functools.lru_cache(maxsize=4096)
def _tensor_map(
    address: int, num_rows: int, num_columns: int, item_bytes: int, box_rows: int
) -> ctypes.Array[ctypes.c_uint64]:
    """How the copy engine finds 128 bytes x `box_rows` of an activation, swizzled; zeros outside."""
    driver = importlib.import_module("cuda.bindings.driver")
    types = driver.CUtensorMapDataType
    one = driver.cuuint32_t(1)
    status, tensor_map = driver.cuTensorMapEncodeTiled(
        types.CU_TENSOR_MAP_DATA_TYPE_UINT8
        if item_bytes == 1
        else types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        2,
        address,
        [driver.cuuint64_t(num_columns), driver.cuuint64_t(num_rows)],
        [driver.cuuint64_t(num_columns * item_bytes)],
        [driver.cuuint32_t(_BOX_BYTES // item_bytes), driver.cuuint32_t(box_rows)],
        [one, one],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    assert status == 0, (status, hex(address), num_rows, num_columns)
    opaque: Any = tensor_map.opaque
    return (ctypes.c_uint64 * 16)(*(int(word) for word in opaque))


def _check_added(out: Tensor, bias: Tensor | None, residual: Tensor | None) -> None:
    for name, extra, shape in (("bias", bias, out.shape[1:]), ("residual", residual, out.shape)):
        if extra is not None:
            assert extra.dtype == torch.bfloat16 and extra.stride(-1) == 1, (name, extra.dtype)
            assert extra.shape == shape, (name, extra.shape, shape)
    if residual is not None:
        is_aligned = residual.stride(0) % 8 == residual.data_ptr() % 16 == 0
        assert residual.is_contiguous() or is_aligned, (residual.stride(), residual.data_ptr())


def _check_input(x: Input, weight: PackedWeight) -> None:
    if isinstance(x, UnscaledNorm):
        x = x.rows
    kind = "bsfp8" if isinstance(x, BlockScaled) else "bf16"
    if isinstance(x, PendingNorm):
        kind = x.kind
    assert kind == weight.kind, f"{kind} rows, {weight.kind} weight"
    assert x.shape[1] == weight.in_features, (x.shape, weight.in_features)
    assert x.device == weight.device, (x.device, weight.device)
    rows = x.data if isinstance(x, BlockScaled) else x.x if isinstance(x, PendingNorm) else x
    if x.device.type == "cuda":
        assert rows.is_contiguous() and rows.data_ptr() % 16 == 0, (rows.stride(), rows.data_ptr())
        assert isinstance(x, BlockScaled) or rows.dtype == torch.bfloat16, rows.dtype
