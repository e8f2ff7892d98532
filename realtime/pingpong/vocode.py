"""The vocode thread: codes -> PCM with exact streaming state, and the one mouth of the engine.

All that a working engine says passes through this thread, slot by slot in the order of the audio: a
turn's end never overtakes its last frame. Only the `SlotFailed` of an engine that dies goes past
it: this thread may be the one that is gone.

A frame is decoded at once while its listener needs it, and with whoever else has frames, or when
there are many (`pacing.next_call`): few calls cost least. PCM of who has enough to hear is said
several frames at a time: those that hear it, process after process, pay by the message.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from model.speech_model import SpeechModel
from realtime.pingpong.codec_calls import MAX_CALL_FRAMES, RING_FRAMES, Call, CodecRunner
from realtime.pingpong.device import VOCODE_PRIORITY, stream_scope
from realtime.pingpong.handoff import Mailbox
from realtime.pingpong.messages import (
    EngineWarning,
    Event,
    FramePcm,
    SegmentEnd,
    SlotRef,
    TurnBegin,
)
from realtime.pingpong.pacing import CallPlan, PlaybackClock, Waiting, hold_ns, next_call
from realtime.pingpong.slots import Slots
from realtime.pingpong.steps import StepBuffer, StepRow

_POLL_S = 0.001  # how late a call may be read, while more steps may come


@dataclass(slots=True)
class _Voice:
    """A slot's frames and events that have not been said, in order."""

    idx: int
    queue: deque[StepRow | Event] = field(default_factory=deque)
    num_events: int = 0  # in the queue
    num_put: int = 0  # frames since the stream began
    num_called: int = 0
    put_ns: int = 0  # when the last frame came, and how long it takes from one to the next
    interval_ns: int = 0
    num_in_flight: int = 0  # frames
    is_urgent: bool = True  # those are
    held: list[tuple[StepRow, NDArray[np.float32]]] = field(default_factory=list)  # not said yet
    num_held: int = 0  # frames
    turn: tuple[SlotRef, int] | None = None  # whose frames these are
    # Of that turn alone: its audio may be heard at once, whatever was said before it.
    clock: PlaybackClock = field(default_factory=PlaybackClock)
    is_over: bool = False  # its last frame has come

    def add_event(self, event: Event) -> None:
        self.queue.append(event)
        self.num_events += 1

    @property
    def num_waiting(self) -> int:
        """Frames before the next event."""
        if not self.num_events:
            return len(self.queue)
        num_frames = 0
        for item in self.queue:
            if not isinstance(item, StepRow):
                break
            num_frames += 1
        return num_frames


class _InFlight(NamedTuple):
    call: Call
    plan: CallPlan
    rows: list[
        tuple[_Voice, StepRow, int]
    ]  # of each slot, with the first of its frames and how many


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
        self.runner = CodecRunner(model.codec, model.device, num_slots)
        self._device = model.device
        self._is_length_fixed = model.serving.is_length_fixed
        self._slots = slots
        self._free = free
        self._sink = sink
        self._voices = [_Voice(idx) for idx in range(num_slots)]
        self._in_flight: dict[bool, deque[_InFlight]] = {
            True: deque(),
            False: deque(),
        }  # urgent or not
        self._holding: dict[int, _Voice] = {}  # those with PCM that is not said yet
        self._frame_samples = model.codec.frame_samples
        self._may_pad = model.device.type == "cuda"  # elsewhere every frame costs the same
        self._enough = MAX_CALL_FRAMES if self._may_pad else None
        self._no_place = self.runner.place(self.runner.dummy_slot, 0)
        self._frame_ns = round(1e9 * model.codec.frame_samples / model.codec.sample_rate)
        self.num_frames = 0
        self.num_calls = 0
        self.host_ns = 0  # of this thread's work, without waiting

    def run(self, is_stopping: Callable[[], bool]) -> None:
        with torch.inference_mode(), stream_scope(self._device, VOCODE_PRIORITY):
            wait_s: float | None = None
            while not is_stopping():
                items = self.inbox.take_all(wait_s)
                for item in items:
                    self.step(item)
                # Planning takes longer than looking: only when something may have changed.
                wait_s = self._advance() if items or not self._is_busy() else _POLL_S

    def step(self, item: StepBuffer | Event) -> None:
        """Take an item; on the CPU, say all that it leads to."""
        begun_ns = time.perf_counter_ns()
        if isinstance(item, StepBuffer):
            self._take_step(item)
        else:
            self._voices[item.slot.idx].add_event(item)
            self._say_events(self._voices[item.slot.idx])
        self.host_ns += time.perf_counter_ns() - begun_ns
        if self._device.type == "cpu":
            while self._work():
                pass

    # ------------------------------------------------------------------ in

    def _take_step(self, step: StepBuffer) -> None:
        """Keep the codes of the rows that are wanted, and what their ends lead to."""
        now_ns = time.perf_counter_ns()
        fresh, places, live = [], [], []
        for row, is_end in zip(step.rows, step.is_end, strict=True):
            if is_end or not self._is_wanted(row):
                places.append(self.runner.place(self.runner.dummy_slot, 0))
                continue
            voice = self._voices[row.slot.idx]
            if row.first_frame + row.frame == 0:
                self._begin(voice, row)
                fresh.append(voice.idx)
            places.append(self._place(voice, now_ns))
            live.append((voice, row))
        if live:
            step.stepped.wait_on_stream()
            if fresh:
                self.runner.begin(fresh)
            self.runner.put(step.codes, places)
        step.copied.record()
        for voice, row in live:
            voice.queue.append(row)
        for row, is_end in zip(step.rows, step.is_end, strict=True):
            if (is_end or row.is_limit) and self._is_wanted(row):
                self._end_segment(row, is_end)
        self._free(step)

    def _begin(self, voice: _Voice, row: StepRow) -> None:
        """A turn's first frame: its stream starts again."""
        self._drop_stale(voice)
        self._work_until(lambda: len(voice.queue) == voice.num_events)  # the turn before is over
        self._say_held(voice)
        voice.num_put = voice.num_called = 0
        voice.is_over = False
        voice.turn, voice.clock = (row.slot, row.turn_id), PlaybackClock()

    def _place(self, voice: _Voice, now_ns: int) -> int:
        """Where the stream's next frame waits: one that is not taken."""
        gap_ns = min(now_ns - voice.put_ns, self._frame_ns)  # a pause counts as real time
        if voice.num_put < 2:
            voice.interval_ns = gap_ns if voice.num_put else self._frame_ns
        else:
            voice.interval_ns += (gap_ns - voice.interval_ns) // 2
        voice.put_ns = now_ns
        self._work_until(
            lambda: voice.num_put - voice.num_called + voice.num_in_flight < RING_FRAMES
        )
        voice.num_put += 1
        return self.runner.place(voice.idx, voice.num_put - 1)

    def _is_wanted(self, row: StepRow) -> bool:
        return self._slots.is_current(row.slot)

    def _end_segment(self, row: StepRow, is_end: bool) -> None:
        voice = self._voices[row.slot.idx]
        voice.is_over = row.ends_turn
        num_frames = row.frame + (0 if is_end else 1)
        if not is_end and not self._is_length_fixed:
            message = f"segment {row.segment} was cut at the limit of {num_frames} frames"
            voice.add_event(EngineWarning(row.slot, row.turn_id, "frame_limit", message))
        voice.add_event(SegmentEnd(row.slot, row.turn_id, row.segment, num_frames))
        self._say_events(voice)

    def _drop_stale(self, voice: _Voice) -> None:
        """Nobody hears the frames of a generation that is over."""
        head = voice.queue[0] if voice.queue else None
        if isinstance(head, StepRow) and not self._slots.is_current(head.slot):
            is_over = [isinstance(i, StepRow) and i.slot == head.slot for i in voice.queue]
            voice.num_called += sum(is_over)  # their places are free
            voice.queue = deque(
                item for item, over in zip(voice.queue, is_over, strict=True) if not over
            )
            self._say_events(voice)

    # ------------------------------------------------------------------ calls

    def _advance(self) -> float | None:
        """Give the device what is due, and say what has come. Returns how long the inbox may be
        waited for."""
        begun_ns = time.perf_counter_ns()
        plan = self._plan()
        while plan.slots:
            self._call(plan)
            plan = self._plan()
        held_ns = self._say_what_is_due()
        self.host_ns += time.perf_counter_ns() - begun_ns
        has_read = False
        for lane in self._in_flight.values():
            while lane and lane[0].call.is_over():
                self._read_oldest(lane)
                has_read = True
        if has_read:  # frames behind an event may be due now
            return 0.0
        if self._in_flight[True]:
            self._read_oldest(self._in_flight[True])
            return 0.0
        if self._in_flight[False]:
            return _POLL_S  # steps that come meanwhile may be urgent
        due_ns = [ns for ns in (plan.due_in_ns, held_ns) if ns is not None]
        return min(due_ns) / 1e9 + 1e-4 if due_ns else None

    def _is_busy(self) -> bool:
        """A call runs that nobody waits for."""
        lane = self._in_flight[False]
        return bool(lane) and not self._in_flight[True] and not lane[0].call.is_over()

    def _work(self) -> bool:
        """Read a call, else make one, whatever waits; False if there is neither."""
        for lane in self._in_flight.values():
            if lane:
                self._read_oldest(lane)
                return True
        plan = self._plan(may_wait=False)
        if plan.slots:
            self._call(plan)
        return bool(plan.slots)

    def _work_until(self, is_done: Callable[[], bool]) -> None:
        """Work may find that a generation is over, and then what was waited for is done as well."""
        while not is_done():
            has_worked = self._work()
            assert has_worked or is_done(), self._voices

    def _plan(self, *, may_wait: bool = True) -> CallPlan:
        """The next call that may be made now. Of those that somebody waits for two are in flight at
        most, so that nobody waits for two; of the others one, so that frames that come meanwhile are
        in the next. Unless it `may_wait` for more frames."""
        now_ns = time.perf_counter_ns()
        waiting: dict[int, Waiting] = {}
        for voice in self._voices:
            if not voice.queue:
                continue
            self._drop_stale(voice)
            item = self._waiting(voice, now_ns)
            # What is in flight of a stream is in one lane: so its calls are over in their order.
            if item is not None and (voice.is_urgent or not voice.num_in_flight):
                waiting[voice.idx] = item
        if not waiting:
            return CallPlan(0, [], None)
        enough = self._enough
        if enough is not None:  # few streams never have as many
            enough = min(enough, self.runner.max_chunk * len(waiting)) if may_wait else 1
        plan = next_call(
            waiting,
            max_chunk=self.runner.max_chunk,
            max_streams=self.runner.max_streams,
            enough=enough,
        )
        if not plan.slots:
            return plan
        if plan.is_urgent:
            return plan if self.runner.can_call(is_urgent=True) else CallPlan(0, [], None)
        slots = [idx for idx in plan.slots if not self._voices[idx].num_in_flight]
        if self._in_flight[False] or not slots:
            return CallPlan(0, [], None)  # until one of those in flight is read
        return plan._replace(slots=slots)

    def _waiting(self, voice: _Voice, now_ns: int) -> Waiting | None:
        num_frames = voice.num_waiting
        if not num_frames:
            return None
        head = voice.queue[0]
        assert isinstance(head, StepRow), head
        num_ahead = voice.num_in_flight + voice.num_held
        lead_ns = voice.clock.lead_ns(now_ns) + num_ahead * self._frame_ns
        if head.first_frame + head.frame == 0:
            lead_ns = 0
        is_last = len(voice.queue) > num_frames
        is_tail = is_last and voice.is_over and self._may_pad
        if is_tail:  # of the turn, not of a segment before the last one
            is_tail = num_frames == len(voice.queue) - voice.num_events
        return Waiting(num_frames, lead_ns, is_last, voice.interval_ns, is_tail)

    def _call(self, plan: CallPlan) -> None:
        rows, places = [], []
        for idx in plan.slots:
            voice = self._voices[idx]
            first, num_frames = voice.queue[0], min(plan.chunk, voice.num_waiting)
            assert isinstance(first, StepRow), first
            rows.append((voice, first, num_frames))
            for _ in range(num_frames):
                voice.queue.popleft()
                places.append(self.runner.place(idx, voice.num_called))
                voice.num_called += 1
            places += [self._no_place] * (plan.chunk - num_frames)
            voice.num_in_flight += num_frames
            voice.is_urgent = plan.is_urgent
        call = self.runner.call(plan.slots, places, plan.chunk, is_urgent=plan.is_urgent)
        self._in_flight[plan.is_urgent].append(_InFlight(call, plan, rows))
        self.num_calls += 1

    # ------------------------------------------------------------------ out

    def _read_oldest(self, lane: deque[_InFlight]) -> None:
        call, _, rows = lane.popleft()
        pcm, is_pinned = call.wait(), self._device.type == "cuda"
        begun_ns = time.perf_counter_ns()
        for (voice, row, num_frames), samples in zip(rows, pcm, strict=True):
            voice.num_in_flight -= num_frames
            if self._slots.is_current(row.slot):
                # Pinned memory is used again; what the CPU made is the receiver's.
                heard = samples[: num_frames * self._frame_samples]
                voice.held.append((row, heard.copy() if is_pinned else heard))
                voice.num_held += num_frames
                self._holding[voice.idx] = voice
                is_due = self._hold_ns(voice, begun_ns) < 0
                if is_due or voice.num_held >= self.runner.max_chunk:
                    self._say_held(voice)
            self._say_events(voice)
        self.runner.done(call)
        self.host_ns += time.perf_counter_ns() - begun_ns

    def _say_what_is_due(self) -> int | None:
        """PCM of whoever has not enough to hear any more. Returns how long the others' may wait."""
        now_ns, waits_ns = time.perf_counter_ns(), []
        for voice in list(self._holding.values()):
            wait_ns = self._hold_ns(voice, now_ns)
            if wait_ns < 0:
                self._say_held(voice)
            else:
                waits_ns.append(wait_ns)
        return min(waits_ns, default=None)

    def _hold_ns(self, voice: _Voice, now_ns: int) -> int:
        return hold_ns(voice.clock.lead_ns(now_ns), voice.num_held * self._frame_ns)

    def _say_held(self, voice: _Voice) -> None:
        """All frames of a voice that are PCM; of one segment, for its end is said behind them."""
        held, num_frames = voice.held, voice.num_held
        if not held:
            return
        voice.held, voice.num_held = [], 0
        del self._holding[voice.idx]
        row, pcm = held[0][0], [pcm for _, pcm in held]
        if self._slots.is_current(row.slot):
            self._say_frames(row, num_frames, pcm[0] if len(pcm) == 1 else np.concatenate(pcm))
            if voice.turn == (row.slot, row.turn_id):
                voice.clock.add(num_frames * self._frame_ns, time.perf_counter_ns())

    def _say_frames(self, row: StepRow, num_frames: int, pcm: NDArray[np.float32]) -> None:
        now_ns = time.perf_counter_ns()
        frame = row.first_frame + row.frame
        if frame == 0:
            row.stamps_ns["first_pcm"] = now_ns
            self._sink(TurnBegin(row.slot, row.turn_id, dict(row.stamps_ns)))
        self.num_frames += num_frames
        self._sink(FramePcm(row.slot, row.turn_id, row.segment, frame, num_frames, pcm))

    def _say_events(self, voice: _Voice) -> None:
        """Those that no frame is before."""
        if voice.num_events and not voice.num_waiting and not voice.num_in_flight:
            self._say_held(voice)
        while voice.queue and not voice.num_in_flight and not isinstance(voice.queue[0], StepRow):
            event = voice.queue.popleft()
            voice.num_events -= 1
            assert not isinstance(event, StepRow), event
            self._sink(event)
