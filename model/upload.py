"""Stored tensors -> parameters, as fast as disk and bus allow, in bounded host memory.

To a CUDA device several threads read large pieces into a few pinned buffers, and each piece is
copied to the device while others are read. Elsewhere the file stays mapped and is copied once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import torch
from torch import Tensor

# S2 Pro's 9.12 GB from the page cache to an H200, GB/s: 4.5 with one thread, 8.8 with two, 13 to 21
# with four, 20 to 26 with eight; copied from a mapping 7.2. Pieces of 4 and 32 MiB are slower.
NUM_THREADS = 8
PIECE_BYTES = 16 << 20
NUM_BUFFERS = 2 * NUM_THREADS  # one is filled while another is on its way: 256 MiB of host memory


class Stored(NamedTuple):
    """A tensor in a file."""

    tensor: Tensor  # mapped, not read
    file: Path
    offset: int  # bytes, of its first value


class Transfer(NamedTuple):
    """A stored tensor, and where it goes: a view that it is broadcast to."""

    stored: Stored
    target: Tensor


@dataclass(slots=True)
class _Buffer:
    """One pinned buffer with the stream that empties it."""

    data: Tensor  # u8 [PIECE_BYTES]
    stream: torch.cuda.Stream


class _Piece(NamedTuple):
    file: Path
    offset: int  # bytes
    num_bytes: int
    dtype: torch.dtype  # as stored
    target: Tensor


def upload(
    transfers: Iterable[Transfer],
    device: torch.device,
    on_bytes: Callable[[int], object] = lambda _: None,
) -> None:
    """Copy all; they are on the device when this returns. `on_bytes` is told of each piece."""
    if device.type == "cuda":
        _upload_cuda(transfers, device, on_bytes)
        return
    for stored, target in transfers:
        target.copy_(stored.tensor)
        on_bytes(stored.tensor.nbytes)


def _upload_cuda(
    transfers: Iterable[Transfer], device: torch.device, on_bytes: Callable[[int], object]
) -> None:
    free: SimpleQueue[_Buffer] = SimpleQueue()
    buffers = [
        _Buffer(
            torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True),
            torch.cuda.Stream(device),  # type: ignore[no-untyped-call]
        )
        for _ in range(NUM_BUFFERS)
    ]
    for buffer in buffers:
        free.put(buffer)
    torch.cuda.current_stream(device).synchronize()  # nothing may still use the parameters' memory
    with ExitStack() as stack:
        descriptors: dict[Path, int] = {}

        def descriptor(file: Path) -> int:
            if file not in descriptors:
                descriptors[file] = os.open(file, os.O_RDONLY)
                stack.callback(os.close, descriptors[file])
            return descriptors[file]

        def move(piece: _Piece, source: int) -> int:
            buffer = free.get()
            try:
                buffer.stream.synchronize()
                _read(source, piece, buffer.data)
                with torch.inference_mode(), torch.cuda.stream(buffer.stream):
                    _copy(buffer.data[: piece.num_bytes].view(piece.dtype), piece.target)
            finally:
                free.put(buffer)
            return piece.num_bytes

        with ThreadPoolExecutor(NUM_THREADS, "plosive-upload") as pool:
            pieces = list(_pieces(transfers))
            for num_bytes in pool.map(move, pieces, [descriptor(p.file) for p in pieces]):
                on_bytes(num_bytes)
        for buffer in buffers:
            buffer.stream.synchronize()


def _pieces(transfers: Iterable[Transfer]) -> Iterator[_Piece]:
    for stored, target in transfers:
        tensor = stored.tensor
        if tensor.shape != target.shape:  # broadcast
            assert tensor.nbytes <= PIECE_BYTES, (tensor.shape, target.shape)
            yield _Piece(stored.file, stored.offset, tensor.nbytes, tensor.dtype, target)
            continue
        flat, step = target.view(-1), PIECE_BYTES // tensor.itemsize
        for start in range(0, tensor.numel(), step):
            part = flat[start : start + step]
            offset = stored.offset + start * tensor.itemsize
            num_bytes = part.numel() * tensor.itemsize
            yield _Piece(stored.file, offset, num_bytes, tensor.dtype, part)


def _read(descriptor: int, piece: _Piece, buffer: Tensor) -> None:
    view = memoryview(buffer.numpy())[: piece.num_bytes]  # type: ignore[arg-type]
    num_read = 0
    while num_read < piece.num_bytes:
        count = os.preadv(descriptor, [view[num_read:]], piece.offset + num_read)
        if count == 0:
            raise OSError(f"{piece.file}: ends early; it was changed while it was read")
        num_read += count


def _copy(source: Tensor, target: Tensor) -> None:
    """Pinned -> device on the current stream; another dtype is converted there."""
    if source.dtype != target.dtype or source.shape != target.shape:
        source = source.to(target.device, non_blocking=True)
    target.copy_(source, non_blocking=True)
