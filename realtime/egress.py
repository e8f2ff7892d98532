"""The egress threads: engine events in, encoded audio out to the event loop, in order per slot.

Bounded queues, one policy: whoever fills a queue waits. When the event loop falls behind, the
egress threads wait for it; when an egress thread falls behind, the engine's codec thread waits.
Waiting slows audio that is ahead of its listener anyway; dropping would be heard.

A slot belongs to one thread. A core encodes 160 to 200 Opus streams in real time (120 us per packet
with everything); libopus runs without the interpreter's lock, so that threads add up.
"""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from realtime.audio_encoder import AudioEncoder
from realtime.deadline_queue import DeadlineQueue
from realtime.metrics import Metrics
from realtime.pingpong.api import SlotTable
from realtime.pingpong.messages import (
    Event,
    FramePcm,
    SlotClosed,
    SlotFailed,
    SlotRef,
    TurnEnd,
)
from realtime.session.actions import EncodedAudio, EncodedPacket
from realtime.threads import name_thread
from realtime.wire import AudioFormat

_SLOTS_PER_THREAD = 8
_CORES_PER_THREAD = 2  # the others are the engine's, the event loop's and the clients'
_MAX_THREADS = 12
_MAX_INBOX = 512  # events of the engine, per thread; 64 slots x 8 frames
_MAX_OUTBOX = 4_096  # events the event loop has not taken
_MAX_BURST_S = 0.002  # encoded before the loop is woken: later streams' packets must not hold up
_POLL_S = 0.1  # how often a waiting thread looks whether it should stop

logger = logging.getLogger(__name__)

LoopEvent = Event | EncodedAudio


@dataclass(slots=True)
class _Stream:
    """A slot's encoder and the turn it is in."""

    encoder: AudioEncoder
    slot: SlotRef
    turn_id: int = -1
    segment: int = 0
    num_frames: int = 0
    played_s: float = 0.0  # when a listener has heard what is encoded

    def is_at(self, slot: SlotRef, turn_id: int) -> bool:
        return self.slot == slot and self.turn_id == turn_id

    def start_turn(self, slot: SlotRef, turn_id: int) -> None:
        self.encoder.reset()
        self.slot, self.turn_id, self.segment, self.num_frames = slot, turn_id, 0, 0
        self.played_s = 0.0

    def encoded(self, num_samples: int, codec_rate: int, now_s: float) -> None:
        self.played_s = max(self.played_s, now_s) + num_samples / codec_rate


def threads_for(num_slots: int, num_cores: int) -> int:
    """A thread encodes 4,000 (Intel Xeon beside an H200) to 7,000 packets/s (AMD EPYC) on a core of its
    own, most of the time inside Opus and without the GIL: 80 to 140 real-time streams. 64 streams
    that are rendered as fast as an H200 can, at 7,500 frames/s of 46 ms, need 17,000."""
    most = min(_MAX_THREADS, num_cores // _CORES_PER_THREAD)
    return max(1, min(most, -(-num_slots // _SLOTS_PER_THREAD)))


class Egress:
    """`put` takes events on any engine thread; `deliver` gets them on the event loop."""

    def __init__(
        self,
        codec_rate: int,
        num_slots: int,
        slots: SlotTable,
        deliver: Callable[[LoopEvent], None],
        metrics: Metrics,
        num_threads: int | None = None,
    ) -> None:
        self._codec_rate = codec_rate
        self._slots = slots
        self._deliver = deliver
        self._metrics = metrics
        self._streams: dict[int, _Stream] = {}  # by slot.idx; added by the loop, removed here
        num_threads = num_threads or threads_for(num_slots, os.cpu_count() or 1)
        self._inboxes = [DeadlineQueue(_MAX_INBOX, self._deadline) for _ in range(num_threads)]
        self._outbox: list[LoopEvent] = []
        self._outbox_changed = threading.Condition()
        self._is_wake_scheduled = False
        self._is_stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._threads = [
            threading.Thread(target=self._run, args=(inbox,), name="plosive-egress", daemon=True)
            for inbox in self._inboxes
        ]

    # ------------------------------------------------------------------ event loop

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop after the engine has; what is still queued is discarded."""
        self._is_stopping = True
        for thread in self._threads:
            if thread.is_alive():
                thread.join()
        self._streams.clear()

    def open_encoder(self, slot: SlotRef, audio_format: AudioFormat) -> None:
        """Make the slot's encoder (30 to 110 us), before the engine hears of the slot."""
        self._streams[slot.idx] = _Stream(AudioEncoder(audio_format, self._codec_rate), slot)

    @property
    def num_encoders(self) -> int:
        return len(self._streams)

    @property
    def num_queued(self) -> int:
        return sum(inbox.qsize() for inbox in self._inboxes)

    def _take(self) -> None:
        with self._outbox_changed:
            events, self._outbox = self._outbox, []
            self._is_wake_scheduled = False
            self._outbox_changed.notify_all()
        for event in events:
            self._deliver(event)

    # ------------------------------------------------------------------ engine threads

    def put(self, event: Event) -> None:
        """The engine's sink. Waits while the queue is full; drops everything once stopping."""
        inbox = self._inboxes[event.slot.idx % len(self._inboxes)]
        while not self._is_stopping and not inbox.put(event, _POLL_S):
            pass

    def _deadline(self, event: Event) -> float:
        """When the listener has played what is encoded of the slot, in `time.perf_counter` seconds. At
        once for what begins a turn, and for what costs nothing."""
        stream = self._streams.get(event.slot.idx)
        if stream is None or not isinstance(event, FramePcm | TurnEnd):
            return 0.0
        return stream.played_s if stream.is_at(event.slot, event.turn_id) else 0.0

    # ------------------------------------------------------------------ egress threads

    def _run(self, inbox: DeadlineQueue) -> None:
        name_thread("plosive-egress")
        while not self._is_stopping:
            events = inbox.get(_POLL_S)
            if events:
                self._post(self._burst(events, inbox))

    def _burst(self, events: list[Event], inbox: DeadlineQueue) -> list[LoopEvent]:
        """Process what is queued, for `_MAX_BURST_S` at most. A turn's first frame goes out at once."""
        burst: list[LoopEvent] = []
        end_s = time.perf_counter() + _MAX_BURST_S
        while events:
            for event in _pieces(_joined(events)):
                burst += self._process(event)
                if _begins_turn(event):
                    self._post(burst)
                    burst = []
            events = inbox.get(0.0) if time.perf_counter() < end_s else []
        return burst

    def _post(self, burst: list[LoopEvent]) -> None:
        with self._outbox_changed:
            while len(self._outbox) >= _MAX_OUTBOX and not self._is_stopping:
                self._outbox_changed.wait(_POLL_S)
            self._outbox += burst
            if not burst or self._is_wake_scheduled or self._is_stopping:
                return
            self._is_wake_scheduled = True
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._take)
        except RuntimeError:  # the loop is closed: nobody is left to hear it
            self._is_stopping = True

    def _process(self, event: Event) -> list[LoopEvent]:
        try:
            return self._encode(event)
        except Exception as error:  # one stream's failure must not silence the others
            logger.exception("encoding failed")
            return [SlotFailed(event.slot, f"encoding failed: {error}")]

    def _encode(self, event: Event) -> list[LoopEvent]:
        match event:
            case FramePcm():
                return self._encode_frames(event)
            case TurnEnd():
                return [*self._encode_tail(event), event]
            case SlotClosed():
                self._streams.pop(event.slot.idx, None)
        return [event]

    def _encode_frames(self, event: FramePcm) -> list[LoopEvent]:
        stream = self._streams.get(event.slot.idx)
        if stream is None or not self._slots.is_current(event.slot):
            self._metrics.stale_frames.inc(event.num_frames)
            return []
        started_s = time.perf_counter()
        if not stream.is_at(event.slot, event.turn_id):
            stream.start_turn(event.slot, event.turn_id)
        stream.segment = event.segment
        stream.num_frames += event.num_frames
        packets = stream.encoder.push(event.pcm)
        stream.encoded(len(event.pcm), self._codec_rate, time.perf_counter())
        self._metrics.frames.inc(event.num_frames)
        self._account(packets, started_s)
        return [
            EncodedAudio(
                event.slot,
                event.turn_id,
                event.segment,
                event.first_frame,
                event.num_frames,
                packets,
                is_last=False,
                num_samples=stream.encoder.num_samples,
                encoded_ns=time.perf_counter_ns(),
            )
        ]

    def _encode_tail(self, event: TurnEnd) -> list[LoopEvent]:
        stream = self._streams.get(event.slot.idx)
        if stream is None or not self._slots.is_current(event.slot):
            return []
        if not stream.is_at(event.slot, event.turn_id):
            return []  # a turn without frames
        started_s = time.perf_counter()
        packets = stream.encoder.finish()
        self._account(packets, started_s)
        tail = EncodedAudio(
            event.slot,
            event.turn_id,
            stream.segment,
            stream.num_frames,
            num_frames=0,
            packets=packets,
            is_last=True,
            num_samples=stream.encoder.num_samples,
            encoded_ns=time.perf_counter_ns(),
        )
        stream.turn_id = -1
        return [tail]

    def _account(self, packets: tuple[EncodedPacket, ...], started_s: float) -> None:
        self._metrics.encode.observe(time.perf_counter() - started_s)
        self._metrics.packets.inc(len(packets))
        self._metrics.audio_bytes.inc(sum(len(packet.payload) for packet in packets))


def _joined(run: list[Event]) -> Event:
    """One event of one slot, or its consecutive frames as one."""
    first = run[0]
    if len(run) == 1 or not isinstance(first, FramePcm):
        return first
    frames = [event for event in run if isinstance(event, FramePcm)]
    pcm = np.concatenate([frame.pcm for frame in frames])
    return replace(first, num_frames=sum(frame.num_frames for frame in frames), pcm=pcm)


def _begins_turn(event: Event) -> bool:
    return isinstance(event, FramePcm) and event.first_frame == 0


def _pieces(event: Event) -> tuple[Event, ...]:
    """The first frame of a turn apart from the others that came with it: 8 frames of S2 are 2 to 5 ms
    of encoding, of which the first packets need an eighth."""
    if not isinstance(event, FramePcm) or not _begins_turn(event) or event.num_frames == 1:
        return (event,)
    size = len(event.pcm) // event.num_frames
    rest = replace(event, first_frame=1, num_frames=event.num_frames - 1, pcm=event.pcm[size:])
    return (replace(event, num_frames=1, pcm=event.pcm[:size]), rest)
