"""A checkpoint directory as one object: DualAR, codec, prompt layout, front end, how to serve it."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Protocol

import torch
from pydantic import Field, TypeAdapter, ValidationError

from model.codec import Codec, load_codec, weight_file
from model.dual_ar import DualAR
from model.errors import ConfigError
from model.json_fields import read_json
from model.kv_cache import has_kernels
from model.loader import load_dual_ar
from model.prompt import PromptBuilder, load_tokenizer
from model.random_model import RandomModel, is_random
from model.tensor_files import fingerprint
from model.text import EnglishFrontEnd

logger = logging.getLogger(__name__)


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


RunAs = Literal["eager", "bf16", "bsfp8"]

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
    is_length_fixed: bool = False  # every segment is `max_frames` long: the weights know no end
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.8
    top_p: Annotated[float, Field(gt=0, le=1)] = 0.8
    top_k: Annotated[int, Field(ge=1)] = 30

    def __post_init__(self) -> None:
        if self.front_end not in FRONT_ENDS:
            raise ConfigError(
                f"plosive.front_end: got {self.front_end!r}, expected one of {sorted(FRONT_ENDS)}"
            )


_SERVING = TypeAdapter(Serving)


class LoadReport(NamedTuple):
    """What loading the DualAR took, reading, copying and packing."""

    num_bytes: int  # of weights, as stored or drawn
    seconds: float

    def __str__(self) -> str:
        speed = self.num_bytes / max(self.seconds, 1e-9)
        return f"{self.num_bytes / 1e9:.2f} GB in {self.seconds:.1f} s ({speed / 1e9:.1f} GB/s)"


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
    load_report: LoadReport = LoadReport(0, 0.0)


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


def load_speech_model(
    path: Path,
    *,
    name: str | None = None,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    run_as: RunAs | None = None,
    on_bytes: Callable[[int], object] = lambda _: None,
) -> SpeechModel:
    """Load a checkpoint directory (S2 Pro's layout or the embedded model's, quantised or not), or
    make up a model: `random:s2-pro` and the like, see `model.random_model`.

    Args:
        run_as: how the blocks run; "bsfp8" quantises weights that are not. Without it: quantised
            ones as they are, others with kernels in bf16 where there are kernels, else eagerly.
        on_bytes: told how many bytes of weights were read since the last call.

    Raises:
        ConfigError, CheckpointError: naming the file or tensor, what was found, what was expected.
    """
    target = torch.device(device)
    dtype = dtype or (torch.bfloat16 if target.type == "cuda" else torch.float32)
    started_s = time.monotonic()
    made_up = RandomModel.parse(str(path)) if is_random(path) else None
    if made_up is None:
        folder, dual_ar = path, load_dual_ar(path, target, dtype, on_bytes=on_bytes)
    else:
        folder, dual_ar = made_up.small_files(), made_up.dual_ar(target, dtype)
    num_bytes = dual_ar.nbytes
    run_as = checked_run_as(run_as, dual_ar)
    if run_as != "eager":
        dual_ar.use_kernels(run_as)
    if target.type == "cuda":
        torch.cuda.synchronize(target)
    report = LoadReport(num_bytes, time.monotonic() - started_s)
    serving = read_serving(read_json(folder / "config.json"))
    if made_up is None:
        codec, codec_id = load_codec(path, target, torch.float32), fingerprint(weight_file(path))
    else:
        codec, codec_id = made_up.codec(target, torch.float32), str(path)
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
        load_report=report,
    )


def checked_run_as(run_as: RunAs | None, model: DualAR) -> RunAs:
    """How the blocks of a model run: as asked, or by default.

    Raises:
        ConfigError: they cannot run so.
    """
    if model.is_quantised and run_as in {"eager", "bf16"}:
        raise ConfigError(
            f"format: got {run_as!r} for a checkpoint quantised as bsgemm, expected 'bsfp8'"
        )
    if model.device.type == "cpu":  # there the definitions of the kernels run
        if run_as == "bf16":
            raise ConfigError("format: got 'bf16' on a CPU, expected auto (weights in f32)")
        if model.is_quantised or run_as == "bsfp8":
            logger.warning(
                "8-bit weights on a CPU are computed by their plain definitions, about ten times "
                "slower than f32 and slower than real time: for tests"
            )
            return "bsfp8"
        return run_as or "eager"
    missing = _missing_for_kernels(model)
    wanted = "bsfp8" if model.is_quantised else run_as
    if missing and wanted in {"bf16", "bsfp8"}:
        raise ConfigError(f"format: got {wanted!r}, whose kernels need {missing}; there is 'eager'")
    return wanted or ("eager" if missing else "bf16")


def _missing_for_kernels(model: DualAR) -> str:
    """What the CUDA kernels need and do not find; empty: they run."""
    if torch.cuda.get_device_capability(model.device) != (9, 0):
        name = torch.cuda.get_device_name(model.device)
        return f"compute capability 9.0 (Hopper), not that of {name}"
    for stack in (model.config.slow, model.config.fast):
        if not has_kernels(stack):
            got = f"{stack.head_dim} and {stack.num_groups}"
            return f"head_dim 64 or 128 and at most 8 queries a key, not {got}"
    return "" if model.dtype == torch.bfloat16 else f"weights in bf16, not {model.dtype}"
