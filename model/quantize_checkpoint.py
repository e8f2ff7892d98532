"""A checkpoint -> a quantised one, a piece of a matrix at a time. See `model.quantized` for what it is.

Each piece is whole blocks of rows, so that the values are those of quantising the matrix at once,
and the ones that `DualAR.use_kernels("bsfp8")` makes of the same weights.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from model.checkpoint_files import published_name, read_state, weight_files
from model.config import DualARConfig
from model.errors import CheckpointError
from model.json_fields import read_json
from model.layers import Block, Stack
from model.loader import (
    COMPUTED,
    check_finite,
    complete_config,
    fit,
    new_model,
    placements,
    quantization_of,
)
from model.quantized import (
    CONFIG_FIELD,
    METADATA_KEY,
    SPLIT_WQKV,
    Format,
    Quantization,
    matrix_shapes,
)
from model.tensor_files import Entry, fingerprint, row_slices, write_weights
from model.upload import Stored
from ops.quantize import quantize_weight
from ops.reference_fp8 import BLOCK, quantize_mxfp8

_PIECE_BYTES = 8 << 20  # of a matrix, in bf16; quantising takes about ten times that
_NOT_COPIED = {".safetensors", ".py", ".pth", ".bin"}  # besides the codec's, which is

_QUANTISERS: Mapping[Format, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "bsgemm": quantize_weight,
    "mxfp8": quantize_mxfp8,
}


class _Target(NamedTuple):
    """A quantised matrix, and the rows of which stored tensors it is."""

    shape: tuple[int, int]
    sources: list[Tensor]


@dataclass
class QuantizePlan:
    """What is read, what is written."""

    path: Path
    quantization: Quantization
    entries: list[Entry]
    others: list[Path]  # files and folders that are copied
    state: dict[str, Stored] = field(repr=False)
    targets: dict[str, _Target] = field(repr=False)  # by name in the file
    names: dict[str, str] = field(repr=False)  # of tensors that are copied: in the file -> ours

    @property
    def nbytes(self) -> int:
        """Of the weights that are written."""
        return sum(entry.nbytes for entry in self.entries)

    @property
    def source_nbytes(self) -> int:
        """Of the weights that are read."""
        return sum(stored.tensor.nbytes for stored in self.state.values())

    @property
    def copied_nbytes(self) -> int:
        """Of the files that are copied."""
        files = [f for path in self.others for f in (path.rglob("*") if path.is_dir() else [path])]
        return sum(file.stat().st_size for file in files if file.is_file())


def plan_quantization(path: Path, format: Format) -> QuantizePlan:
    """Check a checkpoint directory and lay out the quantised one. Reads no weights.

    Raises:
        ConfigError, CheckpointError: it cannot be loaded, or is quantised already.
    """
    if (existing := quantization_of(path)) is not None:
        raise CheckpointError(
            f"{path}: is quantised already ({existing.format}); quantise the original"
        )
    config = complete_config(DualARConfig.from_file(path / "config.json"), path)
    state = read_state(path)
    model = new_model(path, config, state, torch.device("meta"), torch.bfloat16)
    fit(path, state, list(placements(model, state)))
    schema = read_json(path / "config.json")["model_type"]
    plan = QuantizePlan(
        path,
        Quantization.of(format, fingerprint(*weight_files(path))),
        [],
        [other for other in sorted(path.iterdir()) if _is_copied(other)],
        state,
        {},
        {},
    )
    left = dict.fromkeys(name for name in state if name not in COMPUTED)
    for prefix, stack in (("", model.slow), ("fast_", model.fast.stack)):
        _plan_stack(plan, prefix, stack, schema, left)
    for ours in left:
        tensor = state[ours].tensor
        name = published_name(ours, schema)
        plan.names[name] = ours
        plan.entries.append(Entry(name, tensor.dtype, tuple(tensor.shape)))
    return plan


def _plan_stack(
    plan: QuantizePlan, prefix: str, stack: Stack, schema: str, left: dict[str, None]
) -> None:
    for layer, block in enumerate(stack.layers):
        assert isinstance(block, Block)
        at = f"{prefix}layers.{layer}."
        for matrix, shape in matrix_shapes(block):
            sources = [at + source for source in matrix.sources]
            if matrix.attribute == "wqkv" and sources[0] not in plan.state:
                sources = [at + source for source in SPLIT_WQKV]
            for source in sources:
                del left[source]
            name = published_name(at + matrix.name, schema)
            plan.targets[name] = _Target(shape, [plan.state[s].tensor for s in sources])
            quantization = plan.quantization
            scale_shape = quantization.scale_shape(*shape)
            plan.entries.append(Entry(name, torch.float8_e4m3fn, shape))
            plan.entries.append(Entry(f"{name}_scale", quantization.scale_dtype, scale_shape))


def write_quantized(
    plan: QuantizePlan, folder: Path, on_bytes: Callable[[int], object] = lambda _: None
) -> None:
    """Write weights, config.json and everything else of the checkpoint.

    Args:
        folder: exists and is empty.
        on_bytes: told how many bytes of weights were written since the last call.

    Raises:
        CheckpointError: a weight is no finite number.
    """
    scales: dict[str, Tensor] = {}

    def pieces(entry: Entry) -> Iterator[Tensor]:
        if entry.name in scales:
            yield scales.pop(entry.name)
        elif entry.name in plan.targets:
            yield from _quantised_pieces(entry.name)
        else:
            tensor = plan.state[plan.names[entry.name]].tensor
            for rows in row_slices(entry.shape, entry.dtype.itemsize):
                check_finite(plan.path, [(entry.name, tensor[rows])])
                yield tensor[rows]

    def _quantised_pieces(name: str) -> Iterator[Tensor]:
        shape, sources = plan.targets[name]
        parts: list[Tensor] = []
        for rows in row_slices(shape, torch.bfloat16.itemsize, BLOCK, _PIECE_BYTES):
            weight = _rows_of(sources, rows).bfloat16()
            check_finite(plan.path, [(name, weight)])
            data, scale = _QUANTISERS[plan.quantization.format](weight)
            parts.append(scale)
            yield data
        scales[f"{name}_scale"] = torch.cat(parts).contiguous()

    description = plan.quantization.as_json()
    write_weights(folder, plan.entries, pieces, {METADATA_KEY: json.dumps(description)}, on_bytes)
    for other in plan.others:
        copy = shutil.copytree if other.is_dir() else shutil.copyfile
        copy(other, folder / other.name)
    config = read_json(plan.path / "config.json")
    config[CONFIG_FIELD] = description
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def _rows_of(sources: list[Tensor], rows: slice) -> Tensor:
    """Some rows of the tensors one after the other."""
    parts: list[Tensor] = []
    start = 0
    for source in sources:
        stop = start + source.shape[0]
        low, high = max(rows.start, start), min(rows.stop, stop)
        if low < high:
            parts.append(source[low - start : high - start])
        start = stop
    return torch.cat(parts)


def _is_copied(path: Path) -> bool:
    if path.is_dir():
        return path.name == "voices"
    if path.name.startswith("codec."):
        return True
    return path.suffix not in _NOT_COPIED and not path.name.endswith(".index.json")
