"""Shapes of a DualAR model, read from a checkpoint's config.json.

Two schemas are understood: `fish_qwen3_omni` (a `text_config` and an `audio_decoder_config`) and
the older flat `dual_ar` (fast AR fields carry the prefix `fast_`). Both end up in the same frozen
`DualARConfig`. This file knows JSON and numbers, no tensors.

Shape letters used in `model/` and `ops/`:

| letter | meaning |
|---|---|
| B | decode batch: streams that make a frame in this step |
| N | slots, i.e. rows of the KV cache and of the decode state |
| T | text or time positions |
| K | codebooks; codebook 0 is the semantic one |
| L | layers |
| S | audio samples per frame |
| H, H_kv, G | query heads, key/value heads, query heads per key/value head |
| D | head dimension |
| C | hidden size |
| F | feed-forward size |
| V | vocabulary of the head in question |
| W | window of repetition-aware sampling |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.errors import ConfigError
from model.json_fields import Fields, read_json

NESTED_SCHEMA = "fish_qwen3_omni"
FLAT_SCHEMA = "dual_ar"

# Fields that real checkpoints carry and that change nothing in inference.
_INERT_FIELDS = (
    "_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version",
    "model_type", "initializer_range", "use_gradient_checkpointing", "is_reward_model", "dropout",
    "num_experts", "num_experts_per_tok", "norm_topk_prob", "moe_intermediate_size",
    "use_aux_loss_free", "router_gamma", "audio_embed_dim", "audio_hidden_dim", "bos_token_id",
    "pad_token_id", "audio_pad_token_id", "use_cache", "chunk_size_feed_forward", "id2label",
    "label2id", "is_decoder", "is_encoder_decoder", "output_attentions", "output_hidden_states",
    "problem_type", "return_dict",
)  # fmt: skip
# Fields that others read: the codec, the server, `model.quantized`.
_OTHERS_FIELDS = ("codec_config", "plosive", "plosive_quantization")


@dataclass(frozen=True, slots=True)
class StackConfig:
    """One stack of transformer blocks: the slow AR or the fast AR."""

    num_layers: int  # L
    dim: int  # C
    num_heads: int  # H
    num_kv_heads: int  # H_kv
    head_dim: int  # D; num_heads * head_dim may differ from dim
    ffn_dim: int  # F
    rope_base: float
    norm_eps: float
    max_len: int  # positions the stack was trained for
    has_qk_norm: bool
    has_qkv_bias: bool
    has_o_bias: bool

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"n_local_heads: got {self.num_kv_heads}, expected a divisor of n_head "
                f"({self.num_heads}): query heads share key/value heads evenly"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim: got {self.head_dim}, expected an even number for RoPE")

    @property
    def num_groups(self) -> int:
        """Query heads per key/value head (G)."""
        return self.num_heads // self.num_kv_heads

    @property
    def q_dim(self) -> int:
        """Rows of the query part of wqkv."""
        return self.num_heads * self.head_dim

    @property
    def qkv_dim(self) -> int:
        """Rows of wqkv: queries, then keys, then values."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


@dataclass(frozen=True, slots=True)
class DualARConfig:
    """Everything that decides the shapes and the arithmetic of a DualAR model."""

    slow: StackConfig
    fast: StackConfig
    vocab_size: int  # V of the slow AR
    num_codebooks: int  # K
    codebook_size: int  # codes per codebook, V of the fast AR
    tie_word_embeddings: bool  # the slow head is the embedding matrix
    semantic_begin_id: int | None  # id of <|semantic:0|>; None: the tokenizer says it
    semantic_end_id: int | None  # id of the last semantic token, inclusive
    end_id: int | None  # id of <|im_end|>, which ends the speech

    def __post_init__(self) -> None:
        if self.num_codebooks < 2:
            raise ConfigError(
                f"num_codebooks: got {self.num_codebooks}, expected 2 or more: one semantic "
                "codebook from the slow AR and the others from the fast AR"
            )
        self._check_id("semantic_start_token_id", self.semantic_begin_id)
        self._check_id("semantic_end_token_id", self.semantic_end_id)
        self._check_id("eos_token_id", self.end_id)
        if (
            self.semantic_begin_id is not None
            and self.semantic_end_id is not None
            and not 0 < self.num_semantic <= self.codebook_size
        ):
            raise ConfigError(
                f"semantic_end_token_id: got {self.semantic_end_id} with semantic_start_token_id "
                f"{self.semantic_begin_id}, expected 1 to {self.codebook_size} semantic ids"
            )

    def _check_id(self, field: str, token_id: int | None) -> None:
        if token_id is not None and not 0 <= token_id < self.vocab_size:
            raise ConfigError(
                f"{field}: got {token_id}, expected an id below vocab_size {self.vocab_size}"
            )

    @property
    def num_semantic(self) -> int:
        """Number of semantic ids."""
        assert self.semantic_begin_id is not None and self.semantic_end_id is not None, self
        return self.semantic_end_id - self.semantic_begin_id + 1

    @property
    def is_complete(self) -> bool:
        """True when all token ids that decoding needs are known."""
        return None not in (self.semantic_begin_id, self.semantic_end_id, self.end_id)

    @property
    def needs_projection(self) -> bool:
        """True when the slow hidden state is projected to the width of the fast AR."""
        return self.slow.dim != self.fast.dim

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DualARConfig:
        """Read either schema.

        Raises:
            ConfigError: naming the field, what was got and what was expected.
        """
        schema = data.get("model_type")
        if schema == NESTED_SCHEMA:
            return _from_nested(data)
        if schema == FLAT_SCHEMA:
            return _from_flat(data)
        raise ConfigError(
            f"model_type: got {schema!r}, expected {NESTED_SCHEMA!r} or {FLAT_SCHEMA!r}"
        )

    @classmethod
    def from_file(cls, path: Path) -> DualARConfig:
        """Read a config.json.

        Raises:
            ConfigError: if the file is missing, is not a JSON object, or does not fit.
        """
        data = read_json(path)
        try:
            return cls.from_dict(data)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error


def _stack(
    fields: Fields, prefix: str, layers: str, fallback: StackConfig | None, max_len: int | None
) -> StackConfig:
    """Read one stack; RoPE base and epsilon of the fast AR default to those of the slow AR."""
    dim = fields.integer(prefix + "dim", fallback.dim if fallback and prefix else None)
    num_heads = fields.integer(
        prefix + "n_head", fallback.num_heads if fallback and prefix else None
    )
    return StackConfig(
        num_layers=fields.integer(layers),
        dim=dim,
        num_heads=num_heads,
        num_kv_heads=_kv_heads(fields, prefix, num_heads),
        head_dim=fields.integer(prefix + "head_dim", max(1, dim // num_heads)),
        ffn_dim=fields.integer(prefix + "intermediate_size"),
        rope_base=fields.number("rope_base", fallback.rope_base if fallback else None),
        norm_eps=fields.number("norm_eps", fallback.norm_eps if fallback else None),
        max_len=max_len or fields.integer("max_seq_len"),
        has_qk_norm=fields.flag(prefix + "attention_qk_norm", False),
        has_qkv_bias=fields.flag(prefix + "attention_qkv_bias", False),
        has_o_bias=fields.flag(prefix + "attention_o_bias", False),
    )


def _kv_heads(fields: Fields, prefix: str, num_heads: int) -> int:
    """Both schemas write "one key/value head per query head" as -1."""
    name = prefix + "n_local_heads"
    return num_heads if fields.id(name) in (None, -1) else fields.integer(name)


def _from_nested(data: Mapping[str, Any]) -> DualARConfig:
    top = Fields(data)
    text, audio = top.child("text_config"), top.child("audio_decoder_config")
    for fields in (text, audio):
        fields.expect("use_moe", False)
    slow = _stack(text, "", "n_layer", None, None)
    num_codebooks = audio.integer("num_codebooks")
    audio.expect("text_dim", slow.dim)
    fast = _stack(audio, "", "n_layer", slow, num_codebooks + 1)
    config = _config(top, text, slow, fast, num_codebooks, audio.integer("vocab_size"))
    top.ignore("audio_encoder_config", "tie_word_embeddings")
    text.ignore("eos_token_id")
    audio.ignore("eos_token_id", "max_seq_len", "tie_word_embeddings")
    _close(top, text, audio)
    return config


def _from_flat(data: Mapping[str, Any]) -> DualARConfig:
    fields = Fields(data)
    fields.expect("use_moe", False)
    # Both were off in the first published models, whose arithmetic this code does not have.
    fields.expect("scale_codebook_embeddings", True, default=False)
    fields.expect("norm_fastlayer_input", True, default=False)
    fields.expect("share_codebook_embeddings", True)
    slow = _stack(fields, "", "n_layer", None, None)
    num_codebooks = fields.integer("num_codebooks")
    fast = _stack(fields, "fast_", "n_fast_layer", slow, num_codebooks + 1)
    config = _config(fields, fields, slow, fast, num_codebooks, fields.integer("codebook_size"))
    _close(fields)
    return config


def _config(
    top: Fields,
    text: Fields,
    slow: StackConfig,
    fast: StackConfig,
    num_codebooks: int,
    codebook_size: int,
) -> DualARConfig:
    return DualARConfig(
        slow=slow,
        fast=fast,
        vocab_size=text.integer("vocab_size"),
        num_codebooks=num_codebooks,
        codebook_size=codebook_size,
        tie_word_embeddings=text.flag("tie_word_embeddings", True),
        semantic_begin_id=top.id("semantic_start_token_id"),
        semantic_end_id=top.id("semantic_end_token_id"),
        end_id=top.id("eos_token_id"),
    )


def _close(top: Fields, *others: Fields) -> None:
    top.ignore(*_OTHERS_FIELDS)
    for fields in (top, *others):
        fields.ignore(*_INERT_FIELDS)
        fields.close()
