"""Products of plain matrices by the vendor's library, against fp64 sums of the same inputs."""

import pytest
import torch

from ops import reference, reference_fp8
from ops.plain_linear import PlainWeight, multiplies_scaled, plain_linear
from ops.quantize import quantize_rows, quantize_weight

S2_PRO = [(6144, 2560), (2560, 4096), (19456, 2560), (2560, 9728)]


def test_matrices_of_the_models_dtype_are_the_references():
    x, weight, bias = torch.randn(3, 320), torch.randn(192, 320), torch.randn(192)
    packed = reference.pack_weight(weight)
    expected = reference.linear(x, packed, bias)
    assert torch.equal(plain_linear(x, PlainWeight(packed), bias), expected)


def test_the_library_has_no_block_scaled_product_elsewhere():
    assert not multiplies_scaled(torch.device("cpu"), 6144, 2560)


def test_rows_of_the_other_kind_are_refused():
    weight = PlainWeight(*quantize_weight(torch.randn(128, 512).bfloat16()))
    with pytest.raises(AssertionError, match="bsfp8"):
        plain_linear(torch.randn(3, 512).bfloat16(), weight)
    with pytest.raises(AssertionError, match="bf16"):
        plain_linear(
            quantize_rows(torch.randn(3, 512).bfloat16()), PlainWeight(torch.randn(4, 512))
        )


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), S2_PRO)
def test_block_scaled_products(n, k):
    """Any number of rows, though the library takes multiples of four."""
    device = torch.device("cuda")
    if not multiplies_scaled(device, n, k):
        pytest.skip("not on this device")
    matrix = (torch.randn(n, k, device=device) / k**0.5).bfloat16()
    weight = PlainWeight(*quantize_weight(matrix))
    exact = reference_fp8.dequantize_weight(weight.data, weight.scale).double()
    bias = torch.randn(n, device=device).bfloat16()
    for num_rows in (1, 3, 129, 130, 192, 511, 512):
        x = quantize_rows(torch.randn(num_rows, k, device=device).bfloat16())
        expected = x.dequantize().double() @ exact.T
        out = plain_linear(x, weight).double()
        assert out.shape == expected.shape
        assert (out - expected).norm() / expected.norm() < 3e-3, num_rows
        both = plain_linear(x, weight, bias).double()
        assert (both - expected - bias.double()).norm() / expected.norm() < 5e-3, num_rows


@pytest.mark.gpu
def test_shapes_the_library_refuses_are_told():
    device = torch.device("cuda")
    assert not multiplies_scaled(device, 320, 832)  # of the embedded model
    assert not multiplies_scaled(device, 448, 512)
