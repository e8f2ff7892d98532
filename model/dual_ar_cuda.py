"""The DualAR as fused rows: what decoding and prefill run once the weights are packed for kernels.

A row is one position of one slot. A decode step is B rows of B slots, a prefill chunk is rows of one
slot at consecutive positions; both go through the same blocks and the same packed weights. Every op
dispatches on the device, so this runs on a CPU as well (through the ops' PyTorch definitions),
where it is tested against the eager model.

Many rows at once leave the packed weights alone and go through plain ones (`model.wide_rows`).

With kind "bsfp8" the matrices of the blocks are e4m3 with a scale per 128x128 block, and what they
multiply is quantised per 128 values of a row by the op that makes it. Embeddings, norms, heads and
the projection between the stacks stay in the model's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from model.config import StackConfig
from model.frame_state import Frame, FrameState, Riders
from model.kv_cache import KVCache
from model.layers import Block, Stack
from model.sampling import MAX_TOP_K
from model.wide_rows import MOST_NARROW_ROWS, WideBlock, has_room
from ops.attended_linear import attended_linear_and_norm
from ops.attention import decode_attention, frame_attention, paged_attention, rope_append
from ops.attention_launch import PendingAttention
from ops.attention_shared import shared_attention
from ops.embedding import embed_rows
from ops.linear import (
    Input,
    PackedWeight,
    gate_up_swiglu,
    linear,
    linear_and_norm,
    pack_bf16,
    pack_fp8,
)
from ops.quantize import (
    Activation,
    Kind,
    norm_for_linear,
    quantize_weight,
    rms_norm,
)
from ops.sampling import Carried, Draws, Head, advance, draw_codebook, draw_semantic

if TYPE_CHECKING:
    from model.dual_ar import DualAR

MAX_PREFILL_ROWS = 128  # of one pass through the streaming kernels
MAX_WIDE_PREFILL_ROWS = 512  # of one pass through plain matrices

# Of the fast AR: 1.1 ms (S2 Pro, 1 stream, H200), in which a host launches a frame. With 3 the device
# waited 3 % of the time.
_TAIL_PASSES = 4

# [M, H * D]
Attended = Activation | PendingAttention
# (layer, block, qkv [M, H + 2 H_kv, D])
Attend = Callable[[int, "FusedBlock | WideBlock", Tensor], Attended]


@dataclass(frozen=True, slots=True)
class FusedBlock:
    """A block with packed matrices; its own are freed.

    Attributes:
        next_norm: `attention_norm` of the block after it.
    """

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
    next_norm: Tensor | None

    @classmethod
    def take(cls, block: Block, next_norm: Tensor | None, kind: Kind) -> FusedBlock:
        dtype = block.attention_norm.dtype
        return cls(
            config=block.config,
            kind=kind,
            attention_norm=block.attention_norm,
            wqkv=_take(block, "wqkv", kind, dtype),
            qkv_bias=block.qkv_bias,
            qk_norm=block.qk_norm,
            wo=_take(block, "wo", kind, dtype),
            o_bias=block.o_bias,
            ffn_norm=block.ffn_norm,
            gate_up=_take(block, "gate_up", kind, dtype, is_gate_up=True),
            down=_take(block, "down", kind, dtype),
            next_norm=next_norm,
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
    ) -> tuple[Tensor, Input | None]:
        """[M, C] -> [M, C], and `normed` of the next block, see `project`."""
        eps = self.config.norm_eps
        attended = attend(layer, self, self.project(x, normed))
        x, normed = attended_linear_and_norm(
            attended, self.wo, self.ffn_norm, eps, bias=self.o_bias, residual=x
        )
        hidden = gate_up_swiglu(normed, self.gate_up)
        if self.next_norm is None:
            return linear(hidden, self.down, residual=x), None
        return linear_and_norm(hidden, self.down, self.next_norm, eps, residual=x)


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
        blocks = [block for block in stack.layers if isinstance(block, Block)]
        next_norms = [*(block.attention_norm for block in blocks[1:]), None]
        for block, next_norm in zip(blocks, next_norms, strict=True):
            if has_wide:
                self._wide.append(WideBlock.of(block, kind))
            self._fused.append(FusedBlock.take(block, next_norm, kind))

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

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        """[M, C] -> [M, C], before the final norm."""
        x, _ = run_blocks(self.blocks(len(x)), x, attend)
        return x

    def norm_for_head(self, x: Tensor) -> Input:
        """The final norm for a head alone, see `norm_for_linear`."""
        return norm_for_linear(x, self.norm, self.config.norm_eps, "bf16")

    def final_norm(self, x: Tensor) -> Tensor:
        """[M, C] -> [M, C] in the model's dtype, for heads."""
        normed = rms_norm(x, self.norm, self.config.norm_eps, "bf16")
        assert isinstance(normed, Tensor)
        return normed


def run_blocks(
    blocks: Sequence[FusedBlock | WideBlock], x: Tensor, attend: Attend
) -> tuple[Tensor, Input | None]:
    """[M, C] -> [M, C], and that as the block after these takes it, if they have made that."""
    normed = None
    for layer, block in enumerate(blocks):
        if isinstance(block, WideBlock):
            x = block.forward(x, layer, attend)
        else:
            x, normed = block.forward(x, normed, layer, attend)
    return x, normed


class FusedDualAR:
    """Takes the matrices out of a loaded DualAR, which keeps the rest and the interface."""

    def __init__(self, model: DualAR, kind: Kind) -> None:
        self.kind = kind
        config = model.config
        self._num_codebooks = config.num_codebooks
        self._num_ranks = min(MAX_TOP_K, config.num_semantic, config.codebook_size)
        self._semantic_ids = model.semantic_ids
        self._embeddings = model.embeddings
        self._codebook_embeddings = model.codebook_embeddings
        self._fast_embeddings = model.fast.embeddings
        self._head = Head(model.head_tokens, model.head_codes)
        stacks = (model.slow, model.fast.stack)
        blocks = [block for block in model.modules() if isinstance(block, Block)]
        self._has_wide = has_wide = has_room(blocks)
        self._slow, self._fast = (FusedStack(stack, kind, has_wide=has_wide) for stack in stacks)
        self._semantic_head = _take(model, "restricted_head", "bf16", model.dtype)
        self._code_head = _take(model.fast, "output", "bf16", model.dtype)
        self._project_in, self._project_in_bias = None, model.fast.project_in_bias
        if config.needs_projection:
            self._project_in = _take(model.fast, "project_in", "bf16", model.dtype)

    @property
    def nbytes(self) -> int:
        """Of the packed weights, and of plain ones beside them."""
        heads = [self._semantic_head, self._code_head]
        heads += [self._project_in] if self._project_in is not None else []
        num_bytes = sum(tensor.nbytes for weight in heads for tensor in weight.tensors())
        return num_bytes + self._slow.nbytes + self._fast.nbytes

    @property
    def max_prefill_rows(self) -> int:
        """Of one call of `prefill_rows` that is worth it."""
        return MAX_WIDE_PREFILL_ROWS if self._has_wide else MAX_PREFILL_ROWS

    def prefill(self, rows: Tensor, cache: KVCache, slot: int, start: int) -> None:
        """See `DualAR.prefill`."""
        for begin in range(0, rows.shape[1], self.max_prefill_rows):
            chunk = rows[:, begin : begin + self.max_prefill_rows].t().contiguous()
            first, num_rows = start + begin, len(chunk)
            slots = torch.full((num_rows,), slot, device=rows.device)
            positions = torch.arange(first, first + num_rows, device=rows.device)
            self.prefill_rows(chunk, slots, positions, cache)

    def prefill_rows(self, rows: Tensor, slots: Tensor, positions: Tensor, cache: KVCache) -> None:
        """See `DualAR.prefill_rows`. Neighbours of one slot share what attention reads."""

        def append(layer: int, block: FusedBlock | WideBlock, qkv: Tensor) -> Tensor:
            eps, table = block.config.norm_eps, cache.page_table
            where = (cache.kv[layer], table, slots, positions)
            return rope_append(qkv, block.qk_norm, eps, self._slow.rope, *where)

        def attend(layer: int, block: FusedBlock | WideBlock, qkv: Tensor) -> Activation:
            where = (cache.kv[layer], cache.page_table, slots, positions)
            return paged_attention(append(layer, block, qkv), *where, block.kind, is_span=True)

        x = self._embed(rows, None)
        *blocks, last = self._slow.blocks(len(x))
        x, normed = run_blocks(blocks, x, attend)
        qkv = last.project(x, normed) if isinstance(last, FusedBlock) else last.project(x)
        append(len(blocks), last, qkv)

    def decode_frame(
        self,
        state: FrameState,
        slots: Tensor,
        cache: KVCache,
        on_choice: Callable[[Tensor], None] | None,
        on_tail: Callable[[], None] | None,
        riders: Riders | None,
        *,
        shares_pages: bool,
    ) -> Frame:
        """See `DualAR.decode_frame`."""
        hidden = self._decode_hidden(state, slots, cache, riders, shares_pages=shares_pages)
        draws = Draws(
            slots,
            *(state.temperature, state.top_p, state.top_k, state.seed, state.frame_idx),
            num_ranks=self._num_ranks,
            is_chained=True,  # all of it is older than `embed_rows`
        )
        codes = torch.empty(len(slots), self._num_codebooks, dtype=torch.int32, device=slots.device)
        logits = linear(hidden, self._semantic_head)
        if self._project_in is not None:
            hidden = linear(hidden, self._project_in, bias=self._project_in_bias)
        draw = draw_semantic(
            logits, state.window, draws, self._head, hidden, self._fast_embeddings, codes
        )
        if on_choice is not None:
            on_choice(draw.is_end)
        self._decode_codes(draw.x, state, draws, codes, on_tail)
        carried = Carried(state.rows, state.position, state.window, state.frame_idx, cache.history)
        advance(carried, slots, draw.choice, codes, self._head.tokens)
        return Frame(codes, draw.is_end)

    def next_logits(self, state: FrameState, slots: Tensor, cache: KVCache) -> Tensor:
        """See `DualAR.next_logits`."""
        return linear(self._decode_hidden(state, slots, cache), self._semantic_head).float()

    def _decode_hidden(
        self,
        state: FrameState,
        slots: Tensor,
        cache: KVCache,
        riders: Riders | None = None,
        *,
        shares_pages: bool = False,
    ) -> Tensor:
        """[B, C], the slow AR's hidden state after the final norm."""
        positions = state.position.index_select(0, slots)

        def attend_alone(layer: int, block: FusedBlock | WideBlock, qkv: Tensor) -> Attended:
            eps, table = block.config.norm_eps, cache.page_table
            where = (cache.kv[layer], table, slots, positions)
            # Chained: positions and table are older than `embed_rows`.
            rope, scratch = self._slow.rope, cache.scratch
            return decode_attention(
                *(qkv, block.qk_norm, eps, rope, *where, block.kind),
                is_chained=True,
                scratch=scratch,
                wo=block.wo if isinstance(block, FusedBlock) else None,
            )

        x = self._embed(state.rows, slots)
        attend: Attend = attend_alone
        if riders is None:
            if shares_pages:
                attend = self._attend_shared(slots, positions, cache, is_chained=True)
            return self._slow.final_norm(self._slow.forward(x, attend))
        if cache.history is not None:
            cache.history.index_put_((riders.slots, riders.positions), riders.rows)
        x = torch.cat([x, self._embed(riders.rows, None)])
        of_all = torch.cat([slots, riders.slots]), torch.cat([positions, riders.positions])
        attend = self._attend_shared(*of_all, cache, is_chained=False)
        return self._slow.final_norm(self._slow.forward(x, attend)[: len(slots)])

    def _attend_shared(
        self, slots: Tensor, positions: Tensor, cache: KVCache, *, is_chained: bool
    ) -> Attend:
        """All rows' keys and values are written before anybody reads."""

        def attend(layer: int, block: FusedBlock | WideBlock, qkv: Tensor) -> Activation:
            where = (cache.kv[layer], cache.page_table, slots, positions)
            eps, rope = block.config.norm_eps, self._slow.rope
            q = rope_append(qkv, block.qk_norm, eps, rope, *where)
            return shared_attention(q, *where, block.kind, is_chained=is_chained)

        return attend

    def _decode_codes(
        self,
        x: Tensor,
        state: FrameState,
        draws: Draws,
        codes: Tensor,
        on_tail: Callable[[], None] | None,
    ) -> None:
        """Sample the residual codebooks into columns 1..K-1 of `codes`.

        Positions 0 (the hidden state) and 1 (codebook 0) are known together and run as one pass.

        Args:
            x: [2B, C], laid out [B, 2].
            codes: i32 [B, K].
        """
        start, num_rows = 0, len(codes)
        for codebook in range(1, self._num_codebooks):
            if on_tail is not None and codebook == max(1, self._num_codebooks - _TAIL_PASSES):
                on_tail()
            x = self._fast.forward(x, self._frame_attend(state, start, codebook + 1 - start))
            last = x.view(num_rows, -1, x.shape[1])[:, -1]
            logits = linear(self._fast.norm_for_head(last), self._code_head)
            x = draw_codebook(logits, codebook, draws, self._fast_embeddings, codes)
            start = codebook + 1

    def _frame_attend(self, state: FrameState, start: int, num_positions: int) -> Attend:
        def attend(layer: int, block: FusedBlock | WideBlock, qkv: Tensor) -> Attended:
            eps, memory = block.config.norm_eps, state.fast.layers[layer]
            rope, where = self._fast.rope, (start, num_positions)
            wo = block.wo if isinstance(block, FusedBlock) else None
            # Chained: a sampler lies between two passes.
            return frame_attention(
                qkv, block.qk_norm, eps, rope, memory, *where, block.kind, is_chained=True, wo=wo
            )

        return attend

    def _embed(self, rows: Tensor, slots: Tensor | None) -> Tensor:
        return embed_rows(
            rows, slots, self._embeddings, self._codebook_embeddings, self._semantic_ids
        )


def _take(
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
