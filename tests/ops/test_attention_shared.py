"""Attention that reads what neighbours share once, against attention of each row alone.

Everything a row must not read is NaN.
"""

import random

import pytest
import torch

from ops import attention, nvrtc
from ops.attention_shared import shared_attention
from ops.quantize import BlockScaled
from tests.ops.attention_cases import bits, paged, relative_error

S2_PRO = (32, 8, 128)
EMBEDDED = (5, 1, 64)
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


def test_on_a_cpu_it_is_attention_of_each_row():
    case = with_voices(paged([70, 99, 64], (4, 2, 128)), [0, 0, 0], 2)
    for kind in ("bf16", "bsfp8"):
        out, want = (
            attend(case.q, *case.where, kind)
            for attend in (shared_attention, attention.paged_attention)
        )
        if kind == "bf16":
            assert torch.equal(out, want)
        else:
            assert torch.equal(bits(out.data), bits(want.data))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a"])
@pytest.mark.parametrize(("head_dim", "group"), [(128, 4), (64, 5)])
@pytest.mark.parametrize("in_8_bits", [0, 1])
def test_compiles_without_a_gpu(head_dim, group, in_8_bits, arch):
    pytest.importorskip("cuda.bindings.nvrtc")
    shape = {"HEAD_DIM": head_dim, "GROUP": group, "PAGE": 32, "WARPS": 8, "BATCHES": 2}
    defines = {**shape, "IS_FP8": in_8_bits, "IS_CHAINED": 1}
    assert nvrtc.compile_source("attention_shared.cu", arch, defines)[:4] == b"\x7fELF"


@pytest.mark.gpu
@pytest.mark.parametrize("kv_format", ["bf16", "fp8"])
@pytest.mark.parametrize("is_chained", [False, True])
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
def test_is_right(lengths, voices, heads, kv_format, is_chained):
    case = paged(lengths, heads, device="cuda", kv_format=kv_format)
    with_voices(case, voices, 20)
    q = attention.rope_append(case.qkv, *case.rotary, *case.where)
    out = shared_attention(q, *case.where, "bf16", is_chained=is_chained)
    assert relative_error(out, case.expected(q)) < MAX_ERROR


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [43, 128])
def test_rows_of_one_prompt_read_those_before_them(num_rows):
    case = paged([900], S2_PRO, device="cuda")
    start = 701
    slots = case.slots.expand(num_rows).contiguous()
    positions = torch.arange(start, start + num_rows, device="cuda")
    qkv = torch.randn(num_rows, 48, 128, device="cuda").bfloat16()
    where = (case.pages, case.page_table, slots, positions)
    q = attention.rope_append(qkv, *case.rotary, *where)
    want = attention.paged_attention(q, *where, "bf16", is_span=True)
    assert relative_error(shared_attention(q, *where, "bf16"), want) < MAX_ERROR


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
