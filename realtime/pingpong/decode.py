"""The decode thread: one frame for every runnable slot, again and again.

The ends of frame n are known to the host before the device runs the fast AR of frame n, and the
host launches frame n+1 while the last passes of it run: the device does not wait for the host, no
row is computed for a stream that is over, and whoever joins until then is in frame n+1. The last
rows of its prompt may ride with that frame. With `in_order` frame n is over before anything else
happens; that twin is the oracle (same seeds, same codes). The host waits for the device in
`FrameRunner` alone: in `read_ends` and `wait_for_tail`.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from model.kv_cache import KVCache
from model.sampling import SamplingParams as ModelSampling
from model.speech_model import SpeechModel
from realtime.pingpong.device import DECODE_PRIORITY, Event, stream_scope
from realtime.pingpong.frames import FrameRunner
from realtime.pingpong.handoff import Mailbox
from realtime.pingpong.messages import SlotRef
from realtime.pingpong.pacing import (
    Candidate,
    ClockTable,
    Rider,
    pause_ns,
    riders_to_board,
    rows_to_run,
)
from realtime.pingpong.prefill_rows import Piece
from realtime.pingpong.slots import Slots
from realtime.pingpong.step_times import StepTimes
from realtime.pingpong.steps import Join, Returned, StepBuffer, StepRow

NUM_STEP_BUFFERS = 4  # between decode and vocode; decode waits when all are taken


@dataclass(slots=True)
class _Stream:
    """A slot while decode owns it."""

    join: Join
    riders: Piece | None = None  # prompt rows that its first step takes along
    has_room: bool = False  # for them, which others cannot have
    joined_ns: int = 0
    num_launched: int = 0
    num_frames: int = 0  # drained, without the end frame

    @property
    def num_riders(self) -> int:
        return self.riders.num_rows if self.riders else 0

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
        self.frames = FrameRunner(model.dual_ar, cache, num_slots)
        self.times = StepTimes()
        self._device = model.device
        self._has_history = cache.history is not None
        self._slots = slots
        self._give_back = give_back
        self._vocode = vocode
        self._in_order = in_order
        self._streams: dict[int, _Stream] = {}
        self._arriving: list[Join] = []  # prefill still runs
        self._clocks = ClockTable(num_slots)
        self._is_after_pause = True  # the step in flight
        self._frame_ns = round(1e9 * model.codec.frame_samples / model.codec.sample_rate)
        self.num_steps = 0
        self.num_rows = 0
        self.num_ridden = 0  # prompt rows that wait no more for a step to ride with

    def run(self, is_stopping: Callable[[], bool]) -> None:
        pending: StepBuffer | None = None
        with torch.inference_mode(), stream_scope(self._device, DECODE_PRIORITY):
            while not is_stopping():
                pending = self.step(pending, wait=True)

    def step(self, pending: StepBuffer | None, *, wait: bool = False) -> StepBuffer | None:
        """Drain the frame in flight, as far as the host needs it, and launch the next.

        Returns the step in flight, to be passed to the next call. With `wait`, sleeps when there
        is neither a runnable slot nor a step in flight.
        """
        begun_ns = time.perf_counter_ns()
        if pending is not None:
            self._drain(pending)
            self._welcome(self.inbox.take_all())  # while there is time
            self._wait_for_tail()
        self._welcome(self._take_joins(may_sleep=wait and pending is None))
        runnable = self._runnable(time.perf_counter_ns())
        if self._arriving and not runnable:
            self._admit(self._arriving)
            self._arriving = []
            runnable = self._runnable(time.perf_counter_ns())
        boarding = self._boarding(runnable)
        launched = self._launch(boarding) if boarding else None
        if self._in_order and launched is not None:
            launched.stepped.wait_on_host()
            self._drain(launched)
            launched = None
        self._retire_stale()
        self._is_after_pause = pending is None
        self.times.add_call(begun_ns)
        return launched

    # ------------------------------------------------------------------ who runs

    def _take_joins(self, *, may_sleep: bool) -> list[Join]:
        now_ns = time.perf_counter_ns()
        if not may_sleep or self._arriving or self._runnable(now_ns):
            return self.inbox.take_all()
        joins = self.inbox.take_all(self._sleep_s(now_ns))
        self.times.add_wait(now_ns)
        return joins

    def _wait_for_tail(self) -> None:
        begun_ns = time.perf_counter_ns()
        self.frames.wait_for_tail()
        self.times.add_wait(begun_ns)

    def _welcome(self, joins: list[Join]) -> None:
        self._arriving += joins
        self._admit(self._prefilled())

    def _prefilled(self) -> list[Join]:
        """Take out of `_arriving` who is prefilled. A stream that came sooner would make the device
        wait for its prefill, and with it everybody else. In order, nobody is asked: that the same
        streams make up every step must not depend on time."""
        arriving, self._arriving = self._arriving, []
        if self._in_order:
            return arriving
        prefilled: list[Join] = []
        for join in arriving:
            (prefilled if join.prefilled.is_over() else self._arriving).append(join)
        return prefilled

    def _admit(self, joins: list[Join]) -> None:
        starts = []
        for join in joins:
            assert join.slot.idx not in self._streams, join
            join.prefilled.wait_on_stream()
            sampling = ModelSampling(
                temperature=join.sampling.temperature,
                top_p=join.sampling.top_p,
                top_k=join.sampling.top_k,
                seed=join.sampling.seed,
            )
            state = self.frames.state
            starts.append(state.start_words(join.slot.idx, join.row, join.position, sampling))
            self._streams[join.slot.idx] = _Stream(
                join, join.riders, join.riders is not None, joined_ns=time.perf_counter_ns()
            )
        if starts:
            self.frames.start(starts)

    def _runnable(self, now_ns: int) -> list[_Stream]:
        ready = [
            stream
            for idx, stream in self._streams.items()
            if stream.num_launched < stream.join.max_frames
            and not self.is_blocked[idx]
            and self._slots.is_current(stream.join.slot)
        ]
        chosen = rows_to_run(
            [self._candidate(stream, now_ns) for stream in ready],
            frame_ns=self._frame_ns,
            step_ns=self.times.step_ns,
            bucket_of=self.frames.size_for,
        )
        return [ready[i] for i in chosen]

    def _boarding(self, runnable: list[_Stream]) -> list[_Stream]:
        """Those that take part in the next step. Who is paused keeps no room for its riders."""
        waiting = {idx for idx, stream in self._streams.items() if stream.riders}
        if not waiting:
            return runnable
        riders = [stream for stream in runnable if stream.riders]
        for idx in waiting - {stream.join.slot.idx for stream in riders}:
            self._give_up_room(self._streams[idx])
        now_ns = time.perf_counter_ns()
        chosen = riders_to_board(
            [Rider(stream.num_riders, now_ns - stream.joined_ns) for stream in riders],
            # In order, that the same streams make up every step must not depend on time.
            0 if self._in_order else len(runnable) - len(riders),
            self.frames.rider_sizes_for(len(runnable)) if riders else [0],
        )
        boarding = {riders[i].join.slot.idx for i in chosen}
        return [s for s in runnable if not s.riders or s.join.slot.idx in boarding]

    def _candidate(self, stream: _Stream, now_ns: int) -> Candidate:
        join = stream.join
        return Candidate(self._clocks.of(join.slot).lead_ns(now_ns), join.max_lead_ns)

    def _sleep_s(self, now_ns: int) -> float | None:
        """Until the first paused stream's lead is below its cap; None (forever) without one."""
        paused = [
            self._candidate(stream, now_ns)
            for idx, stream in self._streams.items()
            if not self.is_blocked[idx]
        ]
        wait_ns = pause_ns(paused)
        return None if wait_ns is None else wait_ns / 1e9 + 1e-4

    def _retire_stale(self) -> None:
        for stream in list(self._streams.values()):
            if not self._slots.is_current(stream.join.slot):
                self._retire(stream, is_over=False)

    # ------------------------------------------------------------------ launch and drain

    def _launch(self, streams: list[_Stream]) -> StepBuffer | None:
        buffer = self.free_buffers.take()
        if buffer is None:  # the engine is stopping
            return None
        now_ns = time.perf_counter_ns()
        num_rows = len(streams)
        buffer.started.record()
        riders = [stream.riders for stream in streams if stream.riders]
        frame = self.frames.launch([stream.join.slot.idx for stream in streams], riders)
        buffer.copied.wait_on_stream()
        buffer.first_codes(len(frame.codes)).copy_(frame.codes)
        buffer.stepped.record()
        buffer.rows = [self._row(stream, now_ns) for stream in streams]
        for stream in streams if riders else ():
            self._take_riders(stream)
        self.num_steps += 1
        self.num_rows += num_rows
        return buffer

    def _take_riders(self, stream: _Stream) -> None:
        """They are launched, or wanted no more."""
        self._give_up_room(stream)
        stream.riders = None

    def _give_up_room(self, stream: _Stream) -> None:
        if stream.has_room:
            self.num_ridden += stream.num_riders
        stream.has_room = False

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
            ends_turn=join.ends_turn,
        )

    def _drain(self, step: StepBuffer) -> None:
        """Read who has reached the end, and hand the step on to vocode."""
        begun_ns = time.perf_counter_ns()
        step.is_end = self.frames.read_ends(len(step.rows))
        self.times.add_wait(begun_ns)
        self.times.add_step(step, is_first=self._is_after_pause)
        now_ns, over = time.perf_counter_ns(), []
        for row, is_end in zip(step.rows, step.is_end, strict=True):
            stream = self._streams.get(row.slot.idx)
            if stream is None or stream.key != (row.slot, row.turn_id, row.segment):
                continue
            if not is_end:
                stream.num_frames += 1
                self._clocks.of(row.slot).add(self._frame_ns, now_ns)
            if is_end or row.is_limit:
                over.append(stream)
        # Before prefill hears of it, whose word that the turn is over comes next.
        self._vocode(step)
        for stream in over:
            self._retire(stream, is_over=True)

    def _retire(self, stream: _Stream, *, is_over: bool) -> None:
        """Give the slot back. That a stream is over is known when its last frame has read and
        written its KV, in the middle of the frame: prefill need not wait for the rest of it, which
        would hold up everybody's, unless the history, written at the end, is kept."""
        join = stream.join
        self._take_riders(stream)
        del self._streams[join.slot.idx]
        stepped = Event(self._device)
        if not is_over or self._has_history:
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
        started=Event(device, is_timed=True),
        stepped=Event(device, is_timed=True),
        copied=Event(device),
    )
