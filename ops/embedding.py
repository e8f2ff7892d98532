"""Input of the slow AR: token embedding, plus the sum of the codebooks' at semantic positions.

On CUDA one launch of `ops/csrc/embedding.cu`, elsewhere `reference.embed_rows`.
"""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

from ops import nvrtc, reference

_THREADS = 256


def embed_rows(
    rows: Tensor,
    slots: Tensor | None,
    embeddings: Tensor,
    codebook_embeddings: Tensor,
    semantic_ids: tuple[int, int],
) -> Tensor:
    """Embed rows of a prompt or of the decode state.

    Args:
        rows: i32 [R, 1+K]: token id, then codes (zero where the row is text).
        slots: i64 [M], which rows; None = all of them in order.
        embeddings: [V, C].
        codebook_embeddings: [K * codebook_size, C].
        semantic_ids: first and last token id whose rows carry codes.

    Returns:
        [M, C].
    """
    if rows.device.type != "cuda":
        return _definition(rows, slots, embeddings, codebook_embeddings, semantic_ids)
    num_codebooks, dim = rows.shape[1] - 1, embeddings.shape[1]
    assert rows.dtype == torch.int32 and rows.is_contiguous(), (rows.dtype, rows.stride())
    assert embeddings.dtype == codebook_embeddings.dtype == torch.bfloat16, embeddings.dtype
    assert dim % 8 == 0, dim
    num_rows = len(rows) if slots is None else len(slots)
    out = embeddings.new_empty(num_rows, dim)
    sizes = (codebook_embeddings.shape[0] // num_codebooks, *semantic_ids)
    nvrtc.kernel("embedding.cu", "embed_rows", defines={"NUM_CODEBOOKS": num_codebooks}).launch(
        (num_rows,),
        (_THREADS,),
        [
            *(rows, slots, embeddings, codebook_embeddings, out),
            *(ctypes.c_int32(size) for size in sizes),
            *(ctypes.c_float(math.sqrt(num_codebooks + 1)), ctypes.c_int32(dim)),
        ],
    )
    return out


def _definition(
    rows: Tensor,
    slots: Tensor | None,
    embeddings: Tensor,
    codebook_embeddings: Tensor,
    semantic_ids: tuple[int, int],
) -> Tensor:
    chosen = rows if slots is None else rows[slots]
    num_codebooks = rows.shape[1] - 1
    codebook_size = codebook_embeddings.shape[0] // num_codebooks
    offsets = torch.arange(num_codebooks, dtype=torch.int32, device=rows.device) * codebook_size
    return reference.embed_rows(
        chosen.t(), embeddings, codebook_embeddings, offsets[:, None], *semantic_ids
    )
