"""The egress threads: engine events in, encoded audio out to the event loop, in order per slot.

Bounded queues, one policy: whoever fills a queue waits. When the event loop falls behind, the
egress threads wait for it; when an egress thread falls behind, the engine's codec thread waits.
Waiting slows audio that is ahead of its listener anyway; dropping would be heard.

A slot belongs to one thread. libopus runs without the interpreter's lock, but every packet takes the
lock again: with many threads on many cores that, and not Opus, is the limit, and
`realtime.egress_processes` takes their place.
"""

import asyncio
import os
import threading
import time
from collections.abc import Callable
from typing import Protocol

from realtime.deadline_queue import DeadlineQueue
from realtime.encoders import Encoders, LoopEvent, Tally, begins_turn, in_pieces
from realtime.metrics import Metrics
from realtime.pingpong.api import SlotTable
from realtime.pingpong.messages import Event, SlotRef
from realtime.threads import name_thread
from realtime.wire import AudioFormat

_SLOTS_PER_THREAD = 8
_CORES_PER_THREAD = 2  # the others are the engine's, the event loop's and the clients'
_MAX_THREADS = 12
_MAX_INBOX = 512  # events of the engine, per thread; 64 slots x 8 frames
_MAX_OUTBOX = 4_096  # events the event loop has not taken
_MAX_BURST_S = 0.002  # encoded before the loop is woken: later streams' packets must not hold up


class Egress(Protocol):
    """`put` takes events on any engine thread; what they become arrives on the event loop."""

    def start(self, loop: asyncio.AbstractEventLoop) -> None: ...

    def stop(self) -> None:
        """Not on the event loop. Stop after the engine has; what is still queued is discarded."""

    def open_encoder(self, slot: SlotRef, audio_format: AudioFormat) -> None:
        """On the event loop, before the engine hears of the slot."""

    def put(self, event: Event) -> None:
        """The engine's sink. Waits while the queue is full; drops everything once stopping."""

    @property
    def num_encoders(self) -> int: ...

    @property
    def num_queued(self) -> int: ...


def num_cores() -> int:
    """That this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def encoders_for(num_slots: int, num_cores: int) -> int:
    """A core encodes 4,000 (Intel Xeon beside an H200) to 7,000 packets/s (AMD EPYC): 80 to 140
    real-time streams. 64 streams that are rendered as fast as an H200 can, at 7,500 frames/s of
    46 ms, need 17,000."""
    most = min(_MAX_THREADS, num_cores // _CORES_PER_THREAD)
    return max(1, min(most, -(-num_slots // _SLOTS_PER_THREAD)))


def count(metrics: Metrics, tally: Tally) -> None:
    if tally.num_stale:
        metrics.stale_frames.inc(tally.num_stale)
    if tally.seconds is not None:
        metrics.encode.observe(tally.seconds)
        metrics.frames.inc(tally.num_frames)
        metrics.packets.inc(tally.num_packets)
        metrics.audio_bytes.inc(tally.num_bytes)


class EgressThreads:
    """Implements `Egress` in the server's process."""

    def __init__(
        self,
        codec_rate: int,
        num_slots: int,
        slots: SlotTable,
        deliver: Callable[[LoopEvent], None],
        metrics: Metrics,
        num_threads: int | None = None,
    ) -> None:
        self._deliver = deliver
        self._metrics = metrics
        self._encoders = Encoders(codec_rate, slots)
        num_threads = num_threads or encoders_for(num_slots, num_cores())
        deadline = self._encoders.deadline
        self._inboxes = [DeadlineQueue(_MAX_INBOX, deadline) for _ in range(num_threads)]
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
        self._close()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()
        self._encoders.clear()

    def open_encoder(self, slot: SlotRef, audio_format: AudioFormat) -> None:
        self._encoders.open(slot, audio_format)

    @property
    def num_encoders(self) -> int:
        return len(self._encoders)

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
        self._inboxes[event.slot.idx % len(self._inboxes)].put(event)

    # ------------------------------------------------------------------ egress threads

    def _run(self, inbox: DeadlineQueue) -> None:
        name_thread("plosive-egress")
        while events := inbox.get():
            self._post(self._burst(events, inbox))

    def _burst(self, events: list[Event], inbox: DeadlineQueue) -> list[LoopEvent]:
        """Process what is queued, for `_MAX_BURST_S` at most. A turn's first packet goes out at once."""
        burst: list[LoopEvent] = []
        end_s = time.perf_counter() + _MAX_BURST_S
        while events:
            for event in in_pieces(events):
                for encoded in self._encoders.encode(event):
                    count(self._metrics, encoded.tally)
                    burst += encoded.events
                    if begins_turn(event):
                        self._post(burst)
                        burst = []
            events = inbox.get(waits=False) if time.perf_counter() < end_s else []
        return burst

    def _post(self, burst: list[LoopEvent]) -> None:
        with self._outbox_changed:
            self._outbox_changed.wait_for(
                lambda: len(self._outbox) < _MAX_OUTBOX or self._is_stopping
            )
            self._outbox += burst
            if not burst or self._is_wake_scheduled or self._is_stopping:
                return
            self._is_wake_scheduled = True
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._take)
        except RuntimeError:  # the loop is closed: nobody is left to hear it
            self._close()

    def _close(self) -> None:
        """Nothing waits any more, and what comes is dropped."""
        with self._outbox_changed:
            self._is_stopping = True
            self._outbox_changed.notify_all()
        for inbox in self._inboxes:
            inbox.close()
