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
    num_codebooks, dim = rows.shape[1] - 1, embeddings.shape[1]
    codebook_size = codebook_embeddings.shape[0] // num_codebooks
    if rows.device.type != "cuda":
        chosen = rows if slots is None else rows[slots]
        offsets = torch.arange(num_codebooks, dtype=torch.int32, device=rows.device)[:, None]
        tables = (embeddings, codebook_embeddings, offsets * codebook_size)
        return reference.embed_rows(chosen.t(), *tables, *semantic_ids)
    assert rows.dtype == torch.int32 and rows.is_contiguous(), (rows.dtype, rows.stride())
    assert embeddings.dtype == codebook_embeddings.dtype == torch.bfloat16, embeddings.dtype
    assert dim % 8 == 0, dim
    num_rows = len(rows) if slots is None else len(slots)
    out = embeddings.new_empty(num_rows, dim)
    sizes = (codebook_size, *semantic_ids)
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
