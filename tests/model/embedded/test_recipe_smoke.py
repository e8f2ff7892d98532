"""The recipe at toy size: a few steps lower the losses, runs resume, and the exported folder speaks."""

import json
import math
import wave
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from model.embedded import embedded_path
from model.embedded.recipe import encode, export, sample, train_codec, train_dual_ar
from model.embedded.recipe.tokens import PromptTokens, build_vocab
from model.embedded.recipe.trainable import TOY, TrainableDualAR
from model.prompt import Voice
from model.sampling import SamplingParams
from model.speech_model import load_speech_model, read_serving

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
    lines = "".join(f"Text {i}.\t{text}\n" for i, text in enumerate(texts))
    (root / "corpus.tsv").write_text(lines, encoding="utf-8")
    (root / "vocab.json").write_text(json.dumps({p: i + 1 for i, p in enumerate(PHONEMES)}))
    (root / "refs/am_ann").mkdir(parents=True)
    (root / "refs/texts.tsv").write_text(lines, encoding="utf-8")
    with wave.open(str(root / "refs/am_ann/0000.wav"), "wb") as file:
        file.setparams((1, 2, 24_000, 0, "NONE", ""))
        file.writeframes(np.pad(hum(rng, 60), (9600, 9600)).tobytes())
    return root


def losses(log: Path, name: str) -> list[float]:
    records = [json.loads(line) for line in log.read_text().splitlines()]
    return [record[name] for record in records if name in record]


def codec_args(data: Path, steps: int, out: str = "codec") -> list[str]:
    options = "--toy --min-hours 0 --capacity-hours 0.05 --batch 4 --frames 8 --warmup-steps 5"
    options += " --continuous-steps 5 --log-every 5 --refresh-every 5 --revive-every 10"
    options += " --adv-from 0.5 --adv-rows 2 --adv-crop 3000 --adv-alone-steps 2"
    options += f" --adv-ramp-steps 2 --lr 2e-3 --steps {steps}"
    return ["--shards", f"{data}/shards", "--out", f"{data}/{out}", *options.split()]


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
    held = losses(data / "dual/dual_ar.jsonl", "held_semantic")
    assert all(map(math.isfinite, held)) and len(held) == 4  # before the first step as well

    check_export(data, codec_file)
    check_another_decoder(data, codec_file)


def check_export(data: Path, codec_file: Path) -> None:
    out = data / "export"
    weights = ["--codec", str(codec_file), "--dual-ar", f"{data}/dual/dual_ar.safetensors"]
    options = ["--phonemes", f"{data}/vocab.json", "--references", f"{data}/refs"]
    with pytest.raises(SystemExit, match="no clip of the default voice af_heart"):
        export.main([*weights, *options, "--out", str(out)])
    export.main([*weights, *options, "--out", str(out), "--default-voice", "am_ann"])
    check_folder(out)
    own = ["--codec", f"{out}/codec.safetensors", "--dual-ar", f"{out}/dual_ar.safetensors"]
    export.main([*own, *options, "--out", str(out), "--default-voice", "am_ann"])  # onto itself
    check_speech(out)
    sample.main(
        ["--model", str(out), "--texts", f"{data}/corpus.tsv", "--out", f"{data}/samples", "--wav"]
        + ["--limit", "2", "--max-frames", "12", "--voices", "am_ann", "none"]
    )
    assert (data / "samples/am_ann/0001.wav").exists()
    with np.load(data / "samples.npz") as made:
        assert {"am_ann/0000", "am_ann/0001", "none/0000", "none/0001"} < set(made.files)


def check_folder(out: Path) -> None:
    """The same files with the same fields as the folder in the package."""
    product = embedded_path()
    config, expected = (json.loads((f / "config.json").read_text("utf-8")) for f in (out, product))
    assert read_serving(config) == replace(read_serving(expected), default_voice="am_ann")
    assert list(config["plosive"]) == list(expected["plosive"])
    for section in (None, "text_config", "audio_decoder_config", "codec_config"):
        made, wanted = ((c[section] if section else c) for c in (config, expected))
        assert list(made) == list(wanted), section
    for path in product.glob("*.*"):
        if path.suffix in (".json", ".safetensors", ".txt"):
            assert (out / path.name).is_file(), path.name
    voice = json.loads((out / "voices/am_ann.json").read_text("utf-8"))
    wanted = json.loads((product / "voices/af_heart.json").read_text("utf-8"))
    assert list(voice) == list(wanted)
    assert (voice["language"], voice["gender"], voice["text"]) == ("en-US", "male", "Text 0.")
    codes = load_file(out / "voices/am_ann.safetensors")["codes"]
    assert codes.dtype == torch.int32 and codes.shape == (8, voice["frames"])
    assert 36 <= voice["frames"] <= 44  # 1.5 s, its silence trimmed


def check_speech(out: Path) -> None:
    """The runtime loads what the recipe wrote, reads text and reference, and makes sound."""
    model = load_speech_model(out)
    voice = json.loads((out / f"voices/{model.serving.default_voice}.json").read_text("utf-8"))
    codes = load_file(out / "voices/am_ann.safetensors")["codes"]
    reference = Voice(voice["name"], model.front_end(voice["text"]).phonemes, codes)
    text = model.prompt.user_text(model.front_end("A bad day.").phonemes)
    parts = [model.prompt.prefix([reference]), text, model.prompt.assistant_header()]
    prompt = torch.cat(parts, dim=1)
    cache, state = model.dual_ar.new_cache(1, 512), model.dual_ar.new_frame_state(1)
    slots, last = torch.tensor([0]), prompt.shape[1] - 1
    model.dual_ar.prefill(prompt[:, :last], cache, 0, 0)
    model.dual_ar.join(state, 0, prompt[:, last], last, SamplingParams(seed=1))
    frame = model.dual_ar.decode_frame(state, slots, cache)
    sound = model.codec.decode_stream(frame.codes[..., None], model.codec.init_state(1), slots)
    assert sound.numel() == model.codec.frame_samples
    assert bool(sound.isfinite().all()) and float(sound.abs().max()) > 1e-5


def check_another_decoder(data: Path, codec_file: Path) -> None:
    """`--decoder-of`: what makes the codes stays to the bit, what reads them goes on."""
    options = ["--decoder-of", str(codec_file), "--no-adversary", "--revive-every", "1"]
    options += ["--average-every", "1"]
    train_codec.main([*codec_args(data, 4, "decoder"), *options])
    before, after = load_file(codec_file), load_file(data / "decoder/codec.safetensors")
    assert set(before) == set(after)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all(name.startswith("decoder.") for name in changed), changed


def test_a_run_starts_from_weights_that_are_there(tmp_path: Path) -> None:
    names = TrainableDualAR(TOY).state_dict()
    given = {name: torch.randn_like(value).bfloat16() for name, value in names.items()}
    save_file(given, tmp_path / "given.safetensors")
    options = ["--codes", "c.npz", "--corpus", "c.tsv", "--phonemes", "v.json", "--out", "out"]
    options += ["--toy", "--positions", "160", "--capacity-positions", "2e3"]
    args = train_dual_ar.parser().parse_args(
        [*options, "--start-from", f"{tmp_path}/given.safetensors"]
    )
    trainer = train_dual_ar.Trainer(args, torch.device("cpu"))
    for model in (trainer.model, trainer.average):
        kept = model.state_dict()
        assert all(torch.equal(kept[name], value.float()) for name, value in given.items())


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
