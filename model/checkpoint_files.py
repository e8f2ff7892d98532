"""The weight files of a checkpoint directory: which they are, what their tensors are called.

Files are mapped, not read. Every name is ours from here on, see `_PREFIXES`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open

from model.config import FLAT_SCHEMA
from model.errors import CheckpointError
from model.quantized import Quantization, check_metadata
from model.tensor_files import INDEX_FILE, data_offsets
from model.upload import Stored

# In this order; the second is the name inside a directory that holds several models' weights.
SINGLE_FILES = ("model.safetensors", "dual_ar.safetensors")

# Published prefix -> ours; the first that matches is applied, once. Without a match a name is
# already ours, which are those of the older flat checkpoints.
_PREFIXES = (
    ("text_model.model.", ""),
    ("audio_decoder.codebook_embeddings.", "codebook_embeddings."),
    ("audio_decoder.", "fast_"),
    ("model.", ""),
)
_MAX_LISTED = 8
_LFS_MAGIC = b"version https://git-lfs"


def read_state(path: Path, quantization: Quantization | None = None) -> dict[str, Stored]:
    """Memory-map all tensors of a checkpoint directory, under our names.

    Looks for a sharded checkpoint (model.safetensors.index.json), then for model.safetensors, then
    for dual_ar.safetensors; the first that exists is used.

    Raises:
        CheckpointError: if none exists, a shard is missing, a file is damaged or is a Git LFS
            pointer, two tensors have the same name, or a file says that it is quantised otherwise.
    """
    state: dict[str, Stored] = {}
    for file in weight_files(path):
        for name, stored in _read_file(file, quantization):
            ours = _our_name(name)
            if ours in state:
                raise CheckpointError(f"{file}: tensor {name} is stored twice; remove one")
            state[ours] = stored
    return state


def weight_files(path: Path) -> list[Path]:
    if (path / INDEX_FILE).is_file():
        return _shards(path / INDEX_FILE)
    for name in SINGLE_FILES:
        if (path / name).is_file():
            return [path / name]
    found = sorted(file.name for file in path.glob("*") if file.is_file()) or ["nothing"]
    raise CheckpointError(
        f"{path}: found {listed(found)}; expected {INDEX_FILE} with its shards, or "
        f"{' or '.join(SINGLE_FILES)} (checkpoints in .pth format must be converted)"
    )


def _shards(index: Path) -> list[Path]:
    try:
        weight_map = json.loads(_checked_head(index).read_text(encoding="utf-8"))["weight_map"]
        names = sorted({os.fspath(name) for name in weight_map.values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{index}: is not an index of shards ({error!r}), expected an object "
            'with "weight_map": {tensor: file}; download it again'
        ) from error
    for name in names:
        if Path(name).name != name or name in {"", ".", ".."}:
            raise CheckpointError(
                f"{index}: shard {name!r} lies outside the directory; expected the name of a file "
                "beside the index"
            )
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{index.parent}: {len(missing)} of {len(names)} shards missing: {listed(missing)}; "
            "download them"
        )
    return [index.parent / name for name in names]


def _checked_head(file: Path) -> Path:
    with file.open("rb") as stream:
        if stream.read(len(_LFS_MAGIC)) == _LFS_MAGIC:
            raise CheckpointError(
                f"{file}: is a Git LFS pointer, not the file itself; fetch it with `git lfs pull`"
            )
    return file


def _read_file(file: Path, quantization: Quantization | None) -> Iterator[tuple[str, Stored]]:
    _checked_head(file)
    try:
        with safe_open(file, framework="pt", device="cpu") as handle:
            check_metadata(file, handle.metadata(), quantization)
            offsets = data_offsets(file)
            for name in handle.keys():  # noqa: SIM118 - not a mapping
                yield name, Stored(handle.get_tensor(name), file, offsets[name])
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file}: {file.stat().st_size} bytes that are not a complete safetensors file "
            f"({error}); download it again"
        ) from error


def published_name(ours: str, schema: str) -> str:
    """The name of a tensor in a checkpoint of a schema, see `model.config`."""
    if schema == FLAT_SCHEMA:
        return ours
    for prefix, replacement in _PREFIXES[1:3]:
        if ours.startswith(replacement):
            return prefix + ours.removeprefix(replacement)
    return _PREFIXES[0][0] + ours


def _our_name(name: str) -> str:
    for prefix, ours in _PREFIXES:
        if name.startswith(prefix):
            return ours + name.removeprefix(prefix)
    return name


def listed(items: list[str], separator: str = ", ") -> str:
    more = len(items) - _MAX_LISTED
    return separator.join(items[:_MAX_LISTED]) + (f" and {more} more" if more > 0 else "")
