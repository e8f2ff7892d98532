"""Write the product's model folder from trained weights and reference recordings.

    python -m model.embedded.recipe.export --codec codec.safetensors --dual-ar dual_ar.safetensors \
        --phonemes vocab.json --references refs --out DIR

`refs` is what `teacher say` writes: `texts.tsv` has a text in the first column of each line, `VOICE/0000.wav` is line 0
spoken by VOICE. DIR gets config.json, dual_ar.safetensors, codec.safetensors, tokenizer.json, the licence and notice, and
voices/VOICE.{safetensors,json}: all that `model.speech_model.load_speech_model` and a server's voice list read.
"""

import json
import shutil
import wave
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.codec.spectral import SpectralCodec
from model.embedded import embedded_path
from model.embedded.recipe.encode import load_codec
from model.embedded.recipe.stepping import command_parser, save_atomically
from model.embedded.recipe.tokens import (
    CODEBOOK_SIZE,
    SEMANTIC_START,
    VOCAB_SIZE,
    build_vocab,
    read_phonemes,
    tokenizer_json,
)
from model.embedded.recipe.trainable import TOY, DualARConfig

LEAD_MS, TAIL_MS = 40, 120
SILENCE = 0.012  # of the loudest 10 ms
SERVING = {
    "front_end": "english_phonemes",
    "context": "prefix",
    "has_prompt": False,
    "default_voice": "af_heart",
    "max_segment_chars": 190,
    "max_frames": 400,
    "temperature": 0.3,
    "top_p": 0.9,
    "top_k": 30,
}
LANGUAGES = {"a": "en-US", "b": "en-GB"}  # by the first letter of the teacher's voice names
GENDERS = {"f": "female", "m": "male"}  # by the second
NOTICES = ("LICENSE.txt", "NOTICE.txt")  # of the teacher: they go where its voices go
MAX_PARAMETERS, MAX_BYTES = 20_000_000, 40_000_000


def stack_config(config: DualARConfig, fast: bool) -> dict[str, Any]:
    """One transformer of config.json."""
    return {
        "model_type": "fish_qwen3_audio_decoder" if fast else "fish_qwen3",
        "vocab_size": config.codebook_size if fast else VOCAB_SIZE,
        "n_layer": config.fast_layers if fast else config.num_layers,
        "dim": config.dim,
        "n_head": config.num_heads,
        "n_local_heads": 1,
        "head_dim": config.head_dim,
        "intermediate_size": config.fast_ffn_dim if fast else config.ffn_dim,
        "rope_base": config.rope_base,
        "norm_eps": config.norm_eps,
        "max_seq_len": config.num_codebooks + 1 if fast else config.max_seq_len,
        "attention_qk_norm": not fast,
        "attention_qkv_bias": False,
        "attention_o_bias": False,
        "tie_word_embeddings": not fast,
        "dropout": 0.0,
        "use_moe": False,
        "num_experts": 1,
        "initializer_range": 0.02,
    }


def model_config(
    config: DualARConfig,
    codec: dict[str, Any],
    vocab: dict[str, int],
    context: str,
    default_voice: str,
) -> dict[str, Any]:
    fast = stack_config(config, fast=True)
    return {
        "architectures": ["FishQwen3OmniForCausalLM"],
        "model_type": "fish_qwen3_omni",
        "dtype": "bfloat16",
        "eos_token_id": vocab["<|im_end|>"],
        "pad_token_id": vocab["<|pad|>"],
        "audio_pad_token_id": vocab["<|audio_pad|>"],
        "semantic_start_token_id": SEMANTIC_START,
        "semantic_end_token_id": SEMANTIC_START + CODEBOOK_SIZE - 1,
        "text_config": stack_config(config, fast=False),
        "audio_decoder_config": {
            **fast,
            "text_dim": config.dim,
            "num_codebooks": config.num_codebooks,
        },
        "codec_config": codec,
        "plosive": {**SERVING, "context": context, "default_voice": default_voice},
    }


def read_wav(path: Path, sample_rate: int) -> Tensor:
    """-> f32 [samples]"""
    with wave.open(str(path)) as file:
        if (file.getframerate(), file.getnchannels()) != (sample_rate, 1):
            raise SystemExit(f"{path}: expected mono at {sample_rate} Hz")
        samples = np.frombuffer(file.readframes(file.getnframes()), np.int16)
    return torch.from_numpy(samples.astype(np.float32) / 32768)


def trim(wav: Tensor, sample_rate: int) -> Tensor:
    """Cut silence at both ends to a little, as the training clips have it."""
    step = sample_rate // 100
    loud = wav[: len(wav) // step * step].view(-1, step).square().mean(1).sqrt()
    active = (loud > SILENCE * loud.max()).nonzero().flatten()
    first = max(0, int(active[0]) - LEAD_MS // 10)
    last = int(active[-1]) + 1 + TAIL_MS // 10
    return wav[first * step : last * step]


def write_voices(codec: SpectralCodec, references: Path, line: int, out: Path) -> list[str]:
    out.mkdir(parents=True, exist_ok=True)
    texts = (references / "texts.tsv").read_text(encoding="utf-8").splitlines()
    text = texts[line].split("\t")[0]
    names = []
    for path in sorted(references.glob(f"*/{line:04d}.wav")):
        name = path.parent.name
        wav = trim(read_wav(path, codec.sample_rate), codec.sample_rate)
        codes = codec.encode(wav[None])[0]
        save_atomically(
            lambda path, codes=codes: save_file({"codes": codes.contiguous()}, path),
            out / f"{name}.safetensors",
        )
        info = {"name": name, "text": text, "frames": codes.shape[1]}
        if name[:1] in LANGUAGES and name[1:2] in GENDERS:
            info |= {"language": LANGUAGES[name[0]], "gender": GENDERS[name[1]]}
        text_file = out / f"{name}.json"
        text_file.write_text(json.dumps(info, ensure_ascii=False, indent=2) + "\n", "utf-8")
        names.append(name)
    return names


def copy(source: Path, target: Path) -> None:
    """A folder may be written again from its own weights."""
    if not (target.exists() and target.samefile(source)):
        shutil.copyfile(source, target)


def check_size(paths: list[Path]) -> tuple[int, int]:
    """Parameters and bytes of the weight files."""
    num_parameters = sum(t.numel() for path in paths for t in load_file(path).values())
    num_bytes = sum(path.stat().st_size for path in paths)
    if num_parameters > MAX_PARAMETERS or num_bytes > MAX_BYTES:
        raise SystemExit(f"too large: {num_parameters} parameters, {num_bytes} bytes")
    return num_parameters, num_bytes


def main(argv: list[str] | None = None) -> None:
    parser = command_parser("export", __doc__)
    parser.add_argument("--codec", type=Path, required=True, help="codec.safetensors")
    parser.add_argument("--dual-ar", type=Path, required=True, help="dual_ar.safetensors")
    parser.add_argument("--phonemes", type=Path, required=True, help="the teacher's vocab.json")
    parser.add_argument(
        "--references", type=Path, required=True, help="of teacher say: a voice a folder"
    )
    parser.add_argument("--line", type=int, default=0, help="of texts.tsv, for every voice")
    parser.add_argument("--default-voice", default=SERVING["default_voice"], help="one of them")
    parser.add_argument(
        "--context",
        choices=("prefix", "dialogue"),
        default=SERVING["context"],
        help="what the server keeps before a segment: the reference, or the dialogue so far",
    )
    parser.add_argument("--out", type=Path, required=True, help="the model's folder")
    args = parser.parse_args(argv)
    if not (args.references / f"{args.default_voice}/{args.line:04d}.wav").is_file():
        raise SystemExit(f"{args.references}: no clip of the default voice {args.default_voice}")
    args.out.mkdir(parents=True, exist_ok=True)
    codec = load_codec(args.codec, torch.device("cpu"))
    with safe_open(args.codec, framework="pt") as file:
        codec_config = json.loads(file.metadata()["codec_config"])
    dim = load_file(args.dual_ar)["text_model.model.norm.weight"].shape[0]
    vocab = build_vocab(read_phonemes(args.phonemes))
    size = TOY if dim == TOY.dim else DualARConfig()
    config = model_config(size, codec_config, vocab, args.context, args.default_voice)
    for name, value in (("config.json", config), ("tokenizer.json", tokenizer_json(vocab))):
        text = json.dumps(value, ensure_ascii=False, indent=2) + "\n"
        (args.out / name).write_text(text, encoding="utf-8")
    weights = [args.out / "codec.safetensors", args.out / "dual_ar.safetensors"]
    for source, target in zip((args.codec, args.dual_ar), weights, strict=True):
        copy(source, target)
    for name in NOTICES:
        copy(embedded_path() / name, args.out / name)
    names = write_voices(codec, args.references, args.line, args.out / "voices")
    num_parameters, num_bytes = check_size(weights)
    print(f"{num_parameters / 1e6:.2f} M parameters, {num_bytes / 1e6:.1f} MB, voices {names}")


if __name__ == "__main__":
    main()
