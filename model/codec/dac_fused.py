"""The decoder of the modded DAC over the ops of `ops.codec`: few launches, no copies of the past.

The same computation as `dac._Decoder`, which stays the CPU's path and the oracle. Every convolution
adds its residual and applies the snake that follows it, so that an activation is written once.

What a frame of the S2 codec becomes, as steps x channels: latents 1 x 1024, through a transformer of
eight layers, 2 and 4 x 1024 by two upsample blocks, 4 x 1536 by the first convolution, 32 x 768, 256 x
384, 1024 x 192 and 2048 x 96 by four blocks, then 2048 samples. A call of 128 frames is 865 GFLOP.
"""

from __future__ import annotations

import torch
from torch import Tensor

from model.codec.checkpoint import Weights
from model.codec.config import DacConfig, TransformerConfig
from model.codec.dac_layers import HistoryLayout, KvRing
from ops import codec as ops
from ops import codec_unit as units_of
from ops.codec_conv import Conv, ConvOut, Streams, conv, pack_conv

# Frames per pass over a long clip: bounds memory, and one pass' activations stay in cache.
MAX_PASS_FRAMES = 16

_DILATIONS = (1, 3, 9)
_KERNEL = 7


def fits_kernels(config: DacConfig) -> bool:
    """Whether the CUDA kernels are made for these sizes."""
    num_halvings = len(config.decoder_rates)
    widths = [config.latent_dim, *(config.decoder_dim >> i for i in range(num_halvings + 1))]
    factors = (*config.decoder_rates, *config.downsample_factors)
    return (
        (config.post.window, config.post.head_dim) == (ops.WINDOW, ops.HEAD_DIM)
        and all(width % 64 == 0 or (width % 16 == 0 and width <= 112) for width in widths)
        and all(factor & (factor - 1) == 0 for factor in factors)
        and config.latent_dim <= 1024
        and config.decoder_dim % (48 << num_halvings) == 0  # of the last convolution
    )


def has_kernels(device: torch.device, config: DacConfig) -> bool:
    """Whether the ops of `ops.codec` are kernels there: on Hopper alone, whose shared memory they fill."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    return fits_kernels(config)


def pass_sizes(num_frames: int) -> list[int]:
    """Frames of each pass over a clip: powers of two, as the kernels' tiles want them."""
    sizes, size = [MAX_PASS_FRAMES] * (num_frames // MAX_PASS_FRAMES), MAX_PASS_FRAMES
    while size := size // 2:
        sizes += [size] if num_frames & size else []
    return sizes


class FusedDecoder:
    """Codes -> waveform, continuing streams; `dtype` is that of activations and state."""

    def __init__(
        self,
        config: DacConfig,
        weights: Weights,
        quantizer: Weights,
        books: ops.Codebooks,
        dtype: torch.dtype,
    ) -> None:
        self.layout = layout = HistoryLayout()
        make = _Maker(layout, dtype)
        self.dtype, self.books, self.frame_samples = dtype, books, config.frame_samples
        self.post = _Transformer(quantizer.at("post_module"), config.post, make)
        self.upsample = [
            _Upsample(quantizer.at("upsample", i), config, factor, make)
            for i, factor in enumerate(reversed(config.downsample_factors))
        ]
        dim, model = config.decoder_dim, weights.at("model")
        num_blocks = len(config.decoder_rates)
        snakes = [
            model.at(i + 1, "block", 0) if i < num_blocks else model.at(i + 1)
            for i in range(num_blocks + 1)
        ]
        self.conv_in = make.conv(
            model.at(0, "conv"), config.latent_dim, dim, _KERNEL, snake=snakes[0]
        )
        self.blocks: list[_Block] = []
        for i, rate in enumerate(config.decoder_rates):
            self.blocks.append(_Block(model.at(i + 1, "block"), dim, rate, snakes[i + 1], make))
            dim //= 2
        last = model.at(num_blocks + 2, "conv")
        weight = last.take("weight", 1, dim, _KERNEL)[0].T
        self.output = ops.Output(
            weight=weight.to(weights.device).contiguous(),
            bias=float(last.take("bias", 1)),
            history_start=layout.reserve((_KERNEL - 1) * dim).start,
        )

    def __call__(
        self,
        codes: Tensor,
        slots: Tensor,
        positions: Tensor,
        history: Tensor,
        ring: KvRing,
    ) -> Tensor:
        """Decode the next T frames of B streams; all of their state moves on.

        Args:
            codes: i32 [B * T, K].
            slots: i64 [B] — distinct, except that padding may name one slot many times.
            positions, history, ring: rows of `num_slots` streams.

        Returns:
            f32 [B, T * frame_samples].
        """
        new_history = history.new_empty(len(slots), history.shape[1])
        streams = Streams(slots, history, new_history)
        latents, turns = ops.begin(codes, self.books, positions, slots)
        num_steps = num_frames = len(latents) // len(slots)
        x = self.post(latents, turns, ring, positions, slots)
        for layer in self.upsample:
            x = layer(x, streams, num_steps)
            num_steps *= layer.factor
        x = _out(conv(x, self.conv_in, streams, num_steps=num_steps))
        for block in self.blocks:
            x = block(x, streams, num_steps)
            num_steps *= block.rate
        wav = ops.output(x, self.output, streams, num_steps)
        ops.keep(streams, positions, num_frames)
        return wav


class _Maker:
    """Weights of the checkpoint -> layers for the kernels."""

    def __init__(self, layout: HistoryLayout, dtype: torch.dtype) -> None:
        self.layout, self.dtype = layout, dtype

    def place(self, weights: Weights, name: str, *shape: int) -> Tensor:
        return weights.take(name, *shape).to(weights.device).contiguous()

    def conv(
        self,
        weights: Weights,
        in_channels: int,
        out_channels: int,
        kernel: int,
        dilation: int = 1,
        snake: Weights | None = None,
    ) -> Conv:
        weight = self.place(weights, "weight", out_channels, in_channels, kernel).transpose(1, 2)
        return self._pack(weights, weight, out_channels, 1, dilation, snake)

    def transposed(
        self,
        weights: Weights,
        in_channels: int,
        out_channels: int,
        kernel: int,
        stride: int,
        snake: Weights | None = None,
    ) -> Conv:
        """An output step depends on its own input step and the one before: one or two taps, and
        `stride` times the columns. The kernel's first part meets the newest input."""
        weight = self.place(weights, "weight", in_channels, out_channels, kernel)
        weight = weight.view(in_channels, out_channels, kernel // stride, stride)
        weight = weight.permute(3, 1, 2, 0).flip(2).flatten(0, 1)  # [stride * O, taps, I]
        return self._pack(weights, weight, out_channels, stride, 1, snake)

    def unit(
        self, weights: Weights, channels: int, dilation: int, next_snake: Weights | None
    ) -> units_of.Unit:
        """A residual unit, and the snake after it where nobody needs the sum itself."""

        def snake(at: Weights) -> units_of.Snake:
            return units_of.Snake.of(self.place(at, "alpha", 1, channels, 1).flatten())

        conv7, conv1 = weights.at(1, "conv"), weights.at(3, "conv")
        weight7 = self.place(conv7, "weight", channels, channels, _KERNEL).transpose(1, 2)
        weight1 = self.place(conv1, "weight", channels, channels, 1)[..., 0]
        return units_of.Unit(
            weight=units_of.unit_weight(weight7.contiguous(), weight1, self.dtype),
            bias7=self.place(conv7, "bias", channels),
            bias1=self.place(conv1, "bias", channels),
            before=snake(weights.at(0)),
            between=snake(weights.at(2)),
            after=None if next_snake is None else snake(next_snake),
            dilation=dilation,
            history_start=self.layout.reserve((_KERNEL - 1) * dilation * channels).start,
        )

    def linear(self, weight: Tensor, bias: Tensor | None = None, activation: str = "none") -> Conv:
        """weight f32 [N, C]."""
        return pack_conv(weight[:, None], bias, self.dtype, activation=activation)

    def _pack(
        self,
        weights: Weights,
        weight: Tensor,
        out_channels: int,
        repeats: int,
        dilation: int,
        snake: Weights | None,
    ) -> Conv:
        _, num_taps, channels = weight.shape
        alpha = None
        if snake is not None:
            alpha = self.place(snake, "alpha", 1, out_channels, 1).flatten().repeat(repeats)
        return pack_conv(
            weight,
            self.place(weights, "bias", out_channels).repeat(repeats),
            self.dtype,
            dilation=dilation,
            history_start=self.layout.reserve((num_taps - 1) * dilation * channels).start,
            activation="none" if alpha is None else "snake",
            alpha=alpha,
        )


class _Transformer:
    def __init__(self, weights: Weights, config: TransformerConfig, make: _Maker) -> None:
        self.config, self.dtype = config, make.dtype
        self.layers = [
            _TransformerLayer(weights.at("layers", i), config, make)
            for i in range(config.num_layers)
        ]
        self.norm = make.place(weights, "norm.weight", config.dim)

    def __call__(
        self, x: Tensor, turns: Tensor, ring: KvRing, positions: Tensor, slots: Tensor
    ) -> Tensor:
        """x f32 [B * T, dim], overwritten -> [B * T, dim]."""
        eps = self.config.norm_eps
        for i, layer in enumerate(self.layers):
            y = ops.rms_norm(x, layer.attention_norm, eps, self.dtype)
            qkv = _out(conv(y, layer.wqkv))
            y = ops.window_attention(qkv, ring.keys, ring.values, i, turns, positions, slots)
            x = _raw(conv(y, layer.wo, residual=x, raw=torch.float32, has_out=False))
            y = ops.rms_norm(x, layer.ffn_norm, eps, self.dtype)
            y = _out(conv(y, layer.gate_up))
            x = _raw(conv(y, layer.down, residual=x, raw=torch.float32, has_out=False))
        return ops.rms_norm(x, self.norm, eps, self.dtype)


class _TransformerLayer:
    def __init__(self, weights: Weights, config: TransformerConfig, make: _Maker) -> None:
        dim, inner, width = config.dim, config.intermediate_dim, config.num_heads * config.head_dim

        def take(name: str, *shape: int) -> Tensor:
            return make.place(weights, f"{name}.weight", *shape)

        def scale(name: str) -> Tensor:
            return make.place(weights, f"{name}.gamma", dim)[:, None]

        self.attention_norm = take("attention_norm", dim)
        self.wqkv = make.linear(take("attention.wqkv", 3 * width, dim))
        # Layer scale multiplies the outputs of wo and w2, so it goes into their rows.
        wo = take("attention.wo", dim, width) * scale("attention_layer_scale")
        self.wo = make.linear(wo)
        self.ffn_norm = take("ffn_norm", dim)
        gate, up = take("feed_forward.w1", inner, dim), take("feed_forward.w3", inner, dim)
        gate_up = torch.stack([gate, up], dim=1).flatten(0, 1)  # rows alternate
        self.gate_up = make.linear(gate_up, activation="swiglu")
        self.down = make.linear(take("feed_forward.w2", dim, inner) * scale("ffn_layer_scale"))


class _Upsample:
    """Transposed convolution, then x + gamma * mlp(norm(depthwise(x)))."""

    def __init__(self, weights: Weights, config: DacConfig, factor: int, make: _Maker) -> None:
        dim, self.factor, self.dtype = config.latent_dim, factor, make.dtype
        self.conv = make.transposed(weights.at(0, "conv"), dim, dim, factor, factor)
        block, inner = weights.at(1), config.convnext_multiple * dim
        depthwise = block.at("dwconv", "conv")
        taps = make.place(depthwise, "weight", dim, 1, _KERNEL)[:, 0].T.contiguous()
        self.depthwise = ops.Depthwise(
            taps=taps,
            bias=make.place(depthwise, "bias", dim),
            norm_weight=make.place(block, "norm.weight", dim),
            norm_bias=make.place(block, "norm.bias", dim),
            history_start=make.layout.reserve((_KERNEL - 1) * dim).start,
        )
        self.expand = make.linear(
            make.place(block, "pwconv1.weight", inner, dim),
            make.place(block, "pwconv1.bias", inner),
            "gelu",
        )
        # gamma scales the last product's outputs, so it goes into its rows.
        gamma = make.place(block, "gamma", dim)
        self.reduce = make.linear(
            make.place(block, "pwconv2.weight", dim, inner) * gamma[:, None],
            make.place(block, "pwconv2.bias", dim) * gamma,
        )

    def __call__(self, x: Tensor, streams: Streams, num_steps: int) -> Tensor:
        """x [B * T, C] -> [B * T * factor, C]."""
        made = conv(x, self.conv, streams, num_steps=num_steps, raw=torch.float32, has_out=False)
        x = _raw(made).view(-1, x.shape[1])
        y = ops.depthwise_norm(x, self.depthwise, streams, num_steps * self.factor, self.dtype)
        return _out(conv(_out(conv(y, self.expand)), self.reduce, residual=x))


class _Block:
    """Transposed convolution, then x + conv1(snake(conv7(snake(x)))) three times."""

    def __init__(
        self, weights: Weights, dim: int, rate: int, next_snake: Weights, make: _Maker
    ) -> None:
        half, self.rate = dim // 2, rate
        units = [weights.at(i + 2, "block") for i in range(len(_DILATIONS))]
        self.is_fused = half in units_of.CHANNELS
        # A fused unit takes its input without the snake.
        first_snake = None if self.is_fused else units[0].at(0)
        self.conv = make.transposed(
            weights.at(1, "conv"), dim, half, 2 * rate, rate, snake=first_snake
        )
        snakes = [*(unit.at(0) for unit in units[1:]), next_snake]
        self.units: list[units_of.Unit] = []
        self.pairs: list[tuple[Conv, Conv]] = []
        for i, (unit, dilation) in enumerate(zip(units, _DILATIONS, strict=True)):
            if self.is_fused:
                is_last = i + 1 == len(units)
                self.units.append(make.unit(unit, half, dilation, next_snake if is_last else None))
                continue
            conv7 = make.conv(unit.at(1, "conv"), half, half, _KERNEL, dilation, snake=unit.at(2))
            conv1 = make.conv(unit.at(3, "conv"), half, half, 1, snake=snakes[i])
            self.pairs.append((conv7, conv1))

    def __call__(self, x: Tensor, streams: Streams, num_steps: int) -> Tensor:
        """x [B * T, dim], the block's snake applied -> [B * T * rate, dim / 2], the next one's."""
        raw = None if self.is_fused else x.dtype
        made = conv(x, self.conv, streams, num_steps=num_steps, raw=raw)
        num_steps *= self.rate
        y = _out(made)
        y = y.view(-1, y.shape[1] // self.rate)
        for unit in self.units:
            y = units_of.unit(y, unit, streams, num_steps)
        if self.is_fused:
            return y
        x = _raw(made).view_as(y)
        for i, (conv7, conv1) in enumerate(self.pairs):
            is_last = i + 1 == len(self.pairs)
            y = _out(conv(y, conv7, streams, num_steps=num_steps))
            made = conv(y, conv1, residual=x, raw=None if is_last else x.dtype)
            x, y = made.raw if made.raw is not None else x, _out(made)
        return y


def _out(result: ConvOut) -> Tensor:
    assert result.out is not None
    return result.out


def _raw(result: ConvOut) -> Tensor:
    assert result.raw is not None
    return result.raw
