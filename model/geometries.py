"""Published geometries by name, as the JSON that their checkpoints carry: shapes without weights.

`tiny` is nobody's: it has every part of S2 Pro at a size that a test builds in milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from types import MappingProxyType
from typing import Any

from model.config import FLAT_SCHEMA, NESTED_SCHEMA
from model.errors import ConfigError

S2_IDS: Mapping[str, int] = MappingProxyType(
    {
        "<|endoftext|>": 151643,
        "<|im_start|>": 151644,
        "<|im_end|>": 151645,
        "<|pad|>": 151669,
        "<|phoneme_start|>": 151670,
        "<|phoneme_end|>": 151671,
        "<|text|>": 151672,
        "<|voice|>": 151673,
        "<|interleave|>": 151674,
        "<|audio_start|>": 151675,
        "<|audio_end|>": 151676,
        "<|audio_pad|>": 151677,
    }
)
S2_SEMANTIC_BEGIN = 151678

_PLAIN_LINEARS = {"attention_qkv_bias": False, "attention_o_bias": False}

_S2_STACK = {
    "dim": 2560,
    "n_head": 32,
    "n_local_heads": 8,
    "head_dim": 128,
    "intermediate_size": 9728,
    "rope_base": 1_000_000,
    "norm_eps": 1e-6,
    **_PLAIN_LINEARS,
}

_S2_PRO: Mapping[str, Any] = {
    "architectures": ["FishQwen3OmniForCausalLM"],
    "model_type": NESTED_SCHEMA,
    "dtype": "bfloat16",
    "eos_token_id": S2_IDS["<|im_end|>"],
    "pad_token_id": S2_IDS["<|pad|>"],
    "audio_pad_token_id": S2_IDS["<|audio_pad|>"],
    "semantic_start_token_id": S2_SEMANTIC_BEGIN,
    "semantic_end_token_id": S2_SEMANTIC_BEGIN + 4095,
    "text_config": {
        "model_type": "fish_qwen3",
        "vocab_size": 155776,
        "n_layer": 36,
        **_S2_STACK,
        "max_seq_len": 32768,
        "attention_qk_norm": True,
        "tie_word_embeddings": True,
    },
    "audio_decoder_config": {
        "model_type": "fish_qwen3_audio_decoder",
        "vocab_size": 4096,
        "n_layer": 4,
        **_S2_STACK,
        "max_seq_len": 11,
        "attention_qk_norm": False,
        "tie_word_embeddings": False,
        "text_dim": 2560,
        "num_codebooks": 10,
    },
}

_S1_MINI: Mapping[str, Any] = {
    "model_type": FLAT_SCHEMA,
    "vocab_size": 155776,
    "n_layer": 28,
    "dim": 1024,
    "n_head": 16,
    "n_local_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "rope_base": 1_000_000,
    "norm_eps": 1e-6,
    "max_seq_len": 8192,
    "attention_qk_norm": True,
    **_PLAIN_LINEARS,
    "tie_word_embeddings": False,
    "n_fast_layer": 4,
    "fast_dim": 1024,
    "fast_n_head": 16,
    "fast_n_local_heads": 8,
    "fast_head_dim": 64,
    "fast_intermediate_size": 3072,
    "fast_attention_qk_norm": False,
    "fast_attention_qkv_bias": False,
    "fast_attention_o_bias": False,
    "num_codebooks": 10,
    "codebook_size": 4096,
    "scale_codebook_embeddings": True,
    "norm_fastlayer_input": True,
    "eos_token_id": S2_IDS["<|im_end|>"],
    "semantic_start_token_id": S2_SEMANTIC_BEGIN,
    "semantic_end_token_id": S2_SEMANTIC_BEGIN + 4095,
}

_TINY_SEMANTIC_BEGIN = 272
_TINY_IDS = {"<|im_start|>": 256, "<|im_end|>": 257, "<|voice|>": 258}

_TINY: Mapping[str, Any] = {
    "model_type": NESTED_SCHEMA,
    "eos_token_id": _TINY_IDS["<|im_end|>"],
    "semantic_start_token_id": _TINY_SEMANTIC_BEGIN,
    "semantic_end_token_id": _TINY_SEMANTIC_BEGIN + 63,
    "text_config": {
        "vocab_size": 336,
        "n_layer": 3,
        "dim": 128,
        "n_head": 2,
        "n_local_heads": 1,
        "head_dim": 128,
        "intermediate_size": 256,
        "rope_base": 1_000_000,
        "norm_eps": 1e-6,
        "max_seq_len": 2048,
        "attention_qk_norm": True,
        **_PLAIN_LINEARS,
        "tie_word_embeddings": True,
    },
    "audio_decoder_config": {
        "vocab_size": 64,
        "n_layer": 2,
        "dim": 128,
        "n_head": 2,
        "n_local_heads": 1,
        "head_dim": 128,
        "intermediate_size": 256,
        "attention_qk_norm": False,
        **_PLAIN_LINEARS,
        "text_dim": 128,
        "num_codebooks": 4,
    },
    "codec_config": {
        "type": "dac",
        "sample_rate": 44100,
        "encoder_dim": 8,
        "encoder_rates": [2, 4, 8, 8],
        "decoder_dim": 64,
        "decoder_rates": [8, 8, 4, 2],
        "encoder_transformer_layers": [0, 0, 0, 1],
        "decoder_transformer_layers": [1, 0, 0, 0],
        "transformer": {
            "head_dim": 64,
            "rope_base": 10000,
            "norm_eps": 1e-5,
            "encoder_window": 64,
            "intermediate_multiple": 2,
        },
        "quantizer": {
            "input_dim": 128,
            "n_codebooks": 3,
            "codebook_size": 32,
            "codebook_dim": 8,
            "downsample_factor": [2, 2],
            "semantic_codebook_size": 64,
            "pre_post": {
                "n_layer": 2,
                "n_head": 2,
                "dim": 128,
                "intermediate_size": 256,
                "window_size": 16,
                "causal": True,
            },
        },
    },
}

_CONFIGS = {"s2-pro": _S2_PRO, "s1-mini": _S1_MINI, "tiny": _TINY}
GEOMETRIES = tuple(_CONFIGS)


def config_json(geometry: str) -> dict[str, Any]:
    """The config.json of a geometry, to do with as one likes.

    Raises:
        ConfigError: there is no such geometry.
    """
    if geometry not in _CONFIGS:
        raise ConfigError(f"geometry: got {geometry!r}, expected one of {', '.join(GEOMETRIES)}")
    return deepcopy(dict(_CONFIGS[geometry]))


def control_ids(geometry: str) -> dict[str, int]:
    """Token ids of the control tokens, those of the semantic codes excepted."""
    return dict(_TINY_IDS if geometry == "tiny" else S2_IDS)
