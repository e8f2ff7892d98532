"""Fused stacks as one kernel each, where few rows make that faster than a launch per op."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from model.config import StackConfig
from model.kv_cache import FrameCache, KVCache
from ops.packing import PackedWeight
from ops.persistent import HeadTensors, LayerTensors, PersistentStack, StackTensors
from ops.persistent_plans import Geometry, is_supported, plan_for
from ops.quantize import Kind

if TYPE_CHECKING:
    from model.dual_ar_cuda import FusedStack


class OneLaunch:
    """A stack with its norm and a head. Only the thread that decodes may launch what this gives:
    two such kernels at once would wait for each other for ever."""

    def __init__(self, stack: FusedStack, head: PackedWeight, kind: Kind) -> None:
        self._stack, self._head, self._kind = stack, head, kind
        config = stack.config
        self._geometry = Geometry(
            config.dim, config.ffn_dim, config.num_heads, config.num_kv_heads, config.head_dim
        )
        self._is_able = _runs_here(stack.norm.device) and _fits(config, self._geometry, kind)
        # By whose memory the blocks read, then by the most rows.
        self._kernels: WeakKeyDictionary[KVCache | FrameCache, dict[int, PersistentStack]] = (
            WeakKeyDictionary()
        )

    def of(self, num_rows: int, owner: KVCache | FrameCache) -> PersistentStack | None:
        """The kernel for so many rows over such memory; None: ops one by one are faster, or the
        only way. The first call for a memory must not happen under graph capture."""
        plan = plan_for(self._kind, num_rows)
        memories = owner.layers if isinstance(owner, FrameCache) else owner.kv
        if plan is None or not self._is_able or not isinstance(memories, list | Tensor):
            return None  # keys and values of e4m3 are no tensor
        kernels = self._kernels.setdefault(owner, {})
        if plan.rows not in kernels:
            layers = []
            for block, memory in zip(self._stack.narrow_blocks, memories, strict=True):
                assert block.qk_norm is not None
                matrices = (block.wqkv, block.wo, block.gate_up, block.down)
                norms = (block.attention_norm, block.ffn_norm, block.qk_norm)
                layers.append(LayerTensors(*matrices, *norms, memory))
            tensors = StackTensors(
                layers,
                HeadTensors(self._stack.norm, self._head),
                self._stack.rope,
                self._stack.config.norm_eps,
                is_fast=isinstance(owner, FrameCache),
            )
            kernels[plan.rows] = PersistentStack(tensors, self._geometry, self._kind, plan)
        return kernels[plan.rows]


def _runs_here(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def _fits(config: StackConfig, geometry: Geometry, kind: Kind) -> bool:
    has_bias = config.has_qkv_bias or config.has_o_bias
    return config.has_qk_norm and not has_bias and is_supported(geometry, kind)
