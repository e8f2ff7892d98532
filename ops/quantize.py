"""Activations in block-scaled FP8, and RMSNorm that quantises as it goes.

The layout of the scales is part of the type: `BlockScaled` holds them K-major and can be had only
with scales of that shape and stride, so that scales of another layout are never read as these.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ops import nvrtc, reference, reference_fp8
from ops.reference_fp8 import BLOCK, ceil_div

Kind = Literal["bf16", "bsfp8"]

MAX_PENDING_ROWS = 2
_MAX_PENDING_COLUMNS = 4096
_VALUES_PER_THREAD = 8  # 16 bytes of bf16
_MAX_THREADS = 512


@dataclass(frozen=True)
class BlockScaled:
    """An activation [M, K]: value = data * scale of its group of 1x128.

    Attributes:
        data: e4m3 [M, K], contiguous.
        scale: fp32 [ceil(K / 128), M rounded up to 4], contiguous: K-major, one run of M scales per
            group of columns. What lies behind row M counts for nothing.
    """

    data: Tensor
    scale: Tensor

    def __post_init__(self) -> None:
        assert self.data.dtype == torch.float8_e4m3fn, self.data.dtype
        assert self.data.dim() == 2 and self.data.is_contiguous(), self.data.stride()
        assert self.scale.dtype == torch.float32, self.scale.dtype
        assert tuple(self.scale.shape) == scale_shape(*self.data.shape), (
            f"scales of {tuple(self.data.shape)} values are K-major "
            f"{scale_shape(*self.data.shape)}, not {tuple(self.scale.shape)}"
        )
        assert self.scale.is_contiguous(), f"scales are contiguous, not {self.scale.stride()}"

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @property
    def device(self) -> torch.device:
        return self.data.device

    def dequantize(self) -> Tensor:
        """fp32 [M, K]."""
        return reference_fp8.dequantize_rows(self.data, self.scale)

    def take(self, rows: Tensor) -> BlockScaled:
        """Some of the rows.

        Args:
            rows: i64 [R].
        """
        scale = self.scale[:, rows]
        padded = torch.nn.functional.pad(scale, (0, -len(rows) % 4))
        return BlockScaled(self.data.view(torch.uint8)[rows].view(self.data.dtype), padded)

    @classmethod
    def from_row_major(cls, data: Tensor, scale: Tensor) -> BlockScaled:
        """From scales fp32 [M, ceil(K / 128)] as files hold them: the one place that re-strides."""
        num_rows, num_columns = data.shape
        expected = (num_rows, ceil_div(num_columns, BLOCK))
        assert tuple(scale.shape) == expected, f"{tuple(scale.shape)} is not {expected}"
        return cls(data, torch.nn.functional.pad(scale.t(), (0, -num_rows % 4)).contiguous())


Activation = Tensor | BlockScaled


@dataclass(frozen=True)
class PendingNorm:
    """rms_norm(x, weight, eps, kind) that the kernel of the next linear does itself.

    Attributes:
        x: bf16 [M, C], M at most `MAX_PENDING_ROWS`.
        weight: bf16 [C].
    """

    x: Tensor
    weight: Tensor
    eps: float
    kind: Kind

    @property
    def shape(self) -> torch.Size:
        return self.x.shape

    @property
    def device(self) -> torch.device:
        return self.x.device

    def run(self) -> Activation:
        return rms_norm(self.x, self.weight, self.eps, self.kind)


@dataclass(frozen=True)
class UnscaledNorm:
    """RMSNorm of rows but for their factors, which only whole rows tell: the next linear, in 8 bits,
    multiplies its sums by them.

    Attributes:
        rows: the rows times the norm's weight, [M, C].
        squares: fp32 like the scales of `rows`: of the rows, summed per group of columns.
    """

    rows: BlockScaled
    squares: Tensor
    eps: float

    def __post_init__(self) -> None:
        assert self.squares.shape == self.rows.scale.shape, self.squares.shape
        assert self.squares.dtype == torch.float32 and self.squares.is_contiguous()

    @property
    def shape(self) -> torch.Size:
        return self.rows.shape

    @property
    def device(self) -> torch.device:
        return self.rows.device

    def scaled(self) -> BlockScaled:
        """The norm: the rows with their factors in the scales, added up as the kernels do."""
        padded = torch.nn.functional.pad(self.squares, (0, 0, 0, -len(self.squares) % 4))
        every_fourth = functools.reduce(torch.add, padded.view(-1, 4, padded.shape[1]))
        first, second, third, fourth = every_fourth
        mean = ((first + second) + (third + fourth)) * (1 / self.shape[1])
        return BlockScaled(self.rows.data, self.rows.scale * (mean + self.eps).rsqrt())

    def dequantize(self) -> Tensor:
        """fp32 [M, C], normed."""
        return self.scaled().dequantize()


def scale_shape(num_rows: int, num_columns: int) -> tuple[int, int]:
    """Shape of the scales of an activation [M, K]."""
    return ceil_div(num_columns, BLOCK), ceil_div(num_rows, 4) * 4


def empty_block_scaled(num_rows: int, num_columns: int, device: torch.device) -> BlockScaled:
    """Uninitialised, for a kernel to write."""
    data = torch.empty(num_rows, num_columns, dtype=torch.float8_e4m3fn, device=device)
    shape = scale_shape(num_rows, num_columns)
    return BlockScaled(data, torch.empty(shape, dtype=torch.float32, device=device))


def empty_unscaled_norm(
    num_rows: int, num_columns: int, eps: float, device: torch.device
) -> UnscaledNorm:
    """Uninitialised, for a kernel to write."""
    rows = empty_block_scaled(num_rows, num_columns, device)
    return UnscaledNorm(rows, torch.empty_like(rows.scale), eps)


def unscaled_norm(x: Tensor, weight: Tensor, eps: float) -> UnscaledNorm:
    """The definition, of rows [M, C]; the products with the weight are rounded once, to e4m3."""
    exact = x.float()
    rows = BlockScaled(*reference_fp8.quantize_rows(exact * weight.float()))
    padding = (0, -x.shape[1] % BLOCK, 0, -x.shape[0] % 4)
    squares = torch.nn.functional.pad(exact.square(), padding)
    groups = squares.view(len(squares), -1, BLOCK)
    while groups.shape[2] > 1:  # neighbours first, as the kernels add up
        groups = groups[..., ::2] + groups[..., 1::2]
    return UnscaledNorm(rows, groups.squeeze(2).t().contiguous(), eps)


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise a weight [N, K] in blocks of 128x128, anywhere, at load time.

    Returns:
        e4m3 [N, K], and fp32 scales [ceil(N / 128), ceil(K / 128)].
    """
    return reference_fp8.quantize_weight(weight)


def quantize_rows(x: Tensor) -> BlockScaled:
    """Quantise bf16 [M, K] in groups of 1x128; the kernel's bits are the definition's."""
    if x.device.type != "cuda":
        return BlockScaled(*reference_fp8.quantize_rows(x))
    num_rows, num_columns = x.shape
    assert x.dtype == torch.bfloat16 and x.is_contiguous() and num_columns % 8 == 0, x.shape
    out = empty_block_scaled(num_rows, num_columns, x.device)
    blocks = ceil_div(num_columns, _MAX_THREADS * _VALUES_PER_THREAD)
    threads = _threads(ceil_div(num_columns, blocks))
    nvrtc.kernel("quantize.cu", "quantize_rows").launch(
        (num_rows, blocks),
        (threads,),
        [x, out.data, out.scale, *_ints(num_rows, num_columns, out.scale.shape[1])],
    )
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float, kind: Kind) -> Activation:
    """RMSNorm of bf16 [M, C] rows, neighbours or not, as `linear` of weights of that kind takes it.

    "bsfp8" is `unscaled_norm` with the rows' factors in the scales: its values have the same bits,
    whether this makes them or the linear before does.
    """
    if x.device.type != "cuda":
        if kind == "bf16":
            return reference.rms_norm(x, weight, eps)
        return unscaled_norm(x, weight, eps).scaled()
    num_rows, num_columns = x.shape
    assert x.dtype == weight.dtype == torch.bfloat16, (x.dtype, weight.dtype)
    row_stride = x.stride(0)
    assert x.stride(1) == 1 and row_stride % 8 == num_columns % 8 == 0, (x.stride(), num_columns)
    threads = _threads(num_columns)
    items = ceil_div(num_columns, threads * _VALUES_PER_THREAD)
    kernel = nvrtc.kernel("quantize.cu", f"rms_norm_{kind}", defines={"ITEMS": items})
    if kind == "bf16":
        out = x.new_empty(num_rows, num_columns)
        args = [x, weight, out, None, ctypes.c_float(eps)]
        sizes = _ints(num_rows, num_columns, row_stride, 0)
        kernel.launch((num_rows,), (threads,), [*args, *sizes])
        return out
    scaled = empty_block_scaled(num_rows, num_columns, x.device)
    args = [x, weight, scaled.data, scaled.scale, ctypes.c_float(eps)]
    sizes = _ints(num_rows, num_columns, row_stride, scaled.scale.shape[1])
    kernel.launch((num_rows,), (threads,), [*args, *sizes])
    return scaled


def norm_for_linear(x: Tensor, weight: Tensor, eps: float, kind: Kind) -> Activation | PendingNorm:
    """`rms_norm` for a linear alone: left to the linear's kernel where that saves a launch.

    With few rows, that each CTA of the linear normalises them again costs less than a kernel that
    all of them wait for. The bits are those of `rms_norm`.
    """
    num_rows, num_columns = x.shape
    is_small = num_rows <= MAX_PENDING_ROWS and num_columns <= _MAX_PENDING_COLUMNS
    is_small = is_small and x.is_contiguous()
    if x.device.type == "cuda" and is_small and num_columns % _VALUES_PER_THREAD == 0:
        return PendingNorm(x, weight, eps, kind)
    return rms_norm(x, weight, eps, kind)


def _threads(num_columns: int) -> int:
    return min(ceil_div(num_columns, 32 * _VALUES_PER_THREAD) * 32, _MAX_THREADS)


def _ints(*values: int) -> list[nvrtc.Argument]:
    return [ctypes.c_int32(value) for value in values]
