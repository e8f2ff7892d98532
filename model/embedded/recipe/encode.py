"""Encode the corpus with a trained codec: teacher shards -> one file of codes.

    python -m model.embedded.recipe.encode --shards DIR --codec codec.safetensors --out codes.npz

codes.npz: codes u16 [frames, K], and per clip: offset and length in frames, corpus row (`text`), `voice`. With
`--worsen` also `reference` u16 [frames, K]: what the codec makes of half of the clips in noise or of a narrower band, as
references are that people record; the other half is as in `codes`. Clips are batched only with others of the same number of frames, so each gets the codes it would get alone.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open
from torch import Tensor

from model.codec.spectral import SpectralCodec, SpectralConfig
from model.embedded.recipe.shards import BLOCK_SAMPLES, SAMPLE_RATE_HZ, shard_keys
from model.embedded.recipe.stepping import command_parser, save_atomically

MAX_BATCH_FRAMES = 20_000


def load_codec(path: Path, device: torch.device) -> SpectralCodec:
    """A codec written by `train_codec`: bf16 weights, computed in fp32."""
    with safe_open(path, framework="pt") as file:
        config = SpectralConfig.from_dict(json.loads(file.metadata()["codec_config"]))
        weights = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
    codec = SpectralCodec(config)
    codec.load_state_dict(weights)
    return codec.to(device).eval()


def worsen(wav: Tensor) -> Tensor:
    """wav: f32 [B, N]; half of the rows get noise, 3 to 30 dB below the speech and white to pink, and half
    of these lose what is above 3.5 to 10 kHz."""
    rows, size = wav.shape
    bins = torch.arange(size // 2 + 1, device=wav.device)

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(rows, 1, device=wav.device)

    spectrum = torch.fft.rfft(torch.randn_like(wav)) * (1 + bins) ** -uniform(0, 0.5)
    noise = torch.fft.irfft(spectrum, n=size)
    noise = noise / noise.square().mean(1, keepdim=True).sqrt()
    level = wav.square().mean(1, keepdim=True).sqrt() * 10 ** (-uniform(3, 30) / 20)
    noisy = wav + level * noise
    cutoff = uniform(3_500, 10_000) / SAMPLE_RATE_HZ * size
    narrow = torch.fft.irfft(torch.fft.rfft(noisy) * (bins < cutoff), n=size)
    noisy = torch.where(uniform(0, 1) < 0.5, narrow, noisy)
    return torch.where(uniform(0, 1) < 0.5, noisy, wav)


def encode_clips(
    codec: SpectralCodec,
    audio: Tensor,
    lengths: list[int],
    change: Callable[[Tensor], Tensor] | None = None,
) -> list[npt.NDArray]:
    """audio: i16 [samples] on the device, clips one after another -> u16 [frames, K] per clip"""
    starts = np.cumsum([0, *lengths[:-1]])
    frames = [-(-length // codec.frame_samples) for length in lengths]
    groups: dict[int, list[int]] = {}
    for clip, num_frames in enumerate(frames):
        groups.setdefault(num_frames, []).append(clip)
    codes: list[npt.NDArray] = [np.empty(0)] * len(lengths)
    for num_frames, clips in groups.items():
        size = max(1, MAX_BATCH_FRAMES // num_frames)
        for part in (clips[i : i + size] for i in range(0, len(clips), size)):
            wav = torch.zeros(len(part), num_frames * codec.frame_samples, device=audio.device)
            for row, clip in enumerate(part):
                sound = audio[starts[clip] : starts[clip] + lengths[clip]]
                wav[row, : lengths[clip]] = sound.float() / 32768
            wav = change(wav) if change else wav
            batch = codec.encode(wav).transpose(1, 2).cpu().numpy().astype(np.uint16)
            for row, clip in enumerate(part):
                codes[clip] = batch[row]
    return codes


def encode_shards(
    codec: SpectralCodec, folder: Path, cache: Path, device: torch.device, with_worse: bool = False
) -> dict[str, npt.NDArray]:
    """The codes of each shard are kept in `cache`, so a run costs only what is new."""
    cache.mkdir(parents=True, exist_ok=True)
    parts = []
    for key in shard_keys(folder):
        file = cache / f"{key}.npz"
        if not file.exists():
            save_atomically(
                lambda path, key=key: write_npz(
                    path, encode_shard(codec, folder, key, device, with_worse)
                ),
                file,
            )
            print(f"shard {key} encoded", flush=True)
        with np.load(file) as part:
            parts.append(dict(part))
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return {**joined, "offset": np.cumsum(joined["length"]) - joined["length"]}


def encode_shard(
    codec: SpectralCodec, folder: Path, key: str, device: torch.device, with_worse: bool
) -> dict[str, npt.NDArray]:
    rows = np.load(folder / f"m{key}.npy")
    audio = torch.from_numpy(np.load(folder / f"a{key}.npy")).to(device)
    lengths = (rows[:, 3] * BLOCK_SAMPLES).tolist()
    codes = encode_clips(codec, audio, lengths)
    worse = encode_clips(codec, audio, lengths, worsen) if with_worse else []
    return {
        **({"reference": np.concatenate(worse)} if worse else {}),
        "codes": np.concatenate(codes),
        "length": np.array([len(c) for c in codes]),
        "text": rows[:, 0],
        "voice": rows[:, 1],
    }


def write_npz(path: Path, arrays: dict[str, npt.NDArray]) -> None:
    with path.open("wb") as file:  # given a name, numpy would add a suffix
        np.savez(file, **arrays)


def entropy_bits(codes: npt.NDArray, codebook_size: int) -> list[float]:
    """Of each codebook, log2(codebook_size) at most."""
    result = []
    for column in codes.T:
        p = np.bincount(column, minlength=codebook_size) / len(column)
        p = p[p > 0]
        result.append(round(float(-(p * np.log2(p)).sum()), 2))
    return result


def main(argv: list[str] | None = None) -> None:
    parser = command_parser("encode", __doc__)
    parser.add_argument("--shards", type=Path, required=True, help="of teacher generate")
    parser.add_argument("--codec", type=Path, required=True, help="codec.safetensors")
    parser.add_argument("--out", type=Path, required=True, help="codes.npz")
    parser.add_argument(
        "--cache", type=Path, help="codes by shard; `codes` beside --out by default"
    )
    parser.add_argument("--worsen", action="store_true", help="noisy references as well")
    parser.add_argument("--cache-only", action="store_true", help="do not write --out yet")
    args = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    codec, start_s = load_codec(args.codec, device), time.monotonic()
    torch.manual_seed(5)
    cache = args.cache or args.out.parent / "codes"
    result = encode_shards(codec, args.shards, cache, device, args.worsen)
    if not args.cache_only:
        save_atomically(lambda path: write_npz(path, result), args.out)
    hours = len(result["codes"]) * codec.frame_samples / codec.sample_rate / 3600
    bits = entropy_bits(result["codes"], codec.codebook_sizes[0])
    seconds = time.monotonic() - start_s
    print(
        f"{len(result['length'])} clips, {hours:.2f} h in {seconds:.0f} s; bits {bits}", flush=True
    )


if __name__ == "__main__":
    main()
