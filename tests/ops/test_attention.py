"""Definitions of paged attention against attention over contiguous memory, on the CPU."""

import pytest
import torch

from ops import attention, attention_plans, reference, reference_paged
from ops.attention_shared import shared_attention
from ops.fp8_rows import dequantized
from ops.quantize import BlockScaled, quantize_rows
from tests.ops.attention_cases import EPS, bits, copied, paged, relative_error
from tests.ops.compiling import check_compiles

HEADS = (6, 2, 64)
LENGTHS = [1, 8, 9, 40, 17, 33]


@pytest.fixture(params=["bf16", "fp8"])
def case(request):
    """Over pages of either format; here "bf16" is fp32."""
    return paged(LENGTHS, HEADS, page_size=8, dtype=torch.float32, kv_format=request.param)


def test_a_row_reads_its_own_positions(case):
    out = shared_attention(case.q, *case.where, "bf16")
    assert relative_error(out, case.expected(case.q)) < 1e-6


def test_append_writes_one_position_of_each_row(case):
    before = copied(case.pages)
    q = attention.rope_append(case.qkv, *case.rotary, *case.where)
    heads = case.qkv[:, :8]
    rotated = torch.empty_like(heads)
    turns = case.rope[case.positions]
    reference.rope(reference.rms_norm(heads, case.qk_norm, EPS), turns, out=rotated)
    assert torch.equal(q, rotated[:, :6])
    for row, position in enumerate(case.positions.tolist()):
        page = int(case.page_table[case.slots[row], position // 8])
        before[page, :, :, position % 8] = torch.stack([rotated[row, 6:], case.qkv[row, 8:]])
    assert torch.equal(bits(case.pages), bits(before))


def test_what_is_not_finite_is_written_as_zeros(case):
    """Of its row alone, and of what else is in the row nothing changes."""
    broken = case.rows(list(range(len(LENGTHS))))
    for value, dimension in ((torch.nan, 3), (torch.inf, 8), (-torch.inf, 9)):
        broken.qkv[2, 9, dimension] = value  # the second head's values
        case.qkv[2, 9, dimension] = 0
    for rows in (case, broken):
        attention.rope_append(rows.qkv, *rows.rotary, *rows.where)
    assert torch.equal(bits(broken.pages), bits(case.pages))
    broken.qkv[2, 6] = torch.nan  # the first head's keys
    attention.rope_append(broken.qkv, *broken.rotary, *broken.where)
    page = broken.page_table[broken.slots[2], broken.positions[2] // 8]
    keys = dequantized(broken.pages[page], torch.float32)[0, 0, broken.positions[2] % 8]
    assert not keys.any()


def test_without_a_norm_heads_are_only_rotated(case):
    q = attention.rope_append(case.qkv, None, EPS, case.rope, *case.where)
    rotated = torch.empty_like(case.q)
    reference.rope(case.q, case.rope[case.positions], out=rotated)
    assert torch.equal(q, rotated)


def test_decode_attention_is_both(case):
    other = case.rows(list(range(len(LENGTHS))))
    out = attention.decode_attention(case.qkv, *case.rotary, *case.where, "bf16")
    q = attention.rope_append(other.qkv, *other.rotary, *other.where)
    assert torch.equal(out, shared_attention(q, *other.where, "bf16"))
    assert torch.equal(bits(case.pages), bits(other.pages))


def test_a_row_alone_has_the_bits_it_has_in_a_batch(case):
    whole = shared_attention(case.q, *case.where, "bf16")
    for row in range(len(LENGTHS)):
        alone = case.rows([row])
        assert torch.equal(shared_attention(alone.q, *alone.where, "bf16")[0], whole[row])


def test_a_prefill_chunk_is_a_batch_whose_rows_share_a_slot(case):
    """Appended together, then each reads what came before it: causal attention."""
    num_rows, start = 5, 11
    chunk = case.rows([3] * num_rows)
    chunk.positions = torch.arange(start, start + num_rows)
    chunk.qkv = torch.randn(num_rows, *case.qkv.shape[1:])
    q = attention.rope_append(chunk.qkv, *chunk.rotary, *chunk.where)
    out = shared_attention(q, *chunk.where, "bf16")
    k, v = chunk.dense(num_rows - 1).unbind(0)
    expected = reference.causal_attention(q, k, v).flatten(1)
    assert relative_error(out, expected) < 1e-6


# Relative error of attention that 8 bits in memory alone make. Measured: 0.024 to 0.043.
MAX_FP8_ERROR = 0.06


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", [1, 4, 5, 8])
@pytest.mark.parametrize("lengths", [[1, 2, 7, 31, 33, 600], [8192]])
def test_8_bits_change_attention_within_the_bound(head_dim, group, lengths):
    heads = (2 * group, 2, head_dim)
    plain, case = (paged(lengths, heads, kv_format=form) for form in ("bf16", "fp8"))
    out = shared_attention(case.q, *case.where, "bf16")
    assert relative_error(out, plain.expected(plain.q)) < MAX_FP8_ERROR


@pytest.mark.parametrize("kind", ["bf16", "bsfp8"])
def test_output_kinds(kind):
    case = paged(LENGTHS, (4, 2, 128))
    plain = shared_attention(case.q, *case.where, "bf16")
    out = shared_attention(case.q, *case.where, kind)
    if kind == "bf16":
        assert out.dtype == torch.bfloat16 and out.shape == (len(LENGTHS), 512)
    else:
        expected = quantize_rows(plain)
        assert isinstance(out, BlockScaled)
        assert torch.equal(bits(out.data), bits(expected.data))
        assert torch.equal(out.scale, expected.scale)


@pytest.mark.parametrize("with_norm", [True, False])
def test_frame_attention_is_causal_attention_over_the_frame(with_norm):
    num_rows, num_held, (num_heads, num_kv_heads, head_dim) = 3, 11, HEADS
    generator = torch.Generator().manual_seed(1)
    qkv = torch.randn(num_rows, num_held, 10, head_dim, generator=generator)
    qk_norm = torch.rand(8, head_dim, generator=generator) if with_norm else None
    rope = reference.rope_table(num_held, head_dim, 1e6, torch.device("cpu"))
    memory = torch.full((2, num_rows + 2, num_kv_heads, num_held, head_dim), torch.nan)
    outputs = []
    for start, stop in [(0, 2), *((i, i + 1) for i in range(2, num_held))]:
        part = qkv[:, start:stop].flatten(0, 1)
        args = (part, qk_norm, EPS, rope, memory, start, stop - start)
        out = attention.frame_attention(*args, "bf16")
        outputs.append(out.view(num_rows, stop - start, num_heads, head_dim))
    for row, out in enumerate(torch.cat(outputs, dim=1)):
        q, kv = reference_paged.rotate_heads(qkv[row], qk_norm, EPS, rope, num_kv_heads)
        k, v = kv.permute(1, 2, 0, 3).unbind(0)
        expected = reference.causal_attention(q, k, v)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_plans_depend_on_the_launch_shape_and_fit_a_cluster():
    for num_rows in (*range(1, 130), 512):
        for max_pages in (1, 2, 19, 64, 256, 1024):
            plan = attention_plans.plan_for(num_rows, 8, max_pages, 32)
            assert plan.splits in (1, 2, 4, 8) and plan.splits * plan.warps <= 32, plan


@pytest.mark.parametrize("max_tiles", [64, 96, 97, 256, 512, 2048, 4000])
def test_rows_are_cut_into_no_more_parts_than_there_is_room_for(max_tiles):
    most_parts = attention_plans.most_parts_of(max_tiles)
    assert most_parts <= attention_plans.MAX_PARTS
    for num_rows in (1, 49, 50, 64, 128, 129):
        plan = attention_plans.parts_plan_for(num_rows, 8, max_tiles)
        assert (plan is not None) == (50 <= num_rows <= 128 and max_tiles > 96)
        if plan is not None:
            assert plan.part_tiles >= 16 and -(-max_tiles // plan.part_tiles) <= most_parts


def test_kernels_compile():
    s2_pro = {"HEAD_DIM": 128, "GROUP": 4, "PAGE": 32}
    check_compiles(
        [
            ("rope_append.cu", {"HEAD_DIM": 128, "PAGE": 32, "IS_FP8": 0}),
            ("rope_append.cu", {"HEAD_DIM": 64, "PAGE": 32, "IS_FP8": 1}),
            (
                "attention.cu",
                s2_pro
                | {"WARPS": 4, "BLOCKS": 3, "SPLITS": 2, "DEPTH": 0, "IS_CHAINED": 0, "IS_FP8": 0},
            ),
            (
                "attention.cu",
                s2_pro
                | {"WARPS": 4, "BLOCKS": 4, "SPLITS": 1, "DEPTH": 2, "IS_CHAINED": 1, "IS_FP8": 1},
            ),
            (
                "attention_split.cu",
                s2_pro | {"WARPS": 8, "BLOCKS": 1, "DEPTH": 0, "IS_CHAINED": 1, "IS_FP8": 1},
            ),
            (
                "attention_parts.cu",
                s2_pro | {"WARPS": 4, "BLOCKS": 4, "DEPTH": 0, "IS_CHAINED": 1, "IS_FP8": 1},
            ),
            (
                "frame_attention.cu",
                {"HEAD_DIM": 64, "GROUP": 5, "POSITIONS": 2, "IS_LAST_ONLY": 1, "IS_CHAINED": 1},
            ),
        ]
    )
