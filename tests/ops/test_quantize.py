"""Block-scaled FP8: the definition, the type that carries the layout, the kernels' bits."""

import pytest
import torch

from ops import quantize, reference, reference_fp8
from ops.quantize import BlockScaled
from tests.ops.compiling import check_compiles

SHAPES = [(1, 2560), (3, 4096), (5, 320), (17, 9728), (64, 1024), (127, 128), (128, 2560)]


def rows(num_rows, num_columns, device="cpu"):
    """Activations of widely different sizes, with a row and a group of zeros."""
    generator = torch.Generator().manual_seed(num_rows * 10007 + num_columns)
    x = torch.randn(num_rows, num_columns, generator=generator)
    x *= torch.exp(3 * torch.randn(num_rows, 1, generator=generator))
    x[-1] = 0
    x[0, :128] = 0
    return x.bfloat16().to(device)


def test_scales_are_amax_over_448_per_group_and_k_major():
    x = rows(3, 320)
    data, scale = reference_fp8.quantize_rows(x)
    assert data.dtype == torch.float8_e4m3fn and data.shape == x.shape
    assert scale.shape == (3, 4) and scale.is_contiguous()
    for row in range(3):
        for group in range(3):
            values = x[row, group * 128 : (group + 1) * 128].float()
            expected = values.abs().max().clamp_min(1e-10) / 448
            torch.testing.assert_close(scale[group, row], expected, rtol=3e-7, atol=0)
    assert not scale[:, 3].any()


def test_rounding_is_to_nearest_with_a_relative_error_of_a_sixteenth_at_most():
    x = torch.randn(16, 1024)
    data, scale = reference_fp8.quantize_rows(x)
    error = (reference_fp8.dequantize_rows(data, scale) - x).abs()
    per_value = scale[:, :16].t().repeat_interleave(128, 1)
    assert (error <= torch.maximum(x.abs() / 16, per_value * 2**-10)).all()


def test_every_e4m3_value_survives():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    finite = codes.float()[~codes.float().isnan()]
    x = torch.cat([finite, torch.full((2,), 448.0)]).view(2, 128)
    x[:, -1] = 448
    data, scale = reference_fp8.quantize_rows(x)
    torch.testing.assert_close(scale[0, :2], torch.ones(2), rtol=2e-7, atol=0)
    assert torch.equal(data.float(), x)


@pytest.mark.parametrize(("n", "k"), [(256, 384), (200, 320), (64, 128)])
def test_weights_have_a_scale_per_128x128(n, k):
    weight = torch.randn(n, k) * torch.exp(torch.randn(n, 1))
    data, scale = quantize.quantize_weight(weight)
    assert data.shape == (n, k) and scale.shape == (-(-n // 128), -(-k // 128))
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            block = weight[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128]
            torch.testing.assert_close(scale[i, j], block.abs().max() / 448, rtol=3e-7, atol=0)
    error = (reference_fp8.dequantize_weight(data, scale) - weight).norm() / weight.norm()
    assert error < 0.04


@pytest.mark.parametrize(("num_rows", "num_columns"), [(4, 512), (8, 2560), (3, 320)])
def test_scales_of_another_layout_cannot_be_passed(num_rows, num_columns):
    """M-major scales read as K-major give plausible numbers at full speed; here they give an error."""
    data, scale = reference_fp8.quantize_rows(rows(num_rows, num_columns))
    row_major = scale[:, :num_rows].t()
    with pytest.raises(AssertionError, match="K-major|contiguous"):
        BlockScaled(data, row_major)
    with pytest.raises(AssertionError, match="contiguous|K-major"):
        BlockScaled(data, scale.t().contiguous().t())
    if num_rows != scale.shape[0]:
        with pytest.raises(AssertionError, match="K-major"):
            BlockScaled(data, row_major.contiguous())
    with pytest.raises(AssertionError, match="float64"):
        BlockScaled(data, scale.double())
    with pytest.raises(AssertionError, match="bfloat16"):
        BlockScaled(data.bfloat16(), scale)
    restrided = BlockScaled.from_row_major(data, row_major.contiguous())
    assert torch.equal(restrided.scale, scale)
    assert torch.equal(restrided.dequantize(), BlockScaled(data, scale).dequantize())


def test_row_major_scales_are_checked_where_they_are_restrided():
    data, scale = reference_fp8.quantize_rows(rows(3, 320))
    with pytest.raises(AssertionError, match="is not"):
        BlockScaled.from_row_major(data, scale)


def test_rms_norm_in_8_bits_quantises_rows_times_weight_and_scales_them():
    x, weight = rows(5, 320), torch.randn(320).bfloat16()
    normed = quantize.rms_norm(x, weight, 1e-6, "bf16")
    assert torch.equal(normed, reference.rms_norm(x, weight, 1e-6))
    scaled = quantize.rms_norm(x, weight, 1e-6, "bsfp8")
    data, scale = reference_fp8.quantize_rows(x.float() * weight.float())
    assert torch.equal(scaled.data.float(), data.float())
    factors = (x.double().square().mean(1) + 1e-6).rsqrt()
    expected = scale[:, :5].double() * factors
    torch.testing.assert_close(scaled.scale[:, :5].double(), expected, rtol=5e-7, atol=0)
    assert not scaled.scale[:, 5:].any()


def poisoned(monkeypatch):
    """What kernels write is allocated as NaN."""

    def empty(num_rows, num_columns, device):
        data = torch.full((num_rows, num_columns), 0x7F, dtype=torch.uint8, device=device)
        shape = quantize.scale_shape(num_rows, num_columns)
        scale = torch.full(shape, torch.nan, device=device)
        return BlockScaled(data.view(torch.float8_e4m3fn), scale)

    monkeypatch.setattr(quantize, "empty_block_scaled", empty)


@pytest.mark.gpu
@pytest.mark.parametrize(("num_rows", "num_columns"), SHAPES)
def test_the_kernels_quantise_bit_for_bit(num_rows, num_columns, monkeypatch):
    poisoned(monkeypatch)
    x = rows(num_rows, num_columns, "cuda")
    out = quantize.quantize_rows(x)
    data, scale = reference_fp8.quantize_rows(x)
    assert torch.equal(out.data.view(torch.uint8), data.view(torch.uint8))
    assert torch.equal(out.scale, scale)


@pytest.mark.gpu
@pytest.mark.parametrize(("num_rows", "num_columns"), SHAPES)
def test_rms_norm_kernels(num_rows, num_columns, monkeypatch):
    """bf16: sums in another order: at most one value in a thousand rounds to its neighbour. 8 bits: the
    definition's bits, and scales but for the root's last."""
    poisoned(monkeypatch)
    x = rows(num_rows, num_columns, "cuda")
    weight = torch.randn(num_columns, device="cuda").bfloat16()
    normed = quantize.rms_norm(x, weight, 1e-6, "bf16")
    expected = reference.rms_norm(x, weight, 1e-6)
    torch.testing.assert_close(normed, expected, rtol=2**-7, atol=1e-30)
    assert (normed != expected).float().mean() < 1e-3
    scaled = quantize.rms_norm(x, weight, 1e-6, "bsfp8")
    definition = quantize.unscaled_norm(x, weight, 1e-6).scaled()
    assert torch.equal(scaled.data.view(torch.uint8), definition.data.view(torch.uint8))
    torch.testing.assert_close(scaled.scale, definition.scale, rtol=3e-7, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bf16", "bsfp8"])
def test_rms_norm_of_rows_that_are_no_neighbours(kind):
    x, weight = rows(14, 320, "cuda"), torch.randn(320, device="cuda").bfloat16()
    got, expected = (
        quantize.rms_norm(part, weight, 1e-6, kind) for part in (x[1::2], x[1::2].contiguous())
    )
    if kind == "bsfp8":
        got, expected = got.dequantize(), expected.dequantize()
    assert torch.equal(got, expected)


def test_kernels_compile():
    check_compiles([("quantize.cu", {"ITEMS": items}) for items in (1, 2, 3)])
