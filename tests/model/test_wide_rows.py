"""Blocks for many rows at once against the streaming ones, on the device that runs both."""

import pytest
import torch

from model.config import StackConfig
from model.fused_stack import FusedBlock
from model.layers import MATRICES, Block, Storage
from model.wide_rows import WideBlock
from ops.plain_linear import multiplies_scaled
from ops.quantize import quantize_rows

CONFIG = StackConfig(
    num_layers=1,
    dim=1024,
    num_heads=8,
    num_kv_heads=2,
    head_dim=128,
    ffn_dim=1536,
    rope_base=1e4,
    norm_eps=1e-6,
    max_len=128,
    has_qk_norm=False,
    has_qkv_bias=True,
    has_o_bias=True,
)


def random_block(device):
    block = Block(CONFIG, Storage(device, torch.bfloat16))
    for name, parameter in block.named_parameters():
        scale = parameter.shape[-1] ** -0.5 if name in MATRICES else 1.0
        parameter.copy_(torch.randn(parameter.shape, device=device) * scale)
    return block


def attend(_layer, block, qkv):
    """The queries instead of what they would read, in the kind that the block wants."""
    queries = qkv[:, : CONFIG.num_heads].flatten(1).contiguous()
    return queries if block.kind == "bf16" else quantize_rows(queries)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bf16", "bsfp8"])
@torch.inference_mode()
def test_a_wide_block_is_the_fused_one(kind):
    """The vendor's products and ours of the same numbers; a few values of the hidden layer fall on
    the other side of a rounding step of e4m3."""
    device = torch.device("cuda")
    block = random_block(device)
    wide = WideBlock.of(block, kind)
    is_scaled = kind == "bsfp8" and multiplies_scaled(device, CONFIG.dim, CONFIG.q_dim)
    assert wide.kind == ("bsfp8" if is_scaled else "bf16")
    assert len(wide.matrices) == (8 if is_scaled else 4)
    fused = FusedBlock.take(block, kind)
    for num_rows in (129, 256, 510):
        x = torch.randn(num_rows, CONFIG.dim, device=device).bfloat16()
        expected = fused.forward(x, None, 0, attend, None)[0].double()
        out = wide.forward(x, None, 0, attend, None)[0].double()
        error = (out - expected).norm() / (expected - x.double()).norm()
        # e4m3 both ways: sums in another order differ by a last bit of bf16, and where that crosses a
        # step of e4m3 it becomes a step: 0.0167 to 0.0204 for twelve seeds on an H200; 0.030 where
        # only one quantises what it multiplies.
        limit = 1e-2 if kind == "bf16" else 2.5e-2 if is_scaled else 5e-2
        assert error < limit, (num_rows, float(error))
