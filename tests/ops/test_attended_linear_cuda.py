"""The linear after attention that merges or makes what a row or two of attention leave to it."""

import pytest
import torch

from ops import attention, reference
from ops.attended_linear import attended_linear
from ops.attention_launch import PendingAttention, plan_to_pend
from ops.linear import linear
from ops.packing import pack_bf16, pack_fp8
from ops.quantize import quantize_weight
from tests.ops.attention_cases import EPS, bits, paged, relative_error

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, DIM = 32, 8, 128, 2560


def packed(kind, device="cuda", num_heads=NUM_HEADS, head_dim=HEAD_DIM):
    weight = torch.randn(DIM, num_heads * head_dim, device=device).bfloat16() * 0.02
    return pack_bf16(weight) if kind == "bf16" else pack_fp8(*quantize_weight(weight))


def residual_of(num_rows):
    return torch.randn(num_rows, DIM, device="cuda").bfloat16()


@pytest.mark.parametrize(
    ("num_rows", "heads", "pends"),
    [
        (1, (32, 8, 128), True),
        (2, (32, 8, 128), True),
        (3, (32, 8, 128), False),
        (1, (32, 8, 64), False),
        (1, (32, 2, 128), False),
    ],
)
def test_which_rows_are_left_to_the_linear(num_rows, heads, pends):
    weight = packed("bsfp8", "cpu", heads[0], heads[2])
    assert (plan_to_pend(weight, num_rows, *heads) is not None) == pends
    assert plan_to_pend(None, num_rows, *heads) is None


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bf16", "bsfp8"])
@pytest.mark.parametrize("kv_format", ["bf16", "fp8"])
@pytest.mark.parametrize(
    "lengths", [[1], [16], [17], [600], [1100], [8000], [1, 700], [513, 33]], ids=str
)
@pytest.mark.parametrize("is_chained", [False, True])
def test_decode_attention_is_merged_by_the_linear(kind, kv_format, lengths, is_chained):
    heads = (NUM_HEADS, NUM_KV_HEADS, HEAD_DIM)
    whole, parts = (paged(lengths, heads, device="cuda", kv_format=kv_format) for _ in range(2))
    weight, residual = packed(kind), residual_of(len(lengths))
    attended = attention.decode_attention(whole.qkv, *whole.rotary, *whole.where, kind)
    expected = linear(attended, weight, residual=residual)
    pending = attention.decode_attention(
        parts.qkv, *parts.rotary, *parts.where, kind, wo=weight, is_chained=is_chained
    )
    assert isinstance(pending, PendingAttention)
    got = attended_linear(pending, weight, residual=residual)
    # Sums in another order; in 8 bits a value may be rounded to its neighbour.
    assert relative_error(got, expected.float()) < (2e-3 if kind == "bf16" else 4e-3)
    assert torch.equal(bits(parts.pages), bits(whole.pages))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bf16", "bsfp8"])
@pytest.mark.parametrize("num_streams", [1, 2])
@pytest.mark.parametrize("with_norm", [True, False])
def test_a_frames_attention_is_made_by_the_linear(kind, num_streams, with_norm):
    """The same bits as in two launches, pass after pass over one memory."""
    rope = reference.rope_table(11, HEAD_DIM, 1e6, torch.device("cuda"))
    norm = torch.randn(NUM_HEADS + NUM_KV_HEADS, HEAD_DIM, device="cuda").bfloat16()
    shape = (2, num_streams + 2, NUM_KV_HEADS, 11, HEAD_DIM)
    memories = [torch.full(shape, torch.nan, device="cuda").bfloat16() for _ in range(2)]
    weight = packed(kind)
    for start, stop in [(0, 2), *((i, i + 1) for i in range(2, 11))]:
        num_rows = num_streams * (stop - start)
        qkv = torch.randn(
            num_rows, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM, device="cuda"
        ).bfloat16()
        residual = residual_of(num_rows)
        outputs = []
        for memory, wo in zip(memories, (None, weight), strict=True):
            args = (qkv, norm if with_norm else None, EPS, rope, memory, start, stop - start, kind)
            attended = attention.frame_attention(*args, is_chained=True, wo=wo)
            assert isinstance(attended, PendingAttention) == (wo is not None and num_rows <= 2)
            outputs.append(attended_linear(attended, weight, residual=residual))
        assert torch.equal(*outputs), start
        assert torch.equal(bits(memories[0]), bits(memories[1])), start
