"""config.json: both schemas, and what a bad one says."""

import copy
import json

import pytest

from model.config import DualARConfig
from model.errors import ConfigError, ModelError
from tests.model.goldens import GOLDEN, NAMES

# The fields of the published S2 Pro config.json, and those that its config class may write.
STACK = {
    "n_head": 32,
    "n_local_heads": 8,
    "head_dim": 128,
    "dim": 2560,
    "intermediate_size": 9728,
    "rope_base": 1000000,
    "norm_eps": 1e-06,
    "attention_qkv_bias": False,
    "attention_o_bias": False,
    "audio_hidden_dim": 5120,
    "dropout": 0.0,
    "use_moe": False,
    "num_experts": 1,
    "num_experts_per_tok": 1,
    "norm_topk_prob": True,
    "moe_intermediate_size": 768,
    "use_aux_loss_free": False,
    "router_gamma": 0.001,
    "use_gradient_checkpointing": True,
    "initializer_range": 0.019764235376052372,
    "torch_dtype": "bfloat16",
}
S2_PRO = {
    "architectures": ["FishQwen3OmniForCausalLM"],
    "model_type": "fish_qwen3_omni",
    "dtype": "bfloat16",
    "eos_token_id": 151645,
    "pad_token_id": 151669,
    "audio_pad_token_id": 151677,
    "semantic_start_token_id": 151678,
    "semantic_end_token_id": 155773,
    "audio_encoder_config": None,
    "text_config": STACK
    | {
        "model_type": "fish_qwen3",
        "vocab_size": 155776,
        "n_layer": 36,
        "max_seq_len": 32768,
        "attention_qk_norm": True,
        "tie_word_embeddings": True,
    },
    "audio_decoder_config": STACK
    | {
        "model_type": "fish_qwen3_audio_decoder",
        "vocab_size": 4096,
        "n_layer": 4,
        "max_seq_len": 11,
        "attention_qk_norm": False,
        "tie_word_embeddings": False,
        "text_dim": 2560,
        "num_codebooks": 10,
    },
    "transformers_version": "4.57.0",
}
S1_MINI = {
    "model_type": "dual_ar",
    "vocab_size": 155776,
    "n_layer": 28,
    "n_head": 16,
    "n_local_heads": 8,
    "dim": 1024,
    "head_dim": 128,
    "intermediate_size": 3072,
    "rope_base": 1000000,
    "norm_eps": 1e-06,
    "max_seq_len": 8192,
    "tie_word_embeddings": False,
    "attention_qk_norm": True,
    "attention_qkv_bias": False,
    "attention_o_bias": False,
    "n_fast_layer": 4,
    "fast_dim": 1024,
    "fast_n_head": 16,
    "fast_n_local_heads": 8,
    "fast_head_dim": 64,
    "fast_intermediate_size": 3072,
    "fast_attention_qk_norm": False,
    "fast_attention_qkv_bias": False,
    "fast_attention_o_bias": False,
    "codebook_size": 4096,
    "num_codebooks": 10,
    "scale_codebook_embeddings": True,
    "norm_fastlayer_input": True,
    "share_codebook_embeddings": True,
    "is_reward_model": False,
    "use_gradient_checkpointing": True,
    "dropout": 0.0,
    "initializer_range": 0.03125,
}


def test_nested_schema():
    config = DualARConfig.from_dict(S2_PRO)
    slow, fast = config.slow, config.fast
    assert (slow.num_layers, slow.dim, slow.ffn_dim, slow.max_len) == (36, 2560, 9728, 32768)
    assert (slow.q_dim, slow.qkv_dim, slow.num_groups) == (4096, 6144, 4)
    assert slow.has_qk_norm and not fast.has_qk_norm
    assert (fast.num_layers, fast.max_len, fast.rope_base) == (4, 11, 1e6)
    assert (config.num_codebooks, config.codebook_size, config.num_semantic) == (10, 4096, 4096)
    assert config.tie_word_embeddings and config.is_complete and not config.needs_projection


def test_flat_schema():
    config = DualARConfig.from_dict(S1_MINI)
    assert (config.slow.num_layers, config.slow.head_dim, config.slow.num_kv_heads) == (28, 128, 8)
    assert (config.fast.num_layers, config.fast.head_dim, config.fast.qkv_dim) == (4, 64, 2048)
    assert not config.tie_word_embeddings
    assert not config.is_complete  # the tokenizer says the ids


@pytest.mark.parametrize("name", NAMES)
def test_golden_configs(name):
    config = DualARConfig.from_file(GOLDEN / name / "config.json")
    assert config.num_semantic == config.codebook_size == 64
    assert config.needs_projection == (name == "dual_ar_projected")


def test_kv_heads_default_to_all_heads():
    for absent in (-1, None):
        data = S1_MINI | {"n_local_heads": absent}
        assert DualARConfig.from_dict(data).slow.num_kv_heads == 16


def changed(path: str, value) -> dict:
    data = copy.deepcopy(S2_PRO)
    *parents, leaf = path.split(".")
    target = data
    for parent in parents:
        target = target[parent]
    if value is KeyError:
        del target[leaf]
    else:
        target[leaf] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("model_type", "llama", "model_type: got 'llama', expected 'fish_qwen3_omni' or 'dual_ar'"),
        ("text_config", KeyError, "text_config: it is missing, expected an object"),
        ("text_config", [], r"text_config: got \[\], expected an object"),
        ("text_config.dim", KeyError, "text_config.dim: it is missing, expected a positive"),
        ("text_config.dim", "big", 'text_config.dim: got "big", expected a positive integer'),
        ("text_config.dim", -1, "text_config.dim: got -1, expected a positive integer"),
        ("text_config.dim", 2**62, "text_config.dim: got 4[0-9]+, expected at most 2147483647"),
        ("text_config.norm_eps", 10**400, "norm_eps: got 10{59}[.]{3}, expected a finite number"),
        ("text_config.n_layer", True, "text_config.n_layer: got true, expected a positive"),
        ("text_config.rope_base", 0, "text_config.rope_base: got 0, expected a positive number"),
        ("text_config.attention_qk_norm", 1, "attention_qk_norm: got 1, expected true or false"),
        ("text_config.n_local_heads", 5, r"n_local_heads: got 5, expected a divisor of n_head"),
        ("text_config.head_dim", 7, "head_dim: got 7, expected an even number"),
        ("text_config.use_moe", True, "text_config.use_moe: got true, expected false"),
        ("text_config.n_heads", 3, "unknown field text_config.n_heads; valid ones are .*n_head,"),
        ("audio_decoder_config.text_dim", 99, "text_dim: got 99, expected 2560"),
        ("audio_decoder_config.num_codebooks", 1, "num_codebooks: got 1, expected 2 or more"),
        ("semantic_end_token_id", 155776, "semantic_end_token_id: got 155776, expected an id bel"),
        ("semantic_end_token_id", 151000, "semantic_end_token_id: got 151000 with .* expected 1 t"),
        ("eos_token_id", "x", 'eos_token_id: got "x", expected a token id'),
        ("quantization_config", {}, "unknown field quantization_config; valid ones are"),
    ],
)
def test_bad_fields_are_named(path, value, message):
    with pytest.raises(ConfigError, match=message):
        DualARConfig.from_dict(changed(path, value))


@pytest.mark.parametrize("field", ["scale_codebook_embeddings", "norm_fastlayer_input"])
def test_other_arithmetic_is_refused(field):
    with pytest.raises(ConfigError, match=f"{field}: got false, expected true"):
        DualARConfig.from_dict(S1_MINI | {field: False})
    data = {name: value for name, value in S1_MINI.items() if name != field}
    with pytest.raises(ConfigError, match=rf"{field}: it is missing \(which means false\)"):
        DualARConfig.from_dict(data)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"config.json: cannot be read \(No such file"),
        ("{", "config.json: is not JSON"),
        ("[]", "config.json: got a JSON list, expected an object"),
        (json.dumps(S1_MINI | {"dim": 0}), "config.json: dim: got 0"),
    ],
)
def test_bad_files(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=message):
        DualARConfig.from_file(tmp_path / "config.json")
