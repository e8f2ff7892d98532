"""What a streaming codec's decoder is made of: CUDA kernels, and elsewhere their plain definition.

Activations are rows [B * T, C] of T steps of B streams, channels last: f16 on CUDA, with fp32 sums
and a clamp to f16's range, because at the same speed f16 keeps 18 dB more of the waveform than bf16.
What a layer needs of a stream's past lies in its slot's row of `history`; `new_history` receives
the row of the next call, and nothing is written back before every layer has read.

On CUDA a stream's samples are the same bits whatever else is in the batch and however its frames
are cut into calls: every sum has an order of its own.
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

WINDOW, HEAD_DIM, MAX_FRAMES = 128, 64, 16  # what the attention kernel is made for
_ACTIVATIONS = ("none", "snake", "gelu", "swiglu")
_BLOCK = 64  # channels of a slab, unless all of them fit one
_MAX_SINGLE_BLOCK = 112
_THREADS = 128  # of the kernels in codec_stream.cu


class Streams(NamedTuple):
    """Whose steps the rows are.

    slots: i64 [B], rows of `history`
    history: [num_slots, V], read; new_history: [B, V], written by the layers
    """

    slots: Tensor
    history: Tensor
    new_history: Tensor


@dataclass(frozen=True)
class Conv:
    """A causal convolution, and the activation of what it gives.

    weight: [N, K] # K = taps * channels by blocks of channels, padded to 64; see `pack_conv`
    bias, alpha, inverse: f32 [N]; alpha and inverse (1 / alpha) belong to the snake
    """

    weight: Tensor
    bias: Tensor | None
    num_taps: int
    dilation: int
    channels: int
    history_start: int
    activation: str
    alpha: Tensor | None
    inverse: Tensor | None

    @property
    def num_columns(self) -> int:
        return self.weight.shape[0]

    @property
    def num_past(self) -> int:
        """Steps of its input that it needs from before the first."""
        return (self.num_taps - 1) * self.dilation


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
    block = channel_block(channels)
    blocks = weight.view(columns, num_taps, -1, block).transpose(1, 2).reshape(columns, -1)
    return Conv(
        weight=F.pad(blocks, (0, -blocks.shape[1] % 64)).to(dtype).contiguous(),
        bias=bias,
        num_taps=num_taps,
        dilation=dilation,
        channels=channels,
        history_start=history_start,
        activation=activation,
        alpha=alpha,
        inverse=None if alpha is None else 1 / (alpha + 1e-9),
    )


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
    tile = tile_for(x.shape[0], layer.num_columns)
    block = channel_block(layer.channels)
    steps = min(num_steps, tile.rows)
    assert layer.num_taps == 1 or (max(num_steps, tile.rows) % steps == 0), (num_steps, tile)
    slab_rows = tile.rows // steps * (steps + layer.num_past)
    num_slabs = min(math.ceil((tile.stages - 1) / layer.num_taps) + 1, layer.channels // block)
    slab_bytes = num_slabs * slab_rows * (2 * block + 16) + 8 * slab_rows
    sums = 4 * tile.rows * (tile.columns + 8)
    shared = 1024 + max(tile.stages * tile.columns * 128 + slab_bytes, sums)
    extra = residual if residual is not None else result.raw
    is_f32 = extra is not None and extra.dtype == torch.float32
    assert residual is None or result.raw is None or residual.dtype == result.raw.dtype, residual
    defines = defines_of(tile, block)
    numbers = (
        x.shape[0], num_steps, layer.channels, layer.num_columns, layer.num_taps, layer.dilation,
        layer.weight.shape[1], 0 if streams is None else streams.history.shape[1],
        layer.history_start, _ACTIVATIONS.index(layer.activation), int(is_f32), num_slabs,
    )  # fmt: skip
    nvrtc.kernel("codec_conv.cu", "codec_conv", defines=defines).launch(
        (-(-layer.num_columns // tile.columns), -(-x.shape[0] // tile.rows)),
        (2 * tile.rows,),
        [
            x,
            *((None, None, None) if streams is None else _pointers(streams)),
            layer.weight,
            layer.bias,
            layer.alpha,
            layer.inverse,
            residual,
            result.raw,
            result.out,
            *map(ctypes.c_int32, numbers),
        ],
        shared_bytes=shared,
    )


class Tile(NamedTuple):
    """What a CTA of the convolution makes, and how many weight tiles are in flight."""

    rows: int
    columns: int
    stages: int


def tile_for(rows: int, columns: int) -> Tile:
    """Large tiles when they fill the device, else small ones, of which there are more."""
    if -(-rows // 128) * -(-columns // 96) >= 96:
        return Tile(128, 96, 4)
    return Tile(64, 32, 8)


def defines_of(tile: Tile, block: int) -> dict[str, int | str]:
    """Of the kernel for a tile and so many channels at a time."""
    return {
        "WARPGROUPS": tile.rows // 64,
        "BN": tile.columns,
        "CB": block,
        "STAGES": tile.stages,
    }


def _pointers(streams: Streams) -> tuple[Tensor, Tensor, Tensor]:
    return streams.history, streams.new_history, streams.slots


# ---------------------------------------------------------------------- the other layers


@dataclass(frozen=True)
class Codebooks:
    """Codes to latents, and positions to angles.

    table: f32 [sum of sizes, C]; offsets, last_codes: i32 [K]; frequencies: f32 [HEAD_DIM / 2]
    """

    table: Tensor
    offsets: Tensor
    last_codes: Tensor
    frequencies: Tensor


def begin(
    codes: Tensor, index: Tensor | None, books: Codebooks, positions: Tensor, slots: Tensor
) -> tuple[Tensor, Tensor]:
    """Latents and rotary turns of B streams' next T frames.

    Args:
        codes: i32 [R, K] — clamped to each codebook's range.
        index: i64 [B * T] — rows of `codes`; None: row b * T + t.
        positions: i64 [num_slots] — frames decoded so far.
        slots: i64 [B].

    Returns:
        f32 [B * T, C], and f32 [B * T, HEAD_DIM / 2, 2]: cos and sin, rounded to bf16.
    """
    rows = len(codes) if index is None else len(index)
    num_steps, half = rows // len(slots), len(books.frequencies)
    assert rows == num_steps * len(slots) and codes.is_contiguous(), (codes.shape, slots.shape)
    if not codes.is_cuda:
        chosen = codes if index is None else codes[index]
        places = torch.minimum(chosen.clamp_min(0), books.last_codes) + books.offsets
        latents = F.embedding(places, books.table).sum(1)
        new = positions[slots][:, None] + torch.arange(num_steps)
        angles = (new.flatten()[:, None].float() * books.frequencies).double()
        turns = torch.stack([angles.cos(), angles.sin()], dim=-1)
        return latents, turns.bfloat16().float()
    latents = books.table.new_empty(rows, books.table.shape[1])
    turns = books.table.new_empty(rows, half, 2)
    _launch(
        "codec_begin",
        (rows,),
        [
            codes, index, books.last_codes, books.offsets, books.table, books.frequencies,
            positions, slots, latents, turns,
        ],
        (codes.shape[1], latents.shape[1], num_steps, half),
    )  # fmt: skip
    return latents, turns


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """x f32 [M, C], weight f32 [C] -> [M, C]."""
    if not x.is_cuda:
        return F.rms_norm(x, weight.shape, weight, eps).to(dtype)
    out = torch.empty_like(x, dtype=dtype)
    numbers = (ctypes.c_int32(x.shape[1]), ctypes.c_float(eps))
    _launch("codec_rms_norm", (len(x),), [x, weight, out, *numbers])
    return out


def window_attention(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    layer: int,
    turns: Tensor,
    positions: Tensor,
    slots: Tensor,
) -> Tensor:
    """Attention of the new positions over themselves and the WINDOW - 1 before each.

    Args:
        qkv: [B * T, 3 * H * D] — before the rotation.
        keys, values: [num_slots, L, WINDOW, H, D] — position p in place p % WINDOW; the new ones
            are written.

    Returns:
        [B * T, H * D].
    """
    num_slots, num_layers, window, heads, head_dim = keys.shape
    num_steps = len(qkv) // len(slots)
    if not qkv.is_cuda:
        return _attention_plain(qkv, keys[:, layer], values[:, layer], turns, positions, slots)
    assert (window, head_dim) == (WINDOW, HEAD_DIM) and num_steps <= MAX_FRAMES, (
        keys.shape,
        num_steps,
    )
    out = qkv.new_empty(len(qkv), heads * head_dim)
    _launch(
        "codec_attention",
        (heads, len(slots)),
        [qkv, keys, values, turns, positions, slots, out],
        (heads, num_layers, layer, num_steps),
    )
    return out


def _attention_plain(
    qkv: Tensor, keys: Tensor, values: Tensor, turns: Tensor, positions: Tensor, slots: Tensor
) -> Tensor:
    window, heads, head_dim = keys.shape[1:]
    num_streams = len(slots)
    qkv = qkv.view(num_streams, -1, 3, heads, head_dim)
    num_steps = qkv.shape[1]
    cos, sin = turns.view(num_streams, num_steps, 1, 1, -1, 2).unbind(-1)
    even, odd = qkv[:, :, :2].float().view(num_streams, num_steps, 2, heads, -1, 2).unbind(-1)
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1)
    q, k = turned.flatten(-2).to(qkv.dtype).unbind(2)
    v = qkv[:, :, 2]
    first = positions[slots][:, None]
    new = first + torch.arange(num_steps)
    held = first - 1 - (first - 1 - torch.arange(window)) % window  # negative: never written
    age = new[:, :, None] - torch.cat([held, new], dim=1)[:, None]
    mask = (age >= 0) & (age < window)
    mask[:, :, :window] &= (held >= 0)[:, None]
    y = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        torch.cat([keys[slots], k], dim=1).transpose(1, 2),
        torch.cat([values[slots], v], dim=1).transpose(1, 2),
        attn_mask=mask[:, None],
    )
    keys[slots[:, None], new[:, -window:] % window] = k[:, -window:]
    values[slots[:, None], new[:, -window:] % window] = v[:, -window:]
    return y.transpose(1, 2).reshape(num_streams * num_steps, -1)


@dataclass(frozen=True)
class Depthwise:
    """A causal depthwise convolution of 7 taps and the layer norm after it.

    taps: f32 [7, C], oldest first; bias, norm_weight, norm_bias: f32 [C]
    """

    taps: Tensor
    bias: Tensor
    norm_weight: Tensor
    norm_bias: Tensor
    history_start: int


_DEPTHWISE_TAPS = 7
_LAYER_NORM_EPS = 1e-6


def depthwise_norm(
    x: Tensor, layer: Depthwise, streams: Streams, num_steps: int, dtype: torch.dtype
) -> Tensor:
    """x f32 [B * num_steps, C] -> [B * num_steps, C]."""
    dim, past = x.shape[1], _DEPTHWISE_TAPS - 1
    if not x.is_cuda:
        span = slice(layer.history_start, layer.history_start + past * dim)
        held = streams.history[streams.slots, span].view(-1, past, dim)
        padded = torch.cat([held, x.to(held.dtype).view(-1, num_steps, dim)], dim=1)
        streams.new_history[:, span] = padded[:, num_steps:].flatten(1)
        taps = padded.float().unfold(1, _DEPTHWISE_TAPS, 1)  # [B, T, C, 7]
        y = ((taps * layer.taps.T).sum(-1) + layer.bias).flatten(0, 1)
        return F.layer_norm(y, (dim,), layer.norm_weight, layer.norm_bias, _LAYER_NORM_EPS).to(
            dtype
        )
    out = torch.empty_like(x, dtype=dtype)
    numbers = map(ctypes.c_int32, (dim, num_steps, streams.history.shape[1], layer.history_start))
    _launch(
        "codec_depthwise_norm",
        (len(x),),
        [
            x, *_pointers(streams), layer.taps, layer.bias, layer.norm_weight, layer.norm_bias,
            out, *numbers, ctypes.c_float(_LAYER_NORM_EPS),
        ],
    )  # fmt: skip
    return out


@dataclass(frozen=True)
class Output:
    """The last convolution, to one channel: weight f32 [7, C], oldest tap first."""

    weight: Tensor
    bias: float
    history_start: int


def output(x: Tensor, layer: Output, streams: Streams, num_steps: int) -> Tensor:
    """x [B * num_steps, C] -> samples f32 [B, num_steps], in -1..1."""
    (num_taps, channels), num_streams = layer.weight.shape, len(x) // num_steps
    assert num_taps == _DEPTHWISE_TAPS, layer.weight.shape
    if not x.is_cuda:
        past = num_taps - 1
        span = slice(layer.history_start, layer.history_start + past * channels)
        held = streams.history[streams.slots, span].view(-1, past, channels)
        padded = torch.cat([held, x.view(-1, num_steps, channels)], dim=1)
        streams.new_history[:, span] = padded[:, num_steps:].flatten(1)
        taps = padded.float().unfold(1, num_taps, 1)  # [B, T, C, 7]
        return ((taps * layer.weight.T).sum((2, 3)) + layer.bias).tanh()
    samples = torch.empty(num_streams, num_steps, device=x.device)
    numbers = (channels, num_steps, streams.history.shape[1], layer.history_start)
    shared = 4 * num_taps * channels + 4 * (_THREADS + num_taps - 1) * (channels // 2 + 1)
    _launch(
        "codec_output",
        (-(-num_steps // _THREADS), num_streams),
        [x, *_pointers(streams), layer.weight, ctypes.c_float(layer.bias), samples],
        numbers,
        shared_bytes=shared,
    )
    return samples


def _launch(
    name: str,
    grid: tuple[int, ...],
    args: list[nvrtc.Argument],
    numbers: tuple[int, ...] = (),
    *,
    shared_bytes: int = 0,
) -> None:
    nvrtc.kernel("codec_stream.cu", name).launch(
        grid,
        (_THREADS,),
        [*args, *map(ctypes.c_int32, numbers)],
        shared_bytes=shared_bytes,
    )
