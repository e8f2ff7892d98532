"""The embedded model in a larger model's shapes, for the gates: trained weights, and its kernels.

What it computes is what the embedded model does, up to rounding. Every width holds copies: the hidden
state is the small one again and again, so that its norms have the same mean; heads and features of
the feed-forward are copied as well, in part where the width is no multiple. A matrix makes all
copies and reads each value from one of them, chosen so that all its columns are about as often read:
nothing is averaged, and no part of K is idle. A longer head keeps the pairs of its RoPE that turn as
those of the short one do, and zeros between them.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from model.config import DualARConfig, StackConfig
from model.dual_ar import DualAR
from model.embedded import embedded_path
from model.geometries import config_json
from model.layers import Block, Stack
from model.loader import load_dual_ar


def s2_pro_shapes() -> DualARConfig:
    return DualARConfig.from_dict(config_json("s2-pro"))


@torch.inference_mode()
def widened(shapes: DualARConfig, device: torch.device, dtype: torch.dtype) -> DualAR:
    """The embedded model with the widths and heads of `shapes`; its layers, words and codes stay.

    Its hidden width must be a multiple of the embedded one's, its heads too.
    """
    small = load_dual_ar(embedded_path(), device, torch.float32)
    slow, fast = (
        _stack_config(own.config, other)
        for own, other in ((small.slow, shapes.slow), (small.fast.stack, shapes.fast))
    )
    config = replace(small.config, slow=slow, fast=fast, tie_word_embeddings=False)
    wide = DualAR(config, device, dtype)
    hidden = Copies.of(small.config.slow.dim, slow.dim)
    wide.embeddings.copy_(hidden.make(small.embeddings, 1))
    wide.codebook_embeddings.copy_(hidden.make(small.codebook_embeddings, 1))
    wide.output.copy_(hidden.read(_dense(small.output)))
    wide.fast.embeddings.copy_(hidden.make(small.fast.embeddings, 1))
    wide.fast.output.copy_(hidden.read(_dense(small.fast.output)))
    for own, other in ((small.slow, wide.slow), (small.fast.stack, wide.fast.stack)):
        _fill(own, other, hidden)
    wide.finish_loading()
    return wide.eval()


class Copies:
    """Values in a wider space: which each place holds, and whether it is the one that is read."""

    def __init__(self, source: Tensor, is_read: Tensor) -> None:
        """`source` i64, -1 for a zero, and `is_read` bool: [places]."""
        self._source = source
        self._is_read = is_read

    @classmethod
    def of(cls, width: int, wide: int) -> Copies:
        """Again and again; the copies take turns to be read."""
        place, num_copies = torch.arange(wide), wide // width
        assert num_copies > 0, (width, wide)
        return cls(place % width, place // width == place % width % num_copies)

    @classmethod
    def of_heads(cls, heads: tuple[int, int], wide: tuple[int, int]) -> Copies:
        """Of (number of heads, values of a head); each head of the wider is a copy."""
        (num_heads, width), (num_wide, wide_width) = heads, wide
        ratio, num_copies = wide_width // width, num_wide // num_heads
        place = torch.arange(num_wide * wide_width)
        copy, head = place // wide_width // num_heads, place // wide_width % num_heads
        pair, side = place % wide_width // 2, place % 2
        value, is_there = pair // ratio * 2 + side, pair % ratio == 0
        source = torch.where(is_there, head * width + value, -1)
        return cls(source, is_there & (copy == value % num_copies))

    def make(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """All copies along a dimension."""
        source = self._source.to(tensor.device)
        shape = [-1 if axis == dim else 1 for axis in range(tensor.dim())]
        return tensor.index_select(dim, source.clamp(min=0)) * (source >= 0).view(shape)

    def read(self, matrix: Tensor) -> Tensor:
        """[N, width] -> [N, places] that takes each value from one place."""
        return self.make(matrix, 1) * self._is_read.to(matrix.device)


def _stack_config(small: StackConfig, shapes: StackConfig) -> StackConfig:
    assert shapes.dim % small.dim == 0 and small.num_kv_heads == 1, (small, shapes)
    assert shapes.head_dim % small.head_dim == 0, (small, shapes)
    return replace(
        small,
        dim=shapes.dim,
        num_heads=shapes.num_heads,
        num_kv_heads=shapes.num_kv_heads,
        head_dim=shapes.head_dim,
        ffn_dim=shapes.ffn_dim,
    )


def _fill(small: Stack, wide: Stack, hidden: Copies) -> None:
    width, wide_width = small.config.head_dim, wide.config.head_dim
    queries, keys, one = (
        Copies.of_heads((heads, width), (num_wide, wide_width))
        for heads, num_wide in (
            (small.config.num_heads, wide.config.num_heads),
            (1, wide.config.num_kv_heads),
            (1, 1),
        )
    )
    features = Copies.of(small.config.ffn_dim, wide.config.ffn_dim)
    # Products of queries and keys are divided by the root of the head's width, and a norm over zeros
    # makes both of them larger.
    stretch = math.sqrt(wide_width / width)
    wide.norm.copy_(hidden.make(small.norm))
    for own, other in zip(small.layers, wide.layers, strict=True):
        assert isinstance(own, Block) and isinstance(other, Block)
        q, k, v = torch.split(_dense(own.wqkv), [small.config.q_dim, width, width])
        made = [queries.make(q), keys.make(k), keys.make(v)]
        if own.qk_norm is None:
            made[0] *= stretch
        else:
            assert other.qk_norm is not None
            norms = one.make(own.qk_norm[[0, -1]], 1)
            other.qk_norm[: wide.config.num_heads] = norms[0] / stretch
            other.qk_norm[wide.config.num_heads :] = norms[1]
        other.wqkv.copy_(hidden.read(torch.cat(made)))
        other.wo.copy_(queries.read(hidden.make(_dense(own.wo))))
        gate, up = _dense(own.gate_up).chunk(2)
        other.gate_up.copy_(hidden.read(torch.cat([features.make(gate), features.make(up)])))
        other.down.copy_(features.read(hidden.make(_dense(own.down))))
        other.attention_norm.copy_(hidden.make(own.attention_norm))
        other.ffn_norm.copy_(hidden.make(own.ffn_norm))


def _dense(matrix: Tensor) -> Tensor:
    """As it was before `layers.pack`."""
    return matrix.to_dense() if matrix.is_mkldnn else matrix
