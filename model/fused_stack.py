"""The blocks of a stack as fused rows over packed weights, and their chain.

See `model.dual_ar_cuda`, which runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from model.config import StackConfig
from model.layers import Block, Stack
from model.wide_rows import MOST_NARROW_ROWS, WideBlock
from ops.attended_linear import attended_linear_and_norm
from ops.attention_launch import PendingAttention
from ops.linear import (
    Input,
    PackedWeight,
    gate_up_swiglu,
    linear,
    linear_and_norm,
    pack_bf16,
    pack_fp8,
)
from ops.nvrtc import is_compiling
from ops.quantize import (
    Activation,
    Kind,
    norm_for_linear,
    quantize_weight,
    rms_norm,
)

# [M, H * D]
Attended = Activation | PendingAttention
# (layer, block, qkv [M, H + 2 H_kv, D])
Attend = Callable[[int, "FusedBlock | WideBlock", Tensor], Attended]


@dataclass(frozen=True, slots=True)
class FusedBlock:
    """A block with packed matrices; its own are freed."""

    config: StackConfig
    kind: Kind
    attention_norm: Tensor
    wqkv: PackedWeight
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    wo: PackedWeight
    o_bias: Tensor | None
    ffn_norm: Tensor
    gate_up: PackedWeight
    down: PackedWeight

    @classmethod
    def take(cls, block: Block, kind: Kind) -> FusedBlock:
        dtype = block.attention_norm.dtype
        return cls(
            config=block.config,
            kind=kind,
            attention_norm=block.attention_norm,
            wqkv=take_packed(block, "wqkv", kind, dtype),
            qkv_bias=block.qkv_bias,
            qk_norm=block.qk_norm,
            wo=take_packed(block, "wo", kind, dtype),
            o_bias=block.o_bias,
            ffn_norm=block.ffn_norm,
            gate_up=take_packed(block, "gate_up", kind, dtype, is_gate_up=True),
            down=take_packed(block, "down", kind, dtype),
        )

    def project(self, x: Tensor, normed: Input | None = None) -> Tensor:
        """[M, C] -> queries, keys and values [M, H + 2 H_kv, D], neither normed nor rotated.

        Args:
            normed: `x` after `attention_norm`, if the block before has made that.
        """
        eps = self.config.norm_eps
        if normed is None:
            normed = norm_for_linear(x, self.attention_norm, eps, self.kind)
        qkv = linear(normed, self.wqkv, bias=self.qkv_bias)
        return qkv.view(x.shape[0], -1, self.config.head_dim)

    def forward(
        self,
        x: Tensor,
        normed: Input | None,
        layer: int,
        attend: Callable[[int, FusedBlock, Tensor], Attended],
        next_norm: Tensor | None,
    ) -> tuple[Tensor, Input | None]:
        """[M, C] -> [M, C], and that after the next norm.

        Args:
            normed: see `project`.
            next_norm: weight of that norm, if a block's matrix takes it.
        """
        return self.finish(x, attend(layer, self, self.project(x, normed)), next_norm)

    def finish(
        self, x: Tensor, attended: Attended, next_norm: Tensor | None = None
    ) -> tuple[Tensor, Input | None]:
        """What comes after attention, see `forward`."""
        eps = self.config.norm_eps
        x, normed = attended_linear_and_norm(
            attended, self.wo, self.ffn_norm, eps, bias=self.o_bias, residual=x
        )
        hidden = gate_up_swiglu(normed, self.gate_up)
        if next_norm is None:
            return linear(hidden, self.down, residual=x), None
        return linear_and_norm(hidden, self.down, next_norm, eps, residual=x)


class FusedStack:
    """Fused blocks, the final norm and the RoPE table of a stack."""

    def __init__(self, stack: Stack, kind: Kind, *, has_wide: bool) -> None:
        self.config = stack.config
        self.rope = stack.rope
        self.norm = stack.norm
        self._fused: list[FusedBlock] = []
        self._wide: list[WideBlock] = []
        self._most_narrow_rows = MOST_NARROW_ROWS[kind]
        # One after the other: a block is freed before the next is packed.
        for block in stack.layers:
            assert isinstance(block, Block)
            if has_wide:
                self._wide.append(WideBlock.of(block, kind))
            self._fused.append(FusedBlock.take(block, kind))

    @property
    def nbytes(self) -> int:
        """Of the matrices."""
        packed = [w for b in self._fused for w in (b.wqkv, b.wo, b.gate_up, b.down)]
        tensors = [tensor for weight in packed for tensor in weight.tensors()]
        tensors += [matrix for block in self._wide for matrix in block.matrices]
        return sum(tensor.nbytes for tensor in tensors)

    def blocks(self, num_rows: int) -> Sequence[FusedBlock | WideBlock]:
        """Those that run so many rows fastest."""
        return self._wide if self._wide and num_rows > self._most_narrow_rows else self._fused

    def forward(self, x: Tensor, attend: Attend, normed: Input | None = None) -> Tensor:
        """[M, C] -> [M, C], before the final norm.

        Args:
            normed: see `FusedBlock.project`, of the first block.
        """
        x, _ = run_blocks(self.blocks(len(x)), x, attend, normed)
        return x

    def forward_to_last(
        self, x: Tensor, attend: Attend
    ) -> tuple[Tensor, FusedBlock | WideBlock, Tensor]:
        """[M, C] -> what the last block takes [M, C], the block, and its queries, keys and values
        [M, H + 2 H_kv, D]: all that is wanted of rows which only fill memory."""
        *blocks, last = self.blocks(len(x))
        x, normed = run_blocks(blocks, x, attend, last_norm=last.attention_norm)
        return x, last, last.project(x, normed)

    def norm_for_first(self, x: Tensor) -> Activation:
        """[M, C] after the first block's norm."""
        first = self._fused[0]
        return rms_norm(x, first.attention_norm, self.config.norm_eps, first.kind)

    def norm_for_head(self, x: Tensor) -> Input:
        """The final norm for a head alone, see `norm_for_linear`."""
        return norm_for_linear(x, self.norm, self.config.norm_eps, "bf16")

    def final_norm(self, x: Tensor) -> Tensor:
        """[M, C] -> [M, C] in the model's dtype, for heads."""
        normed = rms_norm(x, self.norm, self.config.norm_eps, "bf16")
        assert isinstance(normed, Tensor)
        return normed


def run_blocks(
    blocks: Sequence[FusedBlock | WideBlock],
    x: Tensor,
    attend: Attend,
    normed: Input | None = None,
    last_norm: Tensor | None = None,
) -> tuple[Tensor, Input | None]:
    """[M, C] -> [M, C], and that after the last norm if the blocks make it.

    Args:
        normed: see `FusedBlock.project`, of the first block.
        last_norm: `attention_norm` of the block after these.
    """
    if is_compiling() and len(blocks) > 3:  # those between launch what the second does
        blocks = [*blocks[:2], *blocks[-1:]]
    next_norms = [block.attention_norm for block in blocks[1:]]
    for layer, block in enumerate(blocks):
        norm = next_norms[layer] if layer < len(next_norms) else last_norm
        x, normed = block.forward(x, normed, layer, attend, norm)
    return x, normed


def take_packed(
    module: nn.Module, name: str, kind: Kind, dtype: torch.dtype, *, is_gate_up: bool = False
) -> PackedWeight:
    """Pack a matrix of a module and drop it from there; its memory is free when this returns.

    Args:
        dtype: of what the matrix makes.
    """
    data, scale = _pop(module, name), _pop(module, f"{name}_scale")
    assert data is not None, name
    if kind == "bf16":
        assert scale is None, f"{name} is quantised"
        return pack_bf16(data, is_gate_up=is_gate_up)
    if scale is None:
        data, scale = quantize_weight(data)
    return pack_fp8(data, scale, is_gate_up=is_gate_up, dtype=dtype)


def _pop(module: nn.Module, name: str) -> Tensor | None:
    tensor: Tensor | None = getattr(module, name, None)
    if tensor is None:
        return None
    delattr(module, name)
    return tensor.to_dense() if tensor.is_mkldnn else tensor.detach()
