"""A chain of layers as frames launch it gives the same bits at every replay.

Kernels start before the ones before them have ended and share the SMs with them: whatever is read or
overwritten too early shows here as a difference between replays.
"""

import pytest
import torch

from ops.attended_linear import attended_linear_and_norm
from ops.attention import decode_attention
from ops.linear import gate_up_swiglu, linear, linear_and_norm
from ops.packing import pack_bf16, pack_fp8
from ops.quantize import norm_for_linear, quantize_weight
from tests.ops.attention_cases import paged

DIM, HEADS, FFN = 2560, (32, 8, 128), 9728  # S2 Pro
NUM_REPLAYS, NUM_LAYERS = 20, 3

pytestmark = pytest.mark.gpu


def packed(kind, out_features, in_features, *, is_gate_up=False):
    weight = torch.randn(out_features, in_features, device="cuda").bfloat16() * 0.02
    if kind == "bf16":
        return pack_bf16(weight, is_gate_up=is_gate_up)
    return pack_fp8(*quantize_weight(weight), is_gate_up=is_gate_up)


@pytest.mark.parametrize("num_rows", [1, 16, 48, 64, 128])
@pytest.mark.parametrize("kv_format", ["bf16", "fp8"])
@pytest.mark.parametrize("kind", ["bsfp8", "bf16"])
def test_replays_are_equal(kind, kv_format, num_rows):
    case = paged([512] * num_rows, HEADS, device="cuda", kv_format=kv_format)
    wqkv, wo = packed(kind, 6144, DIM), packed(kind, DIM, 4096)
    gate_up, down = packed(kind, 2 * FFN, DIM, is_gate_up=True), packed(kind, DIM, FFN)
    norm = torch.ones(DIM, device="cuda").bfloat16()
    start = torch.randn(num_rows, DIM, device="cuda").bfloat16()

    def layers():
        x, normed, outputs = start, norm_for_linear(start, norm, 1e-6, kind), []
        for _ in range(NUM_LAYERS):
            qkv = linear(normed, wqkv)
            heads = qkv.view(case.qkv.shape)
            attended = decode_attention(
                heads, *case.rotary, *case.where, kind, is_chained=True, wo=wo
            )
            x, normed = attended_linear_and_norm(attended, wo, norm, 1e-6, residual=x)
            hidden = gate_up_swiglu(normed, gate_up)
            x, normed = linear_and_norm(hidden, down, norm, 1e-6, residual=x)
            outputs += [qkv, x]
        return outputs

    layers()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = layers()
    first = None
    for replay in range(NUM_REPLAYS):
        graph.replay()
        torch.cuda.synchronize()
        got = [output.clone() for output in outputs]
        first = first or got
        differing = [
            i for i, (a, b) in enumerate(zip(got, first, strict=True)) if not torch.equal(a, b)
        ]
        assert not differing, (replay, differing)
