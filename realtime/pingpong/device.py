"""What differs between CUDA and the CPU in the engine, and the only places where a host wait on the
device may happen (`Event.wait_on_host`)."""

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Of streams and of the graphs captured for them; lower goes first. Decode fills the device frame
# after frame, so what is short and waited for, PCM and prefill, has to come before it; PCM that nobody
# waits for (bulk) comes with it. Behind it a call lasts as long as a step, and turns end later: 64 frames
# take 6.6 ms instead of 2.4, and 64 streams in a closed loop on an H200 (S2 Pro, bf16, engine alone, all
# calls in that lane) get 7,018 frames/s instead of 7,512.
VOCODE_PRIORITY, PREFILL_PRIORITY, DECODE_PRIORITY, BULK_PRIORITY = -3, -2, -1, -1


class Event:
    """A point in a stream's work. On the CPU all work is done when the call returns."""

    def __init__(
        self, device: torch.device, *, is_timed: bool = False, is_external: bool = False
    ) -> None:
        """An external event, recorded while a graph is captured, is recorded anew at each replay
        and can be waited for outside the graph."""
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=is_timed, external=is_external)  # type: ignore[no-untyped-call]

    def record(self) -> None:
        """Mark the current stream's work so far."""
        if self._event is not None:
            self._event.record(torch.cuda.current_stream())

    def wait_on_stream(self) -> None:
        """Make the current stream wait; the host does not."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)

    def is_over(self) -> bool:
        """Whether the marked work is done; never blocks."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait_on_host(self) -> None:
        """Block the calling thread until the marked work is done."""
        if self._event is not None:
            self._event.synchronize()

    def ms_until(self, later: "Event") -> float:
        """Device time between two timed events; both must be over. 0 on the CPU."""
        if self._event is None or later._event is None:
            return 0.0
        return float(self._event.elapsed_time(later._event))


def stream_scope(device: torch.device, priority: int = 0) -> AbstractContextManager[object]:
    """A stream of its own for the calling thread, for as long as the scope lasts."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    stream = torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]
    return torch.cuda.stream(stream)


def host_buffer(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Host memory from which and to which copies do not block: pinned when the device is CUDA."""
    return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")


class Upload:
    """Small host arrays to the device in one copy that blocks nothing: two pinned buffers in turn,
    each reused only after the copy made from it has run."""

    def __init__(self, max_bytes: int, device: torch.device) -> None:
        self._host = [host_buffer((max_bytes,), torch.uint8, device) for _ in range(2)]
        self._device = [torch.empty(max_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
        self._copied = [Event(device) for _ in range(2)]
        self._turn = 0

    def __call__(self, *arrays: NDArray[Any]) -> Sequence[Tensor]:
        """The arrays as tensors on the device, valid until the call after the next. Those with the
        widest numbers come first, so that all are aligned."""
        if self._device[0].device.type == "cpu":
            return [torch.from_numpy(array) for array in arrays]
        turn, self._turn = self._turn, 1 - self._turn
        self._copied[turn].wait_on_host()
        data = np.concatenate([np.ascontiguousarray(array).view(np.uint8) for array in arrays])
        num_bytes = len(data)
        self._host[turn].numpy()[:num_bytes] = data
        self._device[turn][:num_bytes].copy_(self._host[turn][:num_bytes], non_blocking=True)
        self._copied[turn].record()
        parts = torch.split(self._device[turn][:num_bytes], [array.nbytes for array in arrays])
        return [
            part.view(torch.from_numpy(array[:0]).dtype)
            for part, array in zip(parts, arrays, strict=True)
        ]
