"""A checkpoint directory as one object: DualAR, codec, prompt layout, front end, how to serve it."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import torch
from pydantic import Field, TypeAdapter, ValidationError

from model.codec import Codec, load_codec, weight_file
from model.dual_ar import DualAR
from model.errors import ConfigError
from model.loader import load_dual_ar
from model.prompt import PromptBuilder, load_tokenizer
from model.random_model import RandomModel, is_random
from model.text import EnglishFrontEnd

_FINGERPRINT_BYTES = 1 << 20


class Spoken(Protocol):
    """What a front end makes of a text: the string the model reads, and what was read otherwise."""

    @property
    def phonemes(self) -> str: ...
    @property
    def warnings(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, slots=True)
class PlainText:
    """Text as it is, for models that read spelling."""

    phonemes: str
    warnings: tuple[str, ...] = ()


FRONT_ENDS: dict[str, Callable[[], Callable[[str], Spoken]]] = {
    "none": lambda: PlainText,
    "english_phonemes": EnglishFrontEnd,
}


@dataclass(frozen=True, slots=True)
class Serving:
    """How a checkpoint wants to be served: the section `plosive` of its config.json. The defaults
    are those of S2 Pro, whose config.json has no such section."""

    front_end: str = "none"
    context: Literal["prefix", "dialogue"] = "dialogue"  # what precedes a segment in the KV
    has_prompt: bool = True
    default_voice: str = "default"
    max_segment_chars: Annotated[int, Field(ge=1)] = 300
    max_frames: Annotated[int, Field(ge=1)] = 1024  # of one segment
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.8
    top_p: Annotated[float, Field(gt=0, le=1)] = 0.8
    top_k: Annotated[int, Field(ge=1)] = 30

    def __post_init__(self) -> None:
        if self.front_end not in FRONT_ENDS:
            raise ConfigError(
                f"plosive.front_end: got {self.front_end!r}, expected one of {sorted(FRONT_ENDS)}"
            )


_SERVING = TypeAdapter(Serving)


@dataclass(frozen=True, slots=True)
class SpeechModel:
    """All that the engine needs. Modules are in eval mode on one device."""

    name: str
    path: Path
    device: torch.device
    dual_ar: DualAR
    codec: Codec
    codec_id: str  # fingerprint of the codec's weights
    prompt: PromptBuilder
    front_end: Callable[[str], Spoken]
    serving: Serving


def read_serving(config: dict[str, Any]) -> Serving:
    """The `plosive` section of a config.json.

    Raises:
        ConfigError: it has a field that this code does not know, or a value out of range.
    """
    section = config.get("plosive", {})
    if not isinstance(section, dict):
        raise ConfigError(f"plosive: got {section!r}, expected an object")
    valid = [field.name for field in fields(Serving)]
    unknown = sorted(set(section) - set(valid))
    if unknown:
        raise ConfigError(f"plosive: unknown field {unknown[0]!r}; valid fields: {valid}")
    try:
        return _SERVING.validate_python(section)
    except ValidationError as error:
        first = error.errors()[0]
        got, name = first["input"], first["loc"][0]
        raise ConfigError(f"plosive.{name}: got {got!r}; {first['msg']}") from error


def fingerprint(file: Path) -> str:
    """Tells files apart by size and both ends; reading all of a 2 GB file would take seconds."""
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as stream:
        digest.update(stream.read(_FINGERPRINT_BYTES))
        stream.seek(max(0, size - _FINGERPRINT_BYTES))
        digest.update(stream.read())
    return digest.hexdigest()[:16]


def load_speech_model(
    path: Path, *, name: str | None = None, device: str = "cpu", dtype: torch.dtype | None = None
) -> SpeechModel:
    """Load a checkpoint directory (S2 Pro's layout or the embedded model's), or make up a model:
    `random:s2-pro` and the like, see `model.random_model`.

    Raises:
        ConfigError, CheckpointError: naming the file or tensor, what was found, what was expected.
    """
    target = torch.device(device)
    dtype = dtype or (torch.bfloat16 if target.type == "cuda" else torch.float32)
    if is_random(path):
        made_up = RandomModel.parse(str(path))
        folder, dual_ar = made_up.temporary_folder(), made_up.dual_ar(target, dtype)
        codec, codec_id = made_up.codec(target, torch.float32), str(path)
    else:
        folder, dual_ar = path, load_dual_ar(path, target, dtype)
        codec = load_codec(path, target, torch.float32)
        codec_id = fingerprint(weight_file(path))
    serving = read_serving(json.loads((folder / "config.json").read_text("utf-8")))
    return SpeechModel(
        name=name or path.name,
        path=folder,
        device=target,
        dual_ar=dual_ar,
        codec=codec,
        codec_id=codec_id,
        prompt=PromptBuilder(load_tokenizer(folder), dual_ar.config),
        front_end=FRONT_ENDS[serving.front_end](),
        serving=serving,
    )
