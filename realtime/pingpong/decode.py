"""The decode thread: one frame for every runnable slot, again and again, never waiting for the host.

`step` launches frame n+1 before it looks at the stop flags of frame n, so a stop is seen one step
late: the surplus row is computed and dropped. With `in_order` the flags are read at once; that twin
is the oracle (same seeds, same codes). Between launch and drain nothing here waits for the device.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from model.kv_cache import KVCache
from model.sampling import SamplingParams as ModelSampling
from model.speech_model import SpeechModel
from realtime.pingpong.device import Event, IndexUpload, host_buffer, stream_scope
from realtime.pingpong.handoff import Mailbox
from realtime.pingpong.messages import SlotRef
from realtime.pingpong.pacing import ClockTable
from realtime.pingpong.slots import Slots
from realtime.pingpong.steps import Join, Returned, StepBuffer, StepRow

NUM_STEP_BUFFERS = 4  # in flight between decode and vocode; decode waits when all are taken


@dataclass(slots=True)
class _Stream:
    """A slot while decode owns it."""

    join: Join
    num_launched: int = 0
    num_frames: int = 0  # drained, without the end frame

    @property
    def key(self) -> tuple[SlotRef, int, int]:
        return (self.join.slot, self.join.turn_id, self.join.segment)


class DecodeLoop:
    """One step at a time (`step`), so that tests can drive it without a thread."""

    def __init__(
        self,
        model: SpeechModel,
        cache: KVCache,
        slots: Slots,
        give_back: Callable[[Returned], None],
        vocode: Callable[[StepBuffer], None],
        *,
        in_order: bool = False,
    ) -> None:
        num_slots = slots.num_slots
        self.inbox: Mailbox[Join] = Mailbox(max_items=num_slots + 1)
        self.free_buffers: Mailbox[StepBuffer] = Mailbox(max_items=NUM_STEP_BUFFERS)
        for _ in range(NUM_STEP_BUFFERS):
            self.free_buffers.put(_new_buffer(model, num_slots))
        self.is_blocked = [False] * num_slots  # written by the event loop
        self._model = model
        self._cache = cache
        self._slots = slots
        self._give_back = give_back
        self._vocode = vocode
        self._in_order = in_order
        self._state = model.dual_ar.new_frame_state(num_slots)
        self._upload = IndexUpload(num_slots, model.device)
        self._streams: dict[int, _Stream] = {}
        self._clocks = ClockTable(num_slots)
        self._frame_ns = round(1e9 * model.codec.frame_samples / model.codec.sample_rate)
        self.num_steps = 0
        self.num_rows = 0

    def run(self, is_stopping: Callable[[], bool]) -> None:
        pending: StepBuffer | None = None
        with torch.inference_mode(), stream_scope(self._model.device, priority=-1):
            while not is_stopping():
                pending = self.step(pending, wait=True)

    def step(self, pending: StepBuffer | None, *, wait: bool = False) -> StepBuffer | None:
        """Launch the next frame, then drain the one before it while the device works.

        Returns the step in flight, to be passed to the next call. With `wait`, sleeps when there
        is neither a runnable slot nor a step in flight.
        """
        now_ns = time.perf_counter_ns()
        runnable = self._runnable(now_ns)
        is_idle = not runnable and pending is None
        joins = self.inbox.take_all(self._sleep_s(now_ns) if wait and is_idle else 0.0)
        for join in joins:
            self._admit(join)
        if joins or is_idle:
            runnable = self._runnable(time.perf_counter_ns())
        launched = self._launch(runnable) if runnable else None
        if self._in_order and launched is not None:
            pending, launched = launched, None
        if pending is not None:
            self._drain(pending)
        self._retire_stale()
        return launched

    # ------------------------------------------------------------------ who runs

    def _admit(self, join: Join) -> None:
        assert join.slot.idx not in self._streams, join
        join.prefilled.wait_on_stream()
        sampling = ModelSampling(
            temperature=join.sampling.temperature,
            top_p=join.sampling.top_p,
            top_k=join.sampling.top_k,
            seed=join.sampling.seed,
        )
        self._model.dual_ar.join(self._state, join.slot.idx, join.row, join.position, sampling)
        self._streams[join.slot.idx] = _Stream(join)

    def _runnable(self, now_ns: int) -> list[_Stream]:
        return [
            stream
            for idx, stream in self._streams.items()
            if stream.num_launched < stream.join.max_frames
            and not self.is_blocked[idx]
            and self._slots.is_current(stream.join.slot)
            and self._clocks.of(stream.join.slot).lead_ns(now_ns) < stream.join.max_lead_ns
        ]

    def _sleep_s(self, now_ns: int) -> float | None:
        """Until the first paused stream's lead is below its cap; None (forever) without one."""
        waits = [
            self._clocks.of(stream.join.slot).lead_ns(now_ns) - stream.join.max_lead_ns
            for idx, stream in self._streams.items()
            if not self.is_blocked[idx]
        ]
        return max(0, min(waits)) / 1e9 + 1e-4 if waits else None

    def _retire_stale(self) -> None:
        for stream in list(self._streams.values()):
            if not self._slots.is_current(stream.join.slot):
                self._retire(stream)

    # ------------------------------------------------------------------ launch and drain

    def _launch(self, streams: list[_Stream]) -> StepBuffer | None:
        buffer = self.free_buffers.take()
        if buffer is None:  # the engine is stopping
            return None
        now_ns = time.perf_counter_ns()
        slots = self._upload([stream.join.slot.idx for stream in streams])
        frame = self._model.dual_ar.decode_frame(self._state, slots, self._cache)
        num_rows = len(streams)
        buffer.is_end[:num_rows].copy_(frame.is_end, non_blocking=True)
        buffer.flags_copied.record()
        buffer.codes[:num_rows].copy_(frame.codes)
        buffer.stepped = Event(self._model.device)
        buffer.stepped.record()
        buffer.rows = [self._row(stream, now_ns) for stream in streams]
        self.num_steps += 1
        self.num_rows += num_rows
        self._vocode(buffer)
        return buffer

    def _row(self, stream: _Stream, now_ns: int) -> StepRow:
        join = stream.join
        join.stamps_ns.setdefault("first_step", now_ns)
        frame = stream.num_launched
        stream.num_launched += 1
        return StepRow(
            slot=join.slot,
            turn_id=join.turn_id,
            segment=join.segment,
            first_frame=join.first_frame,
            frame=frame,
            is_limit=stream.num_launched >= join.max_frames,
            stamps_ns=join.stamps_ns,
        )

    def _drain(self, step: StepBuffer) -> None:
        """Read the stop flags of a step. Rows of slots that stopped a step earlier are surplus."""
        rows = step.rows
        step.flags_copied.wait_on_host()
        now_ns = time.perf_counter_ns()
        for row, is_end in zip(rows, step.is_end[: len(rows)].tolist(), strict=True):
            stream = self._streams.get(row.slot.idx)
            if stream is None or stream.key != (row.slot, row.turn_id, row.segment):
                continue
            if not is_end:
                stream.num_frames += 1
                is_turn_start = row.first_frame + row.frame == 0
                clock = self._clocks.of(row.slot)
                clock.add(self._frame_ns, now_ns, is_turn_start=is_turn_start)
            if is_end or row.is_limit:
                self._retire(stream)

    def _retire(self, stream: _Stream) -> None:
        join = stream.join
        del self._streams[join.slot.idx]
        stepped = Event(self._model.device)
        stepped.record()
        num_written = min(stream.num_frames, max(0, stream.num_launched - 1))
        self._give_back(
            Returned(
                slot=join.slot,
                turn_id=join.turn_id,
                segment=join.segment,
                num_frames=stream.num_frames,
                first_kv=join.position + 1,
                kv_length=join.position + 1 + num_written,
                stepped=stepped,
            )
        )


def _new_buffer(model: SpeechModel, num_slots: int) -> StepBuffer:
    device = model.device
    return StepBuffer(
        codes=torch.zeros(num_slots, model.codec.num_codebooks, dtype=torch.int32, device=device),
        is_end=host_buffer((num_slots,), torch.bool, device),
        flags_copied=Event(device),
        stepped=Event(device),
    )
