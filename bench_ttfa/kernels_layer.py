"""Time of one whole S2 Pro layer: norms, linears, rope, append, attention, in dependent launches."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bench_ttfa.gpu_timing import Call, Timing, graph_us, num_copies
from bench_ttfa.kernels import LINEARS, narrow, pack, random_matrix, weight_bytes
from bench_ttfa.kernels_attention import EPS, Layers
from model.kv_cache import KvFormat
from ops.attended_linear import attended_linear_and_norm
from ops.attention import decode_attention
from ops.linear import Input, PackedWeight, gate_up_swiglu, linear, linear_and_norm
from ops.quantize import Kind, norm_for_linear

OP = "layer"
KV_FORMATS: tuple[KvFormat, ...] = ("bf16", "fp8")
_CONTEXT = 512
_LAYERS_PER_GRAPH = 24


@dataclass(frozen=True)
class Weights:
    """Of one layer."""

    wqkv: PackedWeight
    wo: PackedWeight
    gate_up: PackedWeight
    down: PackedWeight

    @classmethod
    def random(cls, kind: Kind) -> Weights:
        packed = {
            name: pack(random_matrix(n, k), kind, is_gate_up=name == "gate_up")
            for name, (n, k) in LINEARS.items()
        }
        return cls(**packed)


def layer_calls(
    weights: Sequence[Weights], caches: Layers, num_rows: int, kind: Kind
) -> list[Call]:
    """A stack of layers over rotating weights and pages, each a call on the rows of the last."""
    dim = LINEARS["wqkv"][1]
    start = torch.randn(num_rows, dim, device="cuda").bfloat16()
    norm = torch.ones(dim, device="cuda", dtype=torch.bfloat16)
    rows: list[tuple[Tensor, Input]] = []  # of the layer before

    def make(index: int) -> Call:
        weight, where = weights[index % len(weights)], caches.where(index % len(caches.pages))

        def call() -> None:
            x, normed = rows.pop() if index else (start, norm_for_linear(start, norm, EPS, kind))
            qkv = linear(normed, weight.wqkv)
            heads = qkv.view(caches.qkv.shape)
            attended = decode_attention(
                *(heads, caches.qk_norm, EPS, caches.rope, *where, kind),
                is_chained=True,
                wo=weight.wo,
            )
            x, normed = attended_linear_and_norm(attended, weight.wo, norm, EPS, residual=x)
            hidden = gate_up_swiglu(normed, weight.gate_up)
            rows.append(linear_and_norm(hidden, weight.down, norm, EPS, residual=x))

        return call

    return [make(i) for i in range(_LAYERS_PER_GRAPH)]


def measure_layers(rows: Sequence[int], kinds: Sequence[Kind] = ("bsfp8", "bf16")) -> list[Timing]:
    """One layer at a context of 512 positions per row, over keys and values of either format."""
    timings = []
    for kind in kinds:
        num_bytes = weight_bytes(list(LINEARS.values()), kind)
        weights = [Weights.random(kind) for _ in range(num_copies(num_bytes))]
        for kv_format, num_rows in itertools.product(KV_FORMATS, narrow(rows, kind)):
            caches = Layers([_CONTEXT] * num_rows, kv_format)
            us = graph_us(layer_calls(weights, caches, num_rows, kind))
            variant = kind if kv_format == "bf16" else f"{kind}, {kv_format} KV"
            moved = num_bytes + caches.read_bytes
            timings.append(Timing(OP, variant, num_rows, us, moved / us / 1000))
    return timings
