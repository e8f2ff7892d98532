"""Audio codecs: codes <-> waveform, with exact streaming decode.

`load_codec` is the only constructor the rest of the project needs; what it returns is used through
the `Codec` protocol alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from model.codec.checkpoint import Weights, read_tensors
from model.codec.config import DacConfig
from model.codec.dac import DacCodec
from model.codec.spectral import SpectralCodec, SpectralConfig
from model.errors import CheckpointError, ConfigError

__all__ = ["Codec", "CodecState", "load_codec", "weight_file"]

CodecState = Any  # a codec's own state object; callers only hold it and hand it back


class Codec(Protocol):
    """What every codec does. Letters: B streams, K codebooks, T frames, N samples, R rows."""

    @property
    def sample_rate(self) -> int:
        """Of the waveform, in Hz."""

    @property
    def frame_samples(self) -> int:
        """Samples per frame of codes."""

    @property
    def num_codebooks(self) -> int:
        """Codebooks per frame."""

    @property
    def codebook_sizes(self) -> tuple[int, ...]:
        """Size of each codebook; codes beyond are clamped by decode."""

    @property
    def has_exact_chunks(self) -> bool:
        """Whether a stream's samples are the same bits however its frames are cut into calls."""

    def encode(self, wav: Tensor) -> Tensor:
        """wav f32 [B, N] -> codes i32 [B, K, ceil(N / frame_samples)]."""

    def encode_reference(self, wav: Tensor) -> Tensor:
        """`encode` of somebody's recorded speech, whatever its level."""

    def decode(self, codes: Tensor) -> Tensor:
        """codes i32 [B, K, T] -> f32 [B, T * frame_samples]; whole clips."""

    def init_state(self, num_slots: int) -> CodecState:
        """All streaming state of `num_slots` streams: fixed-size tensors [num_slots, ...]."""

    def state_tensors(self, state: CodecState) -> list[Tensor]:
        """What the state is made of."""

    def reset_state(self, state: CodecState, rows: Tensor) -> None:
        """Put the streams in rows i64 [R] back to their beginning."""

    def decode_stream(self, codes: Tensor, state: CodecState, rows: Tensor) -> Tensor:
        """codes i32 [B, K, T], rows i64 [B] -> f32 [B, T * frame_samples].

        Continues the streams in these rows, each from its own position; equals `decode` of the
        whole stream whatever the pieces.
        """


def load_codec(
    path: str | Path,
    device: str | torch.device,
    dtype: torch.dtype,
    *,
    is_fused: bool | None = None,
) -> Codec:
    """Load the codec of a model directory, or of one weight file.

    The weights are `codec.pth` or `codec.safetensors`. The configuration is `config.json` beside
    them: its `codec_config`, or the file itself if it describes a codec; a directory without
    either holds an S2 codec. `is_fused` is for an S2 codec, see `DacCodec`.

    Raises:
        ConfigError: if the configuration cannot be read, names an unknown type or contradicts
            itself.
        CheckpointError: if the weights are missing or damaged, or a tensor is missing, left over
            or wrongly shaped.
    """
    file = weight_file(Path(path))
    raw = _read_config(file.parent / "config.json")
    kind = "dac" if raw is None else raw.get("type", "dac")
    if not isinstance(kind, str) or kind not in _BUILDERS:
        raise ConfigError(f"codec_config.type: expected one of {sorted(_BUILDERS)}, found {kind!r}")
    weights = Weights(read_tensors(file), str(file), torch.device(device), dtype)
    codec = _BUILDERS[kind](raw, weights, is_fused)
    weights.finish()
    return codec


def _build_dac(raw: Mapping[str, Any] | None, weights: Weights, is_fused: bool | None) -> Codec:
    config = DacConfig.s2() if raw is None else DacConfig.from_json(raw)
    return DacCodec(config, weights, is_fused=is_fused)


def _build_spectral(raw: Mapping[str, Any] | None, weights: Weights, _: bool | None) -> Codec:
    assert raw is not None
    try:
        codec = SpectralCodec(SpectralConfig.from_dict(raw))
    except (ValueError, TypeError, AssertionError) as error:
        raise ConfigError(f"codec_config: {error}") from error
    shapes = {name: tensor.shape for name, tensor in codec.state_dict().items()}
    codec.load_state_dict({name: weights.take(name, *shape) for name, shape in shapes.items()})
    return codec.to(weights.device, weights.dtype).eval()


_Builder = Callable[[Mapping[str, Any] | None, Weights, bool | None], Codec]
_BUILDERS: Mapping[str, _Builder] = {
    "dac": _build_dac,
    "spectral": _build_spectral,
}


def weight_file(path: Path) -> Path:
    if not path.is_dir():
        return path
    names = ("codec.pth", "codec.safetensors")
    found = [path / name for name in names if (path / name).is_file()]
    if not found:
        raise CheckpointError(f"{path}: no codec weights; expected one of {', '.join(names)}")
    return found[0]


def _read_config(file: Path) -> Mapping[str, Any] | None:
    """The codec's part of a `config.json`, or None where there is none."""
    if not file.is_file():
        return None
    try:
        raw = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file}: not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{file}: expected an object, found {type(raw).__name__}")
    # A speech model's configuration names its model type; a codec's own does not.
    found = raw.get("codec_config", None if "model_type" in raw else raw)
    if found is not None and not isinstance(found, dict):
        raise ConfigError(f"{file}: codec_config: expected an object, found {found!r}")
    return found
