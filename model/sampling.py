"""Which code comes next: the published sampling of DualAR models, seeded per stream.

Order of the filters: probabilities of the un-tempered logits are summed from the best on, and a
rank goes when the sum including it exceeds `top_p`, or when it is `top_k` or later; the best always
stays. Only then come temperature, softmax and the draw.

Repetition-aware sampling (RAS) applies to semantic tokens: a second sample is drawn at
RAS_TEMPERATURE and RAS_TOP_P, and taken when the first one is among the last RAS_WINDOW tokens.

A draw is a function of (seed, frame, draw index, token), see `ops.reference.gumbel_noise`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from model.errors import SamplingError
from ops import reference

RAS_WINDOW = 10  # frames (W)
RAS_TEMPERATURE = 1.0
RAS_TOP_P = 0.9
MAX_TOP_K = 128  # ranks that are ever looked at; published servers use 30
MAX_TEMPERATURE = 2.0
_MIN_TEMPERATURE = 1e-5


class Sampling(Protocol):
    """What decoding reads of a stream's sampling parameters; see SamplingParams for the ranges."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_p(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def seed(self) -> int: ...


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one stream; the defaults are those of the published server.

    Raises:
        SamplingError: for a value that is not a number or outside its range.
    """

    temperature: float = 0.8  # 0 = always the best token
    top_p: float = 0.8
    top_k: int = 30
    seed: int = 0

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, 0, MAX_TEMPERATURE)
        _check("top_p", self.top_p, 0, 1)
        _check("top_k", self.top_k, 1, MAX_TOP_K, is_whole=True)
        _check("seed", self.seed, -(1 << 63), (1 << 63) - 1, is_whole=True)


def _check(name: str, value: float, low: float, high: float, *, is_whole: bool = False) -> None:
    kind = "an integer" if is_whole else "a number"
    is_number = isinstance(value, int if is_whole else (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not low <= value <= high:
        raise SamplingError(f"{name}: got {value!r}, expected {kind} from {low} to {high}")


class FrameSampler:
    """All draws of one frame for the streams of one step.

    Greedy streams (temperature 0) are streams with one rank left, so that they need no branch: RAS
    then draws the same token twice.
    """

    def __init__(
        self,
        sampling: tuple[Tensor, Tensor, Tensor, Tensor],
        frame_idx: Tensor,
        num_codebooks: int,
        num_semantic: int,
        codebook_size: int,
    ) -> None:
        """Prepare noise and filters.

        Args:
            sampling: temperature f32 [B], top_p f32 [B], top_k i32 [B], seed i64 [B].
            frame_idx: i32 [B], frames that the stream has made before this one.
            num_codebooks: K.
            num_semantic: semantic ids; the end follows them in the restricted head.
            codebook_size: V of the fast AR.
        """
        temperature, top_p, top_k, seed = sampling
        self._num_semantic = num_semantic
        num_tokens = max(num_semantic + 1, codebook_size)
        # Draw 0: semantic; draw 1: its RAS twin; draw i + 1: codebook i.
        self._noise = reference.gumbel_noise(seed, frame_idx, num_codebooks + 1, num_tokens)
        num_ranks = min(MAX_TOP_K, num_semantic, codebook_size)
        top_k = torch.where(temperature > 0, top_k, 1)
        ras_top_p = torch.full_like(top_p, RAS_TOP_P)
        self._thresholds = torch.stack(
            [
                reference.removal_thresholds(top_p, top_k, num_ranks),
                reference.removal_thresholds(ras_top_p, top_k, num_ranks),
            ],
            dim=1,
        )  # f32 [B, 2, num_ranks]
        inv_temperature = temperature.clamp(min=_MIN_TEMPERATURE).reciprocal()
        ras = torch.full_like(inv_temperature, 1.0 / RAS_TEMPERATURE)
        self._inv_temperature = torch.stack([inv_temperature, ras], dim=1)[:, :, None]

    def semantic(self, logits: Tensor, window: Tensor, window_tokens: Tensor) -> Tensor:
        """Choose among the semantic ids and the end.

        Args:
            logits: f32 [B, num_semantic + 1], of the restricted head.
            window: i32 [B, W], the stream's last tokens.
            window_tokens: i32 [num_semantic + 1], token id of each row of the restricted head.

        Returns:
            i64 [B], rows of the restricted head; num_semantic is the end.
        """
        noise = self._noise[:, :2]
        drawn = reference.sample_top(logits, noise, self._thresholds, self._inv_temperature)
        normal, ras = drawn.unbind(1)
        is_recent = (window == window_tokens[normal][:, None]).any(1)
        return torch.where(is_recent & (normal < self._num_semantic), ras, normal)

    def codebook(self, logits: Tensor, codebook: int) -> Tensor:
        """Choose the code of one residual codebook.

        Args:
            logits: f32 [B, codebook_size].
            codebook: 1..K-1.

        Returns:
            i64 [B].
        """
        noise = self._noise[:, codebook + 1, None]
        thresholds, inv_temperature = self._thresholds[:, :1], self._inv_temperature[:, :1]
        return reference.sample_top(logits, noise, thresholds, inv_temperature).squeeze(1)
