"""The codec's residual quantiser while it learns."""

from dataclasses import dataclass

import torch
from torch import Tensor

from model.codec.spectral import SpectralCodec


@dataclass
class Quantized:
    latent: Tensor  # f32 [B, T, dim]
    first: Tensor  # f32 [B, T, dim], what the first codebook alone says
    commit: Tensor
    codebook: Tensor


class TrainableQuantizer:
    """Straight-through training of the codec's quantiser, with usage counts and revival."""

    def __init__(self, codec: SpectralCodec, num_vectors: int) -> None:
        self.stages, config = codec.quantizer.stages, codec.config
        device = next(codec.parameters()).device
        shape = (config.num_codebooks, config.codebook_size)
        self.usage = torch.ones(shape, device=device)
        self.recent = torch.zeros(
            config.num_codebooks, num_vectors, config.codebook_dim, device=device
        )
        self.share = torch.full((num_vectors,), 0.02, device=device)

    def __call__(self, latent: Tensor, kept_stages: Tensor, continuous: Tensor) -> Quantized:
        """latent: f32 [B, T, dim], kept_stages: i64 [B], continuous: bool [B], rows left unquantised"""
        residual, outs = latent, []
        total = torch.zeros_like(latent)
        commit = codebook = latent.new_zeros(())
        for i, stage in enumerate(self.stages):
            projected = stage.in_proj(residual)
            code = stage.search(projected.detach())
            self._count(i, code, projected)
            row = stage.codebook.weight.index_select(0, code.flatten()).view_as(projected)
            keep = (kept_stages > i).float()
            commit = commit + ((projected - row.detach()).square().mean((1, 2)) * keep).mean()
            codebook = codebook + ((row - projected.detach()).square().mean((1, 2)) * keep).mean()
            row = projected + (row - projected).detach()
            out = stage.out_proj(torch.where(continuous[:, None, None], projected, row))
            total = total + out * keep[:, None, None]
            residual = residual - out
            outs.append(out)
        return Quantized(total, outs[0], commit, codebook)

    @torch.no_grad()
    def _count(self, i: int, code: Tensor, projected: Tensor) -> None:
        self.usage[i].mul_(0.98).index_add_(0, code.flatten(), self.share)
        self.recent[i].copy_(projected.flatten(0, 1))

    @torch.no_grad()
    def revive(self) -> None:
        """Give every row that went unused for long the value of a recent input."""
        for stage, usage, recent in zip(self.stages, self.usage, self.recent, strict=True):
            dead = usage < 0.02
            choice = torch.randint(0, len(recent), usage.shape, device=usage.device)
            weight = stage.codebook.weight
            weight.copy_(torch.where(dead[:, None], recent[choice], weight))
            usage.masked_fill_(dead, 1.0)
