"""Blocks for many rows at once: plain matrices and the vendor's matrix products.

The kernels of `ops.linear` stream weights for the few rows of a decode step. With a hundred rows
the products are arithmetic, and the vendor's library is faster: prefill of many sessions' texts and
decode of more streams than that go this way. It costs the weights a second time, in bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from model.config import StackConfig
from model.layers import MATRICES, Block
from ops import reference
from ops.quantize import Activation, Kind, quantize_weight, rms_norm
from ops.reference_fp8 import dequantize_weight

# More rows than these are faster here. H200, S2 Pro: a bf16 layer of 128 rows at 512 positions takes
# 166 us here and 152 us through the streaming kernels; a bsfp8 frame of 192 streams (context 600) 13.7
# and 16.4 ms, a bsfp8 prefill call of 512 rows 9.5 and 13.0 ms.
MOST_NARROW_ROWS: dict[Kind, int] = {"bf16": 128, "bsfp8": 128}
_MEMORY_SHARE = 0.25  # of what is free that the second copy may take


@dataclass(frozen=True, slots=True)
class WideBlock:
    """A block with plain matrices and the interface of a fused one."""

    config: StackConfig
    kind: Kind  # always "bf16": of what attention hands over
    attention_norm: Tensor
    wqkv: Tensor
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    wo: Tensor
    o_bias: Tensor | None
    ffn_norm: Tensor
    gate_up: Tensor
    down: Tensor

    @classmethod
    def of(cls, block: Block, kind: Kind) -> WideBlock:
        """The matrices as blocks of `kind` have them: shared with the block, which may drop them
        afterwards, or the quantised ones again in the model's dtype."""
        return cls(
            config=block.config,
            kind="bf16",
            attention_norm=block.attention_norm,
            wqkv=_plain(block, "wqkv", kind),
            qkv_bias=block.qkv_bias,
            qk_norm=block.qk_norm,
            wo=_plain(block, "wo", kind),
            o_bias=block.o_bias,
            ffn_norm=block.ffn_norm,
            gate_up=_plain(block, "gate_up", kind),
            down=_plain(block, "down", kind),
        )

    @property
    def matrices(self) -> tuple[Tensor, ...]:
        return self.wqkv, self.wo, self.gate_up, self.down

    def project(self, x: Tensor) -> Tensor:
        """[M, C] -> queries, keys and values [M, H + 2 H_kv, D], neither normed nor rotated."""
        qkv = reference.linear(self._normed(x, self.attention_norm), self.wqkv, self.qkv_bias)
        return qkv.view(x.shape[0], -1, self.config.head_dim)

    def forward(
        self, x: Tensor, layer: int, attend: Callable[[int, WideBlock, Tensor], Activation]
    ) -> Tensor:
        """[M, C] -> [M, C]."""
        attended = attend(layer, self, self.project(x))
        assert isinstance(attended, Tensor), self.kind
        x = x + reference.linear(attended, self.wo, self.o_bias)
        gate_up = reference.linear(self._normed(x, self.ffn_norm), self.gate_up, None)
        return x + reference.linear(reference.swiglu(gate_up), self.down, None)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        normed = rms_norm(x, weight, self.config.norm_eps, "bf16")
        assert isinstance(normed, Tensor)
        return normed


def has_room(blocks: list[Block]) -> bool:
    """Whether the device has room for their matrices a second time, which on a CPU makes no sense."""
    device = blocks[0].attention_norm.device
    if device.type != "cuda":
        return False
    num_values = sum(getattr(block, name).numel() for block in blocks for name in MATRICES)
    num_free, _ = torch.cuda.mem_get_info(device)
    return bool(num_values * torch.bfloat16.itemsize <= _MEMORY_SHARE * num_free)


def _plain(block: Block, name: str, kind: Kind) -> Tensor:
    matrix: Tensor = getattr(block, name).detach()
    matrix = matrix.to_dense() if matrix.is_mkldnn else matrix
    if kind == "bsfp8":
        scale: Tensor | None = getattr(block, f"{name}_scale", None)
        quantised = quantize_weight(matrix) if scale is None else (matrix, scale.detach())
        matrix = dequantize_weight(*quantised).to(block.attention_norm.dtype)
    return reference.pack_weight(matrix)
