"""MXFP8: the definition, the type that carries the layout; the sm_120a kernel compiles."""

import pytest
import torch

from ops import reference_fp8
from ops.mxfp8 import MXScaled, linear_mx, quantize_mx
from tests.ops.compiling import check_compiles


def test_scales_are_powers_of_two_that_clip_nothing():
    x = torch.randn(7, 256) * torch.exp(4 * torch.randn(7, 1))
    x[2] = 0
    data, exponent = reference_fp8.quantize_mxfp8(x)
    assert exponent.dtype == torch.uint8 and exponent.shape == (7, 8)
    power = 2.0 ** (exponent.double() - 127)
    amax = x.view(7, 8, 32).abs().amax(-1).double()
    assert (amax <= 448 * power).all()
    assert (amax > 224 * power)[amax > 0].all()
    back = reference_fp8.dequantize_mxfp8(data, exponent)
    assert (
        (back - x).abs() <= x.abs() / 16 + power.float().repeat_interleave(32, 1) * 2**-10
    ).all()


def test_an_exact_power_is_not_rounded_up():
    x = torch.zeros(1, 128)
    x[0, 0] = 448 * 2.0**5
    _, exponent = reference_fp8.quantize_mxfp8(x)
    assert exponent[0, 0] == 127 + 5
    _, exponent = reference_fp8.quantize_mxfp8(x * (1 + 2**-20))
    assert exponent[0, 0] == 127 + 6


def test_scales_are_packed_k_major():
    data, exponent = reference_fp8.quantize_mxfp8(torch.randn(5, 384))
    scaled = MXScaled.from_row_major(data, exponent)
    assert scaled.scale.shape == (3, 8) and not scaled.scale[:, 5:].any()
    for row in range(5):
        for group in range(12):
            word = int(scaled.scale[group // 4, row]) & 0xFFFFFFFF
            assert word >> (8 * (group % 4)) & 0xFF == int(exponent[row, group])
    assert torch.equal(scaled.exponents(), exponent)


@pytest.mark.parametrize(("num_rows", "num_columns"), [(4, 512), (8, 256)])
def test_scales_of_another_layout_cannot_be_passed(num_rows, num_columns):
    scaled = quantize_mx(torch.randn(num_rows, num_columns))
    with pytest.raises(AssertionError, match="K-major"):
        MXScaled(scaled.data, scaled.scale.t())
    with pytest.raises(AssertionError, match="K-major"):
        MXScaled(scaled.data, scaled.scale.t().contiguous().t())
    with pytest.raises(AssertionError, match="uint8"):
        MXScaled(scaled.data, scaled.exponents())
    with pytest.raises(AssertionError, match="is not"):
        MXScaled.from_row_major(scaled.data, scaled.exponents()[:, :-1])


def test_linear_is_close_to_the_product_it_quantises():
    x, weight = torch.randn(9, 512), torch.randn(96, 512) / 512**0.5
    out = linear_mx(quantize_mx(x), quantize_mx(weight))
    assert out.dtype == torch.bfloat16
    truth = (x @ weight.T).flatten()
    assert torch.cosine_similarity(out.float().flatten(), truth, dim=0) > 0.998
    exact = quantize_mx(x).dequantize().double() @ quantize_mx(weight).dequantize().double().T
    assert (out.double() - exact).norm() / exact.norm() < 3e-3


def test_the_kernel_compiles():
    """Compiled, never run."""
    check_compiles([("linear_mxfp8.cu", {"COLS": cols}) for cols in (8, 16, 32, 64)])
