"""Building blocks of the spectral codec, layout [batch, time, channels]."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ConvNeXt(nn.Module):
    """Depthwise convolution, LayerNorm, two-layer MLP; residual with a learned scale per channel."""

    def __init__(self, dim: int, hidden_dim: int, kernel: int, causal: bool) -> None:
        super().__init__()
        self.padding = (kernel - 1, 0) if causal else (kernel // 2, kernel // 2)
        self.depthwise = nn.Conv1d(dim, dim, kernel, groups=dim)
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden_dim)
        self.down = nn.Linear(hidden_dim, dim)
        self.scale = nn.Parameter(torch.full((dim,), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, T, dim] -> [B, T, dim]"""
        h = self.depthwise(F.pad(x.transpose(1, 2), self.padding)).transpose(1, 2)
        h = F.gelu(self.up(self.norm(h)), approximate="tanh")
        out: Tensor = x + self.scale * self.down(h)
        return out


class WindowLayer(nn.Module):
    """Attention within a window of frames, with a learned bias per distance, then SwiGLU."""

    def __init__(self, dim: int, num_heads: int, ffn_dim: int, window: int, causal: bool) -> None:
        super().__init__()
        self.num_heads, self.window, self.causal = num_heads, window, causal
        self.attention_norm, self.ffn_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.gate_up = nn.Linear(dim, 2 * ffn_dim, bias=False)
        self.down = nn.Linear(ffn_dim, dim, bias=False)
        self.distance_bias = nn.Parameter(
            torch.zeros(num_heads, window if causal else 2 * window - 1)
        )
        self.attention_scale = nn.Parameter(torch.full((dim,), 0.2))
        self.ffn_scale = nn.Parameter(torch.full((dim,), 0.2))

    def position_bias(self, num_queries: int, num_keys: int) -> Tensor:
        """[num_heads, num_queries, num_keys], -inf outside the window; the last query is at the last key."""
        device = self.distance_bias.device
        query = torch.arange(num_keys - num_queries, num_keys, device=device)
        distance = query[:, None] - torch.arange(num_keys, device=device)
        nearest = 0 if self.causal else 1 - self.window
        outside = (distance < nearest) | (distance >= self.window)
        index = (distance - nearest).clamp(0, self.distance_bias.shape[1] - 1)
        bias = self.distance_bias.index_select(1, index.flatten())
        return bias.view(self.num_heads, num_queries, num_keys).masked_fill(outside, -math.inf)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, T, dim] -> [B, T, dim]"""
        num_rows, num_frames, dim = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(num_rows, num_frames, 3, self.num_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        bias = self.position_bias(num_frames, num_frames).to(q.dtype)
        h = F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None])
        h = h.transpose(1, 2).reshape(num_rows, num_frames, dim)
        x = x + self.attention_scale * self.out(h)
        gate, up = self.gate_up(self.ffn_norm(x)).chunk(2, dim=-1)
        out: Tensor = x + self.ffn_scale * self.down(F.silu(gate) * up)
        return out


def overlap_add(chunks: Tensor, tail: Tensor, hop_samples: int) -> tuple[Tensor, Tensor]:
    """chunks: [B, H, window], tail: [B, window - hop] -> finished samples [B, H * hop], new tail"""
    num_rows, num_hops, window = chunks.shape
    overlap = window // hop_samples
    parts = chunks.view(num_rows, num_hops, overlap, hop_samples)
    head = tail.view(num_rows, overlap - 1, hop_samples)
    total = F.pad(head, (0, 0, 0, num_hops))
    for i in range(overlap):
        total = total + F.pad(parts[:, :, i], (0, 0, i, overlap - 1 - i))
    total = total.flatten(1)
    return total[:, : num_hops * hop_samples], total[:, num_hops * hop_samples :]
