"""A call captured once per size as a CUDA graph and replayed; elsewhere the same call, run eagerly.

All graphs are captured at start, none under traffic. The graphs of one `GraphSet` share a memory
pool, so no two of them may ever run at the same time; what may run at the same time as they belongs
into a set of its own.
"""

from __future__ import annotations

import contextlib
import gc
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch

Out = TypeVar("Out")
# Shows how far a loop is: gets the sizes that are captured and gives them back one by one.
Progress = Callable[[Iterable[int]], Iterable[int]]

_FIRST_SIZES = (1, 2, 4, 8, 12, 16)
_STEPS = ((64, 8), (128, 16), (256, 32), (1 << 30, 64))  # up to a size: distance of the sizes


def bucket_sizes(max_size: int) -> list[int]:
    """Batch sizes worth a graph, ascending: 1, 2, 4, 8, 12, 16, 24, 32, ... and `max_size` itself.
    Fewer rows are padding than are not; above 16, padding is at most a third of the batch."""
    assert max_size > 0, max_size
    sizes = [size for size in _FIRST_SIZES if size < max_size]
    size = _FIRST_SIZES[-1]
    for limit, step in _STEPS:
        while size < min(limit, max_size):
            size += step
            sizes.append(min(size, max_size))
    return sorted({*sizes, max_size})


class GraphSet(Generic[Out]):
    """`run(size)` for each of some sizes.

    `run` must enqueue the same work at every call of one size: it reads and writes fixed tensors,
    allocates only what nothing outside keeps, and waits for nothing. Its result is the same tensors
    at every replay, valid until the set's next call.
    """

    def __init__(
        self, device: torch.device, run: Callable[[int], Out], sizes: Iterable[int]
    ) -> None:
        self._device = device
        self._run = run
        self._sizes = sorted(sizes)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Out]] = {}
        self._has_run = False  # in every size
        self.nbytes = 0  # of the graphs' memory pool; what the driver keeps of them is not in it

    @property
    def sizes(self) -> tuple[int, ...]:
        """Those that are captured."""
        return tuple(sorted(self._graphs))

    def compile(self) -> None:
        """Call every size within `nvrtc.compiling`, so that what they launch is compiled at once
        instead of one after another. Without CUDA it does nothing."""
        if self._device.type == "cuda" and not self._graphs:
            with torch.cuda.device(self._device):
                for size in self._sizes[::-1]:
                    self._run(size)
            self._has_run = True

    def capture(self, progress: Progress = iter, *, priority: int = 0) -> None:
        """Capture every size, the largest first, so that the others find its memory in the pool. Each
        is run once before, or after `compile` the largest alone. Without CUDA it does nothing.

        Args:
            priority: of the captured kernels, as of a stream; negative goes first.
        """
        if self._device.type != "cuda" or self._graphs:
            return
        with torch.cuda.device(self._device), _no_garbage_collection():
            pool = torch.cuda.graph_pool_handle()
            stream = torch.cuda.Stream(self._device, priority=priority)  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            num_reserved = torch.cuda.memory_reserved()
            for size in progress(self._sizes[::-1]):
                self._graphs[size] = self._capture(size, pool, stream)
            torch.cuda.synchronize()
            self.nbytes = torch.cuda.memory_reserved() - num_reserved

    def size_for(self, num_items: int) -> int:
        """The size that runs when `num_items` are wanted: the next one captured; without graphs
        exactly as many."""
        if not self._graphs:
            return num_items
        assert 0 < num_items <= self._sizes[-1], (num_items, self._sizes)
        return self._sizes[bisect_left(self._sizes, num_items)]

    def __call__(self, size: int) -> Out:
        """Enqueue the work of a size, one that `size_for` gave, on the current stream."""
        if not self._graphs:
            return self._run(size)
        graph, result = self._graphs[size]
        graph.replay()
        return result

    def _capture(
        self, size: int, pool: Any, stream: torch.cuda.Stream
    ) -> tuple[torch.cuda.CUDAGraph, Out]:
        if not self._has_run or not self._graphs:
            with torch.cuda.stream(stream):
                self._run(size)  # compiles kernels, makes handles and the stream's workspaces
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            result = self._run(size)
        return graph, result


class Branch:
    """Work beside the current stream's. Captured kernels that are launched one after the other start
    before the ones before them have ended; a copy or an event between two of them would end that.

    What it reads must live until `join`. Without CUDA, everything is done in its turn.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def begin(self) -> Iterator[None]:
        """What is enqueued inside follows what the current stream has so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """What the current stream gets from here on follows all of it. A capture ends joined."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """An older graph that is collected while another one is captured makes the capture invalid."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
