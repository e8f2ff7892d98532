"""Sampling against a literal reading of the published rules, and what it leaves for the next frame."""

import math

import pytest
import torch
from torch import Tensor

from ops import reference, sampling
from ops.embedding import embed_rows
from ops.quantize import quantize_rows
from ops.sampling import MAX_TOP_K, RAS_TOP_P, Carried, Draws, FrameSampler, Head
from tests.ops import sampling_cases as cases
from tests.ops.compiling import check_compiles

NUM_SEMANTIC, CODEBOOK_SIZE, NUM_CODEBOOKS = 200, 150, 4
WINDOW_TOKENS = torch.arange(1000, 1000 + NUM_SEMANTIC + 1, dtype=torch.int32)


def sampler(
    num_rows: int = 1,
    temperature=0.8,
    top_p=0.8,
    top_k=30,
    seed=0,
    frame_idx=0,
    sizes=(NUM_CODEBOOKS, NUM_SEMANTIC + 1),
) -> FrameSampler:
    """Of as many slots, in another order than their rows."""
    slots = torch.arange(num_rows).flip(0)

    def by_slot(value, dtype):
        values = value if isinstance(value, list) else [value] * num_rows
        return torch.tensor(values, dtype=dtype)[slots]

    draws = Draws(
        slots,
        by_slot(temperature, torch.float32),
        by_slot(top_p, torch.float32),
        by_slot(top_k, torch.int32),
        by_slot(seed, torch.int64),
        by_slot(frame_idx, torch.int32),
        num_ranks=MAX_TOP_K,
    )
    return FrameSampler(draws, *sizes)


def windows(num_rows: int) -> Tensor:
    """i32 [N, W, 1]: nothing was said."""
    return torch.zeros(num_rows, 10, 1, dtype=torch.int32)


def draw_by_the_book(
    logits: Tensor, noise: Tensor, temperature: float, top_p: float, top_k: int
) -> int:
    """One draw, step by step, with a full sort and plain Python decisions."""
    order = sorted(range(len(logits)), key=lambda i: -float(logits[i]))
    probabilities = torch.softmax(logits.double(), dim=-1)
    removed, cumulative = set(), 0.0
    for rank, token in enumerate(order):
        cumulative += float(probabilities[token])
        if rank > 0 and (cumulative > top_p or rank >= top_k):
            removed.add(token)
    tempered = logits.double() / max(temperature, 1e-5)
    tempered[list(removed)] = -math.inf
    p = torch.softmax(tempered, dim=-1)
    minus_log_u = torch.exp(-noise.double())  # noise = -log(-log u)
    return int(torch.argmax(p / minus_log_u))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.9])
@pytest.mark.parametrize("top_p", [0.1, 0.8, 1.0])
@pytest.mark.parametrize("top_k", [1, 5, MAX_TOP_K])
def test_codebook_draws_follow_the_book(temperature, top_p, top_k):
    num_rows = 40
    logits = 3 * torch.randn(num_rows, CODEBOOK_SIZE, generator=torch.Generator().manual_seed(1))
    seeds = list(range(num_rows))
    drawn = sampler(num_rows, temperature, top_p, top_k, seeds).codebook(logits, 2)
    noise = reference.gumbel_noise(
        torch.tensor(seeds), torch.zeros(num_rows, dtype=torch.int32), 4, CODEBOOK_SIZE
    )[:, 3]
    for row in range(num_rows):
        expected = draw_by_the_book(logits[row], noise[row], temperature, top_p, top_k)
        assert drawn[row] == expected, (row, temperature, top_p, top_k)


def test_the_rank_that_crosses_top_p_is_removed_and_the_first_always_stays():
    logits = torch.full((1, CODEBOOK_SIZE), -50.0)
    logits[0, :3] = torch.log(torch.tensor([0.5, 0.3, 0.2]))
    drawn = {int(sampler(top_p=0.79, seed=s).codebook(logits, 1)) for s in range(60)}
    assert drawn == {0}  # 0.5 + 0.3 exceeds 0.79
    drawn = {int(sampler(top_p=0.81, seed=s).codebook(logits, 1)) for s in range(60)}
    assert drawn == {0, 1}
    drawn = {int(sampler(top_p=0.1, seed=s).codebook(logits, 1)) for s in range(60)}
    assert drawn == {0}


def test_filters_see_probabilities_before_temperature():
    logits = torch.full((60, CODEBOOK_SIZE), -50.0)
    logits[:, :3] = torch.log(torch.tensor([0.45, 0.35, 0.2]))
    # Tempered at 0.2 the first two have 0.77 and 0.22: together more than top_p. Before: 0.8.
    cold = sampler(60, 0.2, 0.85, 30, list(range(60)))
    assert set(cold.codebook(logits, 1).tolist()) == {0, 1}


def test_greedy_takes_the_best_token_whatever_the_window():
    logits = torch.randn(8, NUM_SEMANTIC + 1, generator=torch.Generator().manual_seed(2))
    best = logits.argmax(-1)
    window = windows(8)
    window[:, 3, 0] = WINDOW_TOKENS[best].flip(0)
    greedy = sampler(8, 0.0, 0.8, 30, list(range(8)))
    assert torch.equal(greedy.semantic(logits, window, WINDOW_TOKENS), best)
    residual = torch.randn(8, CODEBOOK_SIZE)
    assert torch.equal(greedy.codebook(residual, 1), residual.argmax(-1))


def test_a_repeated_semantic_token_is_drawn_again():
    num_rows = 200
    generator = torch.Generator().manual_seed(3)
    logits = 2 * torch.randn(num_rows, NUM_SEMANTIC + 1, generator=generator)
    seeds = list(range(num_rows))
    draws = sampler(num_rows, 0.7, 0.5, 20, seeds)
    window = windows(num_rows)
    normal = draws.semantic(logits, window, WINDOW_TOKENS)
    said = torch.arange(0, num_rows, 2)  # every other row has just said this token
    window[num_rows - 1 - said, 4, 0] = WINDOW_TOKENS[normal[said]]
    chosen = draws.semantic(logits, window, WINDOW_TOKENS)
    noise = reference.gumbel_noise(
        torch.tensor(seeds), torch.zeros(num_rows, dtype=torch.int32), 2, NUM_SEMANTIC + 1
    )
    for row in range(num_rows):
        again = draw_by_the_book(logits[row], noise[row, 1], 1.0, RAS_TOP_P, 20)
        is_repeated = row % 2 == 0 and normal[row] < NUM_SEMANTIC
        assert chosen[row] == (again if is_repeated else normal[row]), row
    assert (chosen != normal).sum() > 20


def test_the_end_is_never_drawn_again():
    logits = torch.full((1, NUM_SEMANTIC + 1), -20.0)
    logits[0, -1] = 20.0
    window = windows(1)
    window[:] = WINDOW_TOKENS[-1]
    assert sampler().semantic(logits, window, WINDOW_TOKENS).item() == NUM_SEMANTIC


def test_draws_do_not_depend_on_the_batch():
    num_rows = 16
    logits = torch.randn(num_rows, CODEBOOK_SIZE, generator=torch.Generator().manual_seed(4))
    parameters = {
        "temperature": [0.1 * (i + 1) for i in range(num_rows)],
        "top_p": [0.5 + 0.03 * i for i in range(num_rows)],
        "top_k": [i + 1 for i in range(num_rows)],
        "seed": [7 * i for i in range(num_rows)],
        "frame_idx": [i % 3 for i in range(num_rows)],
    }
    together = sampler(num_rows, **parameters).codebook(logits, 3)
    for row in range(num_rows):
        one = {name: values[row] for name, values in parameters.items()}
        assert sampler(1, **one).codebook(logits[row : row + 1], 3).item() == together[row]


def test_codebooks_frames_and_seeds_draw_different_numbers():
    logits = torch.zeros(1, CODEBOOK_SIZE)
    draws = [
        [
            int(sampler(1, 1.0, 1.0, 128, seed, frame).codebook(logits, codebook))
            for seed in range(40)
        ]
        for frame in (0, 1)
        for codebook in (1, 2)
    ]
    for first in range(4):
        assert len(set(draws[first])) > 20
        for second in range(first):
            assert sum(a == b for a, b in zip(draws[first], draws[second], strict=True)) < 8


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_distribution(temperature):
    """Chi-square of 20,000 draws over the kept tokens; fixed seeds, so it cannot flicker."""
    num_draws, num_kept = 20_000, 12
    logits = torch.randn(20, generator=torch.Generator().manual_seed(5))
    for seeds, frames in (
        (list(range(num_draws)), 0),
        ([11] * num_draws, list(range(num_draws))),
    ):
        draws = sampler(num_draws, temperature, 1.0, num_kept, seeds, frames, sizes=(2, 20))
        drawn = draws.codebook(logits.expand(num_draws, -1), 1)
        kept, tokens = logits.topk(num_kept)
        expected = torch.softmax(kept / temperature, 0) * num_draws
        observed = torch.stack([(drawn == token).sum() for token in tokens])
        assert observed.sum() == num_draws
        chi_square = float(((observed - expected) ** 2 / expected).sum())
        assert chi_square < 31.3, chi_square  # 11 degrees of freedom, p = 0.001


def test_drawing_stores_codes_and_looks_up_what_comes_next():
    batch, tokens = cases.draws(40, 0), cases.head_tokens(NUM_SEMANTIC + 1)
    logits = torch.randn(40, NUM_SEMANTIC + 1, generator=torch.Generator().manual_seed(1)) * 3
    window = cases.windows(logits, batch, tokens, 1)
    head = Head(tokens, torch.arange(NUM_SEMANTIC + 1).clamp(max=CODEBOOK_SIZE - 1))
    hidden, table = torch.randn(40, 16), torch.randn(CODEBOOK_SIZE, 16)
    codes = torch.full((40, NUM_CODEBOOKS), -1, dtype=torch.int32)
    first = sampling.draw_semantic(logits, window, batch, head, hidden, table, codes)
    sampler = FrameSampler(batch, NUM_CODEBOOKS, NUM_SEMANTIC + 1)
    choice = sampler.semantic(logits, window, tokens)
    assert torch.equal(first.choice, choice)
    assert torch.equal(first.is_end, choice == NUM_SEMANTIC)
    assert torch.equal(codes[:, 0].long(), head.codes[choice])
    assert torch.equal(first.x.view(40, 2, 16)[:, 0], hidden)
    assert torch.equal(first.x.view(40, 2, 16)[:, 1], table[head.codes[choice]])
    residual = logits[:, :CODEBOOK_SIZE].contiguous()
    normed_table = quantize_rows(table.bfloat16())
    x, normed = sampling.draw_codebook(residual, 2, batch, table, codes, normed_table)
    code = sampler.codebook(residual, 2)
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


def test_kernels_compile():
    semantic = {"NUM_TOKENS": 4097, "LOGIT": "bf16", "IS_SEMANTIC": 1, "IS_CHAINED": 1}
    residual = {"NUM_TOKENS": 1024, "LOGIT": "float", "IS_SEMANTIC": 0, "IS_CHAINED": 0}
    samplers = [("sampling.cu", each | {"THREADS": 512}) for each in (semantic, residual)]
    check_compiles([*samplers, ("advance.cu", {}), ("embedding.cu", {"NUM_CODEBOOKS": 10})])
