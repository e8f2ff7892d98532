"""Definitions of the samplers against the model's, and of what a stream carries on, on the CPU."""

import pytest
import torch

from model.sampling import FrameSampler
from ops import nvrtc, reference, sampling
from ops.embedding import embed_rows
from ops.quantize import quantize_rows
from ops.sampling import Carried, Head
from tests.ops import sampling_cases as cases

NUM_SEMANTIC, CODEBOOK_SIZE, NUM_CODEBOOKS = 200, 150, 4


@pytest.fixture
def batch():
    return cases.draws(40, 0)._replace(num_ranks=128)


def model_sampler(batch):
    slots = batch.slots
    parameters = (batch.temperature, batch.top_p, batch.top_k, batch.seed)
    return FrameSampler(
        tuple(parameter[slots] for parameter in parameters),
        batch.frame_idx[slots],
        NUM_CODEBOOKS,
        NUM_SEMANTIC,
        CODEBOOK_SIZE,
    )


def semantic_case(batch, seed=1):
    logits = torch.randn(40, NUM_SEMANTIC + 1, generator=torch.Generator().manual_seed(seed)) * 3
    tokens = cases.head_tokens(NUM_SEMANTIC + 1)
    return logits, cases.windows(logits, batch, tokens, seed), tokens


def test_semantic_draws_are_the_models(batch):
    logits, window, tokens = semantic_case(batch)
    expected = model_sampler(batch).semantic(logits, window[batch.slots].squeeze(2), tokens)
    assert torch.equal(cases.semantic(logits, window, batch, tokens), expected)
    nothing_recent = cases.semantic(logits, torch.zeros_like(window), batch, tokens)
    assert (nothing_recent != expected).sum() > 5  # twins were taken


@pytest.mark.parametrize("codebook", [1, 2, 3])
def test_codebook_draws_are_the_models(batch, codebook):
    logits = torch.randn(40, CODEBOOK_SIZE, generator=torch.Generator().manual_seed(codebook))
    expected = model_sampler(batch).codebook(logits, codebook)
    assert torch.equal(cases.codebook(logits, codebook, batch), expected)


def test_drawing_stores_codes_and_looks_up_what_comes_next(batch):
    logits, window, tokens = semantic_case(batch)
    head = Head(tokens, torch.arange(NUM_SEMANTIC + 1).clamp(max=CODEBOOK_SIZE - 1))
    hidden, table = torch.randn(40, 16), torch.randn(CODEBOOK_SIZE, 16)
    codes = torch.full((40, NUM_CODEBOOKS), -1, dtype=torch.int32)
    first = sampling.draw_semantic(logits, window, batch, head, hidden, table, codes)
    choice = cases.semantic(logits, window, batch, tokens)
    assert torch.equal(first.choice, choice)
    assert torch.equal(first.is_end, choice == NUM_SEMANTIC)
    assert torch.equal(codes[:, 0].long(), head.codes[choice])
    assert torch.equal(first.x.view(40, 2, 16)[:, 0], hidden)
    assert torch.equal(first.x.view(40, 2, 16)[:, 1], table[head.codes[choice]])
    residual = logits[:, :CODEBOOK_SIZE].contiguous()
    normed_table = quantize_rows(table.bfloat16())
    x, normed = sampling.draw_codebook(residual, 2, batch, table, codes, normed_table)
    code = cases.codebook(residual, 2, batch)
    assert torch.equal(normed.dequantize(), normed_table.dequantize()[code])
    assert torch.equal(x, table[code]) and torch.equal(codes[:, 2].long(), code)
    assert (codes[:, [1, 3]] == -1).all()


def test_advance_makes_the_frame_the_next_input():
    num_slots, slots = 6, torch.tensor([4, 1, 5])  # 5 is the dummy
    tokens = cases.head_tokens(20)
    rows = torch.full((num_slots, 1 + NUM_CODEBOOKS), -1, dtype=torch.int32)
    position, frame_idx = torch.tensor([9, 5, 9, 9, 30, 0]), torch.zeros(6, dtype=torch.int32)
    frame_idx[4] = 7
    window = torch.arange(60, dtype=torch.int32).view(6, 10, 1)
    before = window.clone()
    codes = torch.arange(12, dtype=torch.int32).view(3, NUM_CODEBOOKS)
    history = torch.zeros(num_slots, 40, 1 + NUM_CODEBOOKS, dtype=torch.int32)
    carried = Carried(rows, position, window, frame_idx, history)
    sampling.advance(carried, slots, torch.tensor([3, 19, 0]), codes, tokens)
    assert rows[4].tolist() == [1003, 0, 1, 2, 3] and rows[1].tolist() == [7, 4, 5, 6, 7]
    assert (rows[[0, 2, 3]] == -1).all()
    assert position.tolist() == [9, 6, 9, 9, 31, 0]
    assert frame_idx[:5].tolist() == [0, 1, 0, 0, 8]
    assert window[4, :, 0].tolist() == [*range(41, 50), 1003]
    assert window[1, :, 0].tolist() == [*range(11, 20), 0]  # a first token is not remembered
    assert torch.equal(window[[0, 2, 3]], before[[0, 2, 3]])
    assert (history[[4, 1, 5], [30, 5, 0]] == -1).all(), "the input that was read"
    assert history.count_nonzero() == 3 * (1 + NUM_CODEBOOKS)


def test_embed_rows_of_slots_and_of_a_prompt():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 8, (7, 1 + NUM_CODEBOOKS), generator=generator, dtype=torch.int32)
    rows[:, 0] = torch.tensor([0, 5, 19, 4, 10, 11, 3])
    table, codebooks = torch.randn(20, 16), torch.randn(NUM_CODEBOOKS * 8, 16)
    offsets = torch.arange(NUM_CODEBOOKS, dtype=torch.int32)[:, None] * 8
    expected = reference.embed_rows(rows.t(), table, codebooks, offsets, 4, 10)
    assert torch.equal(embed_rows(rows, None, table, codebooks, (4, 10)), expected)
    slots = torch.tensor([3, 0, 3])
    assert torch.equal(embed_rows(rows, slots, table, codebooks, (4, 10)), expected[slots])


@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a"])
@pytest.mark.parametrize(
    ("source", "defines"),
    [
        (
            "sampling.cu",
            {
                "NUM_TOKENS": 4097,
                "LOGIT": "bf16",
                "IS_SEMANTIC": 1,
                "IS_CHAINED": 1,
                "THREADS": 512,
            },
        ),
        (
            "sampling.cu",
            {
                "NUM_TOKENS": 1024,
                "LOGIT": "float",
                "IS_SEMANTIC": 0,
                "IS_CHAINED": 0,
                "THREADS": 512,
            },
        ),
        ("advance.cu", {}),
        ("embedding.cu", {"NUM_CODEBOOKS": 10}),
    ],
)
def test_compiles_without_a_gpu(source, defines, arch):
    pytest.importorskip("cuda.bindings.nvrtc")
    assert nvrtc.compile_source(source, arch, defines)[:4] == b"\x7fELF"
