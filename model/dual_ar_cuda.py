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

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from model.frame_state import Frame, FrameState, Riders
from model.fused_stack import Attend, Attended, FusedBlock, FusedStack, take_packed
from model.kv_cache import KVCache
from model.layers import Block
from model.wide_rows import WideBlock, has_room
from ops.attention import decode_attention, frame_attention, rope_append
from ops.attention_shared import shared_attention, shared_decode_attention
from ops.embedding import embed_rows
from ops.fp8_rows import KvRows
from ops.linear import linear
from ops.quantize import MAX_PENDING_ROWS, Activation, BlockScaled, Kind
from ops.sampling import Draws, Head, advance, draw_codebook, draw_semantic

if TYPE_CHECKING:
    from model.dual_ar import DualAR

MAX_PREFILL_ROWS = 128  # of one pass through the streaming kernels
MAX_WIDE_PREFILL_ROWS = 512  # of one pass through plain matrices

# Of the fast AR: 1.1 ms (S2 Pro, 1 stream, H200), in which a host launches a frame. With 3 the device
# waited 3 % of the time.
_TAIL_PASSES = 4


class _Places(NamedTuple):
    """Where the keys and values of rows are: slots and positions i64 [M]."""

    cache: KVCache
    slots: Tensor
    positions: Tensor

    def of(self, layer: int) -> tuple[KvRows, Tensor, Tensor, Tensor]:
        """Pages, page table, slots, positions, as the ops take them."""
        return self.cache.kv[layer], self.cache.page_table, self.slots, self.positions


class FusedDualAR:
    """Takes the matrices out of a loaded DualAR, which keeps the rest and the interface."""

    def __init__(self, model: DualAR, kind: Kind) -> None:
        self.kind = kind
        config = model.config
        self._num_codebooks = config.num_codebooks
        self._semantic_ids = model.semantic_ids
        self._embeddings = model.embeddings
        self._codebook_embeddings = model.codebook_embeddings
        self._fast_embeddings = model.fast.embeddings
        self._normed_embeddings: BlockScaled | None = None
        self._head = Head(model.head_tokens, model.head_codes)
        stacks = (model.slow, model.fast.stack)
        blocks = [block for block in model.modules() if isinstance(block, Block)]
        self._has_wide = has_wide = has_room(blocks)
        self._slow, self._fast = (FusedStack(stack, kind, has_wide=has_wide) for stack in stacks)
        if kind == "bsfp8":
            normed = self._fast.norm_for_first(self._fast_embeddings)
            self._normed_embeddings = normed if isinstance(normed, BlockScaled) else None
        self._semantic_head = take_packed(model, "restricted_head", "bf16", model.dtype)
        self._code_head = take_packed(model.fast, "output", "bf16", model.dtype)
        self._project_in, self._project_in_bias = None, model.fast.project_in_bias
        if config.needs_projection:
            self._project_in = take_packed(model.fast, "project_in", "bf16", model.dtype)

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
        places = _Places(cache, slots, positions)

        self._fill(self._embed(rows, None), places)

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
        draws = state.draws(slots, is_chained=True)  # all of it is older than `embed_rows`
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
        advance(state.carried(cache.history), slots, draw.choice, codes, self._head.tokens)
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
        places = _Places(cache, slots, state.position.index_select(0, slots))

        def attend(layer: int, block: FusedBlock | WideBlock, qkv: Tensor) -> Attended:
            # Both may start early: positions and table are older than `embed_rows`.
            rotary = (block.qk_norm, block.config.norm_eps, self._slow.rope)
            if shares_pages:
                return shared_decode_attention(*(qkv, *rotary, *places.of(layer), block.kind))
            return decode_attention(
                *(qkv, *rotary, *places.of(layer), block.kind),
                is_chained=True,
                scratch=cache.scratch,
                wo=block.wo if isinstance(block, FusedBlock) else None,
            )

        x = self._embed(state.rows, slots)
        if riders is None:
            x = self._slow.forward(x, attend)
        else:
            x = self._decode_with(riders, x, places)
        return self._slow.final_norm(x)

    def _decode_with(self, riders: Riders, x: Tensor, places: _Places) -> Tensor:
        """[B, C] -> [B, C], before the final norm: the rows at `places`, once those of prompts are
        written."""
        cache, num_rows = places.cache, len(x)
        if cache.history is not None:
            cache.history.index_put_((riders.slots, riders.positions), riders.rows)
        slots = torch.cat([places.slots, riders.slots])
        of_all = _Places(cache, slots, torch.cat([places.positions, riders.positions]))
        x = torch.cat([x, self._embed(riders.rows, None)])
        x, q = self._fill(x, of_all)
        last = self._slow.blocks(num_rows)[-1]
        attended = shared_attention(q[:num_rows], *places.of(-1), last.kind)
        return last.finish(x[:num_rows], attended)[0]

    def _fill(self, x: Tensor, places: _Places) -> tuple[Tensor, Tensor]:
        """Write keys and values of rows [M, C] in all layers, of all before anybody reads.

        Returns:
            What the last block takes [M, C], and its queries [M, H, D].
        """

        def append(layer: int, block: FusedBlock | WideBlock, qkv: Tensor) -> Tensor:
            eps, rope = block.config.norm_eps, self._slow.rope
            return rope_append(qkv, block.qk_norm, eps, rope, *places.of(layer))

        def attend(layer: int, block: FusedBlock | WideBlock, qkv: Tensor) -> Activation:
            return shared_attention(append(layer, block, qkv), *places.of(layer), block.kind)

        x, last, qkv = self._slow.forward_to_last(x, attend)
        return x, append(-1, last, qkv)

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
        start, num_rows, normed = 0, len(codes), None
        # Of fewer rows the linear makes its norm itself.
        table = self._normed_embeddings if num_rows > MAX_PENDING_ROWS else None
        for codebook in range(1, self._num_codebooks):
            if on_tail is not None and codebook == max(1, self._num_codebooks - _TAIL_PASSES):
                on_tail()
            attend = self._frame_attend(state, start, codebook + 1 - start)
            if start == 0 and 2 * num_rows > MAX_PENDING_ROWS:
                x = self._first_pass(x, state)
            else:
                x = self._fast.forward(x, attend, normed)
                x = x.view(num_rows, -1, x.shape[1])[:, -1]
            logits = linear(self._fast.norm_for_head(x), self._code_head)
            x, normed = draw_codebook(logits, codebook, draws, self._fast_embeddings, codes, table)
            start = codebook + 1

    def _first_pass(self, x: Tensor, state: FrameState) -> Tensor:
        """[2B, C], laid out [B, 2] -> [B, C] of position 1, all that is wanted of the last block."""
        x, last, qkv = self._fast.forward_to_last(x, self._frame_attend(state, 0, 2))
        attended = self._frame_attend(state, 0, 2, is_last_only=True)(-1, last, qkv)
        block = self._fast.blocks(len(x) // 2)[-1]
        return block.finish(x.view(-1, 2, x.shape[1])[:, 1], attended)[0]

    def _frame_attend(
        self, state: FrameState, start: int, num_positions: int, *, is_last_only: bool = False
    ) -> Attend:
        def attend(layer: int, block: FusedBlock | WideBlock, qkv: Tensor) -> Attended:
            eps, memory = block.config.norm_eps, state.fast.layers[layer]
            rope, where = self._fast.rope, (start, num_positions)
            # Chained: a sampler lies between two passes.
            return frame_attention(
                *(qkv, block.qk_norm, eps, rope, memory, *where, block.kind),
                is_chained=True,
                is_last_only=is_last_only,
                wo=block.wo if isinstance(block, FusedBlock) else None,
            )

        return attend

    def _embed(self, rows: Tensor, slots: Tensor | None) -> Tensor:
        return embed_rows(
            rows, slots, self._embeddings, self._codebook_embeddings, self._semantic_ids
        )
