"""Streaming decode of the spectral codec: few operations per step, explicit state, any batch of streams.

LayerNorm weights and learned scales are folded into the matrices beside them, and all codebooks with their
projections become one table: a frame takes 1.5 ms on one idle CPU thread.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.codec.product import Product
from model.codec.spectral_layers import ConvNeXt, WindowLayer, overlap_add

if TYPE_CHECKING:
    from model.codec.spectral import CodecState, SpectralCodec


def _fold(norm: nn.LayerNorm, linear: nn.Linear) -> Product:
    """`linear` after `norm` without its affine part."""
    weight = linear.weight * norm.weight
    bias = linear.weight @ norm.bias
    if linear.bias is not None:
        bias = bias + linear.bias
    return Product(weight.t(), bias)


def _scaled(linear: nn.Linear, scale: Tensor) -> Product:
    """`scale * linear`"""
    bias = None if linear.bias is None else linear.bias * scale
    return Product((linear.weight * scale[:, None]).t(), bias)


class FusedLayer:
    """One `WindowLayer` over a key-value history: norms and scales live inside the matrices."""

    def __init__(self, layer: WindowLayer) -> None:
        self.layer, self.num_heads, self.past = layer, layer.num_heads, layer.window - 1
        self.qkv = _fold(layer.attention_norm, layer.qkv)
        self.out = _scaled(layer.out, layer.attention_scale)
        self.gate_up = _fold(layer.ffn_norm, layer.gate_up)
        self.down = _scaled(layer.down, layer.ffn_scale)
        self.bias: dict[int, Tensor] = {}  # by frames per call

    def step(self, x: Tensor, history: Tensor, unborn: Tensor) -> tuple[Tensor, Tensor]:
        """x: [B * T, dim], history: [B, 2, heads, past, head_dim], unborn: bool [B, past] -> x, history"""
        num_rows, dim = history.shape[0], x.shape[1]
        num_frames, head_dim = x.shape[0] // num_rows, dim // self.num_heads
        if num_frames not in self.bias:
            self.bias[num_frames] = self.layer.position_bias(num_frames, num_frames + self.past)
        qkv = self.qkv(F.layer_norm(x, (dim,)))
        qkv = qkv.view(num_rows, num_frames, 3, self.num_heads, head_dim).permute(0, 2, 3, 1, 4)
        keys_values = torch.cat([history, qkv[:, 1:]], dim=3)
        # Contiguous operands take the same product for one stream as for many.
        queries, keys, values = (t.contiguous() for t in (qkv[:, 0], *keys_values.unbind(1)))
        scores = queries @ keys.transpose(2, 3) * head_dim**-0.5
        scores += self.bias[num_frames]
        scores[..., : self.past].masked_fill_(unborn[:, None, None], -math.inf)
        h = (scores.softmax(-1) @ values).transpose(1, 2).reshape(-1, dim)
        x = x + self.out(h)
        gate, up = self.gate_up(F.layer_norm(x, (dim,))).chunk(2, dim=-1)
        x = x + self.down(F.silu(gate) * up)
        return x, keys_values[:, :, :, num_frames:]


class FusedBlock:
    """One causal `ConvNeXt` over the last inputs of its convolution."""

    def __init__(self, block: ConvNeXt) -> None:
        self.taps = block.depthwise.weight[:, 0].t().contiguous()  # [kernel, dim]
        assert block.depthwise.bias is not None
        self.taps_bias = block.depthwise.bias
        self.up = _fold(block.norm, block.up)
        self.down = _scaled(block.down, block.scale)

    def step(self, x: Tensor, history: Tensor) -> tuple[Tensor, Tensor]:
        """x: [B, H, dim], history: [B, kernel - 1, dim] -> x, history"""
        num_rows, num_hops, dim = x.shape
        seen = torch.cat([history, x], dim=1)
        # A multiply and a sum: at a few hops per call it costs a third of a convolution call.
        h = (seen.unfold(1, len(self.taps), 1).transpose(2, 3) * self.taps).sum(2) + self.taps_bias
        h = self.up(F.layer_norm(h, (dim,)).view(-1, dim))
        h = self.down(F.gelu(h, approximate="tanh"))
        return x + h.view(num_rows, num_hops, dim), seen[:, num_hops:]


class FusedDecoder:
    """The decoder with few operations per step and explicit state, for any batch of streams."""

    @torch.no_grad()
    def __init__(self, codec: SpectralCodec) -> None:
        self.config, self.decoder = codec.config, codec.decoder
        self.table = torch.cat([s.out_proj(s.codebook.weight) for s in codec.quantizer])
        sizes = torch.tensor(codec.codebook_sizes, device=self.table.device)
        self.offsets = (sizes.cumsum(0) - sizes)[:, None]
        self.layers = [FusedLayer(m) for m in codec.decoder.layers if isinstance(m, WindowLayer)]
        self.blocks = [FusedBlock(m) for m in codec.decoder.blocks if isinstance(m, ConvNeXt)]
        split = codec.decoder.split
        self.split = Product(split.weight.t(), split.bias)
        self.head = _fold(codec.decoder.norm_out, codec.decoder.head)
        past = self.config.attention_frames - 1
        self.past_index = torch.arange(past, 0, -1, device=self.table.device)  # frames back

    def step(self, codes: Tensor, state: CodecState, rows: Tensor) -> Tensor:
        """See `SpectralCodec.decode_stream`."""
        c, decoder = self.config, self.decoder
        num_rows, num_codebooks, num_frames = codes.shape
        assert num_codebooks == c.num_codebooks and rows.shape == (num_rows,), (
            codes.shape,
            rows.shape,
        )
        x = F.embedding(codes + self.offsets, self.table).sum(1).view(-1, c.dim)
        seen = state["num_frames"][rows]
        unborn = self.past_index > seen[:, None]
        histories = state["keys_values"][rows]
        updated = []
        for i, layer in enumerate(self.layers):
            x, history = layer.step(x, histories[:, i], unborn)
            updated.append(history)
        state["keys_values"].index_copy_(0, rows, torch.stack(updated, dim=1))
        state["num_frames"].index_copy_(0, rows, (seen + num_frames).clamp(max=c.attention_frames))

        h = self.split(x).view(num_rows, -1, c.decoder_dim)
        h = decoder.norm_in(h)
        conv = state["conv"][rows]
        updated = []
        for i, block in enumerate(self.blocks):
            h, history = block.step(h, conv[:, i])
            updated.append(history)
        state["conv"].index_copy_(0, rows, torch.stack(updated, dim=1))

        h = F.layer_norm(h, (c.decoder_dim,)).flatten(0, 1)
        spectrum = self.head(h).view(num_rows, -1, 2 * c.num_bins)
        wav, tail = overlap_add(decoder.chunks(spectrum), state["tail"][rows], c.hop_samples)
        state["tail"].index_copy_(0, rows, tail)
        return wav
