"""The golden checkpoints: tiny random weights and what the reference implementation makes of them.

`tests/golden/dual_ar_*` hold config.json, a tokenizer.json that knows the end of speech alone,
model.safetensors and expected.safetensors (fp32):
prompt i32 [1+K, T]; prefill_logits, prefill_hidden of the last positions; greedy_frames i32
[12, 1+K]; slow_logits [12, V] and fast_logits [12, K-1, 64] at each step, unrestricted.
"""

import functools
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from model.dual_ar import DualAR
from model.loader import load_dual_ar

GOLDEN = Path(__file__).parents[1] / "golden"
NAMES = ("dual_ar_qwen3", "dual_ar_long", "dual_ar_projected")
END_ID = 270  # of the end of speech
TOLERANCE = 1e-4  # absolute, on logits and hidden states in fp32


class Golden(NamedTuple):
    name: str
    model: DualAR
    expected: dict[str, Tensor]

    @property
    def prompt(self) -> Tensor:
        return self.expected["prompt"]


@functools.cache
def golden(name: str) -> Golden:
    model = load_dual_ar(GOLDEN / name, "cpu", torch.float32)
    return Golden(name, model, load_file(GOLDEN / name / "expected.safetensors"))


def max_error(got: Tensor, expected: Tensor) -> float:
    assert got.shape == expected.shape, (got.shape, expected.shape)
    return float((got - expected).abs().max())
