"""Codec weight files as named tensors, each taken exactly once.

A layer takes its tensors by name and shape while it is built, and the loader ends by asking for
what nobody took: a missing, left-over or wrongly shaped tensor is an error that names it. Weight
norm, in either of torch's two spellings, is folded when the weight is taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from model.errors import CheckpointError

# Buffers that training serialises beside the weights. They follow from the configuration.
BUFFER_NAMES = ("causal_mask", "freqs_cis", "k_cache", "v_cache")

_NORM_SUFFIXES = (
    ("parametrizations.weight.original0", "parametrizations.weight.original1"),
    ("weight_g", "weight_v"),
)
_MAX_NAMES_SHOWN = 5


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a `.safetensors` or `.pth` file; nothing but tensors is ever unpickled.

    Returns:
        name -> tensor (cpu, as stored; a `.pth` stays mapped from disk until a tensor is used).

    Raises:
        CheckpointError: if the file is missing, truncated, corrupt or not a state dict.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; expected the codec weights")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    # Every reader has its own exceptions for a damaged file, RuntimeError to UnpicklingError.
    except Exception as error:
        raise CheckpointError(
            f"{path}: {path.stat().st_size} bytes that cannot be read as codec weights "
            f"(truncated, corrupt or another format): {_first_line(error)}"
        ) from error
    return _unwrap(loaded, path)


class Weights:
    """The tensors of one checkpoint, seen below a name prefix, each taken exactly once."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        source: str,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._tensors = {
            name: tensor
            for name, tensor in tensors.items()
            if name.rpartition(".")[2] not in BUFFER_NAMES
        }
        self._source = source
        self._prefix = ""
        self.device = device
        self.dtype = dtype

    def at(self, *path: str | int) -> Weights:
        """The same tensors, seen below a longer prefix."""
        below = copy(self)
        below._prefix = self._prefix + "".join(f"{part}." for part in path)
        return below

    def take(self, name: str, *shape: int) -> Tensor:
        """Take one tensor.

        Returns:
            f32 `shape` (cpu): folded weight norm where the checkpoint has it.

        Raises:
            CheckpointError: if it is missing, has another shape, or holds what is no finite number.
        """
        weight = self._folded(name, shape)
        low, high = torch.aminmax(weight)
        if not bool(low.isfinite() & high.isfinite()):
            raise CheckpointError(
                f"{self._source}: tensor {self._prefix + name} holds values that are no finite "
                "numbers; expected none; download the codec again, or ask who trained it"
            )
        return weight

    def _folded(self, name: str, shape: tuple[int, ...]) -> Tensor:
        full_name = self._prefix + name
        if name.endswith("weight") and full_name not in self._tensors:
            stem = full_name.removesuffix("weight")
            for magnitude, direction in _NORM_SUFFIXES:
                if stem + direction in self._tensors or stem + magnitude in self._tensors:
                    gain = self._pop(stem + magnitude, (shape[0], *[1] * (len(shape) - 1)))
                    return fold_weight_norm(gain, self._pop(stem + direction, shape))
        return self._pop(full_name, shape)

    def place(self, tensor: Tensor) -> Tensor:
        """Put a prepared tensor where the codec computes: contiguous, its device and dtype."""
        return tensor.to(self.device, self.dtype).contiguous()

    def finish(self) -> None:
        """Check that every tensor was taken.

        Raises:
            CheckpointError: naming what is left over.
        """
        if self._tensors:
            names = sorted(self._tensors)
            more = len(names) - _MAX_NAMES_SHOWN
            shown = ", ".join(
                f"{name} {list(self._tensors[name].shape)}" for name in names[:_MAX_NAMES_SHOWN]
            )
            raise CheckpointError(
                f"{self._source}: {len(names)} tensors that the configuration has no place for: "
                f"{shown}{f' and {more} more' if more > 0 else ''}"
            )

    def _pop(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self._tensors.pop(name, None)
        if tensor is None:
            raise CheckpointError(
                f"{self._source}: tensor {name} is missing; expected shape {list(shape)}"
            )
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{self._source}: tensor {name} has shape {list(tensor.shape)}; "
                f"expected {list(shape)}"
            )
        if not tensor.is_floating_point():
            raise CheckpointError(
                f"{self._source}: tensor {name} has dtype {tensor.dtype}; expected floating point"
            )
        return tensor.float()


def fold_weight_norm(gain: Tensor, direction: Tensor) -> Tensor:
    """gain f32 [N, 1, ...] and direction f32 [N, ...] -> weight f32 [N, ...]."""
    norm = torch.linalg.vector_norm(direction, dim=tuple(range(1, direction.dim())), keepdim=True)
    weight: Tensor = direction * (gain / norm)
    return weight


def _unwrap(loaded: object, path: Path) -> dict[str, Tensor]:
    """Strip the containers that training puts around a state dict."""
    for wrapper in ("state_dict", "generator"):
        if isinstance(loaded, Mapping) and isinstance(loaded.get(wrapper), Mapping):
            loaded = loaded[wrapper]
    if not isinstance(loaded, Mapping):
        raise CheckpointError(
            f"{path}: expected a mapping of tensors, found {type(loaded).__name__}"
        )
    others = [name for name, value in loaded.items() if not isinstance(value, Tensor)]
    if others or not loaded:
        raise CheckpointError(
            f"{path}: expected a mapping of tensors, found "
            + (f"other values under {others[:_MAX_NAMES_SHOWN]}" if others else "an empty one")
        )
    prefix = "generator."
    if any(name.startswith(prefix) for name in loaded):
        # A training checkpoint holds the discriminators too.
        return {
            name.removeprefix(prefix): value
            for name, value in loaded.items()
            if name.startswith(prefix)
        }
    return dict(loaded)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"
