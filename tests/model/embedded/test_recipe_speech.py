"""The recipe between teacher and figures: codes of clips, sampling, copies."""

import importlib
import json
import wave
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from model.codec.spectral import SpectralCodec
from model.embedded.recipe import copy_synthesis, encode, export, sample, train_codec
from model.embedded.recipe.sample import Reference, Sampling, Speaker, pick
from model.embedded.recipe.tokens import SEMANTIC_START, PromptTokens, build_vocab
from model.embedded.recipe.trainable import TOY, TrainableDualAR

PROMPT = PromptTokens(build_vocab(list("abcdefgh .")))
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def codec_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A codec of toy size, untrained, as `train_codec` writes it."""
    torch.manual_seed(0)
    codec = SpectralCodec(train_codec.TOY)
    config = json.dumps({"type": "spectral", **asdict(codec.config)})
    weights = {name: value.bfloat16().contiguous() for name, value in codec.state_dict().items()}
    path = tmp_path_factory.mktemp("codec") / "codec.safetensors"
    save_file(weights, path, {"codec_config": config})
    return path


def noise(num_samples: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-9000, 9000, num_samples).astype(np.int16)


def write_wav(path: Path, samples: np.ndarray, rate_hz: int = 24_000) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, rate_hz, 0, "NONE", ""))
        file.writeframes(samples.tobytes())


def read_wav(path: Path) -> np.ndarray:
    with wave.open(str(path)) as file:
        return np.frombuffer(file.readframes(file.getnframes()), np.int16).copy()


# --- codes


def test_a_clip_encoded_among_others_has_the_codes_it_has_alone(codec_file: Path) -> None:
    codec = encode.load_codec(codec_file, CPU)
    lengths = [9_600, 6_000, 9_000, 9_600, 12_000]
    clips = [noise(length, seed) for seed, length in enumerate(lengths)]
    together = encode.encode_clips(codec, torch.from_numpy(np.concatenate(clips)), lengths)
    assert [len(codes) for codes in together] == [10, 7, 10, 10, 13]
    for clip, codes in zip(clips, together, strict=True):
        (alone,) = encode.encode_clips(codec, torch.from_numpy(clip), [len(clip)])
        assert codes.dtype == np.uint16 and np.array_equal(codes, alone)
    assert not np.array_equal(together[0], together[3])


def test_half_of_the_references_are_worsened(codec_file: Path, tmp_path: Path) -> None:
    """By noise 3 to 30 dB below the speech; what stays, stays to the bit."""
    torch.manual_seed(0)
    t = torch.arange(24_000) / 24_000
    clean = (0.1 * torch.sin(2 * torch.pi * 440 * t)).repeat(400, 1)
    added = encode.worsen(clean) - clean
    changed = added.square().mean(1) > 0
    assert 0.4 < changed.float().mean() < 0.6
    below = 10 * torch.log10(clean[0].square().mean() / added[changed].square().mean(1))
    assert 2.5 < float(below.min()) < 6 and 27 < float(below.max()) < 37
    high = torch.fft.rfft(added[changed])[:, 10_500:].abs().mean(1)
    assert 0.4 < (high < 1e-3).float().mean() < 0.6  # of a narrow band

    np.save(tmp_path / "m0_0.npy", np.array([(0, 0, 1000, 80)] * 12, np.int32))
    np.save(tmp_path / "l0_0.npy", np.zeros(960, np.uint8))
    np.save(tmp_path / "a0_0.npy", np.concatenate([noise(48_000, 1)] * 12))
    codec = encode.load_codec(codec_file, CPU)
    made = encode.encode_shards(codec, tmp_path, tmp_path / "cache", CPU, with_worse=True)
    same = [
        bool((made["reference"][s : s + 50] == made["codes"][s : s + 50]).all())
        for s in made["offset"]
    ]
    assert 0 < sum(same) < 12


def test_entropy() -> None:
    codes = np.stack([np.arange(64) % 8, np.zeros(64, int)], 1)
    assert encode.entropy_bits(codes, 1024) == [3.0, 0.0]


def test_copies_are_as_long_as_what_they_copy(codec_file: Path, tmp_path: Path) -> None:
    lengths = {"ann/0000": 10_000, "ann/0003": 9_600, "bob/0000": 4_321}
    for seed, (name, length) in enumerate(lengths.items()):
        write_wav(tmp_path / f"wavs/{name}.wav", noise(length, seed))
    (tmp_path / "wavs/texts.tsv").write_text("not a clip")
    folders = ["--wavs", f"{tmp_path}/wavs", "--out", f"{tmp_path}/copies"]
    copy_synthesis.main(["--codec", str(codec_file), *folders])
    made = {p.relative_to(tmp_path / "copies"): p for p in (tmp_path / "copies").rglob("*.*")}
    assert {str(p.with_suffix("")) for p in made} == set(lengths)
    codec = encode.load_codec(codec_file, CPU)
    for name, length in lengths.items():
        copy = read_wav(tmp_path / f"copies/{name}.wav")
        assert len(copy) == length
        wav = torch.from_numpy(read_wav(tmp_path / f"wavs/{name}.wav")).float()[None] / 32768
        expected = codec.decode(codec.encode(wav))[0, :length].clamp(-1, 1) * 32767
        assert np.abs(copy - expected.numpy()).max() <= 1


def test_references_must_have_the_codec_rate(tmp_path: Path) -> None:
    write_wav(tmp_path / "clip.wav", noise(100, 0), rate_hz=16_000)
    with pytest.raises(SystemExit, match="expected mono at 24000 Hz"):
        export.read_wav(tmp_path / "clip.wav", 24_000)


def test_references_are_trimmed() -> None:
    loud = torch.from_numpy(noise(24_000, 0)).float() / 32768
    wav = torch.cat([torch.zeros(12_000), loud, torch.zeros(12_000)])
    kept = export.trim(wav, 24_000)
    lead, tail = 24 * export.LEAD_MS, 24 * export.TAIL_MS
    assert len(kept) == lead + 24_000 + tail
    assert torch.equal(kept[lead:-tail], loud)


def test_too_many_parameters_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"a": torch.zeros(10, 10)}, tmp_path / "weights.safetensors")
    num_parameters, num_bytes = export.check_size([tmp_path / "weights.safetensors"])
    assert num_parameters == 100 and num_bytes > 400
    monkeypatch.setattr(export, "MAX_PARAMETERS", 99)
    with pytest.raises(SystemExit, match="too large: 100 parameters"):
        export.check_size([tmp_path / "weights.safetensors"])


# --- sampling


def test_pick_keeps_to_top_k_and_top_p() -> None:
    torch.manual_seed(0)
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log().repeat(500, 1)

    def picked(temperature: float = 1.0, **options) -> set[int]:
        return set(pick(logits, temperature, Sampling(**options)).tolist())

    assert picked(top_p=1.0, top_k=4) == {0, 1, 2, 3}
    assert picked(top_p=1.0, top_k=2) == {0, 1}
    assert picked(top_p=0.5, top_k=4) == {0, 1}
    assert picked(top_p=0.3, top_k=4) == {0}
    assert picked(temperature=0.0, top_p=1.0, top_k=4) == {0}
    assert picked(temperature=0.01, top_p=1.0, top_k=4) == {0}


@pytest.fixture(scope="module")
def speaker() -> Speaker:
    torch.manual_seed(1)
    model = TrainableDualAR(TOY)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.2)  # so that what is said depends on the text
    return Speaker(model, PROMPT)


def prompts(speaker: Speaker) -> list[tuple[torch.Tensor, torch.Tensor]]:
    codes = np.random.default_rng(0).integers(0, 1024, (8, 9)).astype(np.int32)
    ann = Reference("abc", codes)
    return [
        speaker.prompt_rows("abcdefgh", ann),
        speaker.prompt_rows("a", None),
        speaker.prompt_rows("hg fe dc ba.", ann),
        speaker.prompt_rows("abc", None),
    ]


GREEDY = Sampling(temperature=0.0, fast_temperature=0.0)


def test_prompts_of_any_length_are_spoken_as_they_are_alone(speaker: Speaker) -> None:
    rows = prompts(speaker)
    together, _ = speaker.speak(rows, GREEDY, max_frames=6)
    assert len({codes.tobytes() for codes in together}) == len(rows)
    for row, codes in zip(rows, together, strict=True):
        (alone,), _ = speaker.speak([row], GREEDY, max_frames=6)
        assert np.array_equal(codes, alone)


def test_decoding_with_a_cache_is_the_model_without(speaker: Speaker) -> None:
    tokens, codes = prompts(speaker)[0]
    (spoken,), _ = speaker.speak([(tokens, codes)], GREEDY, max_frames=5)
    made = torch.from_numpy(spoken.astype(np.int64))
    with torch.inference_mode():
        hidden = speaker.model.hidden(
            torch.cat([tokens, SEMANTIC_START + made[:, 0]])[None], torch.cat([codes, made])[None]
        )[0, len(tokens) - 1 : -1]
        assert torch.equal(speaker.model.logits(hidden).argmax(-1) - 1, made[:, 0])
        residual = speaker.model.fast_logits(hidden, made[:, :-1]).argmax(-1)
    assert torch.equal(residual, made[:, 1:])


def test_speech_ends_where_the_model_says(
    speaker: Speaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0 is the end; what a row says afterwards, while others go on, is not kept."""
    script = iter(torch.tensor([[3, 4], [0, 5], [6, 7], [8, 9]]))
    monkeypatch.setattr(speaker, "_semantic", lambda *args: next(script))
    codes, ended = speaker.speak(prompts(speaker)[:2], GREEDY, max_frames=4)
    assert ended == [True, False]
    assert [spoken[:, 0].tolist() for spoken in codes] == [[2], [3, 4, 6, 8]]


def test_a_code_said_lately_is_drawn_again(
    speaker: Speaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = {0.7: torch.tensor([5, 5, 0]), 1.0: torch.tensor([7, 7, 7])}
    monkeypatch.setattr(sample, "pick", lambda logits, temperature, sampling: drawn[temperature])
    recent = torch.tensor([[-1, 5], [-1, 6], [-1, 0]])
    hidden = torch.zeros(3, TOY.dim)
    assert speaker._semantic(hidden, recent, Sampling()).tolist() == [7, 5, 0]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], Sampling(0.4, 0.4, 0.8, 20)),
        (["--temperature", "0"], Sampling(0.0, 0.0, 0.8, 20)),
        (["--fast-temperature", "0", "--top-k", "5"], Sampling(0.4, 0.0, 0.8, 5)),
    ],
)
def test_samples_are_drawn_as_the_model_is_served(
    tmp_path: Path, options: list[str], expected: Sampling
) -> None:
    serving = {"temperature": 0.4, "top_p": 0.8, "top_k": 20}
    (tmp_path / "config.json").write_text(json.dumps({"plosive": serving}))
    needed = ["--model", str(tmp_path), "--texts", "texts.tsv", "--out", "samples"]
    assert sample.sampling_of(sample.parser().parse_args([*needed, *options])) == expected


COMMANDS = "corpus teacher train_codec encode train_dual_ar export sample copy_synthesis evaluate"


@pytest.mark.parametrize("name", COMMANDS.split())
def test_commands_say_how_they_are_called(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = importlib.import_module(f"model.embedded.recipe.{name}")
    with pytest.raises(SystemExit) as ended:
        command.main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0
    assert said.startswith(f"usage: python -m model.embedded.recipe.{name} ")
    assert "default: None" not in said and "default: False" not in said


def test_silence_for_a_turn_without_frames(codec_file: Path) -> None:
    codec = encode.load_codec(codec_file, CPU)
    assert not sample.decode(codec, np.zeros((0, 8), np.int16)).any()
    assert sample.decode(codec, np.zeros((3, 8), np.int16)).shape == (3 * 960,)
