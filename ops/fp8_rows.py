"""Keys and values in 8 bits: e4m3 with one bf16 scale for each row of D values.

A row is the keys, or the values, of one position and one key/value head. It is quantised when it is
written and never again, so what a position holds does not depend on when its neighbours came.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Relative error (norms) of a row after quantising: e4m3 rounds by up to 2^-4 of a value, roundings spread
# evenly are 2^-5.2 (0.027) of the norm. Values under 2^-15 of the largest have fewer bits, under 2^-19 none.
MAX_ROW_ERROR = 2.0**-4
_E4M3_MAX = 448.0
_MIN_AMAX = 1e-10


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """Rows [.., D], value = data * scale; indexed by all dimensions but the last.

    Attributes:
        data: e4m3 [.., D].
        scale: bf16 [..].
    """

    data: Tensor
    scale: Tensor

    def __post_init__(self) -> None:
        assert self.data.dtype == torch.float8_e4m3fn, self.data.dtype
        assert self.scale.dtype == torch.bfloat16, self.scale.dtype
        assert self.data.shape[:-1] == self.scale.shape, (self.data.shape, self.scale.shape)

    @classmethod
    def empty(cls, *shape: int, device: torch.device) -> Fp8Rows:
        data = torch.empty(shape, dtype=torch.uint8, device=device)
        scale = torch.empty(shape[:-1], dtype=torch.bfloat16, device=device)
        return cls(data.view(torch.float8_e4m3fn), scale)

    @classmethod
    def of(cls, rows: Tensor) -> Fp8Rows:
        """Quantise: every step is one IEEE operation in fp32, so that a kernel has the same bits."""
        exact = rows.float()
        top = exact.abs().amax(-1).clamp_min(_MIN_AMAX)
        # Not by a scalar: that is a product with its reciprocal on some devices.
        scale = (top / torch.full_like(top, _E4M3_MAX)).bfloat16()
        scaled = exact * scale.float().reciprocal()[..., None]
        return cls(scaled.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn), scale)

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scale.nbytes

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """[.., D]."""
        return (self.data.float() * self.scale.float()[..., None]).to(dtype)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: Any) -> Fp8Rows:
        """Rows chosen as tensors are indexed; a view where that is one."""
        return Fp8Rows(_at(self.data, index), self.scale[index])

    def __setitem__(self, index: Any, rows: Tensor) -> None:
        """Quantises rows into their places."""
        quantised = Fp8Rows.of(rows)
        self.data.view(torch.uint8)[index] = quantised.data.view(torch.uint8)
        self.scale[index] = quantised.scale

    def unbind(self, dim: int) -> Sequence[Fp8Rows]:
        """Along one of the dimensions but the last."""
        assert 0 <= dim < self.scale.dim(), (dim, self.shape)
        parts = zip(self.data.unbind(dim), self.scale.unbind(dim), strict=True)
        return [Fp8Rows(data, scale) for data, scale in parts]


KvRows = Tensor | Fp8Rows


def _at(data: Tensor, index: Any) -> Tensor:
    """By bytes: not every device gathers e4m3."""
    return data.view(torch.uint8)[index].view(torch.float8_e4m3fn)


def dequantized(rows: KvRows, dtype: torch.dtype) -> Tensor:
    """Rows as attention's definition reads them; bf16 ones are returned as they are."""
    return rows.dequantize(dtype) if isinstance(rows, Fp8Rows) else rows
