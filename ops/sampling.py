"""Which code comes next, and what a stream carries into its next frame: one launch each on CUDA.

It is the published sampling of DualAR models, seeded per stream. Order of the filters:
probabilities of the un-tempered logits are summed from the best on, and a rank goes when the sum
including it exceeds `top_p`, or when it is `top_k` or later; the best always stays. Only then come
temperature, softmax and the draw, a function of (seed, frame, draw, token) alone, see
`reference.gumbel_noise`. Repetition-aware sampling (RAS) applies to semantic tokens: a second
sample, the twin, is drawn at RAS_TEMPERATURE and RAS_TOP_P, and taken when the first one is among
the stream's last tokens.

On CUDA `ops/csrc/sampling.cu`, elsewhere the plain definitions here. The hash is exact in both; sums
of probabilities may differ in their last bits, so a draw can differ only where a cumulative
probability equals top_p, or two scores each other, to within rounding.

Each launch draws, stores the codes and looks up the input of the fast AR's next pass.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from ops import nvrtc, reference
from ops.quantize import BlockScaled, empty_block_scaled

RAS_TEMPERATURE = 1.0
RAS_TOP_P = 0.9
MAX_TOP_K = 128  # ranks that are ever looked at; published servers use 30
MIN_TEMPERATURE = 1e-5

_THREADS = 512  # of a row; MAX_CANDIDATES of the kernel or more
_MAX_TOKENS = 1 << 13
_MAX_WINDOW = 32  # lanes of a warp


class Draws(NamedTuple):
    """Whose draws: the rows of a batch, and sampling parameters by slot."""

    slots: Tensor  # i64 [B]
    temperature: Tensor  # f32 [N], 0 = always the best token
    top_p: Tensor  # f32 [N]
    top_k: Tensor  # i32 [N], 1 or more
    seed: Tensor  # i64 [N]
    frame_idx: Tensor  # i32 [N]
    num_ranks: int = MAX_TOP_K  # at most this many ranks count, whatever top_k says
    # Between whatever wrote the tensors above (and a window) and the samplers is a launch of
    # `embed_rows`, and the kernel right before a sampler writes none of them. Then they are fetched
    # while that one still runs.
    is_chained: bool = False


class Head(NamedTuple):
    """What the rows of the restricted head stand for: the semantic ids, then the end."""

    tokens: Tensor  # i32 [n + 1], token ids
    codes: Tensor  # i64 [n + 1], codebook 0


class SemanticDraw(NamedTuple):
    """The slow AR's choice, and what the fast AR starts with."""

    choice: Tensor  # i64 [B], rows of the head; n is the end
    is_end: Tensor  # bool [B]
    x: Tensor  # [2B, C]: of every row the hidden state, then the embedding of its codebook 0


def draw_semantic(
    logits: Tensor,
    window: Tensor,
    draws: Draws,
    head: Head,
    hidden: Tensor,
    embeddings: Tensor,
    codes: Tensor,
) -> SemanticDraw:
    """Choose among the semantic ids and the end, with repetition-aware sampling, and make the fast
    AR's first two inputs.

    Args:
        logits: f32 or bf16 [B, n + 1].
        window: i32 [N, W, 1], last tokens of every slot.
        hidden: [B, C], input 0 of the fast AR.
        embeddings: [V, C], of the fast AR.
        codes: i32 [B, K]; column 0 is written.
    """
    if logits.device.type == "cuda":
        assert window.shape[1] <= _MAX_WINDOW and window.shape[2] == 1, window.shape
        choice = torch.empty_like(draws.slots)
        is_end = torch.empty_like(draws.slots, dtype=torch.bool)
        x = hidden.new_empty(2 * hidden.shape[0], hidden.shape[1])
        semantic = _Semantic(window, head.tokens, head.codes, choice, is_end, hidden)
        _launch(logits, draws, 0, codes, embeddings, x, semantic)
        return SemanticDraw(choice, is_end, x)
    sampler = FrameSampler(draws, codes.shape[1], logits.shape[1])
    choice = sampler.semantic(logits.float(), window, head.tokens)
    code = head.codes[choice]
    codes[:, 0] = code
    x = torch.stack([hidden, embeddings[code]], dim=1).flatten(0, 1)
    return SemanticDraw(choice, choice == head.tokens.shape[0] - 1, x)


def draw_codebook(
    logits: Tensor,
    codebook: int,
    draws: Draws,
    embeddings: Tensor,
    codes: Tensor,
    normed: BlockScaled | None = None,
) -> tuple[Tensor, BlockScaled | None]:
    """Choose the code of one residual codebook, and make the fast AR's next input.

    Args:
        logits: f32 or bf16 [B, V].
        codebook: 1..K-1.
        embeddings: [V, C], of the fast AR.
        codes: i32 [B, K]; column `codebook` is written.
        normed: the embeddings after the norm that comes first in the fast AR, [V, C].

    Returns:
        The embeddings of the codes [B, C], and their rows of `normed`.
    """
    if logits.device.type == "cuda":
        num_rows, dim = len(draws.slots), embeddings.shape[1]
        x = embeddings.new_empty(num_rows, dim)
        rows = None if normed is None else empty_block_scaled(num_rows, dim, x.device)
        _launch(logits, draws, codebook, codes, embeddings, x, normed=_normed(normed, rows))
        return x, rows
    sampler = FrameSampler(draws, codes.shape[1], logits.shape[1])
    code = sampler.codebook(logits.float(), codebook)
    codes[:, codebook] = code
    return embeddings[code], None if normed is None else normed.take(code)


class Carried(NamedTuple):
    """What a stream carries from frame to frame, by slot; the last slot is the dummy."""

    rows: Tensor  # i32 [N, 1+K], next input
    position: Tensor  # i64 [N], where it goes; the dummy's stays
    window: Tensor  # i32 [N, W, 1], last tokens, oldest first
    frame_idx: Tensor  # i32 [N]
    history: Tensor | None = None  # i32 [N, max_len, 1+K], inputs that were read, by position


def advance(
    carried: Carried, slots: Tensor, choice: Tensor, codes: Tensor, head_tokens: Tensor
) -> None:
    """Make the frame just sampled the next input: rows, position, window, frame index in place.
    The input that was read goes to the history.

    The window is shifted as `reference.prev_tokens_shift_inplace` shifts; the first token of a
    stream is remembered as 0, because the published sampler clears the window after it.

    Args:
        slots, choice: i64 [B].
        codes: i32 [B, K].
        head_tokens: i32 [n + 1].
    """
    if slots.device.type != "cuda":
        return advance_definition(carried, slots, choice, codes, head_tokens)
    window, num_codebooks = carried.window, codes.shape[1]
    assert window.shape[1] <= _MAX_WINDOW and window.shape[2] == 1, window.shape
    assert codes.dtype == torch.int32 and codes.is_contiguous(), (codes.dtype, codes.stride())
    history = carried.history
    history_len = 0 if history is None else history.shape[1]
    sizes = (num_codebooks, window.shape[1], carried.position.shape[0] - 1, history_len)
    nvrtc.kernel("advance.cu", "advance").launch(
        (len(slots),),
        (32,),
        [
            *(carried.rows, carried.position, window, carried.frame_idx),
            *(slots, choice, codes, head_tokens, history),
            *(ctypes.c_int32(size) for size in sizes),
        ],
    )
    return None


class _Semantic(NamedTuple):
    """What only the semantic draw reads and writes."""

    window: Tensor | None = None
    tokens: Tensor | None = None
    codes: Tensor | None = None
    choice: Tensor | None = None
    is_end: Tensor | None = None
    hidden: Tensor | None = None


class _Normed(ctypes.Structure):
    """`Normed` of sampling.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("table", "table_scales", "out", "scales")),
        *((name, ctypes.c_int32) for name in ("table_stride", "stride")),
    )


_RESIDUAL, _NO_NORM = _Semantic(), _Normed()


def _normed(table: BlockScaled | None, rows: BlockScaled | None) -> _Normed:
    if table is None or rows is None:
        return _NO_NORM
    assert table.shape[1] % 16 == 0, table.shape
    tensors = (table.data, table.scale, rows.data, rows.scale)
    strides = table.scale.shape[1], rows.scale.shape[1]
    return _Normed(*(tensor.data_ptr() for tensor in tensors), *strides)


def _launch(
    logits: Tensor,
    draws: Draws,
    codebook: int,
    codes: Tensor,
    embeddings: Tensor,
    x: Tensor,
    semantic: _Semantic = _RESIDUAL,
    normed: _Normed = _NO_NORM,
) -> None:
    num_rows, num_tokens = logits.shape
    assert logits.is_contiguous() and num_tokens <= _MAX_TOKENS, (logits.stride(), num_tokens)
    assert codes.dtype == torch.int32 and codes.is_contiguous(), (codes.dtype, codes.stride())
    assert x.shape[1] % 8 == 0, x.shape
    window_len = 0 if semantic.window is None else semantic.window.shape[1]
    sizes = (draws.num_ranks, window_len, codebook, codes.shape[1], x.shape[1])
    defines: dict[str, int | str] = {
        "NUM_TOKENS": num_tokens,
        "LOGIT": {torch.float32: "float", torch.bfloat16: "bf16"}[logits.dtype],
        "IS_SEMANTIC": int(semantic.window is not None),
        "IS_CHAINED": int(draws.is_chained),
        "THREADS": _THREADS,
    }
    nvrtc.kernel("sampling.cu", "sample", defines=defines).launch(
        (num_rows,),
        (_THREADS,),
        [
            *(logits, *draws[:6], *semantic, codes, embeddings, x, normed),
            *(ctypes.c_int32(size) for size in sizes),
        ],
    )


class FrameSampler:
    """All draws of one frame by their plain definition: what the kernels are held against, and how
    the eager model samples.

    Greedy streams (temperature 0) are streams with one rank left, so that they need no branch:
    repetition-aware sampling then draws the same token twice.
    """

    def __init__(self, draws: Draws, num_codebooks: int, num_tokens: int) -> None:
        """Prepare noise and filters.

        Args:
            num_codebooks: K.
            num_tokens: of the widest logits.
        """
        self._slots = slots = draws.slots
        # Draw 0: semantic; draw 1: its twin; draw i + 1: codebook i.
        seed, frame_idx = draws.seed[slots], draws.frame_idx[slots]
        self._noise = reference.gumbel_noise(seed, frame_idx, num_codebooks + 1, num_tokens)
        temperature, top_p = draws.temperature[slots], draws.top_p[slots]
        top_k = torch.where(temperature > 0, draws.top_k[slots], 1)
        num_ranks = min(draws.num_ranks, num_tokens)
        self._thresholds = torch.stack(
            [
                reference.removal_thresholds(top_p, top_k, num_ranks),
                reference.removal_thresholds(torch.full_like(top_p, RAS_TOP_P), top_k, num_ranks),
            ],
            dim=1,
        )  # f32 [B, 2, num_ranks]
        inverse = temperature.clamp(min=MIN_TEMPERATURE).reciprocal()
        twins = torch.full_like(inverse, 1.0 / RAS_TEMPERATURE)
        self._inv_temperature = torch.stack([inverse, twins], dim=1)[:, :, None]

    def semantic(self, logits: Tensor, window: Tensor, head_tokens: Tensor) -> Tensor:
        """See `draw_semantic`; logits f32. Returns i64 [B]."""
        noise = self._noise[:, :2]
        drawn = reference.sample_top(logits, noise, self._thresholds, self._inv_temperature)
        normal, twin = drawn.unbind(1)
        recent = window[self._slots].squeeze(2) == head_tokens[normal][:, None]
        return torch.where(recent.any(1) & (normal < len(head_tokens) - 1), twin, normal)

    def codebook(self, logits: Tensor, codebook: int) -> Tensor:
        """See `draw_codebook`; logits f32. Returns i64 [B]."""
        noise = self._noise[:, codebook + 1, None]
        thresholds, inv_temperature = self._thresholds[:, :1], self._inv_temperature[:, :1]
        return reference.sample_top(logits, noise, thresholds, inv_temperature).squeeze(1)


def advance_definition(
    carried: Carried, slots: Tensor, choice: Tensor, codes: Tensor, head_tokens: Tensor
) -> None:
    """What `advance` is held against."""
    token, frame_idx = head_tokens[choice], carried.frame_idx[slots]
    window = carried.window[slots]
    remembered = torch.where(frame_idx > 0, token, 0)
    reference.prev_tokens_shift_inplace(window, remembered[:, None])
    carried.window[slots] = window
    if carried.history is not None:
        carried.history[slots, carried.position[slots]] = carried.rows[slots]
    carried.rows[slots] = torch.cat([token[:, None], codes], dim=1)
    carried.position[slots] += slots != carried.position.shape[0] - 1
    carried.frame_idx[slots] = frame_idx + 1
