"""The sampling parameters of a stream. What they do is defined in `ops.sampling`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from model.errors import SamplingError
from ops.sampling import MAX_TOP_K

MAX_TEMPERATURE = 2.0


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
