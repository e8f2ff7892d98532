"""A client process: opens sessions, waits for the others, says its texts, keeps every time.

It shares no interpreter with the server and does no work while it measures but reading the socket;
audio is decoded when the load is over.
"""

import asyncio
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from dataclasses import dataclass, field
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Barrier

from bench_ttfa.measure import worst_gap_ms
from clients import (
    AudioFormat,
    AudioPacket,
    ConnectionFailed,
    EffectiveFormat,
    PlosiveError,
    Sampling,
    Session,
    Speech,
    connect,
    decode_turn,
)
from clients.silence import leading_silence_ms

START_TIMEOUT_S = 300.0
TURN_TIMEOUT_S = 300.0
MAX_STAGGER_S = 5.0
MAX_LISTENED = 40  # turns of a process that are decoded, to know where their sound begins
_TICK_S = 0.01


@dataclass(frozen=True)
class Connection:
    """How every session of a run is opened."""

    url: str
    voice: str | None
    format: AudioFormat
    seed: int
    max_lead_ms: int | None
    words_per_s: float | None  # text arrives word by word; None: at once
    api_key: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Arrival:
    """Open loop: a new session that says one text."""

    after_s: float
    text: str


@dataclass(frozen=True)
class Plan:
    """One process's share of a level: loops, each a session's texts, or arrivals."""

    connection: Connection
    first_session: int
    loops: list[list[str]]
    arrivals: list[Arrival]
    warmups: list[list[str]] = field(default_factory=list)  # each a session's, before the barrier
    seconds: float | None = None  # after which no turn begins
    ramp_s: float = 0.0  # before them; sessions of timed closed loops begin spread over it
    is_paced: bool = False  # each turn is listened to in real time before the next; cut at the end

    @property
    def num_turns(self) -> int:
        return len(self.arrivals) + sum(map(len, (*self.loops, *self.warmups)))


@dataclass
class TurnRecord:
    """One turn. `error` is set, and the figures are not, when it failed."""

    num_chars: int
    error: str | None = None
    is_early: bool = False  # begun in the ramp: its packets count, its figures do not
    is_cut: bool = False  # by the end of the level: it has no figures of the server
    ready_ms: float | None = None  # open loop: of the turn's own session
    late_ms: float = 0.0  # open loop: behind the arrival time
    ttfa_ms: float | None = None
    ttfa_first_text_ms: float | None = None
    ttfa_audible_ms: float | None = None
    server_ttfa_ms: float | None = None
    timeline_ms: dict[str, float] = field(default_factory=dict)
    worst_gap_ms: float | None = None
    server_worst_gap_ms: float = 0.0
    num_packets: int = 0
    num_in_time: int = 0  # packets received before the level's end
    num_frames: int = 0
    audio_ms: float = 0.0
    generation_ms: float = 0.0  # commit sent -> last packet


@dataclass
class WorkerResult:
    turns: list[TurnRecord]
    lag_ms: list[float]  # how late the event loop ran its 10 ms ticks
    started_s: float  # monotonic, of the machine
    ended_s: float


@dataclass
class _Said:
    record: TurnRecord
    packets: list[AudioPacket]
    format: EffectiveFormat
    num_samples: int


_barrier: Barrier | None = None
_num_done: "Synchronized[int] | None" = None


def prepare(barrier: Barrier, num_done: "Synchronized[int]") -> None:
    """Called once in each process, before `run`. The parent ends it, and it outlives no parent."""
    global _barrier, _num_done
    _barrier, _num_done = barrier, num_done
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def run(plan: Plan) -> WorkerResult:
    return asyncio.run(_Worker(plan).run())


def _count_turn() -> None:
    if _num_done is not None:
        with _num_done.get_lock():
            _num_done.value += 1


class _Worker:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._turns: list[TurnRecord] = []
        self._said: list[_Said] = []
        self._begins_s, self._ends_s = 0.0, float("inf")  # monotonic, of what is measured

    async def run(self) -> WorkerResult:
        ready = [asyncio.Event() for _ in self._plan.loops]
        go = asyncio.Event()
        lag_ms: list[float] = []
        run_loop = self._paced_loop if self._plan.is_paced else self._closed_loop
        async with asyncio.TaskGroup() as tasks:
            for idx, texts in enumerate(self._plan.loops):
                tasks.create_task(self._loop(run_loop, idx, texts, ready[idx], go))
            if not self._plan.loops:
                await self._warm_up()
            for event in ready:
                await event.wait()
            if _barrier is not None:
                await asyncio.to_thread(_barrier.wait, START_TIMEOUT_S)
            started_s = time.monotonic()
            self._begins_s = started_s + self._plan.ramp_s
            if self._plan.seconds is not None:
                self._ends_s = self._begins_s + self._plan.seconds
            go.set()
            watch = asyncio.create_task(_watch_lag(lag_ms))
            arrivals = [
                tasks.create_task(self._arrive(idx, arrival, started_s))
                for idx, arrival in enumerate(self._plan.arrivals)
            ]
            await asyncio.gather(*arrivals)
        ended_s = time.monotonic()
        watch.cancel()
        for said in self._said[:: max(1, len(self._said) // MAX_LISTENED)]:
            _listen(said)
        return WorkerResult(self._turns, lag_ms, self._begins_s, ended_s)

    async def _loop(
        self,
        run_loop: Callable[[Session, list[str]], Awaitable[None]],
        idx: int,
        texts: list[str],
        ready: asyncio.Event,
        go: asyncio.Event,
    ) -> None:
        """One session: its warm-up, then, with all the others, its turns."""
        left = list(reversed(texts))
        try:
            async with self._connect(idx) as session:
                for text in self._plan.warmups[idx] if self._plan.warmups else ():
                    await self._say(session, None, text)
                ready.set()
                await go.wait()
                await run_loop(session, left)
        except PlosiveError as error:
            for text in left if self._plan.seconds is None else left[-1:]:
                self._add(TurnRecord(len(text), error=_name(error)))
        finally:
            ready.set()

    async def _closed_loop(self, session: Session, left: list[str]) -> None:
        await asyncio.sleep(random.random() * self._plan.ramp_s)
        while left and (now_s := time.monotonic()) < self._ends_s:
            text = left.pop()
            record = TurnRecord(len(text), is_early=now_s < self._begins_s)
            await self._say(session, record, text)

    async def _paced_loop(self, session: Session, left: list[str]) -> None:
        """Begins somewhere in the first part of the level, so that streams are not in step."""
        assert self._plan.seconds is not None
        await asyncio.sleep(random.random() * min(MAX_STAGGER_S, self._plan.seconds / 3))
        while left and time.monotonic() < self._ends_s:
            text = left.pop()
            record = TurnRecord(len(text))
            started_s = time.monotonic()
            await self._say(session, record, text, self._ends_s)
            heard_s = started_s + ((record.ttfa_ms or 0.0) + record.audio_ms) / 1000
            await asyncio.sleep(max(0.0, min(heard_s, self._ends_s) - time.monotonic()))

    async def _warm_up(self) -> None:
        for texts in self._plan.warmups:
            with suppress(PlosiveError):  # what is wrong shows in the measurement
                async with self._connect(0) as session:
                    for text in texts:
                        await self._say(session, None, text)

    async def _arrive(self, idx: int, arrival: Arrival, started_s: float) -> None:
        due_s = started_s + arrival.after_s
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        record = TurnRecord(len(arrival.text))
        record.late_ms = 1000.0 * (time.monotonic() - due_s)
        try:
            async with self._connect(idx) as session:
                record.ready_ms = session.ready_ms
                await self._say(session, record, arrival.text)
        except PlosiveError as error:
            record.error = _name(error)
            self._add(record)

    def _connect(self, idx: int) -> AbstractAsyncContextManager[Session]:
        how = self._plan.connection
        return connect(
            how.url,
            api_key=how.api_key,
            voice=how.voice,
            format=how.format,
            sampling=Sampling(seed=how.seed + self._plan.first_session + idx),
            max_lead_ms=how.max_lead_ms,
        )

    async def _say(
        self,
        session: Session,
        record: TurnRecord | None,
        text: str,
        ends_s: float = float("inf"),
    ) -> None:
        """Without a record, what it measures is forgotten. Cut where the level ends."""
        words_per_s = self._plan.connection.words_per_s
        packets: list[AudioPacket] = []
        error = None
        is_cut = False
        try:
            speech = session.say(text if words_per_s is None else _words(text, words_per_s))
            async with asyncio.timeout(TURN_TIMEOUT_S), aclosing(aiter(speech)) as stream:
                async for packet in stream:
                    packets.append(packet)
                    if is_cut := time.monotonic() >= ends_s:
                        break
        except TimeoutError:
            error = "timeout"
        except PlosiveError as raised:
            error = _name(raised)
        if record is None:
            return _count_turn()
        self._add(record)
        record.error, record.is_cut = error, is_cut
        if error is None:
            self._keep(record, speech, packets, session.format)
        return None

    def _add(self, record: TurnRecord) -> None:
        self._turns.append(record)
        _count_turn()

    def _keep(
        self,
        record: TurnRecord,
        speech: Speech,
        packets: list[AudioPacket],
        format: EffectiveFormat,
    ) -> None:
        timings, metrics = speech.turn.timings, speech.turn.metrics
        if record.is_cut:
            metrics = None  # which may have come, with packets that were not taken any more
        is_complete = metrics is not None or record.is_cut
        if not packets or not is_complete or timings.commit_s is None:
            record.error = "no_audio"
            return
        record.ttfa_ms = timings.ttfa_ms
        record.ttfa_first_text_ms = timings.ttfa_from_first_text_ms
        record.worst_gap_ms = worst_gap_ms(timings.packets_s, format.packet_ms)
        record.num_packets = len(packets)
        record.num_in_time = sum(self._begins_s <= t_s <= self._ends_s for t_s in timings.packets_s)
        record.audio_ms = len(packets) * format.packet_ms
        record.generation_ms = 1000.0 * (timings.packets_s[-1] - timings.commit_s)
        if metrics is not None:
            record.server_ttfa_ms = metrics.server_ttfa_ms
            record.timeline_ms = dict(metrics.timeline_ms)
            record.server_worst_gap_ms = metrics.worst_gap_ms
            record.num_frames = metrics.num_frames
            record.audio_ms = metrics.audio_ms
            self._said.append(_Said(record, packets, format, metrics.num_samples))


def _name(error: PlosiveError) -> str:
    if isinstance(error, ConnectionFailed) and error.status is not None:
        return f"refused_{error.status}"
    return error.code


def _listen(said: _Said) -> None:
    """Decode the turn: where its sound begins, and whether it is all there."""
    try:
        samples, sample_rate_hz = decode_turn(said.packets, said.format, said.num_samples)
    except PlosiveError as error:
        said.record.error = error.code
        return
    silence_ms = leading_silence_ms(samples, sample_rate_hz)
    if silence_ms is None:
        said.record.error = "silent"
    elif said.record.ttfa_ms is not None:
        said.record.ttfa_audible_ms = said.record.ttfa_ms + silence_ms


async def _words(text: str, words_per_s: float) -> AsyncIterator[str]:
    """Word by word on a steady clock, as a language model writes."""
    started_s = time.monotonic()
    for num_words, word in enumerate(text.split(" ")):
        await asyncio.sleep(max(0.0, started_s + num_words / words_per_s - time.monotonic()))
        yield word if num_words == 0 else " " + word


async def _watch_lag(lag_ms: list[float]) -> None:
    while True:
        due_s = time.monotonic() + _TICK_S
        await asyncio.sleep(_TICK_S)
        lag_ms.append(1000.0 * (time.monotonic() - due_s))
