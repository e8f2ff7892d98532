"""Linears over plain matrices by the vendor's library, for hundreds of rows at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ops import reference
from ops.quantize import Activation, BlockScaled, Kind
from ops.reference_fp8 import BLOCK

_ROW_MULTIPLE = 4  # of x, without which cuBLAS refuses a block-scaled product


@dataclass(frozen=True)
class PlainWeight:
    """A matrix [N, K].

    Attributes:
        data: as `reference.pack_weight` has it, or e4m3, contiguous.
        scale: fp32 [N / 128, K / 128] of e4m3, contiguous.
    """

    data: Tensor
    scale: Tensor | None = None

    @property
    def kind(self) -> Kind:
        return "bf16" if self.scale is None else "bsfp8"

    def tensors(self) -> list[Tensor]:
        return [self.data] if self.scale is None else [self.data, self.scale]


def multiplies_scaled(device: torch.device, num_features: int, num_columns: int) -> bool:
    """Whether the library has a product of 1x128 and 128x128 scales for a matrix [N, K]: on Hopper,
    of whole blocks, where scales of four blocks of K lie together."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    return num_features % BLOCK == 0 and num_columns % (4 * BLOCK) == 0


def plain_linear(x: Activation, weight: PlainWeight, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias: [M, K] -> [M, N]; x is `BlockScaled` for a weight of e4m3."""
    if weight.scale is None:
        assert isinstance(x, Tensor), weight.kind
        return reference.linear(x, weight.data, bias)
    assert isinstance(x, BlockScaled), weight.kind
    num_rows = x.shape[0]
    rows = x.data
    if num_rows % _ROW_MULTIPLE != 0:
        rows = F.pad(rows.view(torch.uint8), (0, 0, 0, -num_rows % _ROW_MULTIPLE)).view(rows.dtype)
    product = F.scaled_mm(
        rows,
        weight.data.t(),
        x.scale.t(),
        F.ScalingType.BlockWise1x128,
        weight.scale.t(),
        F.ScalingType.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )[:num_rows]
    return product if bias is None else product + bias
