"""Linear layers whose weights are laid out for the kernels that stream them.

On CUDA (sm_90) a packed weight is tiles of 64 rows x 128 bytes of K in the order, and with the
swizzle, that the kernel reads; N is padded to 128 rows (gate and up to 256) and K to 128 values
with zeros. Elsewhere it is the plain matrix, and the functions are their PyTorch definitions. Pack
on the device that runs.

A row's result depends on no other row. It does depend on the plan (how K is cut into partial sums),
which the number of rows selects: rows of one plan agree bit for bit, rows of two in the last bits.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ops import nvrtc, reference, reference_fp8
from ops.linear_plans import ROWS_PER_TILE, Plan, plan_for
from ops.quantize import (
    Activation,
    BlockScaled,
    Kind,
    PendingNorm,
    empty_block_scaled,
    quantize_rows,
)
from ops.reference_fp8 import BLOCK, ceil_div

_TILE_BYTES = 128  # of K in a tile
_CHUNK = 16  # bytes the swizzle moves
_FEATURES_PER_TILE = 32  # of a gate and up tile: 8 rows of gate, 8 of up, ...

Input = Activation | PendingNorm


@dataclass(frozen=True)
class PackedWeight:
    """A matrix [out_features, in_features] as `linear` or `gate_up_swiglu` reads it.

    Attributes:
        data: on CUDA u8 [row tiles, K tiles, 8192]; elsewhere the matrix.
        scale: fp32 [ceil(N / 128), ceil(K / 128)] of "bsfp8".
        tile_scale: fp32 [row tiles, K tiles, 2] of "bsfp8" on CUDA: of the rows 0..7 and of the
            rows 8..15 of every 16 rows of a tile.
        dtype: of what the definition returns; kernels return bf16.
    """

    kind: Kind
    out_features: int
    in_features: int
    data: Tensor
    scale: Tensor | None
    tile_scale: Tensor | None
    is_gate_up: bool
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        return self.data.device

    def tensors(self) -> list[Tensor]:
        values = [getattr(self, field.name) for field in fields(self)]
        return [value for value in values if isinstance(value, Tensor)]


def pack_bf16(weight: Tensor, *, is_gate_up: bool = False) -> PackedWeight:
    """Pack a weight [N, K]; the definition also carries fp32.

    Args:
        is_gate_up: the rows are F of gate, then F of up, F a multiple of 32.
    """
    num_rows, num_columns = _check_shape(weight, is_gate_up)
    if weight.device.type != "cuda":
        data = reference.pack_weight(weight)
    else:
        assert weight.dtype == torch.bfloat16, weight.dtype
        data = _tiles(weight, is_gate_up)
    return PackedWeight("bf16", num_rows, num_columns, data, None, None, is_gate_up, weight.dtype)


def pack_fp8(
    data: Tensor,
    scale: Tensor,
    *,
    is_gate_up: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> PackedWeight:
    """Pack what `quantize_weight` gave.

    Args:
        data: e4m3 [N, K].
        scale: fp32 [ceil(N / 128), ceil(K / 128)], contiguous.
        is_gate_up: the rows are F of gate, then F of up, F a multiple of 32.
        dtype: what the definition of `linear` returns.
    """
    num_rows, num_columns = _check_shape(data, is_gate_up)
    expected = (ceil_div(num_rows, BLOCK), ceil_div(num_columns, BLOCK))
    assert data.dtype == torch.float8_e4m3fn, data.dtype
    assert scale.dtype == torch.float32 and tuple(scale.shape) == expected, (
        f"scales of a weight {tuple(data.shape)} are fp32 {expected}, "
        f"not {scale.dtype} {tuple(scale.shape)}"
    )
    assert scale.is_contiguous(), f"scales are row-major, not {scale.stride()}"
    if data.device.type != "cuda":
        return PackedWeight("bsfp8", num_rows, num_columns, data, scale, None, is_gate_up, dtype)
    tiles = _tiles(data, is_gate_up)
    tile_scale = _tile_scales(scale, num_rows, len(tiles), is_gate_up)
    return PackedWeight(
        "bsfp8", num_rows, num_columns, tiles, scale, tile_scale, is_gate_up, torch.bfloat16
    )


def unpack(packed: PackedWeight) -> Tensor:
    """The matrix [N, K] that was packed: bf16 (or fp32), or e4m3."""
    if packed.device.type != "cuda":
        return packed.data.to_dense() if packed.data.is_mkldnn else packed.data
    dtype = torch.bfloat16 if packed.kind == "bf16" else torch.float8_e4m3fn
    rows = untile(packed.data, dtype)[:, : packed.in_features]
    if not packed.is_gate_up:
        return rows[: packed.out_features].contiguous()
    order = _gate_up_order(packed.out_features, packed.device)
    out = torch.empty(packed.out_features, packed.in_features, dtype=dtype, device=packed.device)
    out.view(torch.uint8)[order] = rows[: packed.out_features].contiguous().view(torch.uint8)
    return out


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
    for name, extra, shape in (("bias", bias, out.shape[1:]), ("residual", residual, out.shape)):
        if extra is not None:
            assert extra.dtype == torch.bfloat16 and extra.is_contiguous(), (name, extra.dtype)
            assert extra.shape == shape, (name, extra.shape, shape)
    launch(x, weight, out, bias=bias, residual=residual)
    return out


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
    if not isinstance(x, BlockScaled):
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
    plan: Plan | None = None,
) -> None:
    """Enqueue the kernel, with the plan for this shape unless another is given."""
    num_rows, num_columns = x.shape
    is_fp8, is_gate_up = weight.kind == "bsfp8", weight.is_gate_up
    if plan is None:
        plan = plan_for(
            weight.kind,
            num_rows,
            weight.out_features,
            num_columns,
            is_gate_up=is_gate_up,
            has_norm=isinstance(x, PendingNorm),
        )
    if isinstance(x, PendingNorm) and plan.norm == 0:
        x = x.run()
    tensor_map, rows, scale = _rows(x, plan)
    num_blocks = weight.data.shape[1]
    cluster = plan.cluster(is_gate_up, is_fp8)
    row_tiles = weight.data.shape[0]
    assert row_tiles % plan.warpgroups == 0, (plan, row_tiles)
    num_ctas = row_tiles // plan.warpgroups * plan.split
    assert num_ctas % cluster == 0, (plan, num_ctas)
    kernel = nvrtc.kernel(
        "linear.cu", "linear", defines=plan.defines(is_fp8, is_gate_up, num_columns)
    )
    kernel.launch(
        (num_ctas, ceil_div(num_rows, plan.cols)),
        (plan.threads,),
        [
            tensor_map,
            rows,
            weight.data,
            weight.tile_scale,
            scale,
            _output(out, bias, residual),
            ctypes.c_int32(num_blocks),
            ctypes.c_int32(plan.prefetch),
        ],
        shared_bytes=plan.shared_bytes(is_fp8, is_gate_up, num_blocks),
        cluster=(cluster, 1, 1),
    )


class _Rows(ctypes.Structure):
    """`Rows` of linear_rows.cuh."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("num_rows", ctypes.c_int32),
        ("num_columns", ctypes.c_int32),
    )


class _Output(ctypes.Structure):
    """`Output` of linear_epilogue.cuh."""

    _fields_ = (
        ("bias", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("num_rows", ctypes.c_int32),
        ("num_features", ctypes.c_int32),
        ("scale_stride", ctypes.c_int32),
    )


_NO_ROWS = _Rows()
_NO_TENSOR_MAP = (ctypes.c_uint64 * 16)()


def _output(out: Activation, bias: Tensor | None, residual: Tensor | None) -> _Output:
    values, scale = (out.data, out.scale) if isinstance(out, BlockScaled) else (out, None)
    pointers = [None if t is None else t.data_ptr() for t in (bias, residual, values, scale)]
    num_rows, num_features = values.shape
    return _Output(*pointers, num_rows, num_features, ceil_div(num_rows, 4) * 4)


def _rows(x: Input, plan: Plan) -> tuple[ctypes.Array[ctypes.c_uint64], _Rows, Tensor | None]:
    """x as the kernel takes it: by the copy engine, or by address; and its scales."""
    if isinstance(x, PendingNorm):
        rows = _Rows(x.x.data_ptr(), x.weight.data_ptr(), x.eps, *x.shape)
        return _NO_TENSOR_MAP, rows, None
    values, scale = (x.data, x.scale) if isinstance(x, BlockScaled) else (x, None)
    if plan.is_direct:
        assert len(values) <= plan.cols, (values.shape, plan)
        return _NO_TENSOR_MAP, _Rows(values.data_ptr(), None, 0.0, *values.shape), scale
    tensor_map = _tensor_map(values.data_ptr(), *values.shape, values.element_size(), plan.cols)
    return tensor_map, _NO_ROWS, scale


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
        [driver.cuuint32_t(_TILE_BYTES // item_bytes), driver.cuuint32_t(box_rows)],
        [one, one],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    assert status == 0, (status, hex(address), num_rows, num_columns)
    opaque: Any = tensor_map.opaque
    return (ctypes.c_uint64 * 16)(*(int(word) for word in opaque))


def _check_shape(matrix: Tensor, is_gate_up: bool) -> tuple[int, int]:
    num_rows, num_columns = matrix.shape
    assert not is_gate_up or num_rows % (2 * _FEATURES_PER_TILE) == 0, num_rows
    assert num_columns * matrix.element_size() % 16 == 0, num_columns
    return num_rows, num_columns


def _check_input(x: Input, weight: PackedWeight) -> None:
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


def tile(matrix: Tensor, padded_rows: int = BLOCK) -> Tensor:
    """A matrix [N, K] of any dtype as tiles of 64 rows x 128 bytes, u8 [row tiles, K tiles, 8192].

    N is padded to a multiple of `padded_rows` and K to 128 values. In a tile, row r's 16-byte chunk c lies at
    r * 128 + (c ^ r % 8) * 16.
    """
    num_rows, num_columns = matrix.shape
    padded = F.pad(
        matrix.contiguous().view(torch.uint8),
        (0, -num_columns % BLOCK * matrix.element_size(), 0, -num_rows % padded_rows),
    )
    row_tiles = padded.shape[0] // ROWS_PER_TILE
    chunks = padded.view(torch.int64).view(row_tiles, ROWS_PER_TILE, -1, _TILE_BYTES // _CHUNK, 2)
    return (
        _swizzle(chunks.transpose(1, 2)).reshape(row_tiles, chunks.shape[2], -1).view(torch.uint8)
    )


def untile(tiles: Tensor, dtype: torch.dtype) -> Tensor:
    """The padded matrix that `tile` cut up."""
    row_tiles, k_tiles, _ = tiles.shape
    chunks = tiles.view(torch.int64).view(row_tiles, k_tiles, ROWS_PER_TILE, -1, 2)
    rows = _swizzle(chunks).transpose(1, 2).reshape(row_tiles * ROWS_PER_TILE, -1)
    return rows.view(dtype)


def _swizzle(chunks: Tensor) -> Tensor:
    """Swap the chunks of every row: [..., 64 rows, 8 chunks, 2]; its own inverse."""
    device = chunks.device
    rows = torch.arange(ROWS_PER_TILE, device=device)[:, None]
    columns = torch.arange(chunks.shape[-2], device=device)
    return chunks[..., rows, columns ^ (rows % 8), :]


def _gate_up_order(num_rows: int, device: torch.device) -> Tensor:
    """Rows of [gate; up] in the order of the tiles: 8 of gate, the same 8 of up, the next 8, ..."""
    gate = torch.arange(num_rows // 2, device=device).view(-1, 1, 8)
    return torch.cat([gate, gate + num_rows // 2], dim=1).flatten()


def _tiles(matrix: Tensor, is_gate_up: bool) -> Tensor:
    if not is_gate_up:
        return tile(matrix)
    order = _gate_up_order(matrix.shape[0], matrix.device)
    ordered = matrix.view(torch.uint8)[order].view(matrix.dtype)
    return tile(ordered, 2 * BLOCK)  # 128 features, which are quantised together


def _tile_scales(scale: Tensor, num_rows: int, row_tiles: int, is_gate_up: bool) -> Tensor:
    """Scales fp32 [row tiles, K tiles, 2] of rows 0..7 and rows 8..15 of every 16 rows of a tile."""
    tiles = torch.arange(row_tiles, device=scale.device)
    if is_gate_up:
        gate = tiles * _FEATURES_PER_TILE
        first_rows = torch.stack([gate, gate + num_rows // 2], dim=1)
    else:
        first_rows = (tiles * ROWS_PER_TILE)[:, None].expand(-1, 2)
    blocks = (first_rows // BLOCK).clamp_max(scale.shape[0] - 1)
    return scale[blocks].transpose(1, 2).contiguous()
