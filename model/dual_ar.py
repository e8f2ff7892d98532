"""The DualAR model: a slow transformer over frames, a fast one over the codebooks of a frame.

Three ways to run it: `forward` (a whole sequence, for tests and scoring), `prefill` (keys and
values of a prompt into a slot), `decode_frame` (one frame for a batch of slots). Prefill and decode
may run on two threads as long as they work on different slots; neither keeps state in the module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from model.config import DualARConfig
from model.frame_state import Frame, FrameState, Riders
from model.kv_cache import FrameCache, KVCache, KvFormat, attend_sequence
from model.layers import Block, Stack, Storage, pack
from model.sampling import Sampling
from ops import reference
from ops.sampling import FrameSampler, advance_definition

if TYPE_CHECKING:
    from model.dual_ar_cuda import FusedDualAR
    from ops.quantize import Kind


class FastAR(nn.Module):
    """Codebooks 1..K-1 of a frame, given the slow hidden state and codebook 0."""

    def __init__(self, config: DualARConfig, storage: Storage) -> None:
        super().__init__()
        dim = config.fast.dim
        self.project_in = self.project_in_bias = None
        if config.needs_projection:
            self.project_in = storage.parameter(dim, config.slow.dim)
            self.project_in_bias = storage.parameter(dim)
        self.embeddings = storage.parameter(config.codebook_size, dim)
        self.stack = Stack(config.fast, storage)
        self.output = storage.parameter(config.codebook_size, dim)
        self.num_codebooks = config.num_codebooks

    def forward(
        self, hidden: Tensor, code: Tensor, sampler: FrameSampler, cache: FrameCache
    ) -> list[Tensor]:
        """Sample the residual codes.

        Positions 0 (the hidden state) and 1 (codebook 0) are known together and run as one pass.

        Args:
            hidden: [B, C], slow hidden state after the final norm.
            code: i64 [B], codebook 0.
            sampler: draws of this frame.
            cache: scratch for at least B rows.

        Returns:
            K-1 tensors i64 [B], codebooks 1..K-1.
        """
        codes: list[Tensor] = []
        start = 0
        if self.project_in is not None:
            hidden = reference.linear(hidden, self.project_in, self.project_in_bias)
        x = torch.stack([hidden, self.embeddings[code]], dim=1)
        for codebook in range(1, self.num_codebooks):
            num_rows, num_positions, _ = x.shape
            rope = self.stack.rope[start : codebook + 1]
            if num_positions > 1:
                rope = rope.repeat(num_rows, 1, 1)
            attend = cache.steps(start, num_positions)
            out = self.stack(x.flatten(0, 1), rope, attend)
            last = out.view(x.shape)[:, -1]
            code = sampler.codebook(reference.linear(last, self.output, None).float(), codebook)
            codes.append(code)
            start = codebook + 1
            x = self.embeddings[code][:, None]
        return codes


class DualAR(nn.Module):
    """Slow and fast AR with their embeddings and heads.

    The constructor allocates and leaves the weights uninitialised; `model.loader.load_dual_ar`
    fills them and calls `finish_loading`. From then on it runs eagerly, on plain PyTorch, the
    oracle; after `use_kernels` on the fused rows of `model.dual_ar_cuda`. A quantised model (see
    `layers.Block`) runs after `use_kernels("bsfp8")` only.
    """

    restricted_head: Tensor  # [num_semantic + 1, C]
    head_tokens: Tensor  # i32 [num_semantic + 1], token id of each row of restricted_head
    head_codes: Tensor  # i64 [num_semantic + 1], codebook 0 of each row
    code_offsets: Tensor  # i32 [K, 1]

    def __init__(
        self,
        config: DualARConfig,
        device: torch.device,
        dtype: torch.dtype,
        *,
        is_quantised: bool = False,
    ) -> None:
        super().__init__()
        assert config.is_complete, config
        self.config = config
        self.is_quantised = is_quantised
        self._fused: FusedDualAR | None = None
        storage = Storage(device, dtype, is_quantised)
        dim, num_codes = config.slow.dim, config.num_codebooks * config.codebook_size
        self.embeddings = storage.parameter(config.vocab_size, dim)
        self.codebook_embeddings = storage.parameter(num_codes, dim)
        self.slow = Stack(config.slow, storage)
        self.output = self.embeddings
        if not config.tie_word_embeddings:
            self.output = storage.parameter(config.vocab_size, dim)
        self.fast = FastAR(config, storage)

    def finish_loading(self) -> None:
        """Derive what decoding precomputes from the weights and pack the matrices. Call it once,
        after loading them: packed matrices cannot be written."""
        begin, end, end_id = self._ids()
        head = reference.restrict_head(self.output, begin, end, end_id)
        tokens = torch.tensor([*range(begin, end + 1), end_id], device=self.device)
        offsets = torch.arange(self.config.num_codebooks, device=self.device)[:, None]
        for name, tensor in (
            ("restricted_head", reference.pack_weight(head)),
            ("head_tokens", tokens.int()),
            ("head_codes", (tokens - begin).clamp(0, self.config.codebook_size - 1)),
            ("code_offsets", offsets.int() * self.config.codebook_size),
        ):
            self.register_buffer(name, tensor, persistent=False)
        for module in self.modules():
            if isinstance(module, Block):
                module.finish_loading()
        pack(self.fast, "output", *(["project_in"] if self.config.needs_projection else []))

    def use_kernels(self, kind: Kind) -> None:
        """Pack the matrices for `ops` (matrix by matrix, freeing what they were made from) and run
        on them from now on. Whole sequences (`forward`) cannot be run any more. Call it once, after
        `finish_loading`.

        Args:
            kind: "bf16" keeps the weights, "bsfp8" quantises them unless they are quantised.
        """
        from model.dual_ar_cuda import FusedDualAR  # kernels are no concern of eager models

        assert self._fused is None, "use_kernels is called once"
        assert kind == "bsfp8" or not self.is_quantised, kind
        if not self.config.tie_word_embeddings:
            del self.output  # only `forward` reads it
        self._fused = FusedDualAR(self, kind)

    @property
    def kind(self) -> str:
        """How the blocks run: "eager", "bf16" or "bsfp8"."""
        return "eager" if self._fused is None else self._fused.kind

    @property
    def nbytes(self) -> int:
        """Memory of all weights."""
        own = sum(tensor.nbytes for tensor in (*self.parameters(), *self.buffers()))
        return own + (self._fused.nbytes if self._fused is not None else 0)

    @property
    def semantic_ids(self) -> tuple[int, int]:
        """First and last token id whose rows carry codes."""
        begin, end, _ = self._ids()
        return begin, end

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embeddings.device

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, activations and KV."""
        return self.embeddings.dtype

    def new_cache(
        self,
        num_slots: int,
        max_len: int,
        *,
        page_size: int | None = None,
        num_pages: int | None = None,
        has_history: bool = False,
        kv_format: KvFormat = "bf16",
    ) -> KVCache:
        """A KV cache of this model's shape, device and dtype."""
        return KVCache(
            self.config,
            num_slots,
            max_len,
            self.device,
            self.dtype,
            page_size=page_size,
            num_pages=num_pages,
            has_history=has_history,
            kv_format=kv_format,
        )

    def new_frame_state(self, num_slots: int) -> FrameState:
        """Decode state for as many slots as the KV cache has."""
        return FrameState(self.config, num_slots, self.device, self.dtype)

    def forward(self, prompt: Tensor) -> tuple[Tensor, Tensor]:
        """Run a whole sequence without a cache.

        Args:
            prompt: i32 [1+K, T].

        Returns:
            logits f32 [T, V] over the full vocabulary, hidden [T, C] as the fast AR receives it
            (after the final norm, before `project_in`).
        """
        assert self._fused is None, "the packed model runs slots only"
        rope = self.slow.rope[: prompt.shape[1]]
        hidden = self.slow(self._embed(prompt), rope, attend_sequence)
        return reference.linear(hidden, self.output, None).float(), hidden

    def prefill(self, rows: Tensor, cache: KVCache, slot: int, start: int) -> None:
        """Write keys and values of positions start..start+T-1 of a slot; computes no logits.

        Args:
            rows: i32 [1+K, T], T >= 1, on the model's device.
            start: positions of the slot that are valid already.
        """
        if self._fused is not None:
            self._fused.prefill(rows, cache, slot, start)
            return
        num_positions = rows.shape[1]
        attend = cache.span(slot, start, num_positions)
        rope = self.slow.rope[start : start + num_positions]
        self.slow.remember(self._embed(rows), rope, attend)

    @property
    def max_prefill_rows(self) -> int:
        """Of one call of `prefill_rows` that is worth it, and of a frame with riders; 0: there may be
        neither."""
        return 0 if self._fused is None else self._fused.max_prefill_rows

    def prefill_rows(self, rows: Tensor, slots: Tensor, positions: Tensor, cache: KVCache) -> None:
        """`prefill` for rows of several slots at once, after `use_kernels`. Never waits, and no
        shape depends on a value.

        Args:
            rows: i32 [M, 1+K].
            slots, positions: i64 [M], distinct pairs, but for padding (the dummy slot, position 0).
                What lies before a row in its slot is written already, or is among the rows.
        """
        assert self._fused is not None, "use_kernels comes first"
        self._fused.prefill_rows(rows, slots, positions, cache)

    def join(
        self, state: FrameState, slot: int, row: Tensor, position: int, sampling: Sampling
    ) -> None:
        """Start a stream: its first frame reads `row` at `position`, with an empty RAS window.

        Args:
            row: i32 [1+K], the last prompt row, whose KV is not written yet.
            position: number of positions of the slot that are prefilled.
        """
        started = state.start_words(slot, row.tolist(), position, sampling)
        places, words = (torch.from_numpy(part).to(self.device) for part in started)
        state.write(places, words)

    def decode_frame(
        self,
        state: FrameState,
        slots: Tensor,
        cache: KVCache,
        on_choice: Callable[[Tensor], None] | None = None,
        on_tail: Callable[[], None] | None = None,
        riders: Riders | None = None,
        *,
        shares_pages: bool = False,
    ) -> Frame:
        """Make one frame for each of the given slots and advance their state in place.

        Never waits for the device, and no shape depends on a value. In fp32 on the CPU the codes of
        a slot are the same bits whatever other slots are in the batch, in whatever order.

        Args:
            slots: i64 [B], distinct; only the dummy slot of `state`, whose frames mean nothing, may
                come more than once.
            on_choice: called with `is_end` bool [B] between the slow and the fast AR, so that what
                it enqueues, a copy to the host, runs before the rest of the frame.
            on_tail: called where little is left to be done: what it enqueues tells a host that the
                time has come to launch the next one.
            riders: prompt rows to write as `prefill_rows` does, before the slots' rows read; after
                `use_kernels` only.
            shares_pages: most slots begin with the pages of their neighbours in the batch, which then
                are read once for them (`ops.attention_shared`). With riders they always are.
        """
        if self._fused is not None:
            return self._fused.decode_frame(
                state, slots, cache, on_choice, on_tail, riders, shares_pages=shares_pages
            )
        assert riders is None, "use_kernels comes first"
        hidden = self._decode_hidden(state, slots, cache)
        logits = reference.linear(hidden, self.restricted_head, None).float()
        num_tokens = max(logits.shape[1], self.config.codebook_size)
        sampler = FrameSampler(state.draws(slots), self.config.num_codebooks, num_tokens)
        choice = sampler.semantic(logits, state.window, self.head_tokens)
        is_end = choice == self.config.num_semantic
        if on_choice is not None:
            on_choice(is_end)
        code = self.head_codes[choice]
        codes = torch.stack([code, *self.fast(hidden, code, sampler, state.fast)], dim=1).int()
        if on_tail is not None:
            on_tail()
        carried = state.carried(cache.history)
        advance_definition(carried, slots, choice, codes, self.head_tokens)
        return Frame(codes, is_end)

    def next_logits(self, state: FrameState, slots: Tensor, cache: KVCache) -> Tensor:
        """What the next frame's semantic ids are drawn from: f32 [B, num_semantic + 1]. Nothing
        advances; the KV of the rows that would be read is written.

        Args:
            slots: i64 [B].
        """
        if self._fused is not None:
            return self._fused.next_logits(state, slots, cache)
        return reference.linear(
            self._decode_hidden(state, slots, cache), self.restricted_head, None
        ).float()

    def _decode_hidden(self, state: FrameState, slots: Tensor, cache: KVCache) -> Tensor:
        rows, position = state.rows[slots], state.position[slots]
        attend = cache.steps(slots, position)
        hidden: Tensor = self.slow(self._embed(rows.t()), self.slow.rope[position], attend)
        return hidden

    def _embed(self, rows: Tensor) -> Tensor:
        begin, end, _ = self._ids()
        return reference.embed_rows(
            rows, self.embeddings, self.codebook_embeddings, self.code_offsets, begin, end
        )

    def _ids(self) -> tuple[int, int, int]:
        config = self.config
        assert config.semantic_begin_id is not None, config
        assert config.semantic_end_id is not None and config.end_id is not None, config
        return config.semantic_begin_id, config.semantic_end_id, config.end_id
