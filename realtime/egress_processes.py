"""Egress in processes of their own: a core each for Opus, and no lock to share with anything.

In threads, every packet takes the interpreter's lock again; with twelve of them beside an event loop
that, and not Opus, was the limit: 14,000 packets/s, 280 real-time streams, with 4 of 32 cores of an
Intel Xeon in use (`python -m bench_ttfa.host`). Here the lock is taken for each event, which is
several frames.

    put() --link--> worker: queue by deadline, encode --link--> event loop

Everything of a slot goes through one process, in order. Generations are in shared memory, so that
what is stale is dropped before it is encoded.
"""

import asyncio
import atexit
import contextlib
import logging
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable
from typing import NamedTuple

from realtime.child_signals import ignore_signals, start_deaf
from realtime.deadline_queue import DeadlineQueue
from realtime.egress import count, encoders_for
from realtime.encoders import Encoders, LoopEvent, in_pieces
from realtime.garbage import spare_what_is_loaded
from realtime.metrics import Metrics
from realtime.pingpong.api import SlotTable
from realtime.pingpong.messages import Event, SlotClosed, SlotFailed, SlotRef
from realtime.pingpong.slots import Generations, Slots
from realtime.remote.link import READ_BYTES, Link, LinkClosed, MessageReader, link_pair, packed
from realtime.threads import name_thread
from realtime.wire import AudioFormat

_MIN_CORES = 8  # below, threads leave more to the model
_MAX_QUEUED = 512  # events; a worker reads no more until it has encoded some
_STOP_S = 5.0
_RESPAWN_S = 0.5  # what dies at once is not started without end
_DIED = "the process that encodes it has died"

logger = logging.getLogger(__name__)


def processes_for(slots: SlotTable, num_slots: int, num_cores: int) -> int:
    """How many to have; 0 where threads do as well or the slots are not shared."""
    is_shared = isinstance(slots, Slots) and slots.is_shared
    num_encoders = encoders_for(num_slots, num_cores)
    return num_encoders if is_shared and num_encoders > 1 and num_cores >= _MIN_CORES else 0


class OpenEncoder(NamedTuple):
    slot: SlotRef
    format: AudioFormat


class _Worker:
    """The server's end of one process."""

    def __init__(self, codec_rate: int, generations: Generations) -> None:
        ours, theirs = link_pair()
        context = multiprocessing.get_context("spawn")
        self.process = context.Process(
            target=run_worker, args=(theirs, codec_rate, generations), name="plosive-encode"
        )
        start_deaf(self.process)
        theirs.close()
        self.link = Link(ours, "encode")
        self.reader = MessageReader()
        atexit.register(self.stop)  # before multiprocessing's own, which would wait for the process

    def stop(self) -> None:
        atexit.unregister(self.stop)
        self.link.close()  # at which the process ends
        self.process.join(_STOP_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


class EgressProcesses:
    """Implements `realtime.egress.Egress`. The slots' generations must be in shared memory."""

    def __init__(
        self,
        codec_rate: int,
        slots: SlotTable,
        deliver: Callable[[LoopEvent], None],
        metrics: Metrics,
        num_processes: int,
    ) -> None:
        self._codec_rate = codec_rate
        assert isinstance(slots, Slots) and slots.is_shared, (
            "other processes cannot read these slots"
        )
        self._generations = slots.generations
        self._deliver = deliver
        self._metrics = metrics
        self._opened: dict[int, SlotRef] = {}  # by slot.idx; event loop only
        self._listened: dict[int, int] = {}  # worker -> its file descriptor in the event loop
        self._closing: dict[int, SlotClosed] = {}  # on their way; added by engine threads
        self._is_stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._workers = [_Worker(codec_rate, self._generations) for _ in range(num_processes)]

    # ------------------------------------------------------------------ event loop

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        for idx in range(len(self._workers)):
            self._listen(idx)

    def stop(self) -> None:
        self._is_stopping = True
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(self._stop_listening(), self._loop).result()
        for worker in self._workers:
            worker.stop()
        self._opened.clear()

    def open_encoder(self, slot: SlotRef, audio_format: AudioFormat) -> None:
        self._opened[slot.idx] = slot
        try:
            self._workers[self._index(slot)].link.send(OpenEncoder(slot, audio_format))
        except LinkClosed:
            assert self._loop is not None
            self._loop.call_soon(self._deliver, SlotFailed(slot, _DIED))

    @property
    def num_encoders(self) -> int:
        return len(self._opened)

    @property
    def num_queued(self) -> int:
        return sum(worker.link.num_waiting for worker in self._workers)

    def _listen(self, idx: int) -> None:
        assert self._loop is not None
        self._listened[idx] = fd = self._workers[idx].link.fileno()
        self._loop.add_reader(fd, self._read, idx)

    async def _stop_listening(self) -> None:
        assert self._loop is not None
        for fd in self._listened.values():
            self._loop.remove_reader(fd)

    def _read(self, idx: int) -> None:
        worker = self._workers[idx]
        data = worker.link.read()
        if data is None:
            return
        if not data:
            self._replace(idx)
            return
        for encoded in worker.reader.feed(data):
            count(self._metrics, encoded.tally)
            for event in encoded.events:
                if isinstance(event, SlotClosed):
                    self._close(event.slot.idx)
                else:
                    self._deliver(event)

    def _close(self, idx: int) -> None:
        """Once for each `SlotClosed`: it has come back, or never will."""
        closed = self._closing.pop(idx, None)
        if closed is not None:
            self._opened.pop(idx, None)
            self._deliver(closed)

    def _replace(self, idx: int) -> None:
        """A worker has died: its sessions fail, the next ones get a new one."""
        assert self._loop is not None
        dead = self._workers[idx]
        self._loop.remove_reader(self._listened.pop(idx))
        if self._is_stopping:
            return
        dead.stop()
        logger.error("an encoding process has died (exit code %s)", dead.process.exitcode)
        self._loop.call_later(_RESPAWN_S, self._respawn, idx)
        for slot in list(self._opened.values()):
            if self._index(slot) == idx:
                self._deliver(SlotFailed(slot, _DIED))
        for closed in list(self._closing.values()):
            if self._index(closed.slot) == idx:
                self._close(closed.slot.idx)

    def _respawn(self, idx: int) -> None:
        if not self._is_stopping:
            self._workers[idx] = _Worker(self._codec_rate, self._generations)
            self._listen(idx)

    # ------------------------------------------------------------------ engine threads

    def put(self, event: Event) -> None:
        if isinstance(event, SlotClosed):
            self._closing[event.slot.idx] = event
        try:
            self._workers[self._index(event.slot)].link.send(event, is_patient=True)
        except LinkClosed:  # the event loop sees it too
            # What waits for the slot must not wait for ever.
            if isinstance(event, SlotClosed) and self._loop is not None:
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    self._loop.call_soon_threadsafe(self._close, event.slot.idx)

    def _index(self, slot: SlotRef) -> int:
        return slot.idx % len(self._workers)


# ---------------------------------------------------------------------------- the process


def run_worker(sock: socket.socket, codec_rate: int, generations: Generations) -> None:
    """One thread: read what is there, encode the most urgent, send. Ends with the server, whose
    business signals are."""
    ignore_signals()
    name_thread("plosive-encode")
    spare_what_is_loaded()
    with contextlib.suppress(ConnectionError):
        _Work(sock, Encoders(codec_rate, Slots(len(generations), generations))).run()
    sys.stderr.flush()
    os._exit(0)


class _Work:
    def __init__(self, sock: socket.socket, encoders: Encoders) -> None:
        self._link = Link(sock, "encoded")
        self._sock = sock
        self._encoders = encoders
        self._reader = MessageReader()
        self._queue = DeadlineQueue(sys.maxsize, encoders.deadline)

    def run(self) -> None:
        while self._read():
            events = self._queue.get(waits=False)
            for event in in_pieces(events) if events else ():
                for encoded in self._encoders.encode(event):
                    self._sock.sendall(b"".join(packed(encoded)))

    def _read(self) -> bool:
        """Queue what has come; waits if there is nothing to do. False at the end."""
        if self._queue.qsize() >= _MAX_QUEUED:
            return True
        if self._queue.qsize() == 0:
            data: bytes | None = self._sock.recv(READ_BYTES)
        else:
            data = self._link.read()
        for message in self._reader.feed(data or b""):
            if isinstance(message, OpenEncoder):
                self._encoders.open(message.slot, message.format)
            else:
                self._queue.put(message)
        return data != b""
