"""Input of the slow AR: token embedding, plus the sum of the codebooks' at semantic positions.

On CUDA one launch of `ops/csrc/embedding.cu`, elsewhere `reference.embed_rows`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ops import reference


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
    return _embed_rows(rows, slots, embeddings, codebook_embeddings, semantic_ids)


def _embed_rows(
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
