"""Blocks for many rows at once: plain matrices and the vendor's matrix products.

The kernels of `ops.linear` stream weights for the few rows of a decode step. With hundreds of rows
the products are arithmetic, and the vendor's library is faster: prefill of many sessions' texts and
decode of more streams than that go this way. It costs the weights a second time: as they are, or in
bf16 where the library has no block-scaled product for a block's shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from model.config import StackConfig
from model.layers import MATRICES, Block
from ops import reference
from ops.attention_launch import PendingAttention
from ops.linear import Input
from ops.plain_linear import PlainWeight, multiplies_scaled, plain_linear
from ops.quantize import Activation, Kind, quantize_rows, quantize_weight, rms_norm
from ops.reference_fp8 import dequantize_weight

# More rows than these are faster here. H200, S2 Pro, a block without attention, us here and through the
# streaming kernels: bf16, 128 rows 91 and 72, 192 rows 113 and 86, 256 rows 120 and 174; bsfp8, 128 rows
# 100 and 57, 144 rows 110 and 146, 512 rows 163 and 194.
MOST_NARROW_ROWS: dict[Kind, int] = {"bf16": 192, "bsfp8": 128}
_MEMORY_SHARE = 0.25  # of what is free that the second copy may take


@dataclass(frozen=True, slots=True)
class WideBlock:
    """A block with plain matrices and the interface of a fused one."""

    config: StackConfig
    kind: Kind  # of what attention hands over
    attention_norm: Tensor
    wqkv: PlainWeight
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    wo: PlainWeight
    o_bias: Tensor | None
    ffn_norm: Tensor
    gate_up: PlainWeight
    down: PlainWeight

    @classmethod
    def of(cls, block: Block, kind: Kind) -> WideBlock:
        """The matrices as blocks of `kind` have them: shared with the block, which may drop them
        afterwards, or in the model's dtype again."""
        device = block.attention_norm.device
        shapes = [getattr(block, name).shape for name in MATRICES]
        is_scaled = kind == "bsfp8" and all(multiplies_scaled(device, *shape) for shape in shapes)
        wqkv, wo, gate_up, down = (_plain(block, name, kind, is_scaled) for name in MATRICES)
        return cls(
            config=block.config,
            kind=wqkv.kind,
            attention_norm=block.attention_norm,
            wqkv=wqkv,
            qkv_bias=block.qkv_bias,
            qk_norm=block.qk_norm,
            wo=wo,
            o_bias=block.o_bias,
            ffn_norm=block.ffn_norm,
            gate_up=gate_up,
            down=down,
        )

    @property
    def matrices(self) -> tuple[Tensor, ...]:
        weights = (self.wqkv, self.wo, self.gate_up, self.down)
        return tuple(tensor for weight in weights for tensor in weight.tensors())

    def project(self, x: Tensor, _: Input | None = None) -> Tensor:
        """See `FusedBlock.project`; the norm is made here."""
        qkv = plain_linear(self._normed(x, self.attention_norm), self.wqkv, self.qkv_bias)
        return qkv.view(x.shape[0], -1, self.config.head_dim)

    def forward(
        self,
        x: Tensor,
        normed: Input | None,
        layer: int,
        attend: Callable[[int, WideBlock, Tensor], Activation | PendingAttention],
        next_norm: Tensor | None,
    ) -> tuple[Tensor, None]:
        """See `FusedBlock.forward`; the next norm is not made."""
        return self.finish(x, attend(layer, self, self.project(x, normed)), next_norm)

    def finish(
        self, x: Tensor, attended: Activation | PendingAttention, _: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """What comes after attention."""
        assert not isinstance(attended, PendingAttention), attended.num_rows
        x = x + plain_linear(attended, self.wo, self.o_bias)
        gated = reference.swiglu(plain_linear(self._normed(x, self.ffn_norm), self.gate_up))
        hidden = gated if self.kind == "bf16" else quantize_rows(gated)
        return x + plain_linear(hidden, self.down), None

    def _normed(self, x: Tensor, weight: Tensor) -> Activation:
        return rms_norm(x, weight, self.config.norm_eps, self.kind)


def has_room(blocks: list[Block]) -> bool:
    """Whether the device has room for their matrices a second time, which on a CPU makes no sense."""
    device = blocks[0].attention_norm.device
    if device.type != "cuda":
        return False
    num_values = sum(getattr(block, name).numel() for block in blocks for name in MATRICES)
    num_free, _ = torch.cuda.mem_get_info(device)
    return bool(num_values * torch.bfloat16.itemsize <= _MEMORY_SHARE * num_free)


def _plain(block: Block, name: str, kind: Kind, is_scaled: bool) -> PlainWeight:
    matrix: Tensor = getattr(block, name).detach()
    matrix = matrix.to_dense() if matrix.is_mkldnn else matrix
    if kind == "bsfp8":
        scale: Tensor | None = getattr(block, f"{name}_scale", None)
        data, scale = quantize_weight(matrix) if scale is None else (matrix, scale.detach())
        if is_scaled:
            return PlainWeight(data.contiguous(), scale.contiguous())
        matrix = dequantize_weight(data, scale).to(block.attention_norm.dtype)
    return PlainWeight(reference.pack_weight(matrix))
