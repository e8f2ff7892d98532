"""Layers of the modded DAC as causal stream processors.

Everything is channels-last [B, T, C], and every convolution, strided and transposed ones
included, is one matrix product over its taps: a strided one sees blocks of `stride` steps as
channels, a transposed one makes `stride` steps per input step. What a convolution still needs of
the past lies in one flat row per stream, `history`, of which each layer owns a span. A whole clip
is a stream that starts from zeros, so there is one code path for both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from model.codec.checkpoint import Weights
from model.codec.config import TransformerConfig
from model.codec.product import Product


class HistoryLayout:
    """Who owns which span of the flat history row, counted while the layers are built."""

    def __init__(self) -> None:
        self.num_values = 0

    def reserve(self, num_values: int) -> slice:
        """Give the next span to a layer."""
        start = self.num_values
        self.num_values += num_values
        return slice(start, self.num_values)


class Taps:
    """The last inputs of a convolution, laid before the new ones."""

    def __init__(self, kernel: int, dilation: int, channels: int, layout: HistoryLayout) -> None:
        self.kernel, self.dilation, self.channels = kernel, dilation, channels
        self.num_past = (kernel - 1) * dilation
        self.span = layout.reserve(self.num_past * channels)

    def __call__(self, x: Tensor, history: Tensor) -> Tensor:
        """x [B, T, C] -> [B, T, kernel, C], oldest tap first; this span of history moves on."""
        num_streams, num_steps, channels = x.shape
        assert channels == self.channels, (channels, self.channels)
        if not self.num_past:
            return x.unsqueeze(2)
        past = history[:, self.span].view(num_streams, self.num_past, channels)
        padded = torch.cat([past, x], dim=1)
        past.copy_(padded[:, num_steps:])
        return padded.as_strided(
            (num_streams, num_steps, self.kernel, channels),
            (padded.stride(0), channels, self.dilation * channels, 1),
        )


class CausalConv:
    """Convolution with kernel `k`, a multiple of `stride`; left context only."""

    def __init__(
        self,
        weights: Weights,
        layout: HistoryLayout,
        in_channels: int,
        out_channels: int,
        kernel: int,
        dilation: int = 1,
        stride: int = 1,
    ) -> None:
        assert kernel % stride == 0 and (stride == 1 or dilation == 1), (kernel, stride, dilation)
        weight = weights.take("weight", out_channels, in_channels, kernel)
        # [O, I, k] -> [k * I, O]: tap, then channel; a stride only regroups the taps.
        weight = weight.permute(2, 1, 0).reshape(-1, out_channels)
        self.product = Product(
            weights.place(weight), weights.place(weights.take("bias", out_channels))
        )
        self.stride = stride
        self.taps = Taps(kernel // stride, dilation, stride * in_channels, layout)

    def __call__(self, x: Tensor, history: Tensor) -> Tensor:
        """x [B, T, I] -> [B, T / stride, O]."""
        num_streams, num_steps, channels = x.shape
        assert num_steps % self.stride == 0, (num_steps, self.stride)
        x = x.reshape(num_streams, num_steps // self.stride, self.stride * channels)
        columns = self.taps(x, history).reshape(num_streams * x.shape[1], -1)
        return self.product(columns).view(num_streams, x.shape[1], -1)


class CausalTransposedConv:
    """Transposed convolution with kernel `stride` or `2 * stride`, trimmed on the right.

    An output step depends on its own input step and the one before: a convolution of one or two
    taps with `stride` times the output channels.
    """

    def __init__(
        self,
        weights: Weights,
        layout: HistoryLayout,
        in_channels: int,
        out_channels: int,
        kernel: int,
        stride: int,
    ) -> None:
        num_taps = kernel // stride
        assert kernel in (stride, 2 * stride), (kernel, stride)
        weight = weights.take("weight", in_channels, out_channels, kernel)
        # [I, O, taps, stride] -> [taps * I, stride * O]; the kernel's first part meets the newest
        # input, which is the last tap.
        taps_apart = weight.view(in_channels, out_channels, num_taps, stride)
        weight = taps_apart.permute(2, 0, 3, 1).flip(0)
        weight = weight.reshape(num_taps * in_channels, stride * out_channels)
        bias = weights.take("bias", out_channels).repeat(stride)
        self.product = Product(weights.place(weight), weights.place(bias))
        self.stride = stride
        self.taps = Taps(num_taps, 1, in_channels, layout)

    def __call__(self, x: Tensor, history: Tensor) -> Tensor:
        """x [B, T, I] -> [B, T * stride, O]."""
        num_streams, num_steps, _ = x.shape
        columns = self.taps(x, history).reshape(num_streams * num_steps, -1)
        return self.product(columns).view(num_streams, num_steps * self.stride, -1)


class Snake:
    """x + sin(alpha x)^2 / alpha, per channel."""

    def __init__(self, weights: Weights, channels: int) -> None:
        alpha = weights.take("alpha", 1, channels, 1).flatten()
        self.alpha = weights.place(alpha)
        self.inverse = weights.place(1 / (alpha + 1e-9))

    def __call__(self, x: Tensor) -> Tensor:
        return torch.addcmul(x, (x * self.alpha).sin_().square_(), self.inverse)


class ResidualUnit:
    """x + conv1(snake(conv7(snake(x))))."""

    def __init__(
        self, weights: Weights, layout: HistoryLayout, channels: int, dilation: int
    ) -> None:
        at = weights.at("block")
        self.snake7 = Snake(at.at(0), channels)
        self.conv7 = CausalConv(at.at(1, "conv"), layout, channels, channels, 7, dilation)
        self.snake1 = Snake(at.at(2), channels)
        self.conv1 = CausalConv(at.at(3, "conv"), layout, channels, channels, 1)

    def __call__(self, x: Tensor, history: Tensor) -> Tensor:
        y = self.conv7(self.snake7(x), history)
        return self.conv1(self.snake1(y), history).add_(x)


class ConvNeXt:
    """x + gamma * mlp(norm(depthwise(x)))."""

    def __init__(self, weights: Weights, layout: HistoryLayout, dim: int, multiple: int) -> None:
        depthwise = weights.at("dwconv", "conv")
        self.depthwise = weights.place(depthwise.take("weight", dim, 1, 7)[:, 0].T)  # [7, C]
        self.depthwise_bias = weights.place(depthwise.take("bias", dim))
        self.norm_weight = weights.place(weights.take("norm.weight", dim))
        self.norm_bias = weights.place(weights.take("norm.bias", dim))
        inner = multiple * dim
        place, take = weights.place, weights.take
        weight1 = take("pwconv1.weight", inner, dim)
        self.expand = Product(place(weight1.T), place(take("pwconv1.bias", inner)))
        # gamma scales the last product's outputs, so it goes into its rows.
        gamma = take("gamma", dim)
        weight2 = take("pwconv2.weight", dim, inner) * gamma[:, None]
        self.reduce = Product(place(weight2.T), place(take("pwconv2.bias", dim) * gamma))
        self.taps = Taps(7, 1, dim, layout)

    def __call__(self, x: Tensor, history: Tensor) -> Tensor:
        y = (self.taps(x, history) * self.depthwise).sum(2).add_(self.depthwise_bias)
        y = F.layer_norm(y, (y.shape[-1],), self.norm_weight, self.norm_bias, 1e-6)
        y = self.reduce(F.gelu(self.expand(y.flatten(0, 1))))
        return y.view_as(x).add_(x)


@dataclass
class KvRing:
    """Keys and values of the last `window` positions per stream.

    keys, values: [num_slots, num_layers, window, heads, head_dim], keys after RoPE; position p
    lies in slot p mod window. Slots that a stream has not reached yet are masked, never read.
    """

    keys: Tensor
    values: Tensor

    @staticmethod
    def zeros(
        num_slots: int, config: TransformerConfig, device: torch.device, dtype: torch.dtype
    ) -> KvRing:
        """Of streams that have not begun."""
        c = config
        shape = (num_slots, c.num_layers, c.window, c.num_heads, c.head_dim)
        keys = torch.zeros(shape, device=device, dtype=dtype)
        return KvRing(keys, torch.zeros_like(keys))


@dataclass
class _Step:
    """What all layers of a transformer share in one call."""

    rows: Tensor  # i64 [B]
    cos: Tensor  # f32 [B, T, 1, head_dim / 2], rounded to bf16
    sin: Tensor
    mask: Tensor  # bool [B, 1, T, window + T], True = attends; the ring first, then new keys
    ring_slots: Tensor  # i64 [B, min(T, window)] where the newest keys go


class WindowTransformer:
    """Causal transformer in which a query sees itself and the window - 1 positions before."""

    def __init__(self, weights: Weights, config: TransformerConfig) -> None:
        self.config = config
        self.layers = [
            _TransformerLayer(weights.at("layers", i), config, i) for i in range(config.num_layers)
        ]
        self.norm = weights.place(weights.take("norm.weight", config.dim))
        self.device, self.dtype = weights.device, weights.dtype
        half = torch.arange(0, config.head_dim, 2).float() / config.head_dim
        self.frequencies = (1.0 / config.rope_base**half).to(self.device)

    def init_ring(self, num_slots: int) -> KvRing:
        """Allocate the ring of `num_slots` streams."""
        return KvRing.zeros(num_slots, self.config, self.device, self.dtype)

    def __call__(self, x: Tensor, ring: KvRing, rows: Tensor, positions: Tensor) -> Tensor:
        """Continue the streams in `rows`.

        Args:
            x: [B, T, dim].
            ring: updated in place.
            rows: i64 [B] — distinct rows of the ring.
            positions: i64 [B] — absolute position of x[:, 0] in each stream.

        Returns:
            [B, T, dim].
        """
        step = self._plan(rows, positions, x.shape[1])
        for layer in self.layers:
            x = layer(x, ring, step)
        return F.rms_norm(x, (self.config.dim,), self.norm, self.config.norm_eps)

    def _plan(self, rows: Tensor, positions: Tensor, num_steps: int) -> _Step:
        window = self.config.window
        slots = torch.arange(window, device=positions.device)
        first = positions[:, None]
        new = first + torch.arange(num_steps, device=positions.device)  # [B, T]
        held = first - 1 - (first - 1 - slots) % window  # [B, window], negative = never written
        age = new[:, :, None] - torch.cat([held, new], dim=1)[:, None]
        mask = (age >= 0) & (age < window)
        mask[:, :, :window] &= (held >= 0)[:, None]
        # Angles are f32 as in training. Their cosine goes through f64, so that it is the same on
        # every device and for every vector length before it is rounded to bf16.
        angles = (new[..., None].float() * self.frequencies).double()[:, :, None]
        return _Step(
            rows=rows[:, None],
            cos=angles.cos().bfloat16().float(),
            sin=angles.sin().bfloat16().float(),
            mask=mask[:, None],
            ring_slots=new[:, -window:] % window,
        )


class _TransformerLayer:
    def __init__(self, weights: Weights, config: TransformerConfig, index: int) -> None:
        dim, inner, width = config.dim, config.intermediate_dim, config.num_heads * config.head_dim
        self.config, self.index = config, index

        def scale(name: str) -> Tensor:
            return weights.take(f"{name}.gamma", dim)[:, None]

        def take(name: str, *shape: int) -> Tensor:
            return weights.take(f"{name}.weight", *shape)

        def product(weight: Tensor) -> Product:
            return Product(weights.place(weight.T), None)

        self.attention_norm = weights.place(take("attention_norm", dim))
        self.wqkv = product(take("attention.wqkv", 3 * width, dim))
        # Layer scale multiplies the outputs of wo and w2, so it goes into their rows.
        self.wo = product(take("attention.wo", dim, width) * scale("attention_layer_scale"))
        self.ffn_norm = weights.place(take("ffn_norm", dim))
        gate, up = take("feed_forward.w1", inner, dim), take("feed_forward.w3", inner, dim)
        self.gate_up = product(torch.cat([gate, up]))
        self.down = product(take("feed_forward.w2", dim, inner) * scale("ffn_layer_scale"))

    def __call__(self, x: Tensor, ring: KvRing, step: _Step) -> Tensor:
        """x [B, T, dim] -> [B, T, dim]."""
        shape, dim, eps = x.shape, self.config.dim, self.config.norm_eps
        x = x.reshape(-1, dim)
        y = self.wqkv(F.rms_norm(x, (dim,), self.attention_norm, eps))
        x = x + self.wo(self._attend(y.view(*shape[:2], -1), ring, step).view(len(x), -1))
        y = F.rms_norm(x, (dim,), self.ffn_norm, eps)
        gate, up = self.gate_up(y).chunk(2, dim=-1)
        return (x + self.down(F.silu(gate) * up)).view(shape)

    def _attend(self, qkv: Tensor, ring: KvRing, step: _Step) -> Tensor:
        heads, head_dim, window = self.config.num_heads, self.config.head_dim, self.config.window
        q, k, v = qkv.view(*qkv.shape[:2], 3, heads, head_dim).unbind(2)  # [B, T, H, D]
        q, k = rotate(q, step), rotate(k, step)
        ring_keys, ring_values = ring.keys[:, self.index], ring.values[:, self.index]
        rows = step.rows[:, 0]
        keys = torch.cat([ring_keys.index_select(0, rows), k], dim=1)
        values = torch.cat([ring_values.index_select(0, rows), v], dim=1)
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), attn_mask=step.mask
        )
        ring_keys[step.rows, step.ring_slots] = k[:, -window:]
        ring_values[step.rows, step.ring_slots] = v[:, -window:]
        return y.transpose(1, 2).flatten(2)


def rotate(x: Tensor, step: _Step) -> Tensor:
    """Rotate interleaved pairs of x [B, T, H, D] in f32."""
    even, odd = x.float().view(*x.shape[:-1], -1, 2).unbind(-1)
    turned = (even * step.cos - odd * step.sin, odd * step.cos + even * step.sin)
    return torch.stack(turned, dim=-1).flatten(-2).to(x.dtype)
