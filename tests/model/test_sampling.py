"""Sampling against a literal reading of the published rules."""

import math

import pytest
import torch
from torch import Tensor

from model.errors import SamplingError
from model.sampling import MAX_TOP_K, RAS_TOP_P, FrameSampler, SamplingParams
from ops import reference

NUM_SEMANTIC = 200
CODEBOOK_SIZE = 150
NUM_CODEBOOKS = 4
WINDOW_TOKENS = torch.arange(1000, 1000 + NUM_SEMANTIC + 1, dtype=torch.int32)


def sampler(
    num_rows: int = 1,
    temperature=0.8,
    top_p=0.8,
    top_k=30,
    seed=0,
    frame_idx=0,
    sizes=(NUM_CODEBOOKS, NUM_SEMANTIC, CODEBOOK_SIZE),
) -> FrameSampler:
    def rows(value, dtype):
        values = value if isinstance(value, list) else [value] * num_rows
        return torch.tensor(values, dtype=dtype)

    sampling = (
        rows(temperature, torch.float32),
        rows(top_p, torch.float32),
        rows(top_k, torch.int32),
        rows(seed, torch.int64),
    )
    frame = rows(frame_idx, torch.int32)
    return FrameSampler(sampling, frame, *sizes)


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
    window = WINDOW_TOKENS[best][:, None].expand(8, 10)
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
    empty = torch.zeros(num_rows, 10, dtype=torch.int32)
    normal = draws.semantic(logits, empty, WINDOW_TOKENS)
    window = empty.clone()
    window[::2, 4] = WINDOW_TOKENS[normal[::2]]  # every other row has just said this token
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
    window = WINDOW_TOKENS[-1:].expand(1, 10)
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
        draws = sampler(num_draws, temperature, 1.0, num_kept, seeds, frames, sizes=(2, 19, 20))
        drawn = draws.codebook(logits.expand(num_draws, -1), 1)
        kept, tokens = logits.topk(num_kept)
        expected = torch.softmax(kept / temperature, 0) * num_draws
        observed = torch.stack([(drawn == token).sum() for token in tokens])
        assert observed.sum() == num_draws
        chi_square = float(((observed - expected) ** 2 / expected).sum())
        assert chi_square < 31.3, chi_square  # 11 degrees of freedom, p = 0.001


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", math.nan),
        ("temperature", "0.8"),
        ("top_p", 1.01),
        ("top_p", math.inf),
        ("top_k", 0),
        ("top_k", MAX_TOP_K + 1),
        ("top_k", 2.5),
        ("seed", 1 << 63),
        ("seed", True),
    ],
)
def test_parameters_out_of_range(field, value):
    kind = "an integer" if field in ("top_k", "seed") else "a number"
    with pytest.raises(SamplingError, match=rf"{field}: got .*, expected {kind} from "):
        SamplingParams(**{field: value})


def test_parameters_in_range():
    SamplingParams(0, 0.0, 1, -(1 << 63))
    SamplingParams(2, 1, MAX_TOP_K, (1 << 63) - 1)
