"""The codec as the vocode thread calls it: codes that wait on the device, calls in flight, PCM.

A call decodes the next T frames of some streams. Its codes never visit the host: each slot has a
ring of frames on the device, and a call names slots and places in it. On CUDA a call is one graph;
its PCM is copied into pinned memory that is used again when the call has been read.

There are two lanes: calls that somebody waits for go before decode's work on the device, the others
with it, on a stream of their own. Two calls of one stream are never on their way at the same time.

Every operation on a tensor gives the GIL away and has to get it back, so there are few of them here:
views are made once, and what is uploaded has a fixed size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.codec import Codec
from ops.graphs import GraphSet, Progress, bucket_sizes
from realtime.pingpong.device import (
    BULK_PRIORITY,
    VOCODE_PRIORITY,
    Event,
    host_buffer,
    stream_scope,
)

CHUNKS = (1, 2, 4, 8)  # frames of a stream per call
MAX_CALLS = 2  # of a lane in flight: one that runs and one that follows it
MAX_CALL_FRAMES = 128  # of all streams: about 3 ms
RING_FRAMES = 64  # of a slot that may wait
_KEY = 16  # a graph's size is its streams * _KEY + frames of each


class Call:
    """PCM under way to the host."""

    def __init__(self, max_frames: int, codec: Codec, device: torch.device) -> None:
        shape = (max_frames * codec.frame_samples,) if device.type == "cuda" else (0,)
        self._host = host_buffer(shape, torch.float32, device)
        self._views: dict[torch.Size, tuple[Tensor, NDArray[np.float32]]] = {}
        self._copied = Event(device)
        self._pcm: NDArray[np.float32] = np.empty((0, 0), np.float32)
        self.slots: frozenset[int] = frozenset()

    def start(self, pcm: Tensor, slots: list[int]) -> None:
        """pcm f32 [B, N] (device), whose first rows are those of the slots, begins to be copied."""
        self.slots, num_streams = frozenset(slots), len(slots)
        if not pcm.is_cuda:
            self._pcm = pcm.numpy()
            return
        if pcm.shape not in self._views:
            view = self._host[: pcm.numel()].view_as(pcm)
            self._views[pcm.shape] = view, view.numpy()
        view, array = self._views[pcm.shape]
        view.copy_(pcm, non_blocking=True)
        self._copied.record()
        self._pcm = array[:num_streams]

    def is_over(self) -> bool:
        return self._copied.is_over()

    def wait_on_stream(self) -> None:
        """Make the current stream wait for its end."""
        self._copied.wait_on_stream()

    def wait(self) -> NDArray[np.float32]:
        """[B, N], valid until the next `start`; on the CPU for ever."""
        if not self._copied.is_over():
            self._copied.wait_on_host()
        return self._pcm


class _Words:
    """Whole numbers on the device, written by the host as often as it likes: two pinned buffers in
    turn, each reused only after the copy made from it has run."""

    def __init__(self, size: int, value: int, device: torch.device) -> None:
        self.words = torch.full((size,), value, device=device)
        # On the CPU a call has run when it returns: the words themselves are written.
        self._host = [
            self.words if device.type == "cpu" else host_buffer((size,), torch.int64, device)
            for _ in range(2)
        ]
        for buffer in self._host:
            buffer.fill_(value)
        self._arrays = [buffer.numpy() for buffer in self._host]
        self._copied = [Event(device) for _ in range(2)]
        self._turn = 0

    def begin(self) -> NDArray[np.int64]:
        """What to write into; the rest is what it was two calls ago, valid once."""
        self._turn = 1 - self._turn
        if not self._copied[self._turn].is_over():
            self._copied[self._turn].wait_on_host()
        return self._arrays[self._turn]

    def send(self) -> None:
        if self.words is not self._host[self._turn]:
            self.words.copy_(self._host[self._turn], non_blocking=True)
            self._copied[self._turn].record()


class _Lane:
    """Calls that run one after the other: their graphs, and what those read."""

    def __init__(
        self,
        device: torch.device,
        run: Callable[[Tensor, int], Tensor],
        batches: Mapping[int, list[int]],
        named: _Words,
        calls: list[Call],
        dummy_slot: int,
        priority: int,
    ) -> None:
        """`batches`: worth a graph, by frames of each stream; `dummy_slot`: of the padding."""
        self.calls = calls  # not in flight
        self._run = run
        self._batches = batches
        self._named = named
        self._dummy_slot = dummy_slot
        self._priority = priority
        sizes = [batch * _KEY + chunk for chunk, sizes in batches.items() for batch in sizes]
        self._graphs = GraphSet(device, lambda size: run(named.words, size), sizes)
        self._is_captured = False
        self.nbytes = 0

    def compile(self) -> None:
        self._graphs.compile()

    def capture(self, progress: Progress) -> None:
        self._named.words.fill_(self._dummy_slot)
        self._graphs.capture(progress, priority=self._priority)
        self._is_captured = bool(self._graphs.sizes)
        self.nbytes = self._graphs.nbytes

    def start(self, slots: list[int], places: Sequence[int], chunk: int) -> Call:
        """Enqueue a call on the current stream."""
        batch, dummy = len(slots), self._dummy_slot
        if self._is_captured:
            batch = next(size for size in self._batches[chunk] if size >= batch)
        words = self._named.begin()
        words[: len(slots)], words[len(slots) : batch] = slots, dummy
        words[dummy : dummy + len(places)] = places
        words[dummy + len(places) : dummy + batch * chunk] = dummy * RING_FRAMES
        self._named.send()
        call, size = self.calls.pop(), batch * _KEY + chunk
        pcm = self._graphs(size) if self._is_captured else self._run(self._named.words, size)
        call.start(pcm, slots)
        return call


class CodecRunner:
    """One thread, the one that vocodes."""

    def __init__(
        self,
        codec: Codec,
        device: torch.device,
        num_slots: int,
        frames: tuple[int, ...] | None = None,
    ) -> None:
        """`frames`: sizes of chunks, if not those that the codec allows. The same seed must give
        the same samples, so frames are put together only if that changes no bit."""
        self.dummy_slot = num_slots  # of the padding
        chunks = frames or (CHUNKS if codec.has_exact_chunks else CHUNKS[:1])
        self.max_chunk = max(chunks)
        self._codec = codec
        self._state = codec.init_state(num_slots + 1)
        self._codes = torch.zeros(
            (num_slots + 1) * RING_FRAMES, codec.num_codebooks, dtype=torch.int32, device=device
        )
        self._put = _Words(num_slots, self.place(self.dummy_slot, 0), device)
        self._fresh = _Words(num_slots, self.dummy_slot, device)
        max_frames = MAX_CALL_FRAMES
        batches = {chunk: bucket_sizes(self.max_streams(chunk)) for chunk in chunks}

        def lane(priority: int) -> _Lane:
            named = _Words(num_slots + max_frames, self.dummy_slot, device)  # slots, then places
            calls = [Call(max_frames, codec, device) for _ in range(MAX_CALLS)]
            return _Lane(device, self._run, batches, named, calls, self.dummy_slot, priority)

        self._urgent, self._bulk = lane(VOCODE_PRIORITY), lane(BULK_PRIORITY)
        self.bulk_scope = stream_scope(device, BULK_PRIORITY)
        self._bulk_calls: list[Call] = []  # in flight
        self._enqueued = Event(device)

    @property
    def graph_bytes(self) -> int:
        """Device memory of the graphs."""
        return self._urgent.nbytes + self._bulk.nbytes

    @property
    def state_bytes(self) -> int:
        """Device memory of all streams' state."""
        tensors = self._codec.state_tensors(self._state)
        return sum(tensor.nbytes for tensor in tensors)

    def can_call(self, *, is_urgent: bool) -> bool:
        return bool((self._urgent if is_urgent else self._bulk).calls)

    def max_streams(self, chunk: int) -> int:
        """Of one call with so many frames of each."""
        return min(self.dummy_slot, MAX_CALL_FRAMES // chunk)

    def compile(self) -> None:
        """See `GraphSet.compile`. Both lanes launch the same kernels."""
        self._urgent.compile()

    def capture(self, progress: Progress) -> None:
        """Capture every size (CUDA only). No stream may be running."""
        self._urgent.capture(progress)
        self._bulk.capture(progress)

    def place(self, slot: int, frame: int) -> int:
        """Where a slot's frame waits, counted since its stream began."""
        return slot * RING_FRAMES + frame % RING_FRAMES

    def begin(self, slots: list[int]) -> None:
        """Streams start again."""
        for call in self._bulk_calls:
            if not call.slots.isdisjoint(slots):
                call.wait_on_stream()
        self._fresh.begin()[: len(slots)] = slots
        self._fresh.send()
        self._codec.reset_state(self._state, self._fresh.words[: len(slots)])

    def put(self, codes: Tensor, places: list[int]) -> None:
        """codes i32 [R, K] (device) will be called for from these places, if there is one of the
        row."""
        words = self._put.begin()
        words[: len(places)] = places
        words[len(places) :] = self.place(self.dummy_slot, 0)
        self._put.send()
        is_full = len(codes) == len(words)
        rows = self._put.words if is_full else self._put.words[: len(codes)]
        self._codes.index_copy_(0, rows, codes)

    def call(
        self, slots: list[int], places: Sequence[int], chunk: int, *, is_urgent: bool = True
    ) -> Call:
        """Enqueue the decoding of `chunk` frames of each slot, from places [slot, frame], of slots
        that no other call on its way has. `done` gives the call back."""
        assert len(places) == len(slots) * chunk and chunk <= self.max_chunk, (slots, places)
        assert all(call.slots.isdisjoint(slots) for call in self._bulk_calls), slots
        if is_urgent:
            return self._urgent.start(slots, places, chunk)
        self._enqueued.record()
        with self.bulk_scope:
            self._enqueued.wait_on_stream()
            call = self._bulk.start(slots, places, chunk)
        self._bulk_calls.append(call)
        return call

    def done(self, call: Call) -> None:
        """The call's PCM has been read."""
        if call in self._bulk_calls:
            self._bulk_calls.remove(call)
            self._bulk.calls.append(call)
        else:
            self._urgent.calls.append(call)

    def _run(self, words: Tensor, size: int) -> Tensor:
        (batch, chunk), first = divmod(size, _KEY), self.dummy_slot
        slots, places = words[:batch], words[first : first + batch * chunk]
        codes = self._codes.index_select(0, places).view(batch, chunk, -1).transpose(1, 2)
        return self._codec.decode_stream(codes, self._state, slots)
