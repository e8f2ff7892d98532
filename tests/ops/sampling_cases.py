"""Batches to sample from, and why two samplers may disagree on a row."""

from __future__ import annotations

import torch
from torch import Tensor

from ops import reference, sampling
from ops.sampling import MIN_TEMPERATURE, RAS_TEMPERATURE, RAS_TOP_P, Draws, Head

WINDOW = 10
FIRST_TOKEN, END_TOKEN = 1000, 7


def head_tokens(num_tokens: int, device: str = "cpu") -> Tensor:
    tokens = torch.arange(FIRST_TOKEN, FIRST_TOKEN + num_tokens, dtype=torch.int32, device=device)
    tokens[-1] = END_TOKEN
    return tokens


def draws(num_rows: int, seed: int, device: str = "cpu") -> Draws:
    """Random rows of more slots, with every parameter over its whole range."""
    generator = torch.Generator().manual_seed(seed)
    num_slots = num_rows + 3

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(num_slots, generator=generator)

    temperature = uniform(-0.3, 2.0).clamp(min=0)  # some are greedy
    top_k = torch.randint(1, 129, (num_slots,), generator=generator, dtype=torch.int32)
    top_k[::2] = 30
    values = (
        torch.randperm(num_slots, generator=generator)[:num_rows],
        temperature,
        uniform(-0.1, 1.1).clamp(0, 1),
        top_k,
        torch.randint(-(1 << 62), 1 << 62, (num_slots,), generator=generator),
        torch.randint(0, 5000, (num_slots,), generator=generator, dtype=torch.int32),
    )
    return Draws(*(value.to(device) for value in values))


def windows(logits: Tensor, batch: Draws, tokens: Tensor, seed: int) -> Tensor:
    """i32 [N, W, 1]: of half of the slots the likeliest tokens, so that twins are taken."""
    generator = torch.Generator().manual_seed(seed)
    num_slots = len(batch.top_p)
    window = torch.randint(
        FIRST_TOKEN, FIRST_TOKEN + len(tokens), (num_slots, WINDOW, 1), generator=generator
    ).int()
    likely = tokens[logits.float().topk(min(WINDOW, len(tokens) - 1)).indices].cpu()
    slots = batch.slots.cpu()
    window[slots[::2], : likely.shape[1], 0] = likely[::2]
    return window.to(logits.device)


def semantic(logits: Tensor, window: Tensor, batch: Draws, tokens: Tensor) -> Tensor:
    """Choices of `draw_semantic`, i64 [B]."""
    num_rows, device = len(batch.slots), logits.device
    head = Head(tokens, torch.zeros(len(tokens), dtype=torch.int64, device=device))
    codes = torch.zeros(num_rows, 1, dtype=torch.int32, device=device)
    x = torch.zeros(num_rows, 8, dtype=torch.bfloat16, device=device)
    return sampling.draw_semantic(logits, window, batch, head, x, x[:1], codes).choice


def codebook(logits: Tensor, number: int, batch: Draws) -> Tensor:
    """Codes of `draw_codebook`, i64 [B]."""
    num_rows, num_codes = logits.shape
    table = torch.zeros(num_codes, 8, dtype=torch.bfloat16, device=logits.device)
    codes = torch.full((num_rows, number + 1), -1, dtype=torch.int32, device=logits.device)
    sampling.draw_codebook(logits, number, batch, table, codes)
    assert (codes[:, :number] == -1).all()
    return codes[:, number].long()


def margin(logits: Tensor, batch: Draws, row: int, draw: int, *, is_twin: bool = False) -> float:
    """How far a row's draw is from another outcome, in fp64: the least of |cumulative - top_p| over
    its ranks, and the best score's lead."""
    slot = batch.slots[row]
    top_k = int(batch.top_k[slot]) if float(batch.temperature[slot]) > 0 else 1
    num_ranks = min(top_k, batch.num_ranks, logits.shape[1])
    top, idx = logits[row].double().cpu().sort(descending=True, stable=True)
    probabilities = logits[row].double().cpu().softmax(0)[idx]
    cumulative = probabilities.cumsum(0)[:num_ranks]
    top_p = RAS_TOP_P if is_twin else float(batch.top_p[slot])
    temperature = RAS_TEMPERATURE if is_twin else float(batch.temperature[slot])
    noise = reference.gumbel_noise(
        batch.seed[slot, None].cpu(), batch.frame_idx[slot, None].cpu(), draw + 1, logits.shape[1]
    )[0, draw].double()
    scores = top[:num_ranks] / max(temperature, MIN_TEMPERATURE) + noise[idx[:num_ranks]]
    stays = cumulative <= top_p
    stays[0] = True
    best = scores[stays].sort(descending=True).values
    lead = float(best[0] - best[1]) / max(1.0, float(best[0].abs())) if len(best) > 1 else 1.0
    return min(float((cumulative[1:] - top_p).abs().min()) if num_ranks > 1 else 1.0, lead)
