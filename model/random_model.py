"""Real shapes with seeded random weights: `random:s2-pro` in place of a checkpoint directory.

    random:s2-pro?frames=60&reference_s=30&seed=1

| option        | default | meaning                                                          |
|---------------|---------|------------------------------------------------------------------|
| `frames`      | 60      | frames of every segment: all of them are this long               |
| `reference_s` | 10      | length of the default voice's reference, in seconds of codes     |
| `seed`        | 0       | of weights and codes                                             |

Every byte moved is that of the real model; what is said is noise. Besides the default voice there
are `ref-0s`, `ref-10s` and `ref-30s`. A segment's context is the voice alone (no dialogue), so that
lengths do not depend on what was said before. The small files of a checkpoint
(config.json, tokenizer.json, voices) are written to the user's cache; weights are drawn on the
device. `plosive make-checkpoint` writes the same as files. The same seed gives other numbers on
another kind of device, whose generator is another.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import tempfile
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from model.codec import Codec
from model.codec.config import DacConfig
from model.codec.dac import DacCodec
from model.config import DualARConfig
from model.dual_ar import DualAR
from model.errors import ConfigError
from model.geometries import GEOMETRIES, config_json, control_ids
from model.loader import placements
from model.random_weights import RandomWeights, bf16_row_slices, draw_rows, seeded_generator
from model.tensor_files import fingerprint

SCHEME = "random:"
REFERENCES_S = (0, 10, 30)  # lengths of the voices that every random model has
_PROMPT = 112  # positions around a reference: the words of its prompt, each byte a token
_TEXT = 128  # positions that an engine keeps for a segment's text
_TEXT_PER_S = 3.5  # characters, each a token: as many positions a second as of a real tokenizer


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
        max_len = DualARConfig.from_dict(config_json(self.geometry)).slow.max_len
        if self.num_positions > max_len:
            raise ConfigError(
                f"frames={self.frames} with reference_s={self.reference_s} needs a context of "
                f"{self.num_positions} positions, {self.geometry} has {max_len}; ask for less"
            )

    @property
    def num_positions(self) -> int:
        """Of the context that a session in the default voice needs: reference, text and frames."""
        codec = codec_config(self.geometry)
        per_s = codec.sample_rate / codec.frame_samples + _TEXT_PER_S
        reference = math.ceil(self.reference_s * per_s) + _PROMPT if self.reference_s else 0
        return self.frames + _TEXT + reference

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
        serving = {"max_frames": self.frames, "is_length_fixed": True, "context": "prefix"}
        data["plosive"] = serving
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
            generator = seeded_generator(self.seed, f"voice {name}", torch.device("cpu"))
            size = min(codec.codebook_sizes)
            codes = torch.randint(0, size, shape, generator=generator, dtype=torch.int32)
            text = ("la " * math.ceil(seconds * _TEXT_PER_S))[: round(seconds * _TEXT_PER_S)]
            save_file({"codes": codes}, folder / f"{name}.safetensors")
            (folder / f"{name}.json").write_text(json.dumps({"name": name, "text": text}))

    def small_files(self) -> Path:
        """A directory with `write_small_files`, made once: `$XDG_CACHE_HOME/plosive/random/...`."""
        base = os.environ.get("XDG_CACHE_HOME")
        cache = (Path(base) if base else Path.home() / ".cache") / "plosive" / "random"
        cache.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(dir=cache))
        try:
            self.write_small_files(new)
            files = sorted(file for file in new.rglob("*") if file.is_file())
            folder = cache / f"{self.geometry}-{fingerprint(*files)}"
            with contextlib.suppress(OSError):  # it is there, perhaps since just now
                new.rename(folder)
        finally:
            shutil.rmtree(new, ignore_errors=True)
        return folder

    def dual_ar(self, device: torch.device, dtype: torch.dtype) -> DualAR:
        """The model, its weights drawn on the device."""
        config = DualARConfig.from_dict(config_json(self.geometry))
        model = DualAR(config, device, dtype)
        for placement in placements(model):
            name, shape, target, _ = placement
            for rows in bf16_row_slices(shape):
                drawn = torch.empty(
                    (rows.stop - rows.start, *shape[1:]), device=device, dtype=torch.bfloat16
                )
                draw_rows(name, shape, rows, config, self.seed, drawn)
                is_vector = len(shape) == 1  # and perhaps broadcast
                (target if is_vector else target[rows]).copy_(drawn)
        model.finish_loading()
        return model.eval()

    def codec(
        self, device: torch.device, dtype: torch.dtype, *, is_fused: bool | None = None
    ) -> Codec:
        """The codec, its weights drawn on the device; `is_fused`: see `DacCodec`."""
        weights = RandomWeights(self.seed, device, dtype)
        return DacCodec(codec_config(self.geometry), weights, is_fused=is_fused)


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
