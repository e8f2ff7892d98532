"""What a streaming codec's decoder is made of besides convolutions: CUDA kernels, and elsewhere
their plain definition. Rows, streams and their history are those of `ops.codec_conv`.

On CUDA a stream's samples are the same bits whatever else is in the batch and however its frames
are cut into calls: every sum has an order of its own.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ops import nvrtc
from ops.codec_conv import Streams

WINDOW, HEAD_DIM, MAX_FRAMES = 128, 64, 16  # what the attention kernel is made for
_THREADS, _DEPTHWISE_THREADS = 128, 512  # of the kernels in codec_stream.cu
_OUTPUT_RUN = 32  # samples that a group of lanes makes
_KEPT_PER_THREAD = 4  # chunks of the history


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
    codes: Tensor, books: Codebooks, positions: Tensor, slots: Tensor
) -> tuple[Tensor, Tensor]:
    """Latents and rotary turns of B streams' next T frames.

    Args:
        codes: i32 [B * T, K] — clamped to each codebook's range.
        positions: i64 [num_slots] — frames decoded so far.
        slots: i64 [B].

    Returns:
        f32 [B * T, C], and f32 [B * T, HEAD_DIM / 2, 2]: cos and sin, rounded to bf16.
    """
    num_steps, half = len(codes) // len(slots), len(books.frequencies)
    assert codes.is_contiguous() and codes.dtype == torch.int32, (codes.shape, codes.dtype)
    if not codes.is_cuda:
        places = torch.minimum(codes.clamp_min(0), books.last_codes) + books.offsets
        latents = F.embedding(places, books.table).sum(1)
        new = positions[slots][:, None] + torch.arange(num_steps)
        angles = (new.flatten()[:, None].float() * books.frequencies).double()
        turns = torch.stack([angles.cos(), angles.sin()], dim=-1)
        return latents, turns.bfloat16().float()
    latents = books.table.new_empty(len(codes), books.table.shape[1])
    turns = books.table.new_empty(len(codes), half, 2)
    _launch(
        "codec_begin",
        (-(-latents.shape[1] // _THREADS) + 1, len(codes)),
        [
            codes, books.last_codes, books.offsets, books.table, books.frequencies, positions,
            slots, latents, turns,
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
        (heads, num_layers, layer),
        defines={"STEPS": num_steps},
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
    assert dim <= 2 * _DEPTHWISE_THREADS, dim
    out = torch.empty_like(x, dtype=dtype)
    numbers = map(ctypes.c_int32, (dim, num_steps, streams.history.shape[1], layer.history_start))
    _launch(
        "codec_depthwise_norm",
        (len(x),),
        [
            x, *streams.pointers, layer.taps, layer.bias, layer.norm_weight, layer.norm_bias,
            out, *numbers, ctypes.c_float(_LAYER_NORM_EPS),
        ],
        threads=_DEPTHWISE_THREADS,
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
    lanes = 16 if channels % 96 == 0 else 8
    _launch(
        "codec_output",
        (-(-num_steps * lanes // (_THREADS * _OUTPUT_RUN)), num_streams),
        [x, *streams.pointers, layer.weight, ctypes.c_float(layer.bias), samples],
        (num_steps, streams.history.shape[1], layer.history_start),
        defines={"CHANNELS": channels},
    )
    return samples


def keep(streams: Streams, positions: Tensor, num_steps: int) -> None:
    """The end of a call: the new history takes the old one's place, positions i64 [num_slots] move on
    by num_steps frames."""
    slots, history, new_history = streams
    if not history.is_cuda:
        history.index_copy_(0, slots, new_history)
        positions.index_add_(0, slots, torch.full_like(slots, num_steps))
        return
    row_chunks = history.shape[1] * history.element_size() // 16
    assert row_chunks * 16 == history.shape[1] * history.element_size(), history.shape
    _launch(
        "codec_keep",
        (-(-row_chunks // (_THREADS * _KEPT_PER_THREAD)), len(slots)),
        [new_history, history, positions, slots],
        (row_chunks, num_steps),
    )


def _launch(
    name: str,
    grid: tuple[int, ...],
    args: list[nvrtc.Argument],
    numbers: tuple[int, ...] = (),
    *,
    threads: int = _THREADS,
    defines: dict[str, int | str] | None = None,
) -> None:
    nvrtc.kernel("codec_stream.cu", name, defines=defines).launch(
        grid, (threads,), [*args, *map(ctypes.c_int32, numbers)]
    )
