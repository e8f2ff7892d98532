"""Speak sentences with a trained model, many at once: for evaluation, not for serving.

    python -m model.embedded.recipe.sample --model DIR --texts heldout.tsv --out samples

Writes `OUT.npz`: codes i16 [frames, K] under `voice/0000`, ...; and what did not end by itself under
`unfinished`. With `--wav`, also `OUT/voice/0000.wav`.
"""

import argparse
import json
import time
import wave
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file
from torch import Tensor

from model.codec.spectral import SpectralCodec
from model.embedded.recipe.encode import load_codec
from model.embedded.recipe.stepping import command_parser
from model.embedded.recipe.tokens import SEMANTIC_START, PromptTokens
from model.embedded.recipe.trainable import TOY, DualARConfig, TrainableDualAR
from model.text import EnglishFrontEnd

Codes = npt.NDArray[np.int16]


@dataclass(frozen=True)
class Sampling:
    temperature: float = 0.7
    fast_temperature: float = 0.7
    top_p: float = 0.9
    top_k: int = 30
    repeat_window: int = 10


@dataclass(frozen=True)
class Reference:
    phonemes: str
    codes: npt.NDArray[np.int32]  # [K, T]


def pick(logits: Tensor, temperature: float, sampling: Sampling) -> Tensor:
    """logits: [B, V] -> i64 [B]; top-p and top-k on the untempered distribution, then temperature"""
    if temperature <= 0:
        return logits.argmax(-1)
    values, order = logits.float().sort(-1, descending=True)
    probability = values.softmax(-1)
    before = probability.cumsum(-1) - probability
    rank = torch.arange(values.shape[-1], device=values.device)
    cut = (before > sampling.top_p) | (rank >= sampling.top_k)
    weights = (values / temperature).masked_fill(cut, -torch.inf).softmax(-1)
    return order.gather(-1, torch.multinomial(weights, 1))[:, 0]


class Speaker:
    """Decodes a batch of prompts of any lengths with a key-value cache."""

    def __init__(self, model: TrainableDualAR, prompt: PromptTokens) -> None:
        self.model, self.prompt = model.eval(), prompt
        self.device = model.slow.norm.weight.device

    def prompt_rows(self, phonemes: str, reference: Reference | None) -> tuple[Tensor, Tensor]:
        """-> tokens i64 [T], codes i64 [T, K]"""
        frames = reference.codes.T if reference else np.zeros((0, self.model.config.num_codebooks))
        system = self.prompt.system(reference.phonemes if reference else None, len(frames))
        tokens = np.array(system + self.prompt.user(phonemes))
        codes = np.zeros((len(tokens), self.model.config.num_codebooks), np.int64)
        speech = tokens == PromptTokens.CODE
        codes[speech] = frames
        tokens[speech] = SEMANTIC_START + codes[speech, 0]
        return torch.from_numpy(tokens), torch.from_numpy(codes)

    @torch.inference_mode()
    def speak(
        self, prompts: Sequence[tuple[Tensor, Tensor]], sampling: Sampling, max_frames: int
    ) -> tuple[list[Codes], list[bool]]:
        """-> codes i16 [frames, K] per prompt, and whether each ended by itself"""
        model, device, batch = self.model, self.device, len(prompts)
        lengths = torch.tensor([len(tokens) for tokens, _ in prompts], device=device)
        tokens = torch.nn.utils.rnn.pad_sequence([t for t, _ in prompts], True, 1).to(device)
        codes = torch.nn.utils.rnn.pad_sequence([c for _, c in prompts], True).to(device)
        size = tokens.shape[1] + max_frames
        table = model.table(size)
        hidden, caches = self._prefill(tokens, codes, size, table)
        rows = torch.arange(batch, device=device)
        hidden = hidden[rows, lengths - 1]
        recent = torch.full((batch, sampling.repeat_window), -1, device=device)
        ended = torch.zeros(batch, dtype=torch.bool, device=device)
        counts, frames = torch.zeros_like(lengths), []
        slots = torch.arange(size, device=device)
        for step in range(max_frames):
            choice = self._semantic(hidden, recent, sampling)
            ended |= choice == 0
            if step % 10 == 9 and bool(ended.all()):
                break
            recent = torch.cat([recent[:, 1:], choice[:, None]], 1)
            frame = self._frame(hidden, (choice - 1).clamp(min=0), sampling)
            frames.append(frame)
            counts += ~ended
            at = lengths + step
            x = model.embed(SEMANTIC_START + frame[:, :1], frame[:, None]).to(hidden.dtype)
            for layer, cache in zip(model.slow.layers, caches, strict=True):
                x = layer.cached(x, table[at][:, None], cache, at, slots <= at[:, None])
            hidden = model.slow.norm(x)[:, 0]
        spoken = torch.stack(frames, 1).cpu().numpy().astype(np.int16)
        cut = [spoken[i, :n] for i, n in enumerate(counts.tolist())]
        return cut, ended.tolist()

    def _prefill(
        self, tokens: Tensor, codes: Tensor, size: int, table: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """Padding follows a prompt, so causal attention never sees it; it is overwritten later."""
        model, (batch, length) = self.model, tokens.shape
        x, caches = model.embed(tokens, codes), []
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        for layer in model.slow.layers:
            _, k, v = layer.attention.project(layer.attention_norm(x), table[:length])
            cache = torch.zeros(
                batch, 2, size, model.config.head_dim, device=x.device, dtype=x.dtype
            )
            cache[:, 0, :length], cache[:, 1, :length] = k[:, :, 0], v[:, :, 0]
            caches.append(cache)
            x = layer(x, table[:length])
        return model.slow.norm(x), caches

    def _semantic(self, hidden: Tensor, recent: Tensor, sampling: Sampling) -> Tensor:
        """0 is the end, 1 + code a frame; a code said lately is drawn again, less cautiously."""
        logits = self.model.logits(hidden)
        choice = pick(logits, sampling.temperature, sampling)
        if sampling.temperature <= 0:
            return choice
        repeated = (recent == choice[:, None]).any(1) & (choice > 0)
        return torch.where(repeated, pick(logits, 1.0, sampling), choice)

    def _frame(self, hidden: Tensor, first: Tensor, sampling: Sampling) -> Tensor:
        codes = first[:, None]
        for _ in range(1, self.model.config.num_codebooks):
            logits = self.model.fast_logits(hidden, codes)[:, -1]
            code = pick(logits, sampling.fast_temperature, sampling)
            codes = torch.cat([codes, code[:, None]], 1)
        return codes


def load_model(folder: Path, device: torch.device) -> tuple[Speaker, SpectralCodec]:
    """A folder written by `export`."""
    weights = {k: v.float() for k, v in load_file(folder / "dual_ar.safetensors").items()}
    dim = weights["text_model.model.norm.weight"].shape[0]
    model = TrainableDualAR(TOY if dim == TOY.dim else DualARConfig())
    model.load_state_dict(weights)
    vocab = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    prompt = PromptTokens(vocab)
    return Speaker(model.to(device), prompt), load_codec(folder / "codec.safetensors", device)


def read_references(folder: Path) -> dict[str, Reference]:
    references, front_end = {}, EnglishFrontEnd()
    for path in sorted((folder / "voices").glob("*.json")):
        info = json.loads(path.read_text(encoding="utf-8"))
        codes = load_file(path.with_suffix(".safetensors"))["codes"].numpy()
        references[info["name"]] = Reference(front_end(info["text"]).phonemes, codes)
    return references


def write_wav(path: Path, samples: Tensor, sample_rate: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(sample_rate)
        file.writeframes((samples.clamp(-1, 1) * 32767).short().cpu().numpy().tobytes())


def decode(codec: SpectralCodec, codes: Codes) -> Tensor:
    """codes: i16 [frames, K] -> f32 [samples]"""
    device = codec.decoder.head.weight.device
    if not len(codes):
        return torch.zeros(codec.frame_samples, device=device)
    return codec.decode(torch.from_numpy(codes.T.astype(np.int32))[None].to(device))[0]


def parser() -> argparse.ArgumentParser:
    p = command_parser("sample", __doc__)
    p.add_argument("--model", type=Path, required=True, help="a folder written by export")
    p.add_argument("--texts", type=Path, required=True, help="lines of text<TAB>phonemes")
    p.add_argument("--out", type=Path, required=True, help="without suffix")
    p.add_argument("--voices", nargs="*", help="names; all by default, `none` for no reference")
    p.add_argument("--limit", type=int, default=0, help="first sentences only; 0 is all")
    p.add_argument("--batch", type=int, default=40, help="clips at a time")
    p.add_argument("--max-frames", type=int, default=400, help="where a clip is cut off")
    p.add_argument(
        "--temperature", type=float, help="the model's own unless given, as the next two"
    )
    p.add_argument("--top-p", type=float)
    p.add_argument("--top-k", type=int)
    p.add_argument("--fast-temperature", type=float, help="of codebooks 2 to 8, else --temperature")
    p.add_argument("--wav", action="store_true", help="decode to wav files as well")
    p.add_argument("--seed", type=int, default=0, help="of the draws")
    return p


def sampling_of(args: argparse.Namespace) -> Sampling:
    """What is asked for, the rest as the model is served."""
    config = json.loads((args.model / "config.json").read_text(encoding="utf-8"))
    given = {name: getattr(args, name) for name in ("temperature", "top_p", "top_k")}
    values = {k: config["plosive"][k] if v is None else v for k, v in given.items()}
    fast = args.fast_temperature
    return Sampling(fast_temperature=values["temperature"] if fast is None else fast, **values)


def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    speaker, codec = load_model(args.model, device)
    references = read_references(args.model)
    sampling = sampling_of(args)
    lines = [line.split("\t") for line in args.texts.read_text(encoding="utf-8").splitlines()]
    lines = lines[: args.limit or None]
    jobs = [
        (f"{voice}/{i:04d}", speaker.prompt_rows(line[1], references.get(voice)))
        for voice in args.voices or references
        for i, line in enumerate(lines)
    ]
    arrays: dict[str, npt.NDArray] = {}
    unfinished: list[str] = []
    start_s = time.monotonic()
    for part in (jobs[i : i + args.batch] for i in range(0, len(jobs), args.batch)):
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            codes, ended = speaker.speak([rows for _, rows in part], sampling, args.max_frames)
        for (name, _), spoken, finished in zip(part, codes, ended, strict=True):
            arrays[name] = spoken
            unfinished += [] if finished else [name]
            if args.wav:
                write_wav(args.out / f"{name}.wav", decode(codec, spoken), codec.sample_rate)
        print(f"{len(arrays)} of {len(jobs)}, {time.monotonic() - start_s:.0f} s", flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(f"{args.out}.npz", unfinished=np.array(unfinished), **arrays)
    print(f"{len(unfinished)} of {len(jobs)} did not end: {unfinished[:10]}", flush=True)


if __name__ == "__main__":
    main()
