"""A residual unit of a codec, x + conv1(snake(conv7(snake(x)))), as one kernel: for 96 and 192
channels, whose units read and write most of the bytes that a decoder moves."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ops import nvrtc
from ops.codec_conv import Streams, Tile, channel_block, defines_of, pack_matrix

TAPS = 7
CHANNELS = (96, 192)  # a CTA makes all columns of its rows
_FULL_ROWS = 1 << 14  # enough rows for tiles of 128 to fill the device


class Snake(NamedTuple):
    """v + sin(alpha v)^2 / alpha, per channel: f32 [C] both."""

    alpha: Tensor
    inverse: Tensor

    @staticmethod
    def of(alpha: Tensor) -> Snake:
        """alpha: f32 [C]"""
        return Snake(alpha, 1 / (alpha + 1e-9))

    def __call__(self, v: Tensor) -> Tensor:
        return v + (self.alpha * v).sin().square() * self.inverse


@dataclass(frozen=True)
class Unit:
    """weight: conv7's products and then conv1's, each as of `pack_matrix`; biases f32 [C]."""

    weight: Tensor
    bias7: Tensor
    bias1: Tensor
    before: Snake  # conv7
    between: Snake
    after: Snake | None  # of the sum
    dilation: int
    history_start: int

    @property
    def channels(self) -> int:
        return self.bias1.shape[0]

    @property
    def num_past(self) -> int:
        """Steps of its input that it needs from before the first."""
        return (TAPS - 1) * self.dilation


def unit_weight(conv7: Tensor, conv1: Tensor, dtype: torch.dtype) -> Tensor:
    """conv7 f32 [C, 7, C], oldest tap first; conv1 f32 [C, C] -> `Unit.weight`."""
    return pack_matrix(conv7, conv1[:, None], dtype=dtype)


def unit(x: Tensor, layer: Unit, streams: Streams, num_steps: int) -> Tensor:
    """x [B * num_steps, C] -> the same; the history is that of x."""
    assert x.shape[1] == layer.channels and layer.channels in CHANNELS, (x.shape, layer.channels)
    run = _unit_cuda if x.is_cuda else _unit_plain
    return run(x, layer, streams, num_steps)


def _unit_plain(x: Tensor, layer: Unit, streams: Streams, num_steps: int) -> Tensor:
    channels, num_past, num_streams = layer.channels, layer.num_past, len(streams.slots)
    span = slice(layer.history_start, layer.history_start + num_past * channels)
    past = streams.history[streams.slots, span].view(num_streams, num_past, channels)
    padded = torch.cat([past, x.view(num_streams, num_steps, channels)], dim=1)
    streams.new_history[:, span] = padded[:, num_steps:].flatten(1)
    padded = layer.before(padded.float()).to(x.dtype)
    taps = [padded[:, i * layer.dilation :][:, :num_steps] for i in range(TAPS)]
    block = channel_block(channels)
    columns = torch.stack(taps, dim=2).view(len(x), TAPS, -1, block).transpose(1, 2).flatten(1)
    first = -(-columns.shape[1] // 64) * 64  # where conv1's products begin
    weight = layer.weight.to(x.dtype)
    y = F.linear(columns, weight[:, : columns.shape[1]]).float() + layer.bias7
    y = layer.between(y).to(x.dtype)
    y = F.linear(y, weight[:, first : first + channels]).float() + layer.bias1 + x.float()
    return (y if layer.after is None else layer.after(y)).to(x.dtype)


def _unit_cuda(x: Tensor, layer: Unit, streams: Streams, num_steps: int) -> Tensor:
    tile, block = unit_tile(len(x), layer.channels), channel_block(layer.channels)
    steps = min(num_steps, tile.rows)
    assert max(num_steps, tile.rows) % steps == 0, (num_steps, tile)
    slab_rows = tile.rows // steps * (steps + layer.num_past)
    num_slabs = 2 if layer.channels > block else 1
    used = tile.stages * tile.columns * 128 + slab_rows * (num_slabs * (2 * block + 16) + 8)
    sums = 4 * tile.rows * (tile.columns + 8)
    out = torch.empty_like(x)
    after = (None, None) if layer.after is None else layer.after
    numbers = (len(x), num_steps, layer.dilation, streams.history.shape[1], layer.history_start)
    nvrtc.kernel("codec_unit.cu", "codec_unit", defines=defines_of(tile, block)).launch(
        (-(-len(x) // tile.rows),),
        (2 * tile.rows,),
        [
            x, *streams.pointers, layer.weight, layer.bias7, layer.bias1, *layer.before,
            *layer.between, *after, out, *map(ctypes.c_int32, numbers),
        ],
        shared_bytes=1024 + 16 * tile.stages + max(used, sums),
    )  # fmt: skip
    return out


def unit_tile(rows: int, channels: int) -> Tile:
    """What a CTA makes."""
    return Tile(128 if rows >= _FULL_ROWS else 64, channels, 3 if channels == 96 else 4)
