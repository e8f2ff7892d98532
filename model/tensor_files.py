"""safetensors files, written and read in pieces: neither side ever holds a whole checkpoint.

A file is the length of its header (u64, little-endian), the header (JSON: name -> dtype, shape and
place of a tensor), then the tensors one after the other without gaps.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

INDEX_FILE = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5_000_000_000  # as published checkpoints are cut
PIECE_BYTES = 16 << 20  # of a tensor at a time
_FINGERPRINT_BYTES = 1 << 20

_DTYPES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.uint8: "U8",
}


class Entry(NamedTuple):
    """A tensor that is going to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


# An entry's values in order, in pieces of any size.
Pieces = Callable[[Entry], Iterable[Tensor]]


def row_slices(
    shape: Sequence[int], itemsize: int, multiple: int = 1, piece_bytes: int | None = None
) -> Iterator[slice]:
    """Cut a tensor along its first dimension into pieces of about `piece_bytes` (`PIECE_BYTES`), all
    but the last of a multiple of `multiple` rows."""
    row_bytes = max(1, math.prod(shape[1:]) * itemsize)
    step = max(1, (piece_bytes or PIECE_BYTES) // row_bytes // multiple) * multiple
    for start in range(0, shape[0], step):
        yield slice(start, min(shape[0], start + step))


def write_weights(
    folder: Path,
    entries: Sequence[Entry],
    pieces: Pieces,
    metadata: Mapping[str, str],
    on_bytes: Callable[[int], object] = lambda _: None,
) -> None:
    """Write `model-0000X-of-0000Y.safetensors` and their index; one file without index if it fits.

    Args:
        metadata: goes into every file.
        on_bytes: told how many bytes were written since the last call.
    """
    shards = _shards(entries)
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        names = ["model.safetensors"]
    for name, shard in zip(names, shards, strict=True):
        write_file(folder / name, shard, pieces, metadata, on_bytes)
    if len(shards) > 1:
        files = zip(names, shards, strict=True)
        weight_map = {entry.name: name for name, shard in files for entry in shard}
        index = {
            "metadata": {"total_size": sum(entry.nbytes for entry in entries)},
            "weight_map": weight_map,
        }
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2), encoding="utf-8")


def write_file(
    file: Path,
    entries: Sequence[Entry],
    pieces: Pieces,
    metadata: Mapping[str, str],
    on_bytes: Callable[[int], object] = lambda _: None,
) -> None:
    """Write one file, see `write_weights`."""
    with file.open("xb") as stream:
        stream.write(_header(entries, metadata))
        for entry in entries:
            num_written = 0
            for piece in pieces(entry):
                assert piece.dtype == entry.dtype, (entry, piece.dtype)
                data = memoryview(piece.contiguous().view(torch.uint8).numpy())  # type: ignore[arg-type]
                stream.write(data)
                num_written += data.nbytes
                on_bytes(data.nbytes)
            assert num_written == entry.nbytes, (entry, num_written)


def fingerprint(*files: Path) -> str:
    """Tells files apart by size and both ends; reading all of a 2 GB file would take seconds."""
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(str(size).encode())
        with file.open("rb") as stream:
            digest.update(stream.read(_FINGERPRINT_BYTES))
            stream.seek(max(0, size - _FINGERPRINT_BYTES))
            digest.update(stream.read())
    return digest.hexdigest()[:16]


def data_offsets(file: Path) -> dict[str, int]:
    """Where in a complete file (as `safetensors.safe_open` found it) each tensor begins."""
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(header_bytes))
    return {
        name: 8 + header_bytes + value["data_offsets"][0]
        for name, value in header.items()
        if name != "__metadata__"
    }


def _shards(entries: Sequence[Entry]) -> list[list[Entry]]:
    shards: list[list[Entry]] = [[]]
    num_bytes = 0
    for entry in entries:
        if shards[-1] and num_bytes + entry.nbytes > MAX_SHARD_BYTES:
            shards.append([])
            num_bytes = 0
        shards[-1].append(entry)
        num_bytes += entry.nbytes
    return shards


def _header(entries: Sequence[Entry], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    offset = 0
    for entry in entries:
        header[entry.name] = {
            "dtype": _DTYPES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [offset, offset + entry.nbytes],
        }
        offset += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the values are aligned
    return len(text).to_bytes(8, "little") + text
