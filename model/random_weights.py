"""Seeded random weights at a scale at which activations stay finite and near 1.

**Forced length.** The model itself never ends a segment, so that the frame limit does. Channel 0 of
the slow residual stream is a constant: every embedding has the same positive value there, and no
layer writes to it. Only the head's row of the end token reads it, with a large negative weight:
that logit lies about a hundred below the others, whatever the sampling. Decoding knows nothing of
it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from model.codec.checkpoint import Weights
from model.config import DualARConfig
from model.tensor_files import row_slices

_CONSTANT = 0.02  # channel 0 of the embeddings, see above; no larger than their other values
_CONSTANT_GAIN = 512.0  # of the final norm, so that channel 0 weighs enough after it
_END_WEIGHT = -16.0
_RESIDUAL_WRITERS = ("wo.weight", "w2.weight")
_CODEC_OUTPUT_GAIN = 20.0  # a waveform of about 0.1 RMS


def draw_rows(
    name: str,
    shape: tuple[int, ...],
    rows: slice,
    config: DualARConfig,
    seed: int,
    out: Tensor,
) -> None:
    """Draw some rows of a tensor of the DualAR by its name in `model.loader`, bf16.

    They depend on seed, name, shape and rows alone, so that they may be drawn in any order.

    Args:
        rows: one of `bf16_row_slices(shape)`.
        out: gets them.
    """
    if name.endswith("norm.weight"):
        out.fill_(1.0)
    elif name.endswith("bias"):
        out.zero_()
    else:
        generator = seeded_generator(seed, f"{name} {rows.start}", out.device)
        out.normal_(0.0, _std(name, shape, config), generator=generator)
    _forbid_the_end(name, out, rows, config)


def bf16_row_slices(shape: tuple[int, ...]) -> Iterator[slice]:
    """The pieces in which a tensor is drawn."""
    return row_slices(shape, torch.bfloat16.itemsize)


def _std(name: str, shape: tuple[int, ...], config: DualARConfig) -> float:
    std = 1 / math.sqrt(shape[1])
    if name.endswith(_RESIDUAL_WRITERS):  # keeps the residual stream near 1
        stack = config.fast if name.startswith("fast_") else config.slow
        std /= math.sqrt(2 * stack.num_layers)
    return std


def _forbid_the_end(name: str, piece: Tensor, rows: slice, config: DualARConfig) -> None:
    """What these rows of the slow AR's tensors have in channel 0, see the module."""
    if name == "norm.weight":
        piece[0] = _CONSTANT_GAIN
    elif name == "embeddings.weight":
        piece[:, 0] = _CONSTANT
    elif name in {"codebook_embeddings.weight", "output.weight"}:
        piece[:, 0] = 0.0
    elif rows.start == 0 and name.startswith("layers.") and name.endswith(_RESIDUAL_WRITERS):
        piece[0] = 0.0
    head = "embeddings.weight" if config.tie_word_embeddings else "output.weight"
    assert config.end_id is not None, config
    if name == head and rows.start <= config.end_id < rows.stop:
        piece[config.end_id - rows.start, 0] = _END_WEIGHT


class RandomWeights(Weights):
    """Codec weights that are drawn when they are asked for; f32, on the device."""

    def __init__(self, seed: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__({}, "random", device, dtype)
        self._seed = seed

    def take(self, name: str, *shape: int) -> Tensor:
        out = torch.empty(shape, device=self.device, dtype=torch.float32)
        draw_codec_weight(self._prefix + name, self._seed, out)
        return out


def draw_codec_weight(name: str, seed: int, out: Tensor) -> None:
    """Draw a tensor of the codec, f32, at a scale that keeps the waveform neither silent nor
    clipped."""
    if name.endswith("bias"):
        out.zero_()
    elif name.endswith(("norm.weight", "alpha")):
        out.fill_(1.0)
    elif name.endswith("gamma"):
        out.fill_(0.1)
    else:
        generator = seeded_generator(seed, "codec " + name, out.device)
        out.normal_(0.0, _codec_std(name, tuple(out.shape)), generator=generator)


def _codec_std(name: str, shape: tuple[int, ...]) -> float:
    if name.endswith("codebook.weight"):
        return 1.0
    std = 1 / math.sqrt(math.prod(shape[1:]))
    if name.startswith("decoder."):  # residual units and snakes add up
        std *= _CODEC_OUTPUT_GAIN if shape[0] == 1 else 0.5
    return std


def seeded_generator(seed: int, name: str, device: torch.device) -> torch.Generator:
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "little"))
