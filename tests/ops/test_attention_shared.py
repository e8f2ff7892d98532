"""Attention that reads what neighbours share once, against attention of each row alone.

Everything a row must not read is NaN.
"""

import random

import pytest
import torch

from ops import attention
from ops.attention_shared import SharedPlan, shared_attention, shared_decode_attention
from ops.quantize import BlockScaled
from tests.ops.attention_cases import bits, paged, relative_error
from tests.ops.compiling import check_compiles

S2_PRO = (32, 8, 128)
EMBEDDED = (5, 1, 64)
PLANS = [SharedPlan(1, 8), SharedPlan(1, 6), SharedPlan(1, 4), SharedPlan(2, 8), SharedPlan(2, 4)]
MAX_ERROR = 4e-3  # see test_attention_cuda.py
VOICE = [646 + 3 * i for i in range(61)]  # lengths of contexts, 20 pages of which are a voice
UNEVEN = [random.Random(i).randint(1, 900) for i in range(64)]
EDGES = [1, 2, 15, 16, 17, 31, 32, 33, 48, 64, 65, 700]


def with_voices(case, voices, num_pages):
    """Rows begin with the pages of the first row of their voice, as far as their contexts go."""
    for row, voice in enumerate(voices):
        first = voices.index(voice)
        shared = min(num_pages, *(int(case.positions[i]) // 32 for i in (row, first)))
        source = case.page_table[case.slots[first], :shared].clone()
        case.page_table[case.slots[row], :shared] = source
    return case


@pytest.mark.parametrize("kind", ["bf16", "bsfp8"])
def test_on_a_cpu_one_launch_is_attention_of_each_row(kind):
    case = with_voices(paged([70, 99, 64], (4, 2, 128)), [0, 0, 0], 2)
    alone = case.rows([0, 1, 2])
    made, want = (
        attend(*(rows.qkv, *rows.rotary, *rows.where), kind)
        for attend, rows in (
            (shared_decode_attention, case),
            (attention.decode_attention, alone),
        )
    )
    if kind == "bsfp8":
        made, want = made.dequantize(), want.dequantize()
    assert torch.equal(made, want)
    assert torch.equal(bits(case.pages), bits(alone.pages))


def test_the_kernel_compiles():
    shapes = [{"HEAD_DIM": dim, "GROUP": group} for dim, group in ((128, 4), (64, 5))]
    flags = [{"IS_FP8": is_fp8, "IS_FUSED": fused} for is_fp8 in (0, 1) for fused in (0, 1)]
    same = {"PAGE": 32, "WARPS": 8}
    variants = [shape | same | flag for shape in shapes for flag in flags]
    check_compiles([("attention_shared.cu", defines) for defines in variants])


@pytest.mark.gpu
@pytest.mark.parametrize("kv_format", ["bf16", "fp8"])
@pytest.mark.parametrize(
    ("lengths", "voices", "heads"),
    [
        (VOICE, [0] * 61, S2_PRO),
        (VOICE, [row % 2 for row in range(61)], S2_PRO),
        (VOICE, [row // 10 for row in range(61)], S2_PRO),
        (UNEVEN, list(range(64)), S2_PRO),
        (2 * UNEVEN, list(range(128)), S2_PRO),
        (2 * VOICE, [0] * 122, S2_PRO),
        (UNEVEN, [0] * 64, EMBEDDED),
        (EDGES, list(range(12)), S2_PRO),
        (EDGES, [0] * 12, EMBEDDED),
        ([8192, 8000, 3000, 5], [0, 0, 0, 1], S2_PRO),
        ([700], [0], S2_PRO),
    ],
)
def test_is_right(lengths, voices, heads, kv_format):
    case = paged(lengths, heads, device="cuda", kv_format=kv_format)
    check(with_voices(case, voices, 20))


def check(case, plan=None):
    """In two launches and in one, which has the same bits and leaves the same memory."""
    two, one = (case.rows(list(range(len(case.slots)))) for _ in range(2))
    q = attention.rope_append(two.qkv, *two.rotary, *two.where)
    out = shared_attention(q, *two.where, "bf16", plan=plan)
    assert relative_error(out, two.expected(q)) < MAX_ERROR
    fused = shared_decode_attention(*(one.qkv, *one.rotary, *one.where), "bf16", plan=plan)
    assert torch.equal(fused, out)
    assert torch.equal(bits(one.pages), bits(two.pages))


@pytest.mark.gpu
@pytest.mark.parametrize("kv_format", ["bf16", "fp8"])
@pytest.mark.parametrize("plan", PLANS)
def test_every_plan(plan, kv_format):
    lengths = [*EDGES, *VOICE[:20], 3, 8000]
    case = paged(lengths, S2_PRO, device="cuda", kv_format=kv_format)
    check(with_voices(case, [*range(12), *[12] * 20, 13, 14], 20), plan)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_format", ["bf16", "fp8"])
@pytest.mark.parametrize(
    "heads", [S2_PRO, (16, 8, 64), EMBEDDED, (3, 1, 128), (8, 8, 64), (16, 2, 128)], ids=str
)
@pytest.mark.parametrize(
    ("length", "num_rows"), [(700, 128), (128, 128), (5, 3), (4000, 37), (2, 2), (33, 1)]
)
def test_rows_of_one_prompt_read_those_before_them(length, num_rows, heads, kv_format):
    """Consecutive positions of one slot, appended by one launch and read by the next."""
    chunk = paged([40, length], heads, device="cuda", kv_format=kv_format).rows([1] * num_rows)
    chunk.positions = torch.arange(length - num_rows, length, device="cuda")
    chunk.qkv = torch.randn(num_rows, *chunk.qkv.shape[1:], device="cuda").bfloat16()
    q = attention.rope_append(chunk.qkv, *chunk.rotary, *chunk.where)
    out = shared_attention(q, *chunk.where, "bf16")
    assert relative_error(out, chunk.expected(q)) < MAX_ERROR


@pytest.mark.gpu
@pytest.mark.parametrize("kv_format", ["bf16", "fp8"])
def test_runs_of_rows_of_several_slots(kv_format):
    """Of different lengths, one of them twice, with padding behind."""
    case = paged([300, 70, 1, 513, 40], S2_PRO, device="cuda", kv_format=kv_format)
    order = [0] * 5 + [1] + [2] + [3] * 13 + [4, 4, 1, 1, 1] + [0] * 3
    chunk = case.rows(order + [4] * 4)
    offsets = [order[i:].count(row) - 1 for i, row in enumerate(order)]
    positions = case.positions[order] - torch.tensor(offsets, device="cuda")
    assert positions.min() >= 0
    chunk.positions = torch.cat([positions, positions.new_zeros(4)])
    chunk.slots = chunk.slots.clone()
    chunk.slots[-4:] = len(case.page_table) - 1
    out = shared_attention(chunk.q, *chunk.where, "bf16")
    assert relative_error(out[:-4], chunk.expected(chunk.q)[:-4]) < MAX_ERROR
    assert out.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("num_padding", [3, 80])
def test_padding_reads_nothing_and_spoils_nobody(num_padding):
    """Rows of the dummy slot, which has no page; page 0 is NaN."""
    case = paged(VOICE[:6], S2_PRO, device="cuda")
    num_slots = len(case.page_table) - 1
    padding = torch.full((num_padding,), num_slots, device="cuda")
    slots, positions = torch.cat([case.slots, padding]), torch.cat([case.positions, 0 * padding])
    q = torch.cat([case.q, case.q[:1].expand(num_padding, -1, -1)])
    out = shared_attention(q, case.pages, case.page_table, slots, positions, "bf16")
    assert relative_error(out[:6], case.expected(case.q)) < MAX_ERROR
    assert out.isfinite().all()


@pytest.mark.gpu
def test_8_bits_out_are_those_of_bf16_out():
    case = with_voices(paged(VOICE, S2_PRO, device="cuda"), [0] * 61, 20)
    plain = shared_attention(case.q, *case.where, "bf16")
    out = shared_attention(case.q, *case.where, "bsfp8")
    assert isinstance(out, BlockScaled)
    assert relative_error(out.dequantize(), plain) < 0.04  # e4m3: 2^-4 of a value at most
