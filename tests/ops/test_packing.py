"""Weights as tiles: their order, their swizzle, their scales, and the way back."""

import pytest
import torch

from ops import packing
from ops.linear import unpack
from ops.packing import tile, untile
from ops.quantize import quantize_weight
from tests.ops.linear_cases import packed, random_weight


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(("n", "k"), [(64, 128), (320, 832), (130, 64), (1, 16)])
def test_tiles_hold_the_matrix(n, k, dtype):
    matrix = random_weight(n, k).to(dtype)
    tiles = tile(matrix)
    blocks = -(-k // 128) * (1 if dtype.itemsize == 1 else 2)
    assert tiles.shape == (-(-n // 128) * 2, blocks, 8192) and tiles.is_contiguous()
    rows = untile(tiles, dtype)
    assert torch.equal(rows[:n, :k].float(), matrix.float())
    assert not rows[n:].float().any() and not rows[:, k:].float().any()


def test_a_tile_is_swizzled():
    matrix = torch.arange(64 * 128).view(64, 128).to(torch.uint8)
    matrix[:, ::16] = torch.arange(64)[:, None]  # each chunk begins with its row
    matrix[:, 1::16] = torch.arange(8)  # ... and its number
    (flat,) = tile(matrix, 64).view(1, -1)
    for row in range(64):
        for chunk in range(8):
            start = row * 128 + (chunk ^ (row % 8)) * 16
            assert flat[start] == row and flat[start + 1] == chunk


@pytest.mark.parametrize("kind", ["bf16", "bsfp8"])
def test_unpack(kind):
    weight = random_weight(192, 320)
    matrix = unpack(packed(weight, kind))
    expected = weight if kind == "bf16" else quantize_weight(weight)[0]
    assert torch.equal(matrix.float(), expected.float())


def test_the_order_of_gate_and_up_rows():
    order = packing._gate_up_order(64, torch.device("cpu"))
    assert order[:32].tolist() == [
        *range(0, 8),
        *range(32, 40),
        *range(8, 16),
        *range(40, 48),
    ]
    assert sorted(order.tolist()) == list(range(64))


@pytest.mark.parametrize("num_rows", [2 * 832, 2 * 640, 2 * 9728])
def test_tile_scales_follow_the_rows_of_the_tiles(num_rows):
    """Also where 128 rows of scale straddle gate and up."""
    scale = torch.rand(-(-num_rows // 128), 3)
    per_row = scale.repeat_interleave(128, 0)[:num_rows]
    tiles = -(-num_rows // 256) * 4
    for is_gate_up in (False, True):
        tile_scale = packing._tile_scales(scale, num_rows, tiles, is_gate_up)
        rows = per_row
        if is_gate_up:
            rows = per_row[packing._gate_up_order(num_rows, scale.device)]
        expanded = tile_scale.transpose(1, 2)[:, None, :, None, :].expand(-1, 4, -1, 8, -1)
        assert torch.equal(expanded.reshape(tiles * 64, 3)[:num_rows], rows)
