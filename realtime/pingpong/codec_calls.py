"""The codec as the vocode thread calls it: codes that wait on the device, calls in flight, PCM.

A call decodes the next T frames of some streams. Its codes never visit the host: each slot has a
ring of frames on the device, and a call names slots and places in it. On CUDA a call is one graph;
its PCM is copied into pinned memory that is used again when the call has been read.

Every operation on a tensor gives the GIL away and has to get it back, so there are few of them here:
views are made once, and what is uploaded has a fixed size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.codec import Codec
from ops.graphs import GraphSet, Progress, bucket_sizes
from realtime.pingpong.device import VOCODE_PRIORITY, Event, host_buffer

CHUNKS = (1, 2, 4, 8)  # frames of a stream per call
MAX_CALLS = 2  # in flight: one that runs and one that follows it
MAX_CALL_FRAMES = 128  # of all streams, where a call has more than one of each: about 3 ms
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

    def start(self, pcm: Tensor, num_streams: int) -> None:
        """pcm f32 [B, N] (device) begins to be copied; the first rows are wanted."""
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
        max_frames = max(num_slots, MAX_CALL_FRAMES)
        self._named = _Words(num_slots + max_frames, self.dummy_slot, device)  # slots, then places
        self._put = _Words(num_slots, self.place(self.dummy_slot, 0), device)
        self._fresh = _Words(num_slots, self.dummy_slot, device)
        self._calls = [Call(max_frames, codec, device) for _ in range(MAX_CALLS)]
        self._batches = {chunk: bucket_sizes(self.max_streams(chunk)) for chunk in chunks}
        sizes = [batch * _KEY + chunk for chunk, sizes in self._batches.items() for batch in sizes]
        self._graphs = GraphSet(device, self._run, sizes)
        self._is_captured = False

    @property
    def graph_bytes(self) -> int:
        """Device memory of the graphs."""
        return self._graphs.nbytes

    @property
    def state_bytes(self) -> int:
        """Device memory of all streams' state."""
        tensors = self._codec.state_tensors(self._state)
        return sum(tensor.nbytes for tensor in tensors)

    @property
    def can_call(self) -> bool:
        return bool(self._calls)

    def max_streams(self, chunk: int) -> int:
        """Of one call with so many frames of each."""
        return self.dummy_slot if chunk == 1 else min(self.dummy_slot, MAX_CALL_FRAMES // chunk)

    def capture(self, progress: Progress) -> None:
        """Capture every size (CUDA only). No stream may be running."""
        self._named.words.fill_(self.dummy_slot)
        self._graphs.capture(progress, priority=VOCODE_PRIORITY)
        self._is_captured = bool(self._graphs.sizes)

    def place(self, slot: int, frame: int) -> int:
        """Where a slot's frame waits, counted since its stream began."""
        return slot * RING_FRAMES + frame % RING_FRAMES

    def begin(self, slots: list[int]) -> None:
        """Streams start again."""
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

    def call(self, slots: list[int], places: Sequence[int], chunk: int) -> Call:
        """Enqueue the decoding of `chunk` frames of each slot, from places [slot, frame]. `done`
        gives the call back."""
        assert len(places) == len(slots) * chunk and chunk <= self.max_chunk, (slots, places)
        batch = len(slots)
        if self._is_captured:
            batch = next(size for size in self._batches[chunk] if size >= batch)
        words, first = self._named.begin(), self.dummy_slot
        words[: len(slots)], words[len(slots) : batch] = slots, self.dummy_slot
        words[first : first + len(places)] = places
        words[first + len(places) : first + batch * chunk] = self.place(self.dummy_slot, 0)
        self._named.send()
        call, size = self._calls.pop(), batch * _KEY + chunk
        pcm = self._graphs(size) if self._is_captured else self._run(size)
        call.start(pcm, len(slots))
        return call

    def done(self, call: Call) -> None:
        """The call's PCM has been read."""
        self._calls.append(call)

    def _run(self, size: int) -> Tensor:
        (batch, chunk), first = divmod(size, _KEY), self.dummy_slot
        words = self._named.words
        slots, places = words[:batch], words[first : first + batch * chunk]
        codes = self._codes.index_select(0, places).view(batch, chunk, -1).transpose(1, 2)
        return self._codec.decode_stream(codes, self._state, slots)
