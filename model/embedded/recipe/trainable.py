"""The DualAR as it is trained: same tensor names and arithmetic as the runtime's, plus dropout and losses."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.embedded.recipe.dialogues import NO_TARGET, Rows
from model.embedded.recipe.tokens import SEMANTIC_START, VOCAB_SIZE


@dataclass(frozen=True)
class DualARConfig:
    dim: int = 320
    num_layers: int = 7
    num_heads: int = 5
    head_dim: int = 64
    ffn_dim: int = 832
    fast_layers: int = 2
    fast_ffn_dim: int = 640
    num_codebooks: int = 8
    codebook_size: int = 1024
    rope_base: float = 10000.0
    norm_eps: float = 1e-6
    max_seq_len: int = 2048
    im_end: int = 3


TOY = DualARConfig(dim=64, num_layers=2, num_heads=1, ffn_dim=96, fast_layers=1, fast_ffn_dim=64)


def rope_table(num_positions: int, head_dim: int, base: float, device: torch.device) -> Tensor:
    """Cosine and sine, rounded to bf16 as the checkpoint format has it: [T, head_dim / 2, 2]"""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    angle = torch.outer(
        torch.arange(num_positions, dtype=torch.float32, device=device), base**-exponent
    )
    return torch.stack([angle.cos(), angle.sin()], -1).to(torch.bfloat16)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Interleaved RoPE; x: [B, T, heads, head_dim], table: [T or B x T, head_dim / 2, 2]"""
    pairs = x.float().unflatten(-1, (-1, 2))
    cos, sin = table.float().unsqueeze(-3).unbind(-1)
    a, b = pairs.unbind(-1)
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2).to(x.dtype)


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale).to(x.dtype) * self.weight.to(x.dtype)


class Attention(nn.Module):
    """One key-value head shared by all query heads."""

    def __init__(self, config: DualARConfig, qk_norm: bool) -> None:
        super().__init__()
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        self.wqkv = nn.Linear(config.dim, (config.num_heads + 2) * config.head_dim, bias=False)
        self.wo = nn.Linear(config.num_heads * config.head_dim, config.dim, bias=False)
        self.qk_norm = qk_norm
        if qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.norm_eps)

    def project(self, x: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x: [B, T, dim] -> q [B, T, heads, head_dim], k and v [B, T, 1, head_dim]"""
        heads = self.wqkv(x).unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.split([self.num_heads, 1, 1], dim=2)
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(q, table), rotate(k, table), v

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        q, k, v = self.project(x, table)
        num_rows, length = x.shape[:2]
        if length <= 16:  # the fast AR: thousands of tiny sequences, plain products are quicker
            q = q.transpose(1, 2).reshape(num_rows, -1, self.head_dim)
            scores = (q @ k[:, :, 0].transpose(1, 2)).float() / math.sqrt(self.head_dim)
            scores = scores.view(num_rows, self.num_heads, length, length)
            future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            weights = scores.masked_fill(future, -1e9).softmax(-1).to(v.dtype)
            y = weights.view(num_rows, -1, length) @ v[:, :, 0]
            y = y.view(num_rows, self.num_heads, length, self.head_dim)
        else:
            shape = (-1, self.num_heads, -1, -1)
            k, v = k.transpose(1, 2).expand(shape), v.transpose(1, 2).expand(shape)
            y = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(2))

    def cached(self, x: Tensor, table: Tensor, cache: Tensor, at: Tensor, seen: Tensor) -> Tensor:
        """One position; cache: [B, 2, S, head_dim], at: i64 [B], seen: bool [B, S]"""
        q, k, v = self.project(x, table)
        rows = torch.arange(len(x), device=x.device)
        cache[rows, 0, at], cache[rows, 1, at] = k[:, 0, 0].to(cache), v[:, 0, 0].to(cache)
        shape = (-1, self.num_heads, -1, -1)
        keys, values = (cache[:, i, None].expand(shape).to(q.dtype) for i in (0, 1))
        mask = seen[:, None, None]
        y = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=mask)
        return self.wo(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    def __init__(self, config: DualARConfig, ffn_dim: int, qk_norm: bool, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(config, qk_norm)
        self.feed_forward = FeedForward(config.dim, ffn_dim)
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.dropout = dropout

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        h = self.attention(self.attention_norm(x), table)
        x = x + F.dropout(h, self.dropout, self.training)
        h = self.feed_forward(self.ffn_norm(x))
        return x + F.dropout(h, self.dropout, self.training)

    def cached(self, x: Tensor, table: Tensor, cache: Tensor, at: Tensor, seen: Tensor) -> Tensor:
        x = x + self.attention.cached(self.attention_norm(x), table, cache, at, seen)
        return x + self.feed_forward(self.ffn_norm(x))


class SlowAR(nn.Module):
    def __init__(self, config: DualARConfig, dropout: float) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(VOCAB_SIZE, config.dim)
        self.layers = nn.ModuleList(
            Layer(config, config.ffn_dim, True, dropout) for _ in range(config.num_layers)
        )
        self.norm = RMSNorm(config.dim, config.norm_eps)


class FastAR(nn.Module):
    def __init__(self, config: DualARConfig, dropout: float) -> None:
        super().__init__()
        self.codebook_embeddings = nn.Embedding(
            config.num_codebooks * config.codebook_size, config.dim
        )
        self.embeddings = nn.Embedding(config.codebook_size, config.dim)
        self.layers = nn.ModuleList(
            Layer(config, config.fast_ffn_dim, False, dropout) for _ in range(config.fast_layers)
        )
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.codebook_size, bias=False)


def lookup(table: nn.Embedding, index: Tensor) -> Tensor:
    """Rows of an embedding; the gradient of this form may be captured in a CUDA graph."""
    return table.weight.index_select(0, index.flatten()).view(*index.shape, -1)


class TrainableDualAR(nn.Module):
    def __init__(self, config: DualARConfig, dropout: float = 0.0) -> None:
        super().__init__()
        self.config = config
        self.text_model = nn.ModuleDict({"model": SlowAR(config, dropout)})
        self.audio_decoder = FastAR(config, dropout)
        self._init_weights()

    @property
    def slow(self) -> SlowAR:
        model = self.text_model["model"]
        assert isinstance(model, SlowAR)
        return model

    def _init_weights(self) -> None:
        depth = math.sqrt(2 * self.config.num_layers)
        for name, parameter in self.named_parameters():
            if "embeddings" in name:
                nn.init.normal_(parameter, std=0.05)
            elif parameter.dim() == 2:
                last = name.endswith(("wo.weight", "w2.weight"))
                nn.init.normal_(parameter, std=0.02 / depth if last else 0.02)

    def table(self, num_positions: int) -> Tensor:
        c = self.config
        device = self.slow.norm.weight.device
        return rope_table(num_positions, c.head_dim, c.rope_base, device)

    def embed(self, tokens: Tensor, codes: Tensor) -> Tensor:
        """tokens: i64 [B, T], codes: i64 [B, T, K] -> [B, T, dim]"""
        c = self.config
        text = lookup(self.slow.embeddings, tokens)
        offset = torch.arange(c.num_codebooks, device=codes.device) * c.codebook_size
        speech = lookup(self.audio_decoder.codebook_embeddings, codes + offset).sum(-2)
        mixed = (text + speech) / math.sqrt(c.num_codebooks + 1)
        return torch.where((tokens >= SEMANTIC_START)[..., None], mixed, text)

    def hidden(self, tokens: Tensor, codes: Tensor) -> Tensor:
        """-> post-norm hidden states [B, T, dim]"""
        x, table = self.embed(tokens, codes), self.table(tokens.shape[1])
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        for layer in self.slow.layers:
            x = layer(x, table)
        return self.slow.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., dim] -> [..., 1 + codebook_size]: the end, then the semantic codes"""
        weight, end = self.slow.embeddings.weight, self.config.im_end
        head = torch.cat([weight[end : end + 1], weight[SEMANTIC_START:]])
        return hidden @ head.to(hidden.dtype).t()

    def fast_logits(self, hidden: Tensor, codes: Tensor) -> Tensor:
        """hidden: [M, dim], codes: i64 [M, P], the first codebooks -> [M, P, codebook_size] of the next ones"""
        x = lookup(self.audio_decoder.embeddings, codes).to(hidden.dtype)
        x = torch.cat([hidden[:, None], x], dim=1)
        table = self.table(x.shape[1])
        for layer in self.audio_decoder.layers:
            x = layer(x, table)
        return self.audio_decoder.output(self.audio_decoder.norm(x[:, 1:]))


@dataclass(frozen=True)
class Losses:
    semantic: Tensor
    residual: Tensor
    accuracy: Tensor


def add_noise(rows: Rows, share: float, codebook_size: int) -> Rows:
    """Replace some frames by others of the batch and some single codes at random; targets stay."""
    tokens, codes = rows.tokens, rows.codes
    device, shape = tokens.device, tokens.shape
    other = torch.randint(0, tokens.numel(), shape, device=device)
    taken = tokens.flatten()[other]
    swap = (torch.rand(shape, device=device) < share) & (tokens >= SEMANTIC_START)
    swap &= taken >= SEMANTIC_START
    tokens = torch.where(swap, taken, tokens)
    codes = torch.where(swap[..., None], codes.flatten(0, 1)[other], codes)
    odd = (torch.rand(codes.shape, device=device) < share) & (tokens >= SEMANTIC_START)[..., None]
    odd[..., 0] = False
    codes = torch.where(odd, torch.randint(0, codebook_size, codes.shape, device=device), codes)
    return rows._replace(tokens=tokens, codes=codes)


def losses(model: TrainableDualAR, rows: Rows, noise: float, fast_share: float) -> Losses:
    """Cross entropies; the fast AR sees a random `fast_share` of all positions that predict a frame."""
    size = model.config.codebook_size
    seen = add_noise(rows, noise, size) if noise else rows
    hidden = model.hidden(seen.tokens, seen.codes).flatten(0, 1)
    targets = rows.targets.flatten()
    logits = model.logits(hidden).float()
    semantic = F.cross_entropy(logits, targets, ignore_index=NO_TARGET)
    counted = targets >= 0
    accuracy = ((logits.argmax(-1) == targets) & counted).sum() / counted.sum()
    # A fixed number of positions keeps every shape static; those without a frame are masked out.
    frame = targets > 0
    score = torch.rand(len(targets), device=targets.device) + frame
    picked = score.topk(int(fast_share * len(targets)), sorted=False).indices
    codes = rows.next_codes.flatten(0, 1)[picked]
    given = codes[:, :-1]
    if noise:
        odd = torch.rand(given.shape, device=given.device) < noise / 2
        given = torch.where(odd, torch.randint_like(given, size), given)
    wanted = torch.where(frame[picked, None], codes[:, 1:], NO_TARGET)
    fast = model.fast_logits(hidden.index_select(0, picked), given).float()
    residual = F.cross_entropy(fast.flatten(0, 1), wanted.flatten(), ignore_index=NO_TARGET)
    return Losses(semantic, residual, accuracy.detach())
