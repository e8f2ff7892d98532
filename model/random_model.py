"""Real shapes with seeded random weights: `random:s2-pro` in place of a checkpoint directory.

    random:s2-pro?frames=60&reference_s=30&seed=1

| option        | default | meaning                                                          |
|---------------|---------|------------------------------------------------------------------|
| `frames`      | 60      | frames of every segment: all of them are this long               |
| `reference_s` | 10      | length of the default voice's reference, in seconds of codes     |
| `seed`        | 0       | of weights and codes                                             |

Every byte moved is that of the real model; what is said is noise. The small files of a checkpoint
(config.json, tokenizer.json, voices) are written to a temporary directory; weights are drawn on the
device. `plosive make-checkpoint` writes the same as files. The same seed gives other numbers on
another kind of device, whose generator is another.

**Forced length.** The model itself never ends a segment, so that `frames` (the `max_frames` of
`Serving`) does. Channel 0 of the slow residual stream is a constant: every embedding has the same
positive value there, and no layer writes to it. Only the head's row of the end token reads it, with
a large negative weight: that logit lies about a hundred below the others, whatever the sampling.
Decoding knows nothing of it.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import math
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor

from model.codec import Codec
from model.codec.checkpoint import Weights
from model.codec.config import DacConfig
from model.codec.dac import DacCodec
from model.config import DualARConfig
from model.dual_ar import DualAR
from model.errors import ConfigError
from model.geometries import GEOMETRIES, config_json, control_ids
from model.loader import placements

SCHEME = "random:"
REFERENCES_S = (0, 10, 30)  # lengths of the voices that every random model has
_TEXT_PER_S = 3.5  # characters, each a token: as many positions a second as of a real tokenizer
_CONSTANT = 0.02  # channel 0 of the embeddings, see above; no larger than their other values
_CONSTANT_GAIN = 512.0  # of the final norm, so that channel 0 weighs enough after it
_END_WEIGHT = -16.0
_CODEC_OUTPUT_GAIN = 20.0  # a waveform of about 0.1 RMS


@dataclass(frozen=True, slots=True)
class RandomModel:
    """What a name `random:...` asks for."""

    geometry: str
    frames: int = 60
    reference_s: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("frames", 1), ("reference_s", 0), ("seed", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}: got {getattr(self, name)}, expected {least} or more")

    @classmethod
    def parse(cls, name: str) -> RandomModel:
        """Read `random:GEOMETRY?OPTION=N&...`.

        Raises:
            ConfigError: naming what is not known, and what would be.
        """
        geometry, _, query = name.removeprefix(SCHEME).partition("?")
        if not name.startswith(SCHEME) or geometry not in GEOMETRIES:
            raise ConfigError(
                f"{name}: there is no such geometry; expected "
                f"{', '.join(SCHEME + known for known in GEOMETRIES)}"
            )
        options = dict(parse_qsl(query, keep_blank_values=True))
        valid = [field.name for field in fields(cls)][1:]
        for option, value in options.items():
            if option not in valid or not value.isdecimal():
                raise ConfigError(
                    f"{name}: got {option}={value}, expected a whole number for one of "
                    f"{', '.join(valid)}"
                )
        try:
            return cls(geometry, **{option: int(value) for option, value in options.items()})
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error

    def write_small_files(self, folder: Path) -> None:
        """config.json, tokenizer.json and voices/: a checkpoint without its weights."""
        data = config_json(self.geometry)
        data["plosive"] = {"max_frames": self.frames, "context": "prefix"}
        (folder / "config.json").write_text(json.dumps(data, indent=2), encoding="utf-8")
        config = DualARConfig.from_dict(data)
        make_tokenizer(self.geometry, config).save(str(folder / "tokenizer.json"))
        self._write_voices(folder / "voices", config)

    def _write_voices(self, folder: Path, config: DualARConfig) -> None:
        codec = codec_config(self.geometry)
        frames_per_s = codec.sample_rate / codec.frame_samples
        lengths_s = {f"ref-{seconds}s": seconds for seconds in REFERENCES_S}
        lengths_s["default"] = self.reference_s
        folder.mkdir()
        for name, seconds in lengths_s.items():
            shape = (config.num_codebooks, round(seconds * frames_per_s))
            generator = _generator(self.seed, f"voice {name}", torch.device("cpu"))
            size = min(codec.codebook_sizes)
            codes = torch.randint(0, size, shape, generator=generator, dtype=torch.int32)
            text = ("la " * math.ceil(seconds * _TEXT_PER_S))[: round(seconds * _TEXT_PER_S)]
            save_file({"codes": codes}, folder / f"{name}.safetensors")
            (folder / f"{name}.json").write_text(json.dumps({"name": name, "text": text}))

    def temporary_folder(self) -> Path:
        """A directory with the small files, removed when the process ends."""
        folder = Path(tempfile.mkdtemp(prefix="plosive-random-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        self.write_small_files(folder)
        return folder

    def dual_ar(self, device: torch.device, dtype: torch.dtype) -> DualAR:
        """The model, its weights drawn on the device."""
        config = DualARConfig.from_dict(config_json(self.geometry))
        model = DualAR(config, device, dtype)
        draw = weight_source(config, self.seed, device, dtype)
        for placement in placements(model):
            placement.target.copy_(draw(placement.name, placement.shape))
        model.finish_loading()
        return model.eval()

    def codec(self, device: torch.device, dtype: torch.dtype) -> Codec:
        """The codec, its weights drawn on the device."""
        return DacCodec(codec_config(self.geometry), RandomWeights(self.seed, device, dtype))


def is_random(name: str | Path) -> bool:
    """Whether the name asks for a random model, well written or not."""
    return str(name).startswith(SCHEME)


def codec_config(geometry: str) -> DacConfig:
    """Of the codec that goes with a geometry."""
    raw: dict[str, Any] | None = config_json(geometry).get("codec_config")
    return DacConfig.s2() if raw is None else DacConfig.from_json(raw)


def make_tokenizer(geometry: str, config: DualARConfig) -> Tokenizer:
    """A stand-in: the control and semantic tokens of the real one, and a token for every byte.

    Texts are about four times as many positions as with the real vocabulary.
    """
    begin = config.semantic_begin_id
    assert begin is not None, config
    control = control_ids(geometry)
    control |= {f"<|semantic:{i}|>": begin + i for i in range(config.num_semantic)}
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: i for i, character in enumerate(alphabet)} | control
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(control))
    return tokenizer


# ---------------------------------------------------------------------------- weights


def weight_source(
    config: DualARConfig, seed: int, device: torch.device, dtype: torch.dtype
) -> Callable[[str, tuple[int, ...]], Tensor]:
    """A function (name as in `model.loader`, shape) -> tensor on the device.

    Each tensor depends on seed, name and shape alone, so that they may be drawn in any order.
    """

    def draw(name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = torch.empty(shape, device=device, dtype=dtype)
        if name.endswith("norm.weight"):
            tensor.fill_(1.0)
        elif name.endswith("bias"):
            tensor.zero_()
        else:
            std = 1 / math.sqrt(shape[1])
            if name.endswith(("wo.weight", "w2.weight")):  # keeps the residual stream near 1
                stack = config.fast if name.startswith("fast_") else config.slow
                std /= math.sqrt(2 * stack.num_layers)
            tensor.normal_(0.0, std, generator=_generator(seed, name, device))
        _forbid_the_end(name, tensor, config)
        return tensor

    return draw


def _forbid_the_end(name: str, tensor: Tensor, config: DualARConfig) -> None:
    """What the slow AR's tensors have in channel 0, see the module."""
    if name == "norm.weight":
        tensor[0] = _CONSTANT_GAIN
    elif name == "embeddings.weight":
        tensor[:, 0] = _CONSTANT
    elif name in {"codebook_embeddings.weight", "output.weight"}:
        tensor[:, 0] = 0.0
    elif name.startswith("layers.") and name.endswith(("wo.weight", "w2.weight")):
        tensor[0] = 0.0
    head = "embeddings.weight" if config.tie_word_embeddings else "output.weight"
    if name == head:
        tensor[config.end_id, 0] = _END_WEIGHT


class RandomWeights(Weights):
    """Codec weights that are drawn when they are asked for; f32, on the device."""

    def __init__(self, seed: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__({}, "random", device, dtype)
        self._seed = seed

    def take(self, name: str, *shape: int) -> Tensor:
        return draw_codec_weight(self._prefix + name, shape, self._seed, self.device)


def draw_codec_weight(name: str, shape: tuple[int, ...], seed: int, device: torch.device) -> Tensor:
    """One tensor of the codec, f32, at a scale that keeps the waveform neither silent nor clipped."""
    tensor = torch.empty(shape, device=device, dtype=torch.float32)
    if name.endswith("bias"):
        return tensor.zero_()
    if name.endswith(("norm.weight", "alpha")):
        return tensor.fill_(1.0)
    if name.endswith("gamma"):
        return tensor.fill_(0.1)
    std = 1.0 if name.endswith("codebook.weight") else 1 / math.sqrt(math.prod(shape[1:]))
    if name.startswith("decoder."):  # residual units and snakes add up
        std *= _CODEC_OUTPUT_GAIN if shape[0] == 1 else 0.5
    return tensor.normal_(0.0, std, generator=_generator(seed, "codec " + name, device))


def _generator(seed: int, name: str, device: torch.device) -> torch.Generator:
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "little"))
