"""The sampling kernels against the definitions, draw for draw.

A draw may differ only where the definition itself is within rounding of another outcome: a
cumulative probability of top_p, or two scores of each other.
"""

import pytest
import torch

from ops import reference, sampling
from ops.embedding import embed_rows
from ops.quantize import quantize_rows
from ops.sampling import Carried, Draws, Head
from tests.ops import sampling_cases as cases

pytestmark = pytest.mark.gpu
ROUNDING = 2e-5  # of sums of 4097 probabilities, and of scores relative to their size


def moved(batch: Draws, device: str) -> Draws:
    return Draws(*(part.to(device) for part in batch[:6]), batch.num_ranks)


def logits_of(num_rows, num_tokens, seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    logits = torch.randn(num_rows, num_tokens, generator=generator, device="cuda") * 3
    return logits * torch.rand(num_rows, 1, generator=generator, device="cuda")


def assert_same_draws(got, expected, logits, batch, draw, *, is_twin=None):
    """`is_twin`: rows that may have taken the twin's draw."""
    differing = (got != expected.to(got.device)).nonzero().flatten().tolist()
    assert len(differing) <= max(1, len(got) // 50), differing
    for row in differing:
        margins = [cases.margin(logits, batch, row, draw)]
        if is_twin is not None:
            margins.append(cases.margin(logits, batch, row, draw + 1, is_twin=True))
        assert min(margins) < ROUNDING, (row, margins)
    return len(differing)


@pytest.mark.parametrize("num_tokens", [4096, 1024, 1000, 96])
@pytest.mark.parametrize("num_rows", [1, 7, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codebooks(num_tokens, num_rows, dtype):
    for seed in range(8):
        logits = logits_of(num_rows, num_tokens, seed).to(dtype)
        batch = cases.draws(num_rows, seed, "cuda")
        got = cases.codebook(logits, seed + 1, batch)
        if dtype == torch.bfloat16:
            logits = broken_ties(logits)
            got = cases.codebook(logits, seed + 1, batch)
        expected = cases.codebook(logits.cpu(), seed + 1, moved(batch, "cpu"))
        assert_same_draws(got, expected, logits, batch, seed + 2)


def broken_ties(logits):
    """fp32 with nearly the same values, all different: the definition leaves ties open."""
    jitter = torch.arange(logits.shape[1], device=logits.device) * -1e-6
    return logits.float() + jitter


@pytest.mark.parametrize("num_tokens", [4097, 1025])
@pytest.mark.parametrize("num_rows", [1, 7, 64, 128])
def test_semantic(num_tokens, num_rows):
    tokens = cases.head_tokens(num_tokens, "cuda")
    num_twins = 0
    for seed in range(8):
        logits = logits_of(num_rows, num_tokens, seed)
        batch = cases.draws(num_rows, seed, "cuda")
        window = cases.windows(logits, batch, tokens, seed)
        got = cases.semantic(logits, window, batch, tokens)
        cpu = moved(batch, "cpu")
        expected = cases.semantic(logits.cpu(), window.cpu(), cpu, tokens.cpu())
        assert_same_draws(got, expected, logits, batch, 0, is_twin=True)
        normal = cases.semantic(logits, torch.zeros_like(window), batch, tokens)
        num_twins += int((normal != got).sum())
    assert num_twins > num_rows


def ranked_oracle(logits, batch, draw):
    """The definition with ties in the order the kernel promises: the lower index first."""
    slots = batch.slots
    num_ranks = min(batch.num_ranks, logits.shape[1])
    top_k = torch.where(batch.temperature > 0, batch.top_k, 1)[slots]
    thresholds = reference.removal_thresholds(batch.top_p[slots], top_k, num_ranks)
    noise = reference.gumbel_noise(
        batch.seed[slots], batch.frame_idx[slots], draw + 1, logits.shape[1]
    )[:, draw]
    top, idx = (part[:, :num_ranks] for part in logits.float().sort(descending=True, stable=True))
    cumulative = logits.float().softmax(-1).gather(1, idx).cumsum(-1)
    inverse = batch.temperature.clamp(min=sampling.MIN_TEMPERATURE).reciprocal()[slots]
    scores = torch.addcmul(noise.gather(1, idx), top, inverse[:, None])
    scores.masked_fill_(cumulative > thresholds, -torch.inf)
    return idx.gather(1, scores.argmax(-1, keepdim=True)).squeeze(1)


@pytest.mark.parametrize("step", [0.25, 4.0, 1e9])
@pytest.mark.parametrize("num_tokens", [4096, 4097, 300])
def test_equal_logits_come_in_the_order_of_their_index(step, num_tokens):
    """Down to all logits being equal, where the candidates are found by index alone."""
    for seed in range(4):
        logits = (logits_of(64, num_tokens, seed) / step).round() * step
        logits[:8] = 0
        batch = cases.draws(64, seed, "cuda")
        got = cases.codebook(logits.contiguous(), 3, batch)
        expected = ranked_oracle(logits.cpu(), moved(batch, "cpu"), 4)
        assert_same_draws(got, expected, logits, batch, 4)


@pytest.mark.parametrize("pattern", ["rising", "falling", "clustered", "one", "negative", "masked"])
def test_shapes_of_logits_that_defeat_the_first_bound(pattern):
    num_tokens = 4096
    ramp = torch.arange(num_tokens, device="cuda") / num_tokens
    logits = {
        "rising": ramp * 20,
        "falling": -ramp * 20,
        "clustered": torch.where(ramp < 0.1, 5 + ramp * 3, ramp - 20),
        "one": torch.where(ramp == 0.5, 50.0, ramp),
        "negative": -1e4 - ramp * 100,
        "masked": torch.where(ramp < 0.02, ramp * 50, -torch.inf),
    }[pattern].repeat(32, 1)
    batch = cases.draws(32, 5, "cuda")
    got = cases.codebook(logits.contiguous(), 1, batch)
    expected = ranked_oracle(logits.cpu(), moved(batch, "cpu"), 2)
    assert_same_draws(got, expected, logits, batch, 2)


def test_garbage_logits_choose_some_token():
    batch = cases.draws(6, 0, "cuda")
    logits = logits_of(6, 4096, 0)
    logits[0], logits[1, ::3], logits[2] = torch.nan, torch.nan, -torch.inf
    logits[3], logits[4] = torch.inf, -torch.nan
    code = cases.codebook(logits, 1, batch)
    assert ((code >= 0) & (code < 4096)).all(), code


@pytest.mark.parametrize("num_rows", [1, 5, 64])
def test_a_drawn_code_brings_its_row_of_a_norm(num_rows):
    dim, num_entries = 2560, 4096
    table = torch.randn(num_entries, dim, device="cuda").bfloat16()
    normed_table = quantize_rows(table)
    batch, logits = cases.draws(num_rows, 1, "cuda"), logits_of(num_rows, num_entries, 0)
    codes = torch.full((num_rows, 10), -1, dtype=torch.int32, device="cuda")
    for _ in range(3):
        trash = [torch.full((num_rows, dim), torch.nan, device="cuda") for _ in range(4)]
        del trash  # what is allocated next lies there
        x, normed = sampling.draw_codebook(logits, 9, batch, table, codes, normed_table)
        code = codes[:, 9].long()
        assert torch.equal(x, table[code])
        assert torch.equal(normed.data.float(), normed_table.data.float()[code])
        assert torch.equal(normed.scale, normed_table.take(code).scale)


@pytest.mark.parametrize("num_rows", [1, 5, 64])
def test_drawing_stores_codes_and_looks_up_what_comes_next(num_rows):
    num_tokens, dim, num_codebooks = 4097, 2560, 10
    logits = logits_of(num_rows, num_tokens, 0)
    tokens = cases.head_tokens(num_tokens, "cuda")
    batch = cases.draws(num_rows, 1, "cuda")
    window = cases.windows(logits, batch, tokens, 1)
    head = Head(tokens, torch.arange(num_tokens, device="cuda").clamp(max=4095))
    hidden = torch.randn(num_rows, dim, device="cuda").bfloat16()
    table = torch.randn(4096, dim, device="cuda").bfloat16()
    codes = torch.full((num_rows, num_codebooks), -1, dtype=torch.int32, device="cuda")
    first = sampling.draw_semantic(logits, window, batch, head, hidden, table, codes)
    choice = cases.semantic(logits, window, batch, tokens)
    assert torch.equal(first.choice, choice)
    assert torch.equal(first.is_end, choice == num_tokens - 1)
    assert torch.equal(codes[:, 0].long(), head.codes[choice])
    assert torch.equal(first.x, torch.stack([hidden, table[head.codes[choice]]], 1).flatten(0, 1))
    residual = logits[:, 1:].contiguous()
    x, _ = sampling.draw_codebook(residual, 9, batch, table, codes)
    code = cases.codebook(residual, 9, batch)
    assert torch.equal(x, table[code]) and torch.equal(codes[:, 9].long(), code)
    assert (codes[:, 1:9] == -1).all()


def state(num_slots, num_codebooks, has_history=True):
    generator = torch.Generator().manual_seed(0)

    def integers(*shape, dtype=torch.int32):
        return torch.randint(0, 1000, shape, generator=generator, dtype=dtype)

    frame_idx = integers(num_slots) % 3
    return Carried(
        integers(num_slots, 1 + num_codebooks),
        integers(num_slots, dtype=torch.int64),
        integers(num_slots, 10, 1),
        frame_idx,
        integers(num_slots, 1000, 1 + num_codebooks) if has_history else None,
    )


@pytest.mark.parametrize("num_rows", [1, 30, 128])
@pytest.mark.parametrize("num_codebooks", [10, 8])
@pytest.mark.parametrize("has_history", [True, False])
def test_advance(num_rows, num_codebooks, has_history):
    carried = state(num_rows + 2, num_codebooks, has_history)
    on_gpu = Carried(*(None if part is None else part.cuda() for part in carried))
    slots = torch.randperm(num_rows + 2)[:num_rows]
    choice = torch.randint(0, 4097, (num_rows,))
    codes = torch.randint(0, 4096, (num_rows, num_codebooks), dtype=torch.int32)
    tokens = cases.head_tokens(4097)
    sampling.advance(carried, slots, choice, codes, tokens)
    sampling.advance(on_gpu, slots.cuda(), choice.cuda(), codes.cuda(), tokens.cuda())
    for got, expected in zip(on_gpu, carried, strict=True):
        assert expected is None or torch.equal(got.cpu(), expected)


@pytest.mark.parametrize("num_rows", [1, 17, 128])
@pytest.mark.parametrize("dim", [2560, 320])
def test_embed_rows(num_rows, dim):
    num_codebooks, codebook_size = 10, 64
    rows = torch.randint(0, codebook_size, (num_rows + 4, 11), dtype=torch.int32, device="cuda")
    rows[:, 0] = torch.randint(0, 300, (num_rows + 4,))
    table = torch.randn(300, dim, device="cuda").bfloat16()
    codebooks = torch.randn(num_codebooks * codebook_size, dim, device="cuda").bfloat16()
    for slots in (None, torch.randperm(num_rows + 4, device="cuda")[:num_rows]):
        got = embed_rows(rows, slots, table, codebooks, (100, 250))
        chosen = None if slots is None else slots.cpu()
        expected = embed_rows(rows.cpu(), chosen, table.cpu(), codebooks.cpu(), (100, 250)).cuda()
        differs = (got != expected).float().mean()
        assert differs < 1e-3, differs
        torch.testing.assert_close(got, expected, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("num_rows", [1, 64])
@pytest.mark.parametrize("is_chained", [False, True])
def test_replay_is_eager(num_rows, is_chained):
    """Frames of nine samplers and the advance, captured once; the state moves on as it does eagerly."""
    carried = state(num_rows + 1, 10)
    states = [Carried(*(part.cuda() for part in carried)) for _ in range(2)]
    parameters = cases.draws(num_rows, 0, "cuda")
    slots = torch.randperm(num_rows, device="cuda")
    tokens = cases.head_tokens(4097, "cuda")
    logits = logits_of(num_rows, 4097, 0)
    table = torch.randn(4096, 64, device="cuda").bfloat16()
    hidden = torch.randn(num_rows, 64, device="cuda").bfloat16()
    codes = torch.zeros(num_rows, 10, dtype=torch.int32, device="cuda")
    head = Head(tokens, torch.arange(4097, device="cuda").clamp(max=4095))

    def frame(carried):
        batch = parameters._replace(slots=slots, frame_idx=carried.frame_idx, is_chained=is_chained)
        embed_rows(carried.rows % 64, slots, table, table[:640], (0, 9))
        first = sampling.draw_semantic(logits, carried.window, batch, head, hidden, table, codes)
        residual = logits[:, 1:].contiguous()
        for codebook in range(1, 10):
            sampling.draw_codebook(residual, codebook, batch, table, codes)
        sampling.advance(carried, slots, first.choice, codes, tokens)

    frame(states[0])
    frame(states[1])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        frame(states[1])
    for seed in range(4):
        logits.copy_(logits_of(num_rows, 4097, seed + 1))
        frame(states[0])
        graph.replay()
        for got, expected in zip(states[1], states[0], strict=True):
            assert torch.equal(got, expected)
