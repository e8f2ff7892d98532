"""Transformer blocks that the slow and the fast AR share.

Weights have the layout that decoding wants: queries, keys and values fused, gate and up fused, and
every matrix packed the way its device multiplies fastest once it is loaded (`pack`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from model.config import StackConfig
from model.kv_cache import Attend
from ops import reference
from ops.reference_fp8 import BLOCK, ceil_div

MATRICES = ("wqkv", "wo", "gate_up", "down")  # of a block


class Storage(NamedTuple):
    """Where the weights of a model lie, and as what."""

    device: torch.device
    dtype: torch.dtype
    is_quantised: bool = False  # the matrices of its blocks, see `Block`

    def parameter(self, *shape: int) -> nn.Parameter:
        """Uninitialised weights: the loader fills every one of them."""
        data = torch.empty(shape, device=self.device, dtype=self.dtype)
        return nn.Parameter(data, requires_grad=False)


def pack(module: nn.Module, *names: str) -> None:
    """Replace the named matrices of a module by their packed form; their storage is freed."""
    for name in names:
        packed = reference.pack_weight(module.get_parameter(name))
        delattr(module, name)
        module.register_buffer(name, packed, persistent=False)


class Block(nn.Module):
    """Pre-norm attention and SwiGLU, each added to the stream [R, C].

    A quantised block holds its matrices as e4m3 [out, in] with `NAME_scale` f32
    [ceil(out/128), ceil(in/128)] beside each (value = data * scale). It only carries them: what
    runs them is `model.dual_ar_cuda`.
    """

    def __init__(self, config: StackConfig, storage: Storage) -> None:
        super().__init__()
        self.config = config
        self.is_quantised = storage.is_quantised
        dim, num_rotated = config.dim, config.num_heads + config.num_kv_heads
        self.attention_norm = storage.parameter(dim)
        self.ffn_norm = storage.parameter(dim)
        for name, rows, columns in (
            ("wqkv", config.qkv_dim, dim),
            ("wo", dim, config.q_dim),
            ("gate_up", 2 * config.ffn_dim, dim),
            ("down", dim, config.ffn_dim),
        ):
            self._add_matrix(name, rows, columns, storage)
        self.qkv_bias = self.o_bias = self.qk_norm = None
        if config.has_qkv_bias:
            self.qkv_bias = storage.parameter(config.qkv_dim)
        if config.has_o_bias:
            self.o_bias = storage.parameter(dim)
        if config.has_qk_norm:  # one row per head, so that queries and keys are one norm
            self.qk_norm = storage.parameter(num_rotated, config.head_dim)

    wqkv: Tensor
    wo: Tensor
    gate_up: Tensor
    down: Tensor

    def _add_matrix(self, name: str, rows: int, columns: int, storage: Storage) -> None:
        if self.is_quantised:
            blocks = ceil_div(rows, BLOCK), ceil_div(columns, BLOCK)
            scales = storage._replace(dtype=torch.float32)
            setattr(self, f"{name}_scale", scales.parameter(*blocks))
            storage = storage._replace(dtype=torch.float8_e4m3fn)
        setattr(self, name, storage.parameter(rows, columns))

    def finish_loading(self) -> None:
        """Pack the matrices; the block runs with or without."""
        if not self.is_quantised:
            pack(self, *MATRICES)

    def forward(self, x: Tensor, layer: int, rope: Tensor, attend: Attend) -> Tensor:
        """Run the block on rows.

        Args:
            x: [R, C].
            layer: index of this block in its stack, for `attend`.
            rope: complex64 [R, 1, D/2] or [1, 1, D/2], table rows of the positions of x.
            attend: memory of the rows.

        Returns:
            [R, C].
        """
        eps = self.config.norm_eps
        heads = self._project(x, rope)
        attended = attend(layer, *heads).flatten(1)
        x = x + reference.linear(attended, self.wo, self.o_bias)
        gate_up = reference.linear(reference.rms_norm(x, self.ffn_norm, eps), self.gate_up, None)
        return x + reference.linear(reference.swiglu(gate_up), self.down, None)

    def remember(self, x: Tensor, layer: int, rope: Tensor, attend: Attend) -> None:
        """Only leave keys and values in the memory: all that prefill needs of the last block."""
        attend(layer, *self._project(x, rope))

    def _project(self, x: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """Normed and rotated queries [R, H, D], and keys with values [R, 2, H_kv, D]."""
        config = self.config
        normed = reference.rms_norm(x, self.attention_norm, config.norm_eps)
        qkv = reference.linear(normed, self.wqkv, self.qkv_bias).view(
            x.shape[0], -1, config.head_dim
        )
        rotated = qkv[:, : -config.num_kv_heads]  # queries and keys
        source = rotated
        if self.qk_norm is not None:
            source = reference.rms_norm(rotated, self.qk_norm, config.norm_eps)
        reference.rope(source, rope, out=rotated)
        kv = qkv[:, config.num_heads :]
        return qkv[:, : config.num_heads], kv.view(x.shape[0], 2, -1, config.head_dim)


class Stack(nn.Module):
    """Blocks and the final norm."""

    def __init__(self, config: StackConfig, storage: Storage) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(Block(config, storage) for _ in range(config.num_layers))
        self.norm = storage.parameter(config.dim)
        self.rope: Tensor
        self.register_buffer(
            "rope",
            reference.rope_table(config.max_len, config.head_dim, config.rope_base, storage.device),
            persistent=False,
        )

    def forward(self, x: Tensor, rope: Tensor, attend: Attend) -> Tensor:
        """[R, C] -> [R, C] after the final norm. `rope`: the rows of `self.rope` for x."""
        for layer, block in enumerate(self.layers):
            x = block(x, layer, rope, attend)
        return reference.rms_norm(x, self.norm, self.config.norm_eps)

    def remember(self, x: Tensor, rope: Tensor, attend: Attend) -> None:
        """Leave the keys and values of x [T, C] in the memory of `attend`; compute no more."""
        last = len(self.layers) - 1
        for layer, block in enumerate(self.layers):
            assert isinstance(block, Block)
            if layer == last:
                block.remember(x, layer, rope, attend)
            else:
                x = block(x, layer, rope, attend)
