"""The codec as the vocode thread calls it: codes that wait on the device, calls in flight, PCM.

A call decodes the next T frames of some streams. Its codes never visit the host: each slot has a
ring of frames on the device, and a call names slots and places in it. On CUDA a call is one graph;
its PCM is copied into pinned memory that is used again when the call has been read.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from model.codec import Codec
from ops.graphs import GraphSet, Progress, bucket_sizes
from realtime.pingpong.device import VOCODE_PRIORITY, Event, Upload, host_buffer

CHUNKS = (1, 2, 4, 8)  # frames of a stream per call
MAX_CALLS = 2  # in flight: one that runs and one that follows it
MAX_CALL_FRAMES = 128  # of all streams, where a call has more than one of each: about 3 ms
_RING_FRAMES = 32  # of a slot, waiting or in flight
_KEY = 16  # a graph's size is its streams * _KEY + frames of each


class Call:
    """PCM under way to the host."""

    def __init__(self, max_frames: int, codec: Codec, device: torch.device) -> None:
        shape = (max_frames * codec.frame_samples,) if device.type == "cuda" else (0,)
        self._host = host_buffer(shape, torch.float32, device)
        self._copied = Event(device)
        self._pcm: Tensor | None = None

    def start(self, pcm: Tensor) -> None:
        """pcm f32 [B, N] (device) begins to be copied."""
        self._pcm = pcm
        if pcm.is_cuda:
            self._pcm = self._host[: pcm.numel()].view_as(pcm)
            self._pcm.copy_(pcm, non_blocking=True)
            self._copied.record()

    def wait(self) -> Tensor:
        """f32 [B, N] (host), valid until the next `start`; on the CPU for ever."""
        assert self._pcm is not None
        self._copied.wait_on_host()
        return self._pcm


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
            (num_slots + 1) * _RING_FRAMES, codec.num_codebooks, dtype=torch.int32, device=device
        )
        max_frames = max(num_slots, MAX_CALL_FRAMES)
        max_words = num_slots + max_frames
        self._words = torch.full((max_words,), self.dummy_slot, device=device)  # slots, then places
        self._upload_words = Upload(8 * max_words, device)
        self._upload_places = Upload(8 * num_slots, device)
        self._upload_fresh = Upload(8 * num_slots, device)
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
        self._words.fill_(self.dummy_slot)
        self._graphs.capture(progress, priority=VOCODE_PRIORITY)
        self._is_captured = bool(self._graphs.sizes)

    def place(self, slot: int, frame: int) -> int:
        """Where a slot's frame waits, counted since its stream began."""
        return slot * _RING_FRAMES + frame % _RING_FRAMES

    def begin(self, slots: list[int]) -> None:
        """Streams start again."""
        (fresh,) = self._upload_fresh(np.array(slots, np.int64))
        self._codec.reset_state(self._state, fresh)

    def put(self, codes: Tensor, places: list[int]) -> None:
        """codes i32 [R, K] (device) will be called for from these places."""
        (rows,) = self._upload_places(np.array(places, np.int64))
        self._codes.index_copy_(0, rows, codes)

    def call(self, slots: list[int], places: Sequence[int], chunk: int) -> Call:
        """Enqueue the decoding of `chunk` frames of each slot, from places [slot, frame]. `done`
        gives the call back."""
        assert len(places) == len(slots) * chunk and chunk <= self.max_chunk, (slots, places)
        batch = len(slots)
        if self._is_captured:
            batch = next(size for size in self._batches[chunk] if size >= batch)
        num_padding = batch - len(slots)
        padding = [self.place(self.dummy_slot, 0)] * (num_padding * chunk)
        words = [*slots, *[self.dummy_slot] * num_padding, *places, *padding]
        (uploaded,) = self._upload_words(np.array(words, np.int64))
        call = self._calls.pop()
        if self._is_captured:
            self._words[: len(words)].copy_(uploaded)
            call.start(self._graphs(batch * _KEY + chunk)[: len(slots)])
        else:
            call.start(self._decode(uploaded, batch, chunk))
        return call

    def done(self, call: Call) -> None:
        """The call's PCM has been read."""
        self._calls.append(call)

    def _run(self, size: int) -> Tensor:
        batch, chunk = divmod(size, _KEY)
        return self._decode(self._words, batch, chunk)

    def _decode(self, words: Tensor, batch: int, chunk: int) -> Tensor:
        slots, places = words[:batch], words[batch : batch * (1 + chunk)]
        codes = self._codes.index_select(0, places).view(batch, chunk, -1).transpose(1, 2)
        return self._codec.decode_stream(codes, self._state, slots)
