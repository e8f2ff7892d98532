"""All blocks of a stack and its head for few rows in one launch (`csrc/persistent.cu`), on CUDA (sm_90) alone.

The definition is what the blocks do one op after the other: `norm_for_linear`, `linear`,
`decode_attention` or `frame_attention`, `gate_up_swiglu`; then the head. A row's bits depend on its own data and on
the variant (`Plan`), not on its neighbours.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ops import nvrtc
from ops.packing import PackedWeight
from ops.persistent_plans import Geometry, Plan, deal
from ops.quantize import Kind


class LayerTensors(NamedTuple):
    """A block's weights and memory.

    Attributes:
        memory: bf16 pages [P, 2, H_kv, PAGE, D], or of the fast AR [2, capacity, H_kv, num_held, D].
    """

    wqkv: PackedWeight
    wo: PackedWeight
    gate_up: PackedWeight
    down: PackedWeight
    attention_norm: Tensor
    ffn_norm: Tensor
    qk_norm: Tensor
    memory: Tensor


class HeadTensors(NamedTuple):
    """What follows the last block: a norm [dim], and bf16 weights of logits."""

    norm: Tensor
    weight: PackedWeight


class StackTensors(NamedTuple):
    """All of a stack.

    Attributes:
        rope: complex64 [positions, 1, D / 2].
        eps: of the norms.
        is_fast: whether the memory is that of the fast AR.
    """

    layers: Sequence[LayerTensors]
    head: HeadTensors
    rope: Tensor
    eps: float
    is_fast: bool


class _Stack(ctypes.Structure):
    """`Stack` of persistent_shape.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("layers", "begins", "x", "norm", "head")),
        *((name, ctypes.c_void_p) for name in ("normed", "logits", "qkv", "attended")),
        *((name, ctypes.c_void_p) for name in ("middle", "hidden", "last", "parts")),
        *((name, ctypes.c_void_p) for name in ("epochs", "rope", "page_table")),
        *((name, ctypes.c_void_p) for name in ("slots", "positions")),
        *((name, ctypes.c_int32) for name in ("num_layers", "num_rows", "dim", "ffn")),
        *((name, ctypes.c_int32) for name in ("num_heads", "num_kv_heads", "num_logits")),
        *((name, ctypes.c_int32) for name in ("max_splits", "max_pages", "start", "num_positions")),
        *((name, ctypes.c_int32) for name in ("capacity", "num_held")),
        *((name, ctypes.c_float) for name in ("eps", "scale_log2")),
    )


class PersistentStack:
    """Blocks of one stack, ready to be launched. Launches of all stacks of a device must follow each
    other in one stream: CTAs of two at once would wait for room that the other holds."""

    def __init__(
        self,
        tensors: StackTensors,
        geometry: Geometry,
        kind: Kind,
        plan: Plan,
        *,
        is_level: bool = False,
        defines: dict[str, int | str] | None = None,
    ) -> None:
        """`defines`: in place of the plan's, for measurements and tests."""
        layers, head, device = tensors.layers, tensors.head, tensors.rope.device
        self._tensors, self._geometry, self._plan = tensors, geometry, plan
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._num_ctas = num_sms - plan.spare
        self._layers = torch.tensor(
            [_pointers(layer, kind) for layer in layers], dtype=torch.int64, device=device
        )
        self._begins = torch.tensor(
            deal(geometry, head.weight.out_features, self._num_ctas, is_level=is_level),
            dtype=torch.int32,
            device=device,
        )
        assert head.weight.kind == "bf16" and int(self._begins[-1, 1]) > 0, head.weight.kind
        splits = plan.max_splits(geometry, self._num_ctas)
        self._max_splits = 1 if tensors.is_fast else splits
        self._scratch = _scratch(geometry, plan.rows, self._num_ctas, self._max_splits, device)
        page_size = None if tensors.is_fast else layers[0].memory.shape[3]
        self._shared_bytes = plan.shared_bytes(geometry, kind)
        self._kernel = nvrtc.kernel(
            "persistent.cu",
            "persistent",
            defines={**plan.defines(geometry, kind, page_size), **(defines or {})},
        )
        residents = self._kernel.residents(plan.threads, self._shared_bytes)
        assert residents > 0, (plan, self._shared_bytes)  # all CTAs must be there at once

    def decode(
        self, x: Tensor, page_table: Tensor, slots: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Rows of distinct slots (or of the dummy slot) through all blocks and the head.

        Args:
            x: bf16 [M, dim].
            page_table: i32 [num_slots + 1, max_pages].
            slots, positions: i64 [M].

        Returns:
            bf16 [M, dim] after the norm, bf16 [M, num_logits].
        """
        assert not self._tensors.is_fast
        logits, normed = self._logits(x), torch.empty_like(x)
        stack = self._stack(x, logits)
        stack.normed = normed.data_ptr()
        stack.page_table, stack.max_pages = page_table.data_ptr(), page_table.shape[1]
        stack.slots, stack.positions = slots.data_ptr(), positions.data_ptr()
        self._launch(stack)
        return normed, logits

    def frame(self, x: Tensor, start: int, num_positions: int) -> Tensor:
        """Rows x [R * num_positions, dim], laid out [R, num_positions], at positions from `start`
        on.

        Returns:
            bf16 [R, num_logits] of the last positions.
        """
        assert self._tensors.is_fast
        _, capacity, _, num_held, _ = self._tensors.layers[0].memory.shape
        assert len(x) // num_positions <= capacity and start + num_positions <= num_held <= 16, (
            len(x),
            start,
            num_positions,
        )
        logits = self._logits(x[::num_positions])
        stack = self._stack(x, logits)
        stack.start, stack.num_positions = start, num_positions
        stack.capacity, stack.num_held = capacity, num_held
        self._launch(stack)
        return logits

    def _logits(self, rows: Tensor) -> Tensor:
        return rows.new_empty(len(rows), self._tensors.head.weight.out_features)

    def _stack(self, x: Tensor, logits: Tensor) -> _Stack:
        geometry, tensors = self._geometry, self._tensors
        assert x.dtype == torch.bfloat16 and x.is_contiguous(), (x.dtype, x.stride())
        assert 0 < len(x) <= self._plan.rows and x.shape[1] == geometry.dim, x.shape
        scratch = self._scratch
        return _Stack(
            layers=self._layers.data_ptr(),
            begins=self._begins.data_ptr(),
            x=x.data_ptr(),
            norm=tensors.head.norm.data_ptr(),
            head=tensors.head.weight.data.data_ptr(),
            logits=logits.data_ptr(),
            **{name: tensor.data_ptr() for name, tensor in scratch._asdict().items()},
            rope=tensors.rope.data_ptr(),
            num_layers=len(tensors.layers),
            num_rows=len(x),
            dim=geometry.dim,
            ffn=geometry.ffn,
            num_heads=geometry.num_heads,
            num_kv_heads=geometry.num_kv_heads,
            num_logits=logits.shape[1],
            max_splits=self._max_splits,
            eps=tensors.eps,
            scale_log2=math.log2(math.e) / math.sqrt(geometry.head_dim),
            num_positions=1,
        )

    def _launch(self, stack: _Stack) -> None:
        self._kernel.launch(
            (self._num_ctas,), (self._plan.threads,), [stack], shared_bytes=self._shared_bytes
        )


class _Tensors(NamedTuple):
    """Scratch of launches, named as in `_Stack`; words are i64."""

    qkv: Tensor
    attended: Tensor
    middle: Tensor
    hidden: Tensor
    last: Tensor
    parts: Tensor
    epochs: Tensor


def _scratch(
    geometry: Geometry, rows: int, num_ctas: int, splits: int, device: torch.device
) -> _Tensors:
    def words(*shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.int64, device=device)

    (qkv, dim), (_, attended), _, (_, hidden) = geometry.matrices
    return _Tensors(
        qkv=words(rows, qkv // 2),
        attended=words(rows, attended // 2),
        middle=words(rows, dim // 2),
        hidden=words(rows, hidden // 2),
        last=words(rows, dim // 2),
        parts=words(rows * splits * geometry.num_heads, geometry.head_dim + 2),
        epochs=torch.zeros(num_ctas, dtype=torch.int32, device=device),
    )


def _pointers(layer: LayerTensors, kind: Kind) -> list[int]:
    """`Layer` of persistent_shape.cuh."""
    weights = (layer.wqkv, layer.wo, layer.gate_up, layer.down)
    assert all(weight.kind == kind for weight in weights), kind
    scales = [0 if w.tile_scale is None else w.tile_scale.data_ptr() for w in weights]
    others = (layer.attention_norm, layer.ffn_norm, layer.qk_norm, layer.memory)
    return [
        *(weight.data.data_ptr() for weight in weights),
        *scales,
        *(tensor.data_ptr() for tensor in others),
    ]
