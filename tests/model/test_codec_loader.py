"""load_codec: the file layouts it accepts, and the error of each one it does not."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.utils.parametrizations import weight_norm

from model.codec import load_codec
from model.codec.checkpoint import fold_weight_norm
from model.codec.config import DacConfig
from model.errors import CheckpointError, ConfigError
from tests.model.codec_reference import make_tensors

GOLDEN = Path(__file__).parents[1] / "golden" / "codec"
CONFIG = json.loads((GOLDEN / "config.json").read_text())
CODES = torch.zeros(1, 4, 2, dtype=torch.int32)
FLAT = {
    "sample_rate": 24000, "encoder_dim": 4, "encoder_rates": [2, 3], "decoder_dim": 16,
    "decoder_rates": [3, 2], "latent_dim": 16, "n_codebooks": 2, "codebook_size": 16,
    "semantic_codebook_size": 24, "codebook_dim": 4, "downsample_factor": [2, 2],
    "convnext_mult": 2, "pre_layers": 1, "post_layers": 1, "tf_heads": 2, "tf_head_dim": 8,
    "tf_inter": 24, "window": 4, "rope_base": 10000.0, "norm_eps": 1e-5, "hop": 24,
    "frame_rate": 1000, "causal": True, "quantizers_total": 3,
    "encoder_lookahead_training_samples": 12,
}  # fmt: skip


@pytest.fixture(scope="module")
def tensors():
    return torch.load(GOLDEN / "codec.pth", weights_only=True)


@pytest.fixture(scope="module")
def decoded():
    return load(GOLDEN).decode(CODES)


def load(path):
    return load_codec(path, "cpu", torch.float32)


def write(folder, loaded, config=CONFIG):
    torch.save(loaded, folder / "codec.pth")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def folded(tensors):
    """The same weights, plain."""
    plain = {}
    for name, tensor in tensors.items():
        for gain, direction in (("parametrizations.weight.original0",
                                 "parametrizations.weight.original1"),
                                ("weight_g", "weight_v")):  # fmt: skip
            if name.endswith(direction):
                stem = name.removesuffix(direction)
                plain[stem + "weight"] = fold_weight_norm(
                    tensors[stem + gain].float(), tensor.float()
                )
                break
            if name.endswith(gain):
                break
        else:
            plain[name] = tensor
    return plain


def test_fold_is_torchs_weight_norm():
    for layer in (torch.nn.Conv1d(3, 5, 7), torch.nn.ConvTranspose1d(3, 5, 4)):
        normed = weight_norm(layer)
        parts = normed.parametrizations.weight
        with torch.no_grad():
            parts.original0.mul_(1.7)
            got = fold_weight_norm(parts.original0, parts.original1)
        assert torch.allclose(got, normed.weight, atol=1e-7)


def swapped(name, old, new):
    return name.replace(old[0], new[0]).replace(old[1], new[1])


def test_both_spellings_of_weight_norm_and_none(tmp_path, tensors, decoded):
    torch_style = ("parametrizations.weight.original0", "parametrizations.weight.original1")
    old_style = ("weight_g", "weight_v")
    all_old = {swapped(n, torch_style, old_style): t for n, t in tensors.items()}
    all_new = {swapped(n, old_style, torch_style): t for n, t in tensors.items()}
    for variant in (all_old, all_new, folded(tensors)):
        assert torch.equal(load(write(tmp_path, variant)).decode(CODES), decoded)


def test_wrappings_and_buffers(tmp_path, tensors, decoded):
    generator = {f"generator.{name}": tensor for name, tensor in tensors.items()}
    with_buffers = {
        **tensors,
        "quantizer.pre_module.freqs_cis": torch.zeros(8, 32, 2, dtype=torch.bfloat16),
        "quantizer.post_module.causal_mask": torch.ones(8, 8, dtype=torch.bool),
        "encoder.block.4.block.5.causal_mask": torch.ones(8, 8, dtype=torch.bool),
    }
    for wrapped in (
        {"state_dict": tensors, "epoch": 3},
        {"generator": tensors},
        {**generator, "discriminator.weight": torch.zeros(3)},
        {"state_dict": generator},
        with_buffers,
    ):
        assert torch.equal(load(write(tmp_path, wrapped)).decode(CODES), decoded)


def test_safetensors_with_codec_config(tmp_path, tensors, decoded):
    speech_model = {"model_type": "fish_qwen3_omni", "codec_config": CONFIG}
    (tmp_path / "config.json").write_text(json.dumps(speech_model))
    save_file(folded(tensors), tmp_path / "codec.safetensors")
    for path in (tmp_path, tmp_path / "codec.safetensors", str(tmp_path)):
        assert torch.equal(load(path).decode(CODES), decoded)


def test_flat_configuration(tmp_path):
    config = DacConfig.from_json(FLAT)
    save_file(make_tensors(config, seed=0), tmp_path / "codec.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"codec_config": {"type": "dac", **FLAT}}))
    codec = load(tmp_path)
    assert (codec.sample_rate, codec.frame_samples, codec.num_codebooks) == (24_000, 24, 3)
    wav = torch.randn(2, 100, generator=torch.Generator().manual_seed(0))
    codes = codec.encode(wav)
    assert codes.shape == (2, 3, 5) and codec.decode(codes).shape == (2, 120)


def test_an_s2_directory_has_no_codec_config(tmp_path, tensors):
    """With the S2 sizes assumed, the tiny golden weights are refused by their first tensor."""
    s2 = DacConfig.s2()
    assert (s2.sample_rate, s2.frame_samples, s2.num_codebooks) == (44_100, 2048, 10)
    assert s2.codebook_sizes == (4096, *[1024] * 9)
    assert (s2.post.num_layers, s2.post.num_heads, s2.post.window) == (8, 16, 128)
    assert [t and (t.num_layers, t.num_heads, t.window) for t in s2.encoder_transformers] == [
        None, None, None, (4, 16, 512)
    ]  # fmt: skip
    for config in (None, {"model_type": "fish_qwen3_omni"}):
        with pytest.raises(CheckpointError, match=r"encoder\.block\.0.* shape \[8, 1, 1\].*64"):
            load(write(tmp_path, tensors, config))


def test_codec_pth_comes_before_safetensors(tmp_path, tensors):
    (tmp_path / "codec.safetensors").write_bytes(b"not read")
    load(write(tmp_path, tensors))


NAME = "decoder.model.6.conv.bias"
GAIN = "encoder.block.0.conv.parametrizations.weight.original0"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(NAME), rf"tensor {NAME} is missing; expected shape \[1\]"),
        (lambda t: t.update({NAME: torch.zeros(3)}), rf"{NAME} has shape \[3\]; expected \[1\]"),
        (lambda t: t.update({NAME: torch.zeros(1, dtype=torch.int64)}), rf"{NAME} has dtype"),
        (
            lambda t: t.update({NAME: torch.full_like(t[NAME], torch.nan)}),
            rf"{NAME} holds values that are no finite numbers",
        ),
        (
            lambda t: t.update({GAIN: t[GAIN] * torch.inf}),
            r"encoder\.block\.0\.conv\.weight holds values that are no finite numbers",
        ),
        (lambda t: t.update({"extra.weight": torch.zeros(3)}), r"no place for: extra.weight \[3\]"),
        (
            lambda t: t.pop(GAIN),
            r"encoder\.block\.0\.conv\.parametrizations\.weight\.original0 is missing",
        ),
    ],
    ids=["missing", "shape", "dtype", "NaN", "infinite", "left over", "half a weight norm"],
)
def test_tensor_errors(tmp_path, tensors, change, message):
    changed = dict(tensors)
    change(changed)
    with pytest.raises(CheckpointError, match=message):
        load(write(tmp_path, changed))


@pytest.mark.parametrize("keep", [0, 10, 3000, -1000])
def test_truncated_files(tmp_path, keep):
    for name in ("codec.pth", "codec.safetensors"):
        folder = tmp_path / name
        folder.mkdir()
        shutil.copy(GOLDEN / "config.json", folder)
        data = (GOLDEN / "codec.pth").read_bytes()
        if name == "codec.safetensors":
            save_file(load_file(GOLDEN / "expected.safetensors"), folder / name)
            data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[:keep])
        with pytest.raises(CheckpointError, match=r"bytes that cannot be read as codec weights"):
            load(folder)


class _NotATensor:
    pass


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "expected a mapping of tensors, found list"),
        ({}, "an empty one"),
        ({"a": "text"}, r"other values under \['a'\]"),
        ({"a": _NotATensor()}, "cannot be read"),
    ],
)
def test_other_contents(tmp_path, content, message):
    with pytest.raises(CheckpointError, match=message):
        load(write(tmp_path, content))


def test_missing_files(tmp_path):
    with pytest.raises(CheckpointError, match=r"expected one of codec.pth, codec.safetensors"):
        load(tmp_path)
    with pytest.raises(CheckpointError, match="no such file"):
        load(tmp_path / "nowhere")


def nested(**changes):
    return {**CONFIG, **changes}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (nested(surprise=1), "unknown field codec_config.surprise; valid ones are .*sample_rate, "),
        (nested(type="flac"), r"codec_config.type: expected one of \['dac', 'spectral'\]"),
        (nested(type=[0]), r"codec_config.type: expected one of .*, found \[0\]"),
        (
            nested(decoder_transformer_layers="x"),
            'decoder_transformer_layers: got "x", expected a list',
        ),
        (
            nested(decoder_transformer_layers=[1]),
            r"1 decoder_transformer_layers for \d+ decoder_ra",
        ),
        (
            nested(encoder_dim=10**30),
            "codec_config.encoder_dim: got 10*, expected at most 2147483647",
        ),
        (nested(sample_rate=2**31 - 1), "sample_rate: got 2147483647, expected at most 192000"),
        (
            {**FLAT, "sample_rate": 192_001},
            "codec_config.sample_rate: got 192001, expected at most 192000",
        ),
        (
            {"type": "spectral", "sample_rate": 2**31 - 1},
            r"codec_config.sample_rate: expected 1 to 192000, found 2147483647",
        ),
        (
            {**FLAT, "n_codebooks": 10**30},
            "codec_config.n_codebooks: got 10*, expected at most 1024",
        ),
        (
            nested(quantizer=CONFIG["quantizer"] | {"n_codebooks": 10**30}),
            "codec_config.quantizer.n_codebooks: got 10*, expected at most 1024",
        ),
        (
            {**FLAT, "norm_eps": 10**400},
            "codec_config.norm_eps: got 10.*, expected a finite number",
        ),
        ({**FLAT, "norm_eps": float("inf")}, "norm_eps: got Infinity, expected a finite number"),
        (nested(encoder_dim=0), "codec_config.encoder_dim: got 0, expected a positive integer"),
        (nested(decoder_rates=[8, 8, 4]), "encoder_rates multiply to 512, decoder_rates to 256"),
        (nested(transformer=3), "codec_config.transformer: got 3, expected an object"),
        (nested(encoder_rates="248"), 'codec_config.encoder_rates: got "248", expected a list'),
        (
            nested(encoder_rates=[2, 2**31]),
            "encoder_rates: got .*, expected a list of integers from",
        ),
        (
            {k: v for k, v in FLAT.items() if k != "window"},
            "codec_config.window: it is missing, expected a pos",
        ),
        ({**FLAT, "hop": 25}, "codec_config.hop: got 25, expected 24"),
        ({**FLAT, "norm_eps": "x"}, 'codec_config.norm_eps: got "x", expected a positive number'),
        ({"model_type": "x", "codec_config": []}, r"codec_config: expected an object"),
        ({"type": "spectral", "no": 1}, r"codec_config"),
        ([], "expected an object, found list"),
    ],
)
def test_config_errors(tmp_path, tensors, config, message):
    with pytest.raises(ConfigError, match=message):
        load(write(tmp_path, tensors, config))


def test_config_that_is_not_json(tmp_path, tensors):
    write(tmp_path, tensors)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        load(tmp_path)
