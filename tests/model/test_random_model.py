"""Random models: real shapes, finite activations, a segment that ends where it is told to."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from model.config import DualARConfig
from model.errors import ConfigError
from model.geometries import GEOMETRIES, S2_IDS, config_json
from model.loader import load_dual_ar
from model.random_checkpoint import plan_checkpoint, write_checkpoint
from model.random_model import RandomModel, make_tokenizer
from model.sampling import MAX_TOP_K, SamplingParams
from model.speech_model import SpeechModel, load_speech_model
from tests.model.test_config import S1_MINI, S2_PRO

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Iterator[SpeechModel]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield load_speech_model(Path("random:tiny?frames=7&reference_s=3"))


def prompt_rows(model: SpeechModel) -> torch.Tensor:
    parts = [
        model.prompt.prefix([]),
        model.prompt.user_text("Hello <|im_end|> there."),
        model.prompt.assistant_header(),
    ]
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize(("name", "published"), [("s2-pro", S2_PRO), ("s1-mini", S1_MINI)])
def test_the_geometry_is_the_published_one(name, published):
    ours, theirs = DualARConfig.from_dict(config_json(name)), DualARConfig.from_dict(published)
    if not theirs.is_complete:  # the published file leaves the ids to the tokenizer
        ids = ("semantic_begin_id", "semantic_end_id", "end_id")
        theirs = replace(theirs, **{field: getattr(ours, field) for field in ids})
    assert ours == theirs


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("random:s2-pro", RandomModel("s2-pro")),
        ("random:tiny?frames=9&reference_s=0&seed=3", RandomModel("tiny", 9, 0, 3)),
    ],
)
def test_names(name, expected):
    assert RandomModel.parse(name) == expected


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("random:s3", "random:s3: there is no such geometry; expected random:s2-pro"),
        ("random:", "there is no such geometry"),
        ("random:tiny?frame=3", "got frame=3, expected a whole number for one of frames"),
        ("random:tiny?frames=x", "got frames=x"),
        ("random:tiny?frames=-1", "got frames=-1"),
        ("random:tiny?frames=0", "frames: got 0, expected 1 or more"),
        ("random:tiny?frames", "got frames="),
    ],
)
def test_a_wrong_name_is_explained(name, message):
    with pytest.raises(ConfigError) as refused:
        load_speech_model(Path(name))
    assert message in str(refused.value)


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_the_tokenizer_has_the_published_ids(geometry):
    config = DualARConfig.from_dict(config_json(geometry))
    tokenizer = make_tokenizer(geometry, config)
    assert tokenizer.token_to_id("<|semantic:0|>") == config.semantic_begin_id
    last = f"<|semantic:{config.num_semantic - 1}|>"
    assert tokenizer.token_to_id(last) == config.semantic_end_id
    assert tokenizer.token_to_id("<|im_end|>") == config.end_id
    if geometry != "tiny":
        assert {name: tokenizer.token_to_id(name) for name in S2_IDS} == S2_IDS
    text = "Grüße, 你好 🙂"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_the_same_seed_is_the_same_model(tiny):
    rows = prompt_rows(tiny)
    with torch.inference_mode():
        first, again, other = (
            RandomModel("tiny", seed=seed).dual_ar(CPU, torch.float32)(rows)[0]
            for seed in (0, 0, 1)
        )
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_stay_near_one_and_the_end_is_out_of_reach(tiny, dtype):
    model = RandomModel("tiny").dual_ar(CPU, dtype)
    with torch.inference_mode():
        logits, hidden = model(prompt_rows(tiny))
    end_id, begin = model.config.end_id, model.config.semantic_begin_id
    assert 0.5 < float(hidden[:, 1:].float().std()) < 2.0
    assert 0.3 < float(logits[-1, begin:].std()) < 3.0
    assert float(logits[-1, end_id]) < float(logits[-1].median()) - 50


def test_no_sampling_reaches_the_end(tiny):
    model, rows = tiny.dual_ar, prompt_rows(tiny)
    num_frames = 40
    cache, state = model.new_cache(1, rows.shape[1] + num_frames), model.new_frame_state(1)
    slots = torch.tensor([0])
    with torch.inference_mode():
        model.prefill(rows[:, :-1], cache, 0, 0)
        hot = SamplingParams(temperature=2.0, top_p=1.0, top_k=MAX_TOP_K, seed=3)
        model.join(state, 0, rows[:, -1], rows.shape[1] - 1, hot)
        for _ in range(num_frames):
            frame = model.decode_frame(state, slots, cache)
            assert not frame.is_end.any()


def test_voices_of_every_length(tiny):
    folder = tiny.path / "voices"
    assert {file.stem for file in folder.glob("*.safetensors")} == {
        "default",
        "ref-0s",
        "ref-10s",
        "ref-30s",
    }
    assert json.loads((folder / "ref-0s.json").read_text())["text"] == ""


def test_the_small_files_are_written_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first, again = (RandomModel("tiny", reference_s=1).small_files() for _ in range(2))
    other = RandomModel("tiny", reference_s=2).small_files()
    assert first == again != other
    assert sorted(first.parent.iterdir()) == sorted([first, other])
    assert (first / "voices" / "default.json").is_file()


# ---------------------------------------------------------------------------- as files


def test_the_files_are_the_same_model(tmp_path):
    made_up = RandomModel("tiny", frames=7)
    num_written = []
    write_checkpoint(made_up, tmp_path, num_written.append)
    assert sum(num_written) == plan_checkpoint("tiny").nbytes
    loaded = load_speech_model(tmp_path)
    rows = prompt_rows(loaded)
    codes = torch.randint(0, 32, (1, 4, 5)).int()
    with torch.inference_mode():
        assert torch.equal(loaded.dual_ar(rows)[0], made_up.dual_ar(CPU, torch.float32)(rows)[0])
        pcm = made_up.codec(CPU, torch.float32).decode(codes)
        torch.testing.assert_close(loaded.codec.decode(codes), pcm, atol=1e-5, rtol=1e-4)
    assert loaded.serving.max_frames == 7 and loaded.serving.is_length_fixed


def test_it_writes_shards(tmp_path, monkeypatch):
    monkeypatch.setattr("model.tensor_files.MAX_SHARD_BYTES", 1_000_000)
    write_checkpoint(RandomModel("tiny"), tmp_path)
    names = sorted(file.name for file in tmp_path.glob("*.safetensors"))
    assert names == [f"model-{i}-of-00003.safetensors" for i in ("00001", "00002", "00003")]
    rows = prompt_rows(load_speech_model(tmp_path))
    with torch.inference_mode():
        expected = RandomModel("tiny").dual_ar(CPU, torch.float32)(rows)[0]
        assert torch.equal(load_dual_ar(tmp_path, CPU, torch.float32)(rows)[0], expected)


def test_published_names_and_sizes():
    """The two files of S2 Pro hold 9,123,704,832 bytes; codec.pth 391 M parameters."""
    plan = plan_checkpoint("s2-pro")
    shapes = {entry.name: entry.shape for entry in plan.weights}
    assert sum(entry.nbytes for entry in plan.weights) == 9_123_704_832
    assert shapes["text_model.model.embeddings.weight"] == (155776, 2560)
    assert shapes["text_model.model.layers.35.attention.wqkv.weight"] == (6144, 2560)
    assert shapes["text_model.model.layers.0.attention.q_norm.weight"] == (128,)
    assert shapes["text_model.model.layers.0.feed_forward.w2.weight"] == (2560, 9728)
    assert shapes["audio_decoder.codebook_embeddings.weight"] == (40960, 2560)
    assert shapes["audio_decoder.layers.3.attention.wo.weight"] == (2560, 4096)
    assert shapes["audio_decoder.output.weight"] == (4096, 2560)
    assert not any("project_in" in name or name.endswith("bias") for name in shapes)
    assert len(shapes) == 2 + 1 + 36 * 9 + 3 + 4 * 7
    num_codec = sum(math.prod(shape) for shape in plan.codec.values())
    assert 390e6 < num_codec < 392e6
    assert plan.codec["decoder.model.0.conv.weight"] == (1536, 1024, 7)


@pytest.mark.gpu
def test_s2_pro_on_the_device():
    device = torch.device("cuda")
    model = RandomModel("s2-pro").dual_ar(device, torch.bfloat16)
    rows = torch.zeros(11, 40, dtype=torch.int32, device=device)
    rows[0] = torch.arange(40, device=device)
    with torch.inference_mode():
        logits, hidden = model(rows)
    assert bool(logits.isfinite().all()) and 0.5 < float(hidden[:, 1:].float().std()) < 2.0
    assert float(logits[-1, model.config.end_id]) < float(logits[-1].median()) - 50
