"""Weights as tiles, in the order and with the swizzle that `csrc/linear.cu` reads.

A tile is 64 rows x 128 bytes of K; N is padded to 128 rows (gate and up to 256) and K to 128 values
with zeros. On other devices than CUDA a packed weight is the plain matrix. Pack on the device that
runs.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from ops import reference
from ops.linear_plans import ROWS_PER_TILE
from ops.quantize import Kind
from ops.reference_fp8 import BLOCK, ceil_div

_TILE_BYTES = 128  # of K in a tile
_CHUNK = 16  # bytes the swizzle moves
_FEATURES_PER_TILE = 32  # of a gate and up tile: 8 rows of gate, 8 of up, ...


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

    @property
    def tiling(self) -> tuple[int, int]:
        """(row tiles, K tiles) on CUDA."""
        return self.data.shape[0], self.data.shape[1]

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


def _check_shape(matrix: Tensor, is_gate_up: bool) -> tuple[int, int]:
    num_rows, num_columns = matrix.shape
    assert not is_gate_up or num_rows % (2 * _FEATURES_PER_TILE) == 0, num_rows
    assert num_columns * matrix.element_size() % 16 == 0, num_columns
    return num_rows, num_columns


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
