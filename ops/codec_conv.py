"""The causal convolution of a streaming codec as one matrix product, and its packing.

Activations are rows [B * T, C] of T steps of B streams, channels last: f16 on CUDA, with fp32 sums
and a clamp to f16's range, because at the same speed f16 keeps 18 dB more of the waveform than bf16.
What a layer needs of a stream's past lies in its slot's row of `history`; `new_history` receives
the row of the next call, and nothing is written back before every layer has read.

Words of the kernels: a tile is what a CTA makes, rows x columns. A slab is the input of its rows, with
the steps before them that the taps reach, of one block of channels. Weights come in pieces of 64
products (tap and channel) for 32 columns.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ops import nvrtc

_ACTIVATIONS = ("none", "snake", "gelu", "swiglu")
_BLOCK = 64  # channels of a slab, unless all of them fit one
_MAX_SINGLE_BLOCK = 112
# Sums are split where few columns leave most of the device idle for one stream.
_LONG_SUM, _MANY_COLUMNS = 3072, 3072
_LINEAR_TILES = 16  # of weights and input: most that the kernel for few rows multiplies, or holds
_FEW_ROWS = 8  # for which it holds little of the input
_NUM_SMS = 132  # of an H200
_SLABS_BYTES = 57344  # at most, so that two CTAs fit a multiprocessor
_LINEAR_MAX_CTAS = 200  # beyond it the other kernel is faster (measured on an H200)


class Streams(NamedTuple):
    """Whose steps the rows are.

    slots: i64 [B], rows of `history`
    history: [num_slots, V], read; new_history: [B, V], written by the layers
    """

    slots: Tensor
    history: Tensor
    new_history: Tensor

    @property
    def pointers(self) -> tuple[Tensor, Tensor, Tensor]:
        """As the kernels take them."""
        return self.history, self.new_history, self.slots


@dataclass(frozen=True)
class Conv:
    """A causal convolution, and the activation of what it gives.

    weight: [N, K] # K = taps * channels by blocks of channels, padded to 64; see `pack_conv`.
        On CUDA in the order in which the kernel reads it: [K / 64, N / 32, 32, 64], see `_tiles`
    bias, alpha, inverse: f32 [N]; alpha and inverse (1 / alpha) belong to the snake
    """

    weight: Tensor
    bias: Tensor | None
    num_columns: int
    num_products: int  # K, padded
    num_taps: int
    dilation: int
    channels: int
    history_start: int
    activation: str
    alpha: Tensor | None
    inverse: Tensor | None

    @property
    def num_past(self) -> int:
        """Steps of its input that it needs from before the first."""
        return (self.num_taps - 1) * self.dilation

    @property
    def num_splits(self) -> int:
        """CTAs that share a sum; it depends on nothing else, or else the bits would."""
        num_blocks = self.channels // channel_block(self.channels)
        if self.num_products < _LONG_SUM or self.num_columns >= _MANY_COLUMNS or num_blocks % 4:
            return 1
        return 4 if num_blocks >= 16 else 2


def channel_block(channels: int) -> int:
    """Channels that the kernel takes at a time."""
    is_single = channels % 16 == 0 and channels <= _MAX_SINGLE_BLOCK
    assert is_single or channels % _BLOCK == 0, channels
    return channels if is_single else _BLOCK


def pack_conv(
    weight: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    *,
    dilation: int = 1,
    history_start: int = 0,
    activation: str = "none",
    alpha: Tensor | None = None,
) -> Conv:
    """weight f32 [N, taps, C], oldest tap first; bias and alpha f32 [N]."""
    columns, num_taps, channels = weight.shape
    assert activation in _ACTIVATIONS, activation
    assert (alpha is not None) == (activation == "snake"), activation
    packed = pack_matrix(weight, dtype=dtype)
    return Conv(
        weight=packed,
        bias=bias,
        num_columns=columns,
        num_products=-(-num_taps * channels // 64) * 64,
        num_taps=num_taps,
        dilation=dilation,
        channels=channels,
        history_start=history_start,
        activation=activation,
        alpha=alpha,
        inverse=None if alpha is None else 1 / (alpha + 1e-9),
    )


def pack_matrix(*weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Each f32 [N, taps, C], oldest tap first -> products by blocks of channels, padded to 64, one
    weight's after the other: [N, K], and on CUDA the pieces of it that the kernels copy."""
    parts = []
    for weight in weights:
        columns, num_taps, channels = weight.shape
        blocks = weight.view(columns, num_taps, -1, channel_block(channels)).transpose(1, 2)
        parts.append(F.pad(blocks.flatten(1), (0, -num_taps * channels % 64)))
    packed = torch.cat(parts, dim=1).to(dtype).contiguous()
    return _tiles(packed) if packed.is_cuda else packed


def _tiles(weight: Tensor) -> Tensor:
    """[N, K] -> [K / 64, N / 32, 32, 64]: pieces of 4 KiB, those that are needed together beside each
    other. Within a piece, the tensor cores expect chunk c (16 bytes) of row r at chunk c ^ r % 8."""
    weight = F.pad(weight, (0, 0, 0, -weight.shape[0] % 32))
    num_rows, num_products = weight.shape
    pieces = weight.view(num_rows // 32, 32, num_products // 64, 8, 8).permute(2, 0, 1, 3, 4)
    chunk = torch.arange(8, device=weight.device)
    source = (chunk ^ torch.arange(32, device=weight.device)[:, None] % 8)[..., None]
    return pieces.gather(3, source.expand_as(pieces)).flatten(3).contiguous()


class ConvOut(NamedTuple):
    """`raw` before the activation, `out` after it; None where not asked for."""

    raw: Tensor | None
    out: Tensor | None


def conv(
    x: Tensor,
    layer: Conv,
    streams: Streams | None = None,
    *,
    num_steps: int = 1,
    residual: Tensor | None = None,
    raw: torch.dtype | None = None,
    has_out: bool = True,
) -> ConvOut:
    """Convolve, add, activate.

    Args:
        x: [B * num_steps, C]; without `streams` (one tap) any rows.
        residual: [B * num_steps, N], f32 or x's dtype, added before the activation.
        raw: dtype of the sum before the activation, if it is wanted; that of `residual`.

    Returns:
        [B * num_steps, N], `out` in x's dtype; half the columns with "swiglu".
    """
    rows, channels = x.shape
    assert channels == layer.channels and rows % num_steps == 0, (x.shape, layer, num_steps)
    assert streams is not None or layer.num_taps == 1, layer
    if streams is None:
        num_steps = 1
    shape = (rows, layer.num_columns)
    raw_rows = None if raw is None else torch.empty(shape, dtype=raw, device=x.device)
    result = ConvOut(raw_rows, None)
    if has_out:
        halved = 2 if layer.activation == "swiglu" else 1
        result = ConvOut(raw_rows, x.new_empty(rows, shape[1] // halved))
    run = _conv_cuda if x.is_cuda else _conv_plain
    run(x, layer, streams, num_steps, residual, result)
    return result


def _conv_plain(
    x: Tensor,
    layer: Conv,
    streams: Streams | None,
    num_steps: int,
    residual: Tensor | None,
    result: ConvOut,
) -> None:
    columns = x
    if streams is not None and layer.num_taps > 1:
        num_streams = len(streams.slots)
        span = slice(layer.history_start, layer.history_start + layer.num_past * layer.channels)
        past = streams.history[streams.slots, span].view(num_streams, -1, layer.channels)
        padded = torch.cat([past, x.view(num_streams, num_steps, -1)], dim=1)
        streams.new_history[:, span] = padded[:, num_steps:].flatten(1)
        taps = [padded[:, i * layer.dilation :][:, :num_steps] for i in range(layer.num_taps)]
        columns = torch.stack(taps, dim=2).flatten(0, 1)  # [rows, taps, C]
        block = channel_block(layer.channels)
        columns = columns.view(len(x), layer.num_taps, -1, block).transpose(1, 2).flatten(1)
    weight = layer.weight[:, : columns.shape[1]].to(x.dtype)
    y = F.linear(columns, weight).float()
    if layer.bias is not None:
        y = y + layer.bias
    if residual is not None:
        y = y + residual.float()
    if result.raw is not None:
        result.raw.copy_(y)
    if result.out is not None:
        result.out.copy_(_activated(y, layer))


def _activated(y: Tensor, layer: Conv) -> Tensor:
    if layer.activation == "snake":
        assert layer.alpha is not None and layer.inverse is not None, layer
        return y + (layer.alpha * y).sin().square() * layer.inverse
    if layer.activation == "gelu":
        return F.gelu(y)
    if layer.activation == "swiglu":
        return F.silu(y[:, ::2]) * y[:, 1::2]
    return y


def _conv_cuda(
    x: Tensor,
    layer: Conv,
    streams: Streams | None,
    num_steps: int,
    residual: Tensor | None,
    result: ConvOut,
) -> None:
    extra = residual if residual is not None else result.raw
    is_f32 = extra is not None and extra.dtype == torch.float32
    assert residual is None or result.raw is None or residual.dtype == result.raw.dtype, residual
    ends = [layer.bias, layer.alpha, layer.inverse, residual, result.raw, result.out]
    kind = (_ACTIVATIONS.index(layer.activation), int(is_f32))
    if is_linear(x.shape[0], layer):
        _launch_linear(x, layer, ends, kind)
        return
    tile = tile_for(x.shape[0], layer)
    block = channel_block(layer.channels)
    steps = min(num_steps, tile.rows)
    assert layer.num_taps == 1 or (max(num_steps, tile.rows) % steps == 0), (num_steps, tile)
    slab_rows = tile.rows // steps * (steps + layer.num_past)
    num_blocks = layer.channels // block // layer.num_splits
    # One or two taps use a slab up before the next one has come, if that is asked for only then.
    wanted = math.ceil((tile.stages - 1) / layer.num_taps) + (1 if layer.num_taps > 2 else 2)
    slab_bytes = slab_rows * (2 * block + 16)
    num_slabs = min(wanted, num_blocks, max(2, _SLABS_BYTES // slab_bytes))
    slab_bytes = num_slabs * slab_bytes + 8 * slab_rows
    sums = 4 * tile.rows * (tile.columns + 8)
    numbers = (
        x.shape[0], num_steps, layer.channels, layer.num_columns, layer.num_taps, layer.dilation,
        layer.num_products, 0 if streams is None else streams.history.shape[1],
        layer.history_start, *kind, num_slabs, layer.num_splits,
    )  # fmt: skip
    nvrtc.kernel("codec_conv.cu", "codec_conv", defines=defines_of(tile, block)).launch(
        (-(-layer.num_columns // tile.columns), -(-x.shape[0] // tile.rows), layer.num_splits),
        (2 * tile.rows,),
        [
            x,
            *((None, None, None) if streams is None else streams.pointers),
            layer.weight,
            *ends,
            *map(ctypes.c_int32, numbers),
        ],
        shared_bytes=1024
        + 16 * tile.stages
        + max(tile.stages * tile.columns * 128 + slab_bytes, sums),
        cluster=(1, 1, layer.num_splits),
    )


def is_linear(rows: int, layer: Conv) -> bool:
    """Whether few rows and one tap go through the kernel that waits least."""
    num_tiles = layer.num_products // 64 // layer.num_splits
    has_pieces = layer.num_taps == 1 and layer.channels % _BLOCK == 0
    is_small = rows <= _FEW_ROWS or math.prod(_linear_grid(rows, layer)) <= _LINEAR_MAX_CTAS
    if rows > 32 and layer.num_splits > 1:
        return False
    return has_pieces and num_tiles <= _LINEAR_TILES and is_small


def _linear_grid(rows: int, layer: Conv) -> tuple[int, int, int]:
    """CTAs of 32 columns and 8 or 64 rows; of a cluster, along a sum."""
    return -(-layer.num_columns // 32), -(-rows // 64), layer.num_splits


def linear_stages(rows: int, layer: Conv) -> int:
    """Tiles of weights and input that a CTA has in flight: all, or if there are more CTAs of 64 rows
    than multiprocessors, half of them, so that two share one. H200, 1024 -> 6144: 64 rows 14.9 -> 9.6
    us; 1024 -> 3072, 128 rows 13.4 -> 9.1, and 64 rows, which are 96 CTAs, 7.5 with all, 8.1."""
    num_ctas = math.prod(_linear_grid(rows, layer))
    return _LINEAR_TILES if rows <= _FEW_ROWS or num_ctas <= _NUM_SMS else _LINEAR_TILES // 2


def _launch_linear(
    x: Tensor, layer: Conv, ends: list[Tensor | None], kind: tuple[int, int]
) -> None:
    rows, stages = _FEW_ROWS if len(x) <= _FEW_ROWS else 64, linear_stages(len(x), layer)
    held = min(stages, layer.num_products // 64 // layer.num_splits)
    padding = (64 - rows) * 128  # read, whatever it is
    numbers = (x.shape[0], layer.channels, layer.num_columns, *kind, layer.num_splits)
    nvrtc.kernel(
        "codec_linear.cu", "codec_linear", defines={"ROWS": rows, "STAGES": stages}
    ).launch(
        _linear_grid(len(x), layer),
        (128,),
        [x, layer.weight, *ends, *map(ctypes.c_int32, numbers)],
        shared_bytes=1024 + 16 * stages + max(held * (4096 + rows * 128) + padding, 4 * 64 * 40),
        cluster=(1, 1, layer.num_splits),
    )


class Tile(NamedTuple):
    """What a CTA of the convolution makes, and how many weight tiles are in flight."""

    rows: int
    columns: int
    stages: int


TILES = (Tile(64, 32, 8), Tile(64, 96, 4), Tile(128, 96, 3))
_FULL_CTAS = 132  # of large tiles, from which on they are the fastest (measured on an H200)


def tile_for(rows: int, layer: Conv) -> Tile:
    """Large tiles when they fill the device, else smaller ones, of which there are more."""
    small, medium, large = TILES

    def num_ctas(tile: Tile) -> int:
        num_columns = -(-layer.num_columns // tile.columns)
        return -(-rows // tile.rows) * num_columns * layer.num_splits

    if rows > small.rows and num_ctas(large) >= _FULL_CTAS:
        return large
    # A cluster's CTAs start together, so there should not be many of them.
    enough = 80 if layer.num_splits > 1 and layer.num_taps == 1 else 100
    if rows > small.rows and num_ctas(medium) >= enough:
        return medium
    return small


def defines_of(tile: Tile, block: int) -> dict[str, int | str]:
    """Of the kernel for a tile and so many channels at a time."""
    return {
        "WARPGROUPS": tile.rows // 64,
        "BN": tile.columns,
        "CB": block,
        "STAGES": tile.stages,
    }
