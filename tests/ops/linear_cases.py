"""Rows and weights for the tests of linears, what they stand for in fp64, and launches into NaNs."""

import torch

from ops import linear as packed_linear
from ops import reference_fp8
from ops.linear import pack_bf16, pack_fp8
from ops.quantize import BlockScaled, quantize_rows, quantize_weight

S2_PRO = [(6144, 2560), (2560, 4096), (2560, 9728), (4097, 2560)]
OTHERS = [(2048, 1024), (1024, 2048), (1024, 3072), (448, 320), (320, 832), (1024, 640)]
GATE_UP = [(19456, 2560), (6144, 1024), (1664, 320), (1280, 320)]
ROWS = [1, 2, 3, 4, 7, 8, 13, 16, 31, 32, 33, 64, 65, 96, 127, 128, 192]


def random_rows(num_rows, num_columns, device="cpu"):
    return torch.randn(num_rows, num_columns, device=device).bfloat16()


def random_weight(n, k, device="cpu"):
    return (torch.randn(n, k, device=device) / k**0.5).bfloat16()


def packed(weight, kind, *, is_gate_up=False):
    if kind == "bf16":
        return pack_bf16(weight, is_gate_up=is_gate_up)
    return pack_fp8(*quantize_weight(weight), is_gate_up=is_gate_up)


def activation(x, kind):
    return x if kind == "bf16" else quantize_rows(x)


def exact(weight, kind):
    """The fp64 matrix that a packed weight stands for."""
    if kind == "bf16":
        return weight.double()
    return reference_fp8.dequantize_weight(*quantize_weight(weight)).double()


def exact_rows(x, kind):
    return x.double() if kind == "bf16" else quantize_rows(x).dequantize().double()


def poisoned_launch(x, weight, num_features, **options):
    """`launch` into NaNs."""
    shape = (x.shape[0], num_features)
    if weight.is_gate_up and weight.kind == "bsfp8":
        out = BlockScaled(
            torch.full(shape, 0x7F, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn),
            torch.full((-(-shape[1] // 128), -(-shape[0] // 4) * 4), torch.nan, device="cuda"),
        )
    else:
        out = torch.full(shape, torch.nan, dtype=torch.bfloat16, device="cuda")
    packed_linear.launch(x, weight, out, **options)
    return out
