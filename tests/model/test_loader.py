"""Every layout of a checkpoint gives the same model; every damage gives an error that says it."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from model.checkpoint_files import read_state
from model.config import DualARConfig
from model.dual_ar import DualAR
from model.errors import CheckpointError, ConfigError
from model.loader import load_dual_ar, placements
from model.quantize_checkpoint import plan_quantization, write_quantized
from tests.model.goldens import END_ID, GOLDEN, golden
from tests.model.test_config import S2_PRO

MAPS = Path("/proc/self/maps")
NAME = "dual_ar_projected"  # biases, qk-norm, projection and an untied head: every kind of tensor
WQKV = "text_model.model.layers.0.attention.wqkv.weight"


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    shutil.copytree(GOLDEN / NAME, tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def load(path: Path):
    return load_dual_ar(path, "cpu", torch.float32)


def logits_of(path: Path) -> torch.Tensor:
    return load(path)(golden(NAME).prompt)[0]


def rewrite(path: Path, change) -> None:
    file = path / "model.safetensors"
    state = load_file(file)
    change(state)
    save_file(state, file)


def shard(path: Path) -> list[str]:
    """In three."""
    state = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = [f"model-{i + 1:05}-of-00003.safetensors" for i in range(3)]
    weight_map = {key: names[i % 3] for i, key in enumerate(state)}
    for name in names:
        save_file({k: state[k] for k, file in weight_map.items() if file == name}, path / name)
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return names


def flat_name(name: str) -> str:
    if name.startswith("audio_decoder.codebook_embeddings."):
        return name.removeprefix("audio_decoder.")
    if name.startswith("audio_decoder."):
        return "fast_" + name.removeprefix("audio_decoder.")
    return name.removeprefix("text_model.model.")


def make_flat_twin(path: Path) -> None:
    """The same tensors as an old checkpoint: flat config, flat names, wq, wk and wv apart."""
    nested = json.loads((path / "config.json").read_text())
    text, audio = nested["text_config"], nested["audio_decoder_config"]
    flat = {"model_type": "dual_ar", **text}
    flat |= {"n_fast_layer": audio["n_layer"], "codebook_size": audio["vocab_size"]}
    flat |= {"num_codebooks": audio["num_codebooks"], "scale_codebook_embeddings": True}
    flat |= {"norm_fastlayer_input": True}
    for field in ["dim", "n_head", "n_local_heads", "head_dim", "intermediate_size"]:
        flat["fast_" + field] = audio[field]
    for field in ["qk_norm", "qkv_bias", "o_bias"]:
        flat["fast_attention_" + field] = audio["attention_" + field]
    state = {
        flat_name(name): tensor for name, tensor in load_file(path / "model.safetensors").items()
    }
    for name in [name for name in state if "wqkv" in name]:
        stack = audio if name.startswith("fast_") else text
        q_rows, kv_rows = (stack[n] * stack["head_dim"] for n in ("n_head", "n_local_heads"))
        for part, rows in zip(
            "qkv", state.pop(name).split([q_rows, kv_rows, kv_rows]), strict=True
        ):
            state[name.replace("wqkv", "w" + part)] = rows.contiguous()
    state["freqs_cis"] = torch.zeros(4)  # old files carry computed tables
    save_file(
        {"model." + name: tensor for name, tensor in state.items()}, path / "model.safetensors"
    )
    tokens = {"<|semantic:0|>": 200, "<|semantic:63|>": 263, "<|im_end|>": END_ID}
    added = [{"id": token_id, "content": content} for content, token_id in tokens.items()]
    (path / "config.json").write_text(json.dumps(flat))
    (path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))


def test_flat_twin_with_split_projections(checkpoint):
    expected = logits_of(checkpoint)
    make_flat_twin(checkpoint)
    twin = load_dual_ar(checkpoint, "cpu", torch.float32)  # ids from the tokenizer
    assert twin.config == golden(NAME).model.config
    assert torch.equal(twin(golden(NAME).prompt)[0], expected)


def test_sharded_twin(checkpoint):
    expected = logits_of(checkpoint)
    shard(checkpoint)
    assert torch.equal(logits_of(checkpoint), expected)


def test_other_single_file_name(checkpoint):
    expected = logits_of(checkpoint)
    (checkpoint / "model.safetensors").rename(checkpoint / "dual_ar.safetensors")
    assert torch.equal(logits_of(checkpoint), expected)


def test_dtype_and_eval_mode():
    model = load_dual_ar(GOLDEN / NAME, "cpu", torch.bfloat16)
    assert model.dtype == torch.bfloat16 and not model.training
    assert not any(weights.requires_grad for weights in model.parameters())


@pytest.mark.skipif(not MAPS.exists(), reason="needs /proc")
def test_weights_are_mapped_not_read(checkpoint):
    state = read_state(checkpoint)
    assert str(checkpoint / "model.safetensors") in MAPS.read_text()
    assert len(state) == len(load_file(checkpoint / "model.safetensors"))


def test_placements_cover_the_published_model():
    """S2 Pro has 4,561,852,416 parameters, the two files' 9,123,704,832 bytes in bf16."""
    model = DualAR(DualARConfig.from_dict(S2_PRO), torch.device("meta"), torch.bfloat16)
    placed = list(placements(model))
    assert sum(math.prod(placement.shape) for placement in placed) == 4_561_852_416
    assert len({placement.name for placement in placed}) == len(placed)
    assert sum(p.target.nbytes for p in placed) == sum(p.nbytes for p in model.parameters())


# ---------------------------------------------------------------------- tensors that do not fit


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda state: state.pop(WQKV),
            r"1 tensors do not fit .*layers.0.attention.wqkv.weight: missing, expected shape "
            r"\[256, 128\]",
        ),
        (
            lambda state: state.update(extra=torch.zeros(3)),
            r"extra: left over with shape \[3\], expected no such tensor",
        ),
        (
            lambda state: state.update({WQKV: torch.zeros(128, 256)}),
            r"layers.0.attention.wqkv.weight: got shape \[128, 256\], expected \[256, 128\]",
        ),
        (
            lambda state: state.update({WQKV: torch.zeros(256, 128, dtype=torch.int8)}),
            r"layers.0.attention.wqkv.weight: got torch.int8, expected bf16, f16 or f32",
        ),
        (
            lambda state: state.update(
                {WQKV.replace("wqkv", "wq"): torch.zeros(128, 128), "b": torch.zeros(1)}
            ),
            r"4 tensors do not fit .*wk.weight: missing.*wv.weight: missing.*wqkv.weight: left",
        ),
        (
            lambda state: [state.update({f"extra{i}": torch.zeros(1)}) for i in range(20)],
            r"20 tensors do not fit .* and 12 more; config and weights must come from the same",
        ),
    ],
)
def test_tensors_that_do_not_fit(checkpoint, change, message):
    rewrite(checkpoint, change)
    with pytest.raises(CheckpointError, match=message):
        load(checkpoint)


def test_the_same_tensor_under_two_names(checkpoint):
    rewrite(checkpoint, lambda state: state.update({"norm.weight": torch.zeros(128)}))
    with pytest.raises(CheckpointError, match="norm.weight is stored twice"):
        load(checkpoint)


# ---------------------------------------------------------------------- files that are not there


def test_missing_directory(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere: not a directory; expected a checkpoint"):
        load(tmp_path / "nowhere")


def test_no_weights(checkpoint):
    (checkpoint / "model.safetensors").rename(checkpoint / "model.pth")
    with pytest.raises(
        CheckpointError, match=r"found config.json, .*model.pth, .*; expected .*index"
    ):
        load(checkpoint)


def test_missing_shard(checkpoint):
    names = shard(checkpoint)
    (checkpoint / names[1]).unlink()
    with pytest.raises(CheckpointError, match=f"1 of 3 shards missing: {names[1]}; download"):
        load(checkpoint)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "..", ".", "", "a/b"])
def test_shard_outside_the_directory(checkpoint, name):
    shard(checkpoint)
    index = {"weight_map": {"a": name}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="lies outside the directory"):
        load(checkpoint)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "{}",
        '{"weight_map": 3}',
        '{"weight_map": {"a": 5}}',
        '{"weight_map": {"a": null}}',
    ],
)
def test_bad_index(checkpoint, content):
    shard(checkpoint)
    (checkpoint / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"index.json: is not an index of shards"):
        load(checkpoint)


@pytest.mark.parametrize("keep_bytes", [0, 5, 4000, -100])
def test_truncated_file(checkpoint, keep_bytes):
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep_bytes])
    with pytest.raises(CheckpointError, match=r"bytes that are not a complete safetensors file"):
        load(checkpoint)


def test_corrupt_header(checkpoint):
    file = checkpoint / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[8:40] = b"\xff" * 32
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"download it again"):
        load(checkpoint)


def test_git_lfs_pointer(checkpoint):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    (checkpoint / "model.safetensors").write_text(pointer)
    with pytest.raises(CheckpointError, match="is a Git LFS pointer.*git lfs pull"):
        load(checkpoint)


def test_unknown_token_ids(checkpoint):
    (checkpoint / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"token ids unknown \(semantic 200 to 263, end None\)"):
        load_dual_ar(checkpoint, "cpu", torch.float32)
    (checkpoint / "tokenizer.json").write_text("[]")
    with pytest.raises(ConfigError, match="tokenizer.json: is not a tokenizer"):
        load_dual_ar(checkpoint, "cpu", torch.float32)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("n_layer", 10**9, "1000000[0-9]+ layers .n_layer., the weights are [0-9]+ tensors"),
        ("vocab_size", 2**31 - 1, "there is no room on cpu for a model of config.json's sizes"),
        ("dim", 2**31 - 2, "there is no room on cpu for a model of config.json's sizes"),
        (
            "intermediate_size",
            2**31 - 1,
            "there is no room on cpu for a model of config.json's sizes",
        ),
    ],
)
@pytest.mark.parametrize("read", [load, lambda path: plan_quantization(path, "bsgemm")])
def test_sizes_that_nothing_has(checkpoint, field, value, message, read):
    """Said at once, before memory or minutes are spent on them."""
    config = json.loads((checkpoint / "config.json").read_text())
    config["text_config"][field] = value
    if field == "dim":
        config["audio_decoder_config"]["text_dim"] = value
    (checkpoint / "config.json").write_text(json.dumps(config))
    if read is not load:
        message = "sizes|do not fit|layers"
    with pytest.raises(CheckpointError, match=message):
        read(checkpoint)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", [WQKV, "text_model.model.norm.weight"])
def test_weights_that_are_no_numbers(checkpoint, tmp_path, name, value):
    def spoil(state):
        state[name].view(-1)[-1] = value

    rewrite(checkpoint, spoil)
    message = "tensors hold values that are no finite numbers: .*(wqkv|norm).weight; expected none"
    with pytest.raises(CheckpointError, match=message):
        load(checkpoint)
    (tmp_path / "out").mkdir()
    for format in ("bsgemm", "mxfp8"):
        with pytest.raises(CheckpointError, match=message):
            write_quantized(plan_quantization(checkpoint, format), tmp_path / "out")
        for file in (tmp_path / "out").iterdir():
            file.unlink()


@pytest.mark.parametrize("format", ["bsgemm", "mxfp8"])
@pytest.mark.parametrize("suffix", ["weight", "weight_scale"])
def test_quantised_weights_that_are_no_numbers(checkpoint, tmp_path, format, suffix):
    out = tmp_path / "out"
    out.mkdir()
    write_quantized(plan_quantization(checkpoint, format), out)
    load(out)
    file, name = out / "model.safetensors", WQKV.removesuffix("weight") + suffix
    with safe_open(file, "pt") as stored:
        metadata = stored.metadata()
    state = load_file(file)
    is_f32 = state[name].dtype == torch.float32
    spoiled = state[name].view(torch.float32 if is_f32 else torch.uint8).view(-1)
    spoiled[0] = float("nan") if is_f32 else 0xFF
    save_file(state, file, metadata=metadata)
    with pytest.raises(CheckpointError, match=f"finite numbers: .*wqkv.{suffix}; expected none"):
        load(out)
