"""Quantised checkpoints: the values of quantising at once, in pieces; files that do not fit are refused."""

import json
import math
import shutil
import tracemalloc
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from model import quantize_checkpoint
from model.checkpoint_files import read_state, weight_files
from model.dual_ar import DualAR
from model.errors import CheckpointError, ConfigError, ModelError
from model.loader import load_dual_ar
from model.quantize_checkpoint import plan_quantization, write_quantized
from model.quantized import CONFIG_FIELD, METADATA_KEY, Format
from model.random_checkpoint import plan_checkpoint, write_checkpoint
from model.random_model import RandomModel
from model.speech_model import load_speech_model
from ops.reference_fp8 import dequantize_mxfp8, dequantize_weight, quantize_mxfp8, quantize_weight
from tests.model.goldens import GOLDEN
from tests.model.test_loader import make_flat_twin

W13 = "text_model.model.layers.1.feed_forward.w13.weight"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_checkpoint(RandomModel("tiny"), folder)
    return folder


def quantise(source: Path, out: Path, format: Format = "bsgemm") -> Path:
    out.mkdir()
    write_quantized(plan_quantization(source, format), out)
    return out


def packed(model: DualAR) -> list[torch.Tensor]:
    """All packed tensors of the blocks, as bytes."""
    assert model._fused is not None
    blocks = [*model._fused._slow.blocks(1), *model._fused._fast.blocks(1)]
    matrices = [m for b in blocks for m in (b.wqkv, b.wo, b.gate_up, b.down)]
    return [t.view(torch.uint8) for matrix in matrices for t in matrix.tensors()]


def assert_like_quantising_on_load(source: Path, out: Path) -> None:
    """bf16, as on a device."""
    loaded = load_dual_ar(out, "cpu", torch.bfloat16)
    fresh = load_dual_ar(source, "cpu", torch.bfloat16)
    for model in (loaded, fresh):
        model.use_kernels("bsfp8")
    for ours, expected in zip(packed(loaded), packed(fresh), strict=True):
        assert torch.equal(ours, expected)
    assert torch.equal(loaded.embeddings, fresh.embeddings)


@pytest.mark.parametrize("piece_bytes", [1, 128 * 128 * 2, 8 << 20])
def test_bsgemm_is_what_quantising_on_load_makes(tmp_path, tiny, monkeypatch, piece_bytes):
    monkeypatch.setattr(quantize_checkpoint, "_PIECE_BYTES", piece_bytes)
    assert_like_quantising_on_load(tiny, quantise(tiny, tmp_path / "out"))


@pytest.mark.parametrize("name", ["dual_ar_projected", "dual_ar_long"])
def test_odd_shapes_biases_and_f32_sources(tmp_path, name):
    """Blocks that reach past the matrix: 96 columns, 160 rows, gate and up that share a block."""
    source = shutil.copytree(GOLDEN / name, tmp_path / "in")
    assert_like_quantising_on_load(source, quantise(source, tmp_path / "out"))


def test_split_projections_are_fused(tmp_path):
    nested = shutil.copytree(GOLDEN / "dual_ar_projected", tmp_path / "nested")
    flat = shutil.copytree(nested, tmp_path / "flat")
    make_flat_twin(flat)
    outs = [quantise(nested, tmp_path / "n"), quantise(flat, tmp_path / "f")]
    states = [{name: s.tensor for name, s in _state(out).items()} for out in outs]
    assert all(name.endswith("bias") for name in states[0].keys() ^ states[1].keys())
    for name in states[0].keys() & states[1].keys():
        assert torch.equal(*(_bytes(state[name]) for state in states)), name
    load_dual_ar(outs[1], "cpu", torch.bfloat16).use_kernels("bsfp8")


def test_mxfp8_is_expanded_on_loading(tmp_path, tiny):
    out = quantise(tiny, tmp_path / "out", "mxfp8")
    original = load_file(tiny / "model.safetensors")
    gate_up = torch.cat([original[W13.replace("w13", part)] for part in ("w1", "w3")])
    data, scale = quantize_mxfp8(gate_up)
    stored = load_file(out / "model.safetensors")
    assert torch.equal(_bytes(stored[W13]), _bytes(data))
    assert torch.equal(stored[f"{W13}_scale"], scale)
    model = load_dual_ar(out, "cpu", torch.float32)
    expanded = model.slow.layers[1].gate_up.to_dense()
    assert torch.equal(expanded, dequantize_mxfp8(data, scale))
    rows = torch.zeros(5, 12, dtype=torch.int32)
    rows[0] = torch.arange(12)
    with torch.inference_mode():
        near, exact = model(rows)[0], load_dual_ar(tiny, "cpu", torch.float32)(rows)[0]
    assert float((near - exact).std() / exact[:, 272:].std()) < 0.3


@pytest.mark.parametrize("format", ["bsgemm", "mxfp8"])
def test_what_the_file_says(tmp_path, tiny, format):
    plan = plan_quantization(tiny, format)
    out = quantise(tiny, tmp_path / "out", format)
    (file,) = weight_files(out)
    with safe_open(file, framework="pt") as handle:
        description = json.loads(handle.metadata()[METADATA_KEY])
    assert description == json.loads((out / "config.json").read_text())[CONFIG_FIELD]
    assert (description["format"], description["layout"]) == (format, 1)
    assert len(description["source"]) == 16
    stored = load_file(file)
    assert sum(tensor.nbytes for tensor in stored.values()) == plan.nbytes
    for name, tensor in stored.items():
        is_matrix = name.endswith(("wqkv.weight", "wo.weight", "w13.weight", "w2.weight"))
        kinds = {torch.float8_e4m3fn} if is_matrix else {torch.bfloat16, torch.float32, torch.uint8}
        assert tensor.dtype in kinds and tensor.is_contiguous(), name
    others = {path.name for path in out.iterdir()} - {file.name}
    assert others == {"config.json", "tokenizer.json", "codec.pth", "voices"}


def test_shards_and_serving(tmp_path, tiny, monkeypatch):
    """Sharded in, sharded out; served as any other, on the CPU through the definitions."""
    monkeypatch.setattr("model.tensor_files.MAX_SHARD_BYTES", 500_000)
    source = tmp_path / "in"
    source.mkdir()
    write_checkpoint(RandomModel("tiny"), source)
    out = quantise(source, tmp_path / "out")
    assert len(list(out.glob("model-*.safetensors"))) > 1
    model = load_speech_model(out)
    assert model.dual_ar.kind == "bsfp8" and model.load_report.num_bytes > 0
    assert_like_quantising_on_load(tiny, out)


def test_memory_does_not_grow_with_the_checkpoint(tmp_path):
    """Python's own memory: a plan of S2 Pro is names and shapes."""
    tracemalloc.start()
    plan = plan_checkpoint("s2-pro")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert plan.nbytes > 10**10 and peak < 50e6


@pytest.mark.parametrize("shape", [(128, 128), (300, 200), (1, 32), (129, 33)])
def test_error_bounds_of_the_formats(shape):
    """Half a step of three bits of mantissa: 1/16 of a value, and what lies under e4m3's range."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    for quantise_, expand in (
        (quantize_weight, dequantize_weight),
        (quantize_mxfp8, dequantize_mxfp8),
    ):
        data, scale = quantise_(weight)
        error = (expand(data, scale) - weight.float()).abs()
        assert bool((error <= weight.float().abs() / 16 + 1e-3 * weight.abs().max()).all())
        assert math.isfinite(float(scale.float().sum()))


# ---------------------------------------------------------------------------- what is refused


@pytest.fixture
def quantised(tmp_path, tiny) -> Path:
    return quantise(tiny, tmp_path / "quantised")


def refused(path: Path) -> str:
    with pytest.raises(ModelError) as error:
        load_dual_ar(path, "cpu", torch.bfloat16)
    return str(error.value)


def rewrite(path: Path, change) -> None:
    file = path / "model.safetensors"
    with safe_open(file, framework="pt") as handle:
        metadata = handle.metadata()
    state = load_file(file)
    change(state)
    save_file(state, file, metadata)


def set_in_config(path: Path, **values: object) -> None:
    file = path / "config.json"
    data = json.loads(file.read_text())
    data[CONFIG_FIELD] |= values
    file.write_text(json.dumps(data))


def test_scales_of_another_layout_are_refused(quantised):
    """The known trap: K-major scales, read as row-major, are wrong numbers at full speed."""

    def transpose(state) -> None:
        state[f"{W13}_scale"] = state[f"{W13}_scale"].t().contiguous()

    rewrite(quantised, transpose)
    assert "w13.weight_scale: got shape [1, 4], expected [4, 1]" in refused(quantised)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"layout": 2}, "layout: got 2, expected 1"),
        ({"format": "int4"}, "format: got 'int4', expected 'bsgemm' or 'mxfp8'"),
        ({"format": [1]}, "format: got [1]"),
        ({"weight_block": [128, 64]}, "weight_block: got (128, 64), expected (128, 128)"),
        ({"weight_block": 5}, "weight_block: got 5"),
        ({"extra": 1}, "got ['extra', 'format', 'layout', 'source', 'weight_block'], expected"),
        ({"source": "0" * 16}, "both must come from the same `plosive quantize`"),
    ],
)
def test_a_description_that_does_not_fit(quantised, values, message):
    set_in_config(quantised, **values)
    assert message in refused(quantised)


def test_a_missing_scale_another_dtype_and_a_tensor_too_many(quantised):
    def change(state) -> None:
        scale = state.pop(f"{W13}_scale")
        state[W13] = state[W13].to(torch.bfloat16)
        state["text_model.model.layers.0.feed_forward.w1.weight"] = scale

    rewrite(quantised, change)
    message = refused(quantised)
    assert "layers.1.feed_forward.w13.weight_scale: missing, expected shape [4, 1]" in message
    assert "w13.weight: got torch.bfloat16, expected torch.float8_e4m3fn" in message
    assert "layers.0.feed_forward.w1.weight: left over" in message


def test_weights_and_config_of_two_checkpoints(tmp_path, tiny, quantised):
    mixed = shutil.copytree(tiny, tmp_path / "mixed")
    shutil.copyfile(quantised / "model.safetensors", mixed / "model.safetensors")
    assert "config.json's plosive_quantization is None" in refused(mixed)
    shutil.copyfile(tiny / "model.safetensors", quantised / "model.safetensors")
    assert f"its {METADATA_KEY} is None" in refused(quantised)


def test_a_quantised_one_is_not_quantised_again(quantised):
    with pytest.raises(CheckpointError, match=r"is quantised already \(bsgemm\)"):
        plan_quantization(quantised, "mxfp8")


def test_a_quantised_one_does_not_run_as_bf16(quantised):
    with pytest.raises(ConfigError, match="got 'bf16' for a checkpoint quantised as bsgemm"):
        load_speech_model(quantised, run_as="bf16")


def _state(path: Path):
    from model.loader import quantization_of

    return read_state(path, quantization_of(path))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["bsgemm", "mxfp8"])
def test_a_device_gets_the_same_values(tmp_path, tiny, format):
    out = quantise(tiny, tmp_path / "out", format)
    host = load_dual_ar(out, "cpu", torch.bfloat16)
    device = load_dual_ar(out, "cuda", torch.bfloat16)
    for ours, theirs in zip(device.slow.layers, host.slow.layers, strict=True):
        for name in ("wqkv", "wo", "gate_up", "down"):
            expected = getattr(theirs, name)
            expected = expected.to_dense() if expected.is_mkldnn else expected
            assert torch.equal(_bytes(getattr(ours, name)).cpu(), _bytes(expected)), name
