"""MXFP8 (e4m3, UE8M0 per 1x32): type, packing of scales, linear.

The definition is what runs. The sm_120a kernel is compiled in the tests and was never run: no such
card was at hand. The layout of the scales is part of the type, as in `ops.quantize`.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ops import nvrtc, reference_fp8
from ops.reference_fp8 import BLOCK, ceil_div

_FEATURES_PER_CTA = 16
_THREADS = 256
_WIDTHS = (8, 16, 32, 64)


@dataclass(frozen=True)
class MXScaled:
    """A matrix [M, K], K a multiple of 128: value = data * 2^(exponent - 127) of its 1x32.

    Attributes:
        data: e4m3 [M, K], contiguous.
        scale: i32 [K / 128, M rounded up to 4], contiguous: K-major, four exponents to a word, that
            of the lowest K in the lowest byte; zero behind row M.
    """

    data: Tensor
    scale: Tensor

    def __post_init__(self) -> None:
        assert self.data.dtype == torch.float8_e4m3fn, self.data.dtype
        assert self.data.dim() == 2 and self.data.is_contiguous(), self.data.stride()
        assert self.scale.dtype == torch.int32, self.scale.dtype
        num_rows, num_columns = self.data.shape
        assert num_columns % BLOCK == 0, num_columns
        expected = (num_columns // BLOCK, ceil_div(num_rows, 4) * 4)
        assert tuple(self.scale.shape) == expected and self.scale.is_contiguous(), (
            f"scales of {num_rows, num_columns} values are K-major {expected}, contiguous, "
            f"not {tuple(self.scale.shape)} with strides {self.scale.stride()}"
        )

    @classmethod
    def from_row_major(cls, data: Tensor, exponent: Tensor) -> MXScaled:
        """From exponents u8 [M, K / 32] as files hold them: the one place that packs."""
        num_rows, num_columns = data.shape
        expected = (num_rows, num_columns // reference_fp8.MX_GROUP)
        assert exponent.dtype == torch.uint8, exponent.dtype
        assert tuple(exponent.shape) == expected, f"{tuple(exponent.shape)} is not {expected}"
        words = exponent.contiguous().view(torch.int32)  # little-endian
        return cls(data, F.pad(words.t(), (0, -num_rows % 4)).contiguous())

    def exponents(self) -> Tensor:
        """u8 [M, K / 32]: `from_row_major` undone."""
        words = self.scale[:, : self.data.shape[0]].t().contiguous()
        return words.view(torch.uint8)

    def dequantize(self) -> Tensor:
        """fp32 [M, K]."""
        return reference_fp8.dequantize_mxfp8(self.data, self.exponents())


def quantize_mx(x: Tensor) -> MXScaled:
    """Quantise rows of an activation or of a weight [M, K]."""
    return MXScaled.from_row_major(*reference_fp8.quantize_mxfp8(x))


def linear_mx(x: MXScaled, weight: MXScaled) -> Tensor:
    """x @ weight.T: [M, K], [N, K] -> bf16 [M, N], sums in fp32."""
    assert x.data.shape[1] == weight.data.shape[1], (x.data.shape, weight.data.shape)
    if not _has_kernel(x.data.device):
        return F.linear(x.dequantize(), weight.dequantize()).bfloat16()
    num_rows, num_columns = x.data.shape
    num_features = weight.data.shape[0]
    out = torch.empty(num_rows, num_features, dtype=torch.bfloat16, device=x.data.device)
    cols = next((width for width in _WIDTHS if num_rows <= width), _WIDTHS[-1])
    kernel = nvrtc.kernel("linear_mxfp8.cu", "linear_mxfp8", defines={"COLS": cols})
    kernel.launch(
        (ceil_div(num_features, _FEATURES_PER_CTA), ceil_div(num_rows, cols)),
        (_THREADS,),
        [
            x.data,
            x.scale,
            ctypes.c_int32(x.scale.shape[1]),
            weight.data,
            weight.scale,
            ctypes.c_int32(weight.scale.shape[1]),
            out,
            ctypes.c_int32(num_rows),
            ctypes.c_int32(num_features),
            ctypes.c_int32(num_columns),
        ],
    )
    return out


def _has_kernel(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 12
