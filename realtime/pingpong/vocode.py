"""The vocode thread: codes -> PCM with exact streaming state, and the one mouth of the engine.

All that a working engine says passes through this thread's queue, so that the order of events is
the order of audio: a turn's end never overtakes its last frame. Only the `SlotFailed` of an engine
that dies goes past it: this thread may be the one that is gone.
"""

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from model.speech_model import SpeechModel
from realtime.pingpong.device import Event as DeviceEvent
from realtime.pingpong.device import IndexUpload, host_buffer, stream_scope
from realtime.pingpong.handoff import Mailbox
from realtime.pingpong.messages import (
    EngineWarning,
    Event,
    FramePcm,
    SegmentEnd,
    SlotRef,
    TurnBegin,
    TurnEnd,
)
from realtime.pingpong.pacing import ClockTable
from realtime.pingpong.slots import Slots
from realtime.pingpong.steps import StepBuffer, StepRow


class VocodeLoop:
    """One queue item at a time (`step`), so that tests can drive it without a thread."""

    def __init__(
        self,
        model: SpeechModel,
        slots: Slots,
        free: Callable[[StepBuffer], None],
        sink: Callable[[Event], None],
    ) -> None:
        num_slots = slots.num_slots
        self.inbox: Mailbox[StepBuffer | Event] = Mailbox(max_items=16 + 8 * num_slots)
        self._model = model
        self._slots = slots
        self._free = free
        self._sink = sink
        self._state = model.codec.init_state(num_slots)
        self._pcm = host_buffer((num_slots, model.codec.frame_samples), torch.float32, model.device)
        self._upload_rows = IndexUpload(num_slots, model.device)
        self._upload_slots = IndexUpload(num_slots, model.device)
        self._ended: list[tuple[SlotRef, int, int] | None] = [None] * num_slots
        self._clocks = ClockTable(num_slots)
        self._frame_ns = round(1e9 * model.codec.frame_samples / model.codec.sample_rate)
        self.num_frames = 0

    def run(self, is_stopping: Callable[[], bool]) -> None:
        with torch.inference_mode(), stream_scope(self._model.device):
            while not is_stopping():
                item = self.inbox.take()
                if item is None:
                    return
                self.step(item)

    def step(self, item: StepBuffer | Event) -> None:
        if isinstance(item, StepBuffer):
            self._vocode(item)
        elif isinstance(item, TurnEnd):
            self._sink(self._with_underruns(item))
        else:
            self._sink(item)

    def _vocode(self, step: StepBuffer) -> None:
        rows = step.rows
        flags = step.is_end
        live = [i for i, row in enumerate(rows) if not flags[i] and self._is_wanted(row)]
        if live:
            pcm = self._decode(step, live)
            for line, i in enumerate(live):
                self._emit_pcm(rows[i], pcm[line].clone())
        for row, is_end in zip(rows, flags, strict=True):
            if (is_end or row.is_limit) and self._is_wanted(row):
                self._end_segment(row, is_end)
        self._free(step)

    def _is_wanted(self, row: StepRow) -> bool:
        """Not stale, and not the surplus frame after the segment's end."""
        key = (row.slot, row.turn_id, row.segment)
        return self._slots.is_current(row.slot) and self._ended[row.slot.idx] != key

    def _decode(self, step: StepBuffer, live: list[int]) -> torch.Tensor:
        """f32 [len(live), frame_samples] (host), valid until the next call."""
        rows = [step.rows[i] for i in live]
        step.stepped.wait_on_stream()
        fresh = [row.slot.idx for row in rows if row.first_frame + row.frame == 0]
        if fresh:
            self._model.codec.reset_state(self._state, self._upload_slots(fresh))
        codes = step.codes[self._upload_rows(live)].unsqueeze(-1)
        slots = self._upload_slots([row.slot.idx for row in rows])
        pcm = self._model.codec.decode_stream(codes, self._state, slots)
        host = self._pcm[: len(live)]
        host.copy_(pcm, non_blocking=True)
        copied = DeviceEvent(self._model.device)
        copied.record()
        copied.wait_on_host()
        return host

    def _emit_pcm(self, row: StepRow, pcm: torch.Tensor) -> None:
        now_ns = time.perf_counter_ns()
        frame = row.first_frame + row.frame
        clock = self._clocks.of(row.slot)
        if frame == 0:
            clock.start_turn()
            row.stamps_ns["first_pcm"] = now_ns
            self._sink(TurnBegin(row.slot, row.turn_id, dict(row.stamps_ns)))
        clock.add(self._frame_ns, now_ns, is_turn_start=frame == 0)
        self.num_frames += 1
        self._sink(FramePcm(row.slot, row.turn_id, row.segment, frame, 1, pcm.numpy()))

    def _end_segment(self, row: StepRow, is_end: bool) -> None:
        self._ended[row.slot.idx] = (row.slot, row.turn_id, row.segment)
        num_frames = row.frame + (0 if is_end else 1)
        if not is_end:
            message = f"segment {row.segment} was cut at the limit of {num_frames} frames"
            self._sink(EngineWarning(row.slot, row.turn_id, "frame_limit", message))
        self._sink(SegmentEnd(row.slot, row.turn_id, row.segment, num_frames))

    def _with_underruns(self, end: TurnEnd) -> TurnEnd:
        if end.num_frames == 0:
            return end
        clock = self._clocks.of(end.slot)
        return replace(
            end, num_underruns=clock.num_underruns, worst_gap_ms=clock.worst_gap_ns / 1e6
        )
