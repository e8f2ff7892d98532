"""The recipe at toy size: a few steps lower the losses, runs resume, and the exported folder speaks."""

import json
import math
import wave
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from model.codec import load_codec
from model.embedded.recipe import encode, export, sample, train_codec, train_dual_ar
from model.embedded.recipe.tokens import PromptTokens, build_vocab
from model.loader import load_dual_ar

PHONEMES = list("abdefhijklmnoprstuvwz ,.ˈː")
NUM_TEXTS = 24


def hum(rng: np.random.Generator, num_blocks: int) -> np.ndarray:
    """A gliding harmonic tone with syllable-like loudness: i16 [num_blocks * 600]"""
    t = np.arange(num_blocks * 600) / 24_000
    phase = 2 * np.pi * (rng.uniform(100, 220) * t + rng.uniform(-10, 10) * t * t)
    tone = sum(np.sin(k * phase) / k for k in range(1, 9))
    return (6000 * tone * np.sin(np.pi * 4 * t) ** 2).astype(np.int16)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Teacher shards of two voices, a corpus, an alphabet and reference recordings."""
    root, rng = tmp_path_factory.mktemp("recipe"), np.random.default_rng(0)
    (root / "shards").mkdir()
    for shard in range(2):
        rows = [
            (i if shard else 0, i % 2, 1000, int(n))
            for i, n in enumerate(rng.integers(40, 70, NUM_TEXTS))
        ]
        audio = [hum(rng, row[3]) for row in rows]
        labels = rng.integers(1, 100, sum(row[3] for row in rows))
        np.save(root / f"shards/m{shard}_0.npy", np.array(rows, np.int32))
        np.save(root / f"shards/l{shard}_0.npy", labels.astype(np.uint8))
        np.save(root / f"shards/a{shard}_0.npy", np.concatenate(audio))
    texts = ["".join(rng.choice(PHONEMES, 20)) for _ in range(NUM_TEXTS)]
    lines = "".join(f"text {i}\t{text}\n" for i, text in enumerate(texts))
    (root / "corpus.tsv").write_text(lines, encoding="utf-8")
    (root / "vocab.json").write_text(json.dumps({p: i + 1 for i, p in enumerate(PHONEMES)}))
    (root / "refs/ann").mkdir(parents=True)
    (root / "refs/texts.tsv").write_text(lines, encoding="utf-8")
    with wave.open(str(root / "refs/ann/0000.wav"), "wb") as file:
        file.setparams((1, 2, 24_000, 0, "NONE", ""))
        file.writeframes(np.pad(hum(rng, 60), (9600, 9600)).tobytes())
    return root


def losses(log: Path, name: str) -> list[float]:
    records = [json.loads(line) for line in log.read_text().splitlines()]
    return [record[name] for record in records if name in record]


def codec_args(data: Path, steps: int) -> list[str]:
    options = "--toy --min-hours 0 --capacity-hours 0.05 --batch 4 --frames 8 --warmup-steps 5"
    options += " --continuous-steps 5 --log-every 5 --refresh-every 5 --revive-every 10"
    options += " --adv-from 0.5 --adv-rows 2 --adv-crop 3000 --adv-alone-steps 2"
    options += f" --adv-ramp-steps 2 --lr 2e-3 --steps {steps}"
    return ["--shards", f"{data}/shards", "--out", f"{data}/codec", *options.split()]


def test_recipe_end_to_end(data: Path) -> None:
    torch.set_num_threads(1)
    train_codec.main(codec_args(data, 20))
    train_codec.main(codec_args(data, 30))  # goes on where the first run stopped
    mel = losses(data / "codec/codec.jsonl", "mel")
    assert len(mel) == 6 and mel[-1] < 0.8 * mel[0], mel
    assert losses(data / "codec/codec.jsonl", "d_period")

    codec_file, codes_file = data / "codec/codec.safetensors", data / "codes.npz"
    encode.main(
        ["--shards", f"{data}/shards", "--codec", str(codec_file), "--out", str(codes_file)]
    )
    codes = np.load(codes_file)
    assert len(codes["length"]) == 2 * NUM_TEXTS
    assert codes["codes"].shape == (codes["length"].sum(), 8)

    options = "--toy --positions 640 --capacity-positions 2e4 --warmup-steps 4 --lr 3e-3"
    options += " --log-every 5 --held-every 10 --wait --steps 30"
    files = ["--codes", str(codes_file), "--corpus", f"{data}/corpus.tsv"]
    files += ["--phonemes", f"{data}/vocab.json", "--out", f"{data}/dual"]
    train_dual_ar.main([*files, *options.split()])
    semantic = losses(data / "dual/dual_ar.jsonl", "semantic")
    assert semantic[-1] < semantic[0] - 0.3, semantic
    assert all(map(math.isfinite, losses(data / "dual/dual_ar.jsonl", "held_semantic")))

    check_export(data, codec_file)


def check_export(data: Path, codec_file: Path) -> None:
    out = data / "export"
    weights = ["--codec", str(codec_file), "--dual-ar", f"{data}/dual/dual_ar.safetensors"]
    export.main(
        [*weights, "--phonemes", f"{data}/vocab.json", "--references", f"{data}/refs"]
        + ["--out", str(out)]
    )
    voice = load_file(out / "voices/ann.safetensors")["codes"]
    assert voice.dtype == torch.int32 and voice.shape[0] == 8
    assert 36 <= voice.shape[1] <= 44  # 1.5 s, its silence trimmed
    texts = data / "corpus.tsv"
    sample.main(
        ["--model", str(out), "--texts", str(texts), "--out", f"{data}/samples", "--wav"]
        + ["--limit", "2", "--max-frames", "12", "--voices", "ann", "none"]
    )
    assert (data / "samples/ann/0001.wav").exists()
    # The runtime reads what the recipe writes.
    codec = load_codec(out, "cpu", torch.float32)
    assert codec.decode(voice[None]).shape == (1, voice.shape[1] * 960)
    load_dual_ar(out, "cpu", torch.float32)


def test_prompt_tokens_are_what_the_tokenizer_makes_of_the_prompt(tmp_path: Path) -> None:
    vocab = build_vocab(PHONEMES)
    export_file = tmp_path / "tokenizer.json"
    export_file.write_text(json.dumps(export.tokenizer_json(vocab)))
    tokenizer, prompt = Tokenizer.from_file(str(export_file)), PromptTokens(vocab)
    text = (
        "<|im_start|>system\nconvert the provided text to speech reference to the following:\n\n"
        "Text:\n<|speaker:0|>hˈi\n\nSpeech:\n<|semantic:7|><|im_end|>\n<|im_start|>user\nbaːd."
        "<|im_end|>\n<|im_start|>assistant\n<|voice|>"
    )
    made = [*prompt.system("hˈi", 1), *prompt.user("baːd.")]
    made = [vocab["<|semantic:7|>"] if i == PromptTokens.CODE else i for i in made]
    assert tokenizer.encode(text, add_special_tokens=False).ids == made
