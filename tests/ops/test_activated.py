"""The check of gate and up's kernels tells noise of the last bits from faults."""

import pytest
import torch

from ops import reference
from ops.quantize import quantize_rows
from tests.ops.activated import assert_activated


def moved(activated, place, factor):
    """Quantised with one group's values or scale wrong by a factor."""
    scaled = quantize_rows(activated)
    if place == "scale":
        scaled.scale[0, : len(activated)] *= factor
    else:
        scaled.data.view(torch.uint8)[0, 5:8] ^= 1  # to the next step, or the one before
    return scaled


def test_activated_rows_are_told_from_wrong_ones():
    torch.manual_seed(0)
    activated = reference.swiglu(3 * torch.randn(37, 2 * 384)).bfloat16()
    assert_activated(quantize_rows(activated), activated)
    noisy = activated * (1 + 1e-3 * torch.randn(activated.shape)).bfloat16()
    assert_activated(quantize_rows(noisy), activated)
    for place, factor in (("scale", 1.03), ("scale", 1.019), ("values", 1)):
        large = activated.clone()
        large[0, 5:8] = activated[0].abs().max()
        with pytest.raises(AssertionError):
            assert_activated(moved(large, place, factor), large)
