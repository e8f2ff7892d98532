"""Keys and values in 8 bits: what a row loses, and that rows are rows wherever they lie."""

import pytest
import torch

from ops.fp8_rows import MAX_ROW_ERROR, Fp8Rows, dequantized
from tests.ops.attention_cases import bits


def rows_of(kind: str, head_dim: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(head_dim)
    values = torch.randn(500, head_dim, generator=generator)
    if kind == "outlier dimensions":  # as keys of trained models have them
        values[:, ::17] *= 30
    elif kind == "any magnitude":
        values *= torch.exp(10 * torch.randn(500, 1, generator=generator))
    elif kind == "heavy tails":
        values *= torch.exp(2 * torch.randn(values.shape, generator=generator))
    return values.to(dtype)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["normal", "outlier dimensions", "any magnitude", "heavy tails"])
def test_no_row_loses_more_than_the_bound(kind, dtype, head_dim):
    values = rows_of(kind, head_dim, dtype)
    read = dequantized(Fp8Rows.of(values), torch.float32)
    error = (read - values.float()).norm(dim=-1) / values.float().norm(dim=-1)
    assert error.max() < MAX_ROW_ERROR
    if kind == "normal":
        assert 0.02 < error.mean() < 0.03  # and not by much less: it is 8 bits


def test_the_largest_value_of_a_row_is_kept_to_the_scales_precision():
    """A dimension that outweighs all others, as keys have, does not lose 2^-4 of itself."""
    values = rows_of("outlier dimensions", 128)
    read = dequantized(Fp8Rows.of(values), torch.float32)
    largest = values.float().abs().argmax(-1, keepdim=True)
    torch.testing.assert_close(
        read.gather(1, largest), values.float().gather(1, largest), rtol=2**-8, atol=0
    )


def test_zeros_stay_zeros_and_what_was_read_is_written_again_unchanged():
    values = torch.cat([torch.zeros(1, 64), rows_of("any magnitude", 64)]).bfloat16()
    rows = Fp8Rows.of(values)
    read = dequantized(rows, torch.bfloat16)
    assert not read[0].any()
    assert torch.equal(dequantized(Fp8Rows.of(read), torch.bfloat16), read)


def test_rows_written_anywhere_are_the_rows_quantised():
    pages = Fp8Rows.empty(5, 2, 3, 8, 64, device=torch.device("cpu"))
    pages.data.view(torch.uint8).fill_(0x7F)
    pages.scale.fill_(torch.nan)
    before = bits(pages).clone()
    kv = torch.randn(4, 2, 3, 64)
    page, offset = torch.tensor([3, 1, 3, 4]), torch.tensor([0, 7, 5, 2])
    pages[page, :, :, offset] = kv
    assert torch.equal(bits(pages[page, :, :, offset]), bits(Fp8Rows.of(kv)))
    before[page, :, :, offset] = bits(Fp8Rows.of(kv))
    assert torch.equal(bits(pages), before)


def test_parts_are_views_of_the_whole():
    rows = Fp8Rows.of(torch.randn(3, 2, 4, 64))
    rows[1, :, 2:] = torch.zeros(2, 2, 64)
    for part in (rows[1], rows.unbind(0)[1]):
        assert not dequantized(part, torch.float32)[:, 2:].any()
        part[0, 0] = torch.ones(64)
        read = dequantized(rows, torch.float32)[1, 0, 0]
        torch.testing.assert_close(read, torch.ones(64), rtol=2**-8, atol=0)
    assert rows.nbytes == 3 * 2 * 4 * (64 + 2) and len(rows) == 3


def test_scales_of_another_shape_are_refused():
    rows = Fp8Rows.of(torch.randn(3, 2, 64))
    with pytest.raises(AssertionError):
        Fp8Rows(rows.data, rows.scale.t().contiguous())
