"""Plain PyTorch definitions of the two 8-bit formats: the oracle of the kernels, and the CPU path.

Block-scaled FP8 (Hopper): e4m3 values with an fp32 scale per 1x128 of an activation and per
128x128 of a weight. MXFP8 (Blackwell; its kernel is compiled, never run): e4m3 values with a power
of two (UE8M0) per 1x32 of either.
In both, value = data * scale. Arithmetic is fp32 and every step is one IEEE operation, so that a
kernel can reproduce the bits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128  # values of K that share a scale; and rows of a weight
MX_GROUP = 32  # values of K that share a power of two of MXFP8
E4M3_MAX = 448.0
_MIN_AMAX = 1e-10
_UE8M0_BIAS = 127


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _scale_of(amax: Tensor) -> tuple[Tensor, Tensor]:
    """(factor onto the range of e4m3, scale back), both rounded once from `amax`."""
    top = torch.full_like(amax, E4M3_MAX)  # a number instead would round twice
    factor = top / amax.clamp_min(_MIN_AMAX)
    return factor, factor.reciprocal()


def _to_e4m3(x: Tensor) -> Tensor:
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise an activation [M, K] in groups of 1x128.

    Returns:
        e4m3 [M, K], and fp32 scales [ceil(K / 128), M rounded up to 4], zero behind the last row.
    """
    num_rows, num_columns = x.shape
    num_blocks = ceil_div(num_columns, BLOCK)
    padded = F.pad(x.float(), (0, num_blocks * BLOCK - num_columns))
    groups = padded.view(num_rows, num_blocks, BLOCK)
    factor, scale = _scale_of(groups.abs().amax(-1))
    data = _to_e4m3(groups * factor[..., None]).view(num_rows, -1)[:, :num_columns]
    return data.contiguous(), F.pad(scale.t(), (0, -num_rows % 4)).contiguous()


def dequantize_rows(data: Tensor, scale: Tensor) -> Tensor:
    """fp32 [M, K] of what `quantize_rows` gave."""
    num_rows, num_columns = data.shape
    per_value = scale[:, :num_rows].t().repeat_interleave(BLOCK, 1)[:, :num_columns]
    return data.float() * per_value


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise a weight [N, K] in blocks of 128x128.

    Returns:
        e4m3 [N, K], and fp32 scales [ceil(N / 128), ceil(K / 128)].
    """
    num_rows, num_columns = weight.shape
    rows, columns = ceil_div(num_rows, BLOCK), ceil_div(num_columns, BLOCK)
    padded = F.pad(weight.float(), (0, columns * BLOCK - num_columns, 0, rows * BLOCK - num_rows))
    blocks = padded.view(rows, BLOCK, columns, BLOCK)
    factor, scale = _scale_of(blocks.abs().amax((1, 3)))
    data = _to_e4m3(blocks * factor[:, None, :, None]).view(rows * BLOCK, -1)
    return data[:num_rows, :num_columns].contiguous(), scale


def dequantize_weight(data: Tensor, scale: Tensor) -> Tensor:
    """fp32 [N, K] of what `quantize_weight` gave."""
    num_rows, num_columns = data.shape
    per_value = scale.repeat_interleave(BLOCK, 0)[:num_rows].repeat_interleave(BLOCK, 1)
    return data.float() * per_value[:, :num_columns]


def quantize_mxfp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise a matrix [M, K] in groups of 1x32 with a power of two each, the least that fits.

    Returns:
        e4m3 [M, K], and u8 [M, ceil(K / 32)], row-major: UE8M0, the exponent plus 127.
    """
    num_rows, num_columns = x.shape
    num_groups = ceil_div(num_columns, MX_GROUP)
    padded = F.pad(x.float(), (0, num_groups * MX_GROUP - num_columns))
    groups = padded.view(num_rows, num_groups, MX_GROUP)
    fraction, exponent = torch.frexp(groups.abs().amax(-1).clamp_min(_MIN_AMAX) / E4M3_MAX)
    exponent = exponent - (fraction == 0.5).int()  # a power of two is its own scale
    data = _to_e4m3(torch.ldexp(groups, -exponent[..., None])).view(num_rows, -1)
    return data[:, :num_columns].contiguous(), (exponent + _UE8M0_BIAS).to(torch.uint8)


def dequantize_mxfp8(data: Tensor, scale: Tensor) -> Tensor:
    """fp32 [M, K] of what `quantize_mxfp8` gave."""
    exponent = scale.int() - _UE8M0_BIAS
    per_value = exponent.repeat_interleave(MX_GROUP, 1)[:, : data.shape[1]]
    return torch.ldexp(data.float(), per_value)
