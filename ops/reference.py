"""Plain PyTorch definitions of what a frame needs: the oracle of the kernels, and the CPU path.

Nothing here waits for a device: no `.item()`, no shape that depends on values. Arithmetic follows
the published DualAR models where they are particular: RMSNorm and RoPE compute in fp32, the RoPE
table is rounded to bf16, keys and queries are rotated in interleaved pairs.

On the CPU in fp32 every function gives a row the same bits whatever the other rows hold and
however many there are (see `pack_weight` for the one that needs care).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

_MIX = 0xD6E8FEB86659FD93 - (1 << 64)  # odd multiplier with good avalanche, as a signed i64
_SEED_OFFSET = 0x9E3779B97F4A7C15 - (1 << 64)
_UNIFORM_BITS = 23  # (bits + 0.5) * 2^-23 is exact in f32, hence never 0 or 1


def rope_table(num_positions: int, head_dim: int, base: float, device: torch.device) -> Tensor:
    """Turns of RoPE: cos + i sin of every angle, each rounded to bf16 and stored in fp32.

    A GPU's powers differ from a CPU's in the last bit, which late positions multiply: the table is
    a CPU's everywhere.

    Returns:
        complex64 [num_positions, 1, D/2].
    """
    where = torch.device("cpu") if device.type == "cuda" else device
    exponents = torch.arange(0, head_dim, 2, device=where, dtype=torch.float32) / head_dim
    positions = torch.arange(num_positions, device=where, dtype=torch.float32)
    angles = torch.outer(positions, 1.0 / base**exponents)
    rounded = torch.stack([angles.cos(), angles.sin()], dim=-1).bfloat16().float()
    return torch.view_as_complex(rounded).unsqueeze(1).to(device)


def rope(x: Tensor, turns: Tensor, out: Tensor) -> None:
    """Rotate interleaved pairs (x[2i], x[2i+1]) in fp32.

    Args:
        x: [R, H, D].
        turns: complex64 [R, 1, D/2], rows of `rope_table`; or [1, 1, D/2], the same for all rows.
        out: [R, H, D], same dtype; overwritten. May be `x` itself.
    """
    assert x.shape == out.shape and turns.shape[0] in (1, x.shape[0]), (x.shape, turns.shape)
    shape = (*x.shape[:-1], -1, 2)
    pairs = torch.view_as_complex(x.float().view(shape))
    if out.dtype == torch.float32:
        torch.mul(pairs, turns, out=torch.view_as_complex(out.view(shape)))
    else:
        out.copy_(torch.view_as_real(pairs * turns).flatten(-2))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension in fp32, round to x's dtype, then scale by `weight`."""
    return torch.rms_norm(x.float(), x.shape[-1:], None, eps).to(x.dtype) * weight


def pack_weight(weight: Tensor) -> Tensor:
    """Lay out a matrix [out, in] for `linear`; what comes back is good for nothing else.

    On the CPU this is oneDNN's blocked layout. It makes the bits of a row of `linear` independent
    of the other rows and of their number, which MKL does not (1 to 3 rows and 4 or more differ),
    and costs little more for 8 rows than for 1: 320 -> 1664 in fp32, one thread, weights out of
    cache, 67 us for 1 row and 89 us for 8, where MKL takes 82 and 219.
    """
    if weight.device.type != "cpu" or not _is_onednn_able(weight.dtype):
        return weight
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
    return packed


def _is_onednn_able(dtype: torch.dtype) -> bool:
    if not torch._C._has_mkldnn:
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias: [R, in] -> [R, out]. `weight` [out, in], packed or not."""
    if not weight.is_mkldnn:
        return F.linear(x, weight, bias)
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up: [R, 2F] (gate, then up) -> [R, F]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def grouped_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention of every query over every key that `mask` allows, scaled by D^-0.5.

    Query head h reads key/value head h // G: the G heads of a group are G queries of one head, so
    that keys are never repeated.

    Args:
        q: [B, H, D], one query position per row.
        k, v: [B, H_kv, n, D].
        mask: bool [B, n], True = may be read; None = all.

    Returns:
        [B, H, D].
    """
    num_rows, num_heads, head_dim = q.shape
    grouped = q.view(num_rows, k.shape[1], -1, head_dim)
    attn_mask = None if mask is None else mask[:, None, None, :]
    out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=attn_mask)
    return out.reshape(num_rows, num_heads, head_dim)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of T consecutive positions, the last T of the n that k and v hold.

    Args:
        q: [T, H, D].
        k, v: [H_kv, n, D], n >= T.

    Returns:
        [T, H, D].
    """
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads, num_keys, _ = k.shape
    assert num_keys >= num_queries, (num_keys, num_queries)
    grouped = q.view(num_queries, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    shape = (num_kv_heads, grouped.shape[1], num_keys, head_dim)
    mask = None
    if num_keys > num_queries:
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q.device)
        mask = mask.tril(num_keys - num_queries)
    out = F.scaled_dot_product_attention(
        grouped,
        k[:, None].expand(shape),
        v[:, None].expand(shape),
        attn_mask=mask,
        is_causal=mask is None,
    )
    return out.permute(2, 0, 1, 3).reshape(num_queries, num_heads, head_dim)


def embed_rows(
    rows: Tensor,
    embeddings: Tensor,
    codebook_embeddings: Tensor,
    code_offsets: Tensor,
    semantic_begin_id: int,
    semantic_end_id: int,
) -> Tensor:
    """Input of the slow AR.

    Text: E[token]. Semantic positions: (E[token] + sum over i of C[code_i + i * codebook_size]) /
    sqrt(K + 1); the semantic code is row 1 as well, so it counts twice.

    Args:
        rows: i32 [1+K, T]: token ids, then codes (zero where the position is text).
        embeddings: [V, C].
        codebook_embeddings: [K * codebook_size, C].
        code_offsets: i32 [K, 1], i * codebook_size.

    Returns:
        [T, C].
    """
    tokens, codes = rows[0], rows[1:]
    num_codebooks = codes.shape[0]
    text = F.embedding(tokens, embeddings)
    audio = F.embedding(codes + code_offsets, codebook_embeddings).sum(0)
    is_semantic = (tokens >= semantic_begin_id) & (tokens <= semantic_end_id)
    scaled = (text + audio) / math.sqrt(num_codebooks + 1)
    return torch.where(is_semantic[:, None], scaled, text)


def restrict_head(
    weight: Tensor, semantic_begin_id: int, semantic_end_id: int, end_id: int
) -> Tensor:
    """Rows of an LM head [V, C] that decoding can ever choose: the semantic ids, then the end.

    Returns:
        [num_semantic + 1, C], own storage.
    """
    return torch.cat([weight[semantic_begin_id : semantic_end_id + 1], weight[end_id : end_id + 1]])


def _mix(x: Tensor) -> Tensor:
    """One round of a 64-bit mixer on i64, wrapping; the shift keeps the sign, which costs a bit."""
    return (x ^ (x >> 32)) * _MIX


def gumbel_noise(seed: Tensor, frame_idx: Tensor, num_draws: int, num_tokens: int) -> Tensor:
    """Gumbel noise that is a function of (seed, frame, draw, token) alone.

    Counter-based: what a stream draws depends on no other stream, on no batch and on no order of
    calls. argmax(log p + noise) is a sample of p, and equals argmax(p / -log u) for uniform u.

    Args:
        seed: i64 [B].
        frame_idx: i32 or i64 [B].

    Returns:
        f32 [B, num_draws, num_tokens].
    """
    draws = torch.arange(num_draws, device=seed.device)
    tokens = torch.arange(num_tokens, device=seed.device)
    stream = _mix(_mix(seed + _SEED_OFFSET) + frame_idx)
    keys = _mix(_mix(stream[:, None] + draws))
    hashed = _mix(_mix(keys[:, :, None] + tokens))
    bits = (hashed >> (64 - _UNIFORM_BITS)) & ((1 << _UNIFORM_BITS) - 1)
    uniform = (bits.float() + 0.5) * 2.0**-_UNIFORM_BITS
    return uniform.log_().neg_().log_().neg_()


def removal_thresholds(top_p: Tensor, top_k: Tensor, num_ranks: int) -> Tensor:
    """Turn top_p and top_k into one bound per rank: a rank goes when the cumulative probability
    up to and including it exceeds the bound.

    Args:
        top_p: f32 [B].
        top_k: i32 [B], 1 or more.

    Returns:
        f32 [B, num_ranks]: infinite at rank 0 (always kept), top_p below top_k, -1 from there on.
    """
    ranks = torch.arange(num_ranks, device=top_p.device)
    bounds = torch.where(ranks < top_k[:, None], top_p[:, None], -1.0)
    return torch.where(ranks == 0, torch.inf, bounds)


def sample_top(
    logits: Tensor, noise: Tensor, thresholds: Tensor, inv_temperature: Tensor
) -> Tensor:
    """Draw from filtered logits; several draws of one distribution at once.

    Ranks whose cumulative un-tempered probability exceeds their threshold are removed; the others
    are tempered and drawn by argmax(logit / temperature + noise). Only the best `num_ranks` logits
    are ever sorted.

    Args:
        logits: f32 [B, V].
        noise: f32 [B, n, V or more], from `gumbel_noise`; n draws.
        thresholds: f32 [B, n, num_ranks], num_ranks <= V, from `removal_thresholds`.
        inv_temperature: f32 [B, n, 1].

    Returns:
        i64 [B, n], indices into V.
    """
    num_ranks = thresholds.shape[-1]
    top, tokens = logits.topk(num_ranks, dim=-1)
    cumulative = logits.softmax(-1).gather(1, tokens).cumsum(-1)
    tokens = tokens[:, None].expand_as(thresholds)
    scores = torch.addcmul(noise.gather(2, tokens), top[:, None], inv_temperature)
    scores.masked_fill_(cumulative[:, None] > thresholds, -torch.inf)
    return tokens.gather(2, scores.argmax(-1, keepdim=True)).squeeze(-1)


def prev_tokens_shift_inplace(prev: Tensor, next_tokens: Tensor) -> None:
    """Shift each window one step to the left and append the new tokens: the oldest falls out.

    Args:
        prev: i32 [bs, W, cw], contiguous; overwritten.
        next_tokens: i32 [bs, cw], contiguous, on the same device, not overlapping `prev`.

    Raises:
        ValueError: for any other rank, shape, dtype, stride, device, or for overlapping memory;
            `prev` is untouched then.
    """
    _check_shift(prev, next_tokens)
    prev.copy_(torch.cat([prev[:, 1:], next_tokens[:, None]], dim=1))


def _check_shift(prev: Tensor, next_tokens: Tensor) -> None:
    for name, tensor, ndim in (("prev", prev, 3), ("next_tokens", next_tokens, 2)):
        if tensor.dtype != torch.int32:
            raise ValueError(f"{name}: got dtype {tensor.dtype}, expected torch.int32")
        if tensor.ndim != ndim or 0 in tensor.shape:
            raise ValueError(
                f"{name}: got shape {list(tensor.shape)}, expected {ndim} dimensions, none empty "
                "(prev [bs, W, cw], next_tokens [bs, cw])"
            )
        if not tensor.is_contiguous():
            raise ValueError(
                f"{name}: got strides {tensor.stride()} for shape {list(tensor.shape)}, expected "
                "a contiguous tensor"
            )
    if (prev.shape[0], prev.shape[2]) != tuple(next_tokens.shape):
        raise ValueError(
            f"next_tokens: got shape {list(next_tokens.shape)}, expected [bs, cw] = "
            f"[{prev.shape[0]}, {prev.shape[2]}] of prev {list(prev.shape)}"
        )
    if prev.device != next_tokens.device:
        raise ValueError(f"next_tokens: got device {next_tokens.device}, expected {prev.device}")
    begin, other = prev.data_ptr(), next_tokens.data_ptr()  # 0: no memory (meta device)
    if 0 < begin < other + next_tokens.nbytes and other < begin + prev.nbytes:
        raise ValueError("next_tokens: overlaps prev in memory, expected separate storage")
