"""The attention kernels against fp32.

Everything a row must not read is NaN, every output is fresh memory full of NaN.
"""

from functools import partial

import pytest
import torch

from ops import attention, attention_launch, reference, reference_paged
from ops.attention_plans import PartsPlan, Plan
from ops.embedding import embed_rows
from ops.quantize import quantize_rows
from tests.ops.attention_cases import EPS, bits, copied, overwrite, paged, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
S2_PRO = (32, 8, 128)
S1_MINI, S1_MINI_FAST = (16, 8, 128), (16, 8, 64)
EMBEDDED = (5, 1, 64)
MODELS = [S2_PRO, S1_MINI, S1_MINI_FAST, EMBEDDED]
# Weights and outputs of a row are rounded to bf16 (2^-9 each); sums are fp32.
MAX_ERROR = 4e-3


@pytest.fixture(autouse=True)
def poisoned():
    """Memory that outputs will be taken from holds NaN."""
    fills = [torch.full((n,), torch.nan, device="cuda") for n in (1 << 22, 1 << 16, 1 << 12)]
    del fills


@pytest.fixture(params=["bf16", "fp8"])
def on_gpu(request):
    """Rows over pages of either format."""
    return partial(paged, device="cuda", kv_format=request.param)


def mixed_lengths(num_rows, seed=0, longest=8192):
    """1 to `longest`, some of each magnitude, with the edges of tiles and pages among them."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.rand(num_rows, generator=generator) * torch.tensor(float(longest)).log2()
    lengths = (2**exponents).long().clamp(1, longest).tolist()
    edges = [longest, 1, 16, 17, 32, 33, 15, 31, 64, 65, 512, 513]
    lengths[: min(num_rows, len(edges)) // 2] = edges[: min(num_rows, len(edges)) // 2]
    return lengths


def captured(call):
    """`call` as a graph: once eagerly, then captured; returns what replays and its result."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


@pytest.mark.parametrize("heads", MODELS)
@pytest.mark.parametrize("num_rows", [1, 2, 7, 64, 128])
def test_rope_append_matches(heads, num_rows):
    case = paged(mixed_lengths(num_rows, longest=600), heads, device="cuda")
    expected = case.rows(list(range(num_rows)))
    q = attention.rope_append(case.qkv, *case.rotary, *case.where)
    turns = expected.rope[expected.positions]
    q_expected, kv = reference_paged.rotate_heads(
        expected.qkv, expected.qk_norm, EPS, turns, heads[1]
    )
    reference_paged.append(kv, *expected.where)
    assert torch.equal(case.pages.isnan(), expected.pages.isnan())
    for got, wanted in ((q, q_expected), (case.pages, expected.pages)):
        got, wanted = got.nan_to_num().float(), wanted.nan_to_num().float()
        differs = got != wanted  # a sum of squares in another order can turn a rounding
        assert differs.float().mean() < 2e-3
        torch.testing.assert_close(got, wanted, rtol=2**-6, atol=2**-7)


@pytest.mark.parametrize("heads", MODELS)
@pytest.mark.parametrize("num_rows", [1, 7, 128])
@pytest.mark.parametrize("magnitude", [1.0, 1e-4, 1e4, 0.0])
def test_rows_in_8_bits_are_those_in_bf16_quantised(heads, num_rows, magnitude):
    """Bit for bit, of values of any size, and nothing else is written."""
    lengths, options = mixed_lengths(num_rows, longest=600), {"device": "cuda", "seed": num_rows}
    plain, case = (paged(lengths, heads, **options, kv_format=form) for form in ("bf16", "fp8"))
    for rows in (plain, case):
        rows.qkv *= magnitude
    expected = copied(case.pages)
    q = attention.rope_append(case.qkv, *case.rotary, *case.where)
    assert torch.equal(q, attention.rope_append(plain.qkv, *plain.rotary, *plain.where))
    page_size = plain.pages.shape[3]
    pages = plain.page_table[plain.slots, plain.positions // page_size].long()
    at = (pages, slice(None), slice(None), plain.positions % page_size)
    expected[at] = plain.pages[at]
    assert torch.equal(bits(case.pages), bits(expected))


def whole(case, plan, kind="bf16"):
    rotary = (case.qk_norm, case.rope, EPS)
    return attention_launch.launch_whole(case.qkv, rotary, case.where, kind, plan)


def decode(case, kind="bf16"):
    return attention.decode_attention(*(case.qkv, *case.rotary, *case.where), kind)


def is_right(case, attend):
    """Its output is close to attention in fp32 over what `rope_append` writes, its memory is that."""
    two = case.rows(list(range(len(case.slots))))
    q = attention.rope_append(two.qkv, *two.rotary, *two.where)
    out = attend(case)
    assert torch.equal(bits(case.pages), bits(two.pages))
    return relative_error(out, two.expected(q)) < MAX_ERROR


@pytest.mark.parametrize("heads", MODELS)
@pytest.mark.parametrize("num_rows", [1, 3, 16, 64, 67, 128])
def test_decode_attention_is_both(on_gpu, heads, num_rows):
    assert is_right(on_gpu(mixed_lengths(num_rows), heads, seed=num_rows), decode)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", range(1, 9))
def test_every_group_size(on_gpu, head_dim, group):
    assert is_right(on_gpu([700, 1, 33, 5], (2 * group, 2, head_dim), page_size=16), decode)


@pytest.mark.parametrize("splits", [1, 2, 4, 8])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 511, 512, 513, 8192])
def test_every_plan(on_gpu, splits, length):
    case = on_gpu([length, 40], S2_PRO, max_len=8192)
    for rest in ((4, 3, 1, 0), (4, 4, 5, 2), (2, 6, 3, 4), (4, 2, 1, 1)):
        plan = Plan(splits, *rest)
        assert is_right(case.rows([0, 1]), partial(whole, plan=plan)), plan


@pytest.mark.parametrize("num_rows", [1, 2, 5, 64])
def test_quantised_output_is_the_bf16_output_quantised(on_gpu, num_rows):
    case = on_gpu(mixed_lengths(num_rows, longest=600), S2_PRO)
    out, expected = decode(case, "bsfp8"), quantize_rows(decode(case))
    assert torch.equal(bits(out.data), bits(expected.data))
    assert torch.equal(out.scale, expected.scale)


def in_parts(case, plan, *, is_chained=False):
    num_heads, num_kv_heads, head_dim = case.q.shape[1], case.pages.shape[2], case.q.shape[2]
    group, device = num_heads // num_kv_heads, case.qkv.device
    scratch = attention_launch.Scratch(num_kv_heads, group, head_dim, 16, device)
    scratch.sums.fill_(torch.nan)
    rotary = (case.qk_norm, case.rope, EPS)
    out = attention_launch.launch_parts(
        case.qkv, rotary, case.where, "bf16", plan, scratch, is_chained=is_chained
    )
    assert not scratch.counts.any()
    return out


@pytest.mark.parametrize("heads", MODELS)
@pytest.mark.parametrize("num_rows", [1, 7, 64, 128])
def test_rows_in_parts(on_gpu, heads, num_rows):
    """Rows of any lengths, of one part and of many, give what attention of whole rows gives."""
    case = on_gpu(mixed_lengths(num_rows, seed=3), heads, max_len=8192)
    two = case.rows(list(range(num_rows)))
    q = attention.rope_append(two.qkv, *two.rotary, *two.where)
    for plan in (PartsPlan(4, 4, 32), PartsPlan(4, 3, 64, 2), PartsPlan(2, 1, 512)):
        one = case.rows(list(range(num_rows)))
        out = in_parts(one, plan)
        assert relative_error(out, two.expected(q)) < MAX_ERROR, plan
        assert torch.equal(bits(one.pages), bits(two.pages))
        for row in {0, num_rows // 2, num_rows - 1}:
            alone = in_parts(case.rows([row]), plan)
            assert torch.equal(alone[0], out[row]), (plan, row)


def test_a_row_alone_has_the_bits_it_has_in_a_batch_of_the_same_plan(on_gpu):
    case = on_gpu(mixed_lengths(48, seed=2), S2_PRO)
    for plan in (Plan(1, 4, 4), Plan(2, 4, 3, 2), Plan(8, 4, 3, 8, 2)):
        together, again = whole(case, plan), whole(case, plan)
        assert torch.equal(together, again)
        for row in (0, 5, 17, 47):
            assert torch.equal(whole(case.rows([row]), plan)[0], together[row])


def test_the_dummy_slot_disturbs_nobody(on_gpu):
    case = on_gpu([300, 77], S2_PRO)
    padded = case.rows([0, 1, 1, 1])
    padded.slots = padded.slots.clone()
    padded.slots[2:] = case.page_table.shape[0] - 1
    padded.positions = padded.positions.clone()
    padded.positions[2:] = 0
    plan = Plan(4, 4, 3)
    out, expected = whole(padded, plan), whole(case, plan)
    assert torch.equal(out[:2], expected)
    assert torch.equal(bits(padded.pages[1:]), bits(case.pages[1:]))


@pytest.mark.parametrize("num_rows", [1, 5, 40, 64])  # 64 are cut into parts
@pytest.mark.parametrize("is_chained", [False, True])
def test_replay_is_eager(on_gpu, num_rows, is_chained):
    """Of a chain as a frame has it, with new inputs in the captured buffers."""
    case = on_gpu(mixed_lengths(num_rows, longest=2000), S2_PRO, max_len=4096)
    rows = torch.zeros(num_rows, 3, dtype=torch.int32, device="cuda")
    table = torch.randn(4, 6144, device="cuda").bfloat16()
    pages, scratch = copied(case.pages), attention_launch.Scratch(8, 4, 128, 16, case.qkv.device)

    def chain():
        embedded = embed_rows(rows, None, table, table, (8, 9))
        qkv = (embedded.view_as(case.qkv) + case.qkv).contiguous()
        outputs = [qkv]
        for _ in range(3):
            out = attention.decode_attention(
                qkv, *case.rotary, *case.where, "bf16", is_chained=is_chained, scratch=scratch
            )
            qkv = torch.cat([out.view(num_rows, 32, 128), qkv[:, 32:]], dim=1)
            outputs.append(out)
        return outputs

    graph, results = captured(chain)
    for seed in range(3):
        case.qkv.copy_(torch.randn(case.qkv.shape, device="cuda").bfloat16())
        rows.fill_(seed)
        overwrite(case.pages, pages)
        eager = [out.clone() for out in chain()]
        written = copied(case.pages)
        overwrite(case.pages, pages)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(results, eager, strict=True))
        assert torch.equal(bits(case.pages), bits(written))


@pytest.mark.parametrize("heads", [S2_PRO, S1_MINI_FAST, EMBEDDED, (8, 1, 128), (3, 3, 128)])
@pytest.mark.parametrize("num_rows", [1, 2, 9, 64, 128])
@pytest.mark.parametrize("with_norm", [True, False])
def test_frame_attention_matches(heads, num_rows, with_norm):
    num_heads, num_kv_heads, head_dim = heads
    num_held = 11
    shape = (num_rows, num_held, num_heads + 2 * num_kv_heads, head_dim)
    qkv = torch.randn(shape, device="cuda").bfloat16()
    norm = torch.randn(num_heads + num_kv_heads, head_dim, device="cuda").bfloat16()
    qk_norm = norm if with_norm else None
    rope = reference.rope_table(num_held, head_dim, 1e6, torch.device("cuda"))
    memory = torch.full(
        (2, num_rows + 3, num_kv_heads, num_held, head_dim), torch.nan, device="cuda"
    ).bfloat16()
    expected_memory = memory.clone()
    for start, stop in [(0, 2), *((i, i + 1) for i in range(2, num_held))]:
        part = qkv[:, start:stop].flatten(0, 1).contiguous()
        args = (part, qk_norm, EPS, rope)
        out = attention.frame_attention(*args, memory, start, stop - start, "bf16")
        wanted = reference_paged.frame_attention(*args, expected_memory, start, stop - start)
        torch.testing.assert_close(memory, expected_memory, rtol=2**-6, atol=2**-6, equal_nan=True)
        # Both round, the definition's softmax too; keys may differ by a rounding.
        assert relative_error(out, wanted.flatten(1)) < 2e-2, start
        expected_memory.copy_(memory)
        if head_dim == 128:
            scaled = attention.frame_attention(*args, memory, start, stop - start, "bsfp8")
            assert torch.equal(bits(scaled.data), bits(quantize_rows(out).data))


@pytest.mark.parametrize("kind", ["bf16", "bsfp8"])
@pytest.mark.parametrize("heads", [S2_PRO, EMBEDDED])
def test_the_last_position_alone_may_attend(heads, kind):
    """The bits of both, and both are appended."""
    num_heads, num_kv_heads, head_dim = heads
    qkv = torch.randn(18, num_heads + 2 * num_kv_heads, head_dim, device="cuda").bfloat16()
    rope = reference.rope_table(11, head_dim, 1e6, torch.device("cuda"))
    memories = torch.zeros(2, 2, 9, num_kv_heads, 11, head_dim, device="cuda").bfloat16()
    both, last = (
        attention.frame_attention(
            qkv, None, EPS, rope, memory, 0, 2, kind, is_last_only=is_last_only
        )
        for memory, is_last_only in zip(memories, (False, True), strict=True)
    )
    assert torch.equal(*memories) and memories.any()
    if kind == "bsfp8":
        both, last = both.dequantize(), last.dequantize()
    assert last.shape == (9, num_heads * head_dim) and torch.equal(last, both[1::2])


@pytest.mark.parametrize("num_rows", [1, 64])
def test_frame_attention_replays(num_rows):
    rope = reference.rope_table(11, 128, 1e6, torch.device("cuda"))
    memory = torch.zeros(2, num_rows, 8, 10, 128, device="cuda").bfloat16()
    qkv = [
        torch.randn(num_rows * (2 if i == 0 else 1), 48, 128, device="cuda").bfloat16()
        for i in range(9)
    ]

    def passes():
        outputs = []
        for i, part in enumerate(qkv):
            start, count = (0, 2) if i == 0 else (i + 1, 1)
            args = (part, None, EPS, rope, memory, start, count)
            outputs.append(attention.frame_attention(*args, "bf16"))
        return outputs

    graph, results = captured(passes)
    eager = [out.clone() for out in passes()]
    memory.fill_(torch.nan)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(results, eager, strict=True))
