"""The sweep: probe session starts, then load the server level by level from client processes."""

import asyncio
import math
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import dataclass, field, replace
from multiprocessing.context import BaseContext
from typing import Literal

from bench_ttfa import worker
from bench_ttfa.measure import continuity
from bench_ttfa.progress import Progress
from bench_ttfa.scrape import scrape
from bench_ttfa.system import peak_resident_mib, resident_mib, thread_times
from bench_ttfa.worker import Arrival, Connection, Plan, WorkerResult
from bench_ttfa.workload import Kind, TextSource, poisson_arrivals_s
from clients import ConnectionFailed, connect
from clients.voices import list_voices
from realtime.wire import SessionReady

OPEN_LOOP_CONCURRENCY = 32  # arrivals that share one client process
PACED_PER_PROCESS = 32  # sessions: 1,600 packets/s, about 0.2 of a core
MAX_SESSIONS_PER_PROCESS = 8  # of closed loops, which are answered in bursts
MAX_TURNS_PER_S = {
    "closed": 10.0,
    "paced": 1.0,
}  # of one session, for which timed levels have texts
UNPACED_MS = 600_000
NUM_READY_PROBES = 20
_POLL_S = 0.25
_MAX_RETRIES = 100
_RETRY_S = 0.05


ThreadTimes = dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Level:
    """One load. Closed loop: `concurrency` sessions, each says its next turn when the last is
    done. Open loop: turns arrive at `rate_per_s`, whatever the server does. Paced: `concurrency`
    sessions, each says its next turn when a listener has heard the last. A level ends after
    `seconds` where they are given (paced ones always), else after `num_turns`."""

    mode: Literal["closed", "open", "paced"]
    num_turns: int
    concurrency: int = 0
    rate_per_s: float = 0.0
    seconds: float | None = None
    voice: str | None = None  # instead of the connection's
    num_chars: int | None = None  # of each text, about; None: as the texts come
    ramp_s: float = 0.0  # before `seconds` of a closed loop, see `worker.Plan`
    axis: str = ""  # what grows from level to level where it is not the load
    value: float = 0.0  # on that axis

    @property
    def name(self) -> str:
        if self.axis:
            return f"{self.axis} {self.value:g}"
        if self.mode == "open":
            return f"{self.rate_per_s:g}/s"
        return f"c={self.concurrency}" if self.mode == "closed" else f"{self.concurrency} paced"


@dataclass(frozen=True)
class Config:
    levels: tuple[Level, ...]
    connection: Connection
    kind: Kind = "mixed"
    warmup_turns: int = 2  # of each session (open loop: each process), before the measurement
    sessions_per_process: int = MAX_SESSIONS_PER_PROCESS
    keeps_going: bool = False  # to more paced streams than those whose continuity broke


@dataclass
class LevelResult:
    level: Level
    workers: list[WorkerResult]
    resident_mib: list[float] = field(default_factory=list)
    cpu: list[tuple[float, ThreadTimes]] = field(default_factory=list)  # at monotonic times
    metrics_before: dict[str, float] = field(default_factory=dict)  # of the server's /metrics
    metrics_after: dict[str, float] = field(default_factory=dict)


@dataclass
class SweepResult:
    config: Config
    ready_cold_ms: list[float] = field(default_factory=list)
    ready_cached_ms: list[float] = field(default_factory=list)
    levels: list[LevelResult] = field(default_factory=list)
    model: str = ""
    frame_rate_hz: float = 0.0
    was_interrupted: bool = False  # after some of its levels
    server_peak_mib: float | None = None
    load_before: float = 0.0  # what else ran on this machine: load average of the last minute
    server_start_s: float | None = None  # of a server that was started for this run


def sweep(
    config: Config,
    server_pid: int | None = None,
    on_step: Callable[[str], None] = lambda _: None,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> SweepResult:
    """Everything that `config` asks for, one after another; `on_progress` hears several times a
    second how far a level is."""
    result = SweepResult(config)
    texts = TextSource(config.connection.seed, config.kind)
    on_step("session starts")
    asyncio.run(_probe_ready(config.connection, result))
    try:
        _run_levels(config, result, texts, server_pid, on_step, on_progress)
    except KeyboardInterrupt:
        if not result.levels:
            raise
        result.was_interrupted = True  # what is measured is told
    if server_pid is not None:
        result.server_peak_mib = peak_resident_mib(server_pid)
    return result


def _run_levels(
    config: Config,
    result: SweepResult,
    texts: TextSource,
    server_pid: int | None,
    on_step: Callable[[str], None],
    on_progress: Callable[[Progress], None],
) -> None:
    is_broken = False
    for level in config.levels:
        if level.mode == "paced" and is_broken and not config.keeps_going:
            on_step(f"{level.name}: left out, continuity broke before")
            continue
        on_step(f"{level.name}: {level.seconds:g} s" if level.seconds else _num_turns(level))
        done = _run_level(level, config, texts, server_pid, on_progress)
        result.levels.append(done)
        is_broken = is_broken or (level.mode == "paced" and not is_continuous(done))


def _num_turns(level: Level) -> str:
    return f"{level.name}: {level.num_turns} turns"


def is_continuous(result: LevelResult) -> bool:
    """No stream failed or stalled for more than 100 ms."""
    turns = [turn for each in result.workers for turn in each.turns]
    share = continuity([turn.worst_gap_ms for turn in turns], 100.0)
    return share == 1.0 and not any(turn.error for turn in turns)


async def _probe_ready(connection: Connection, result: SweepResult) -> None:
    """Every voice once, then one voice often; the server says which starts it had cached."""
    voices = await asyncio.to_thread(list_voices, connection.url, api_key=connection.api_key)
    names = [voice.name for voice in voices]
    for voice in [*names, *[connection.voice] * NUM_READY_PROBES]:
        ready_ms, ready = await _time_ready(connection, voice)
        (result.ready_cached_ms if ready.cached else result.ready_cold_ms).append(ready_ms)
        result.model, result.frame_rate_hz = ready.model, ready.frame_rate_hz


async def _time_ready(connection: Connection, voice: str | None) -> tuple[float, SessionReady]:
    """A slot comes free shortly after its session has gone, so a full server is asked again."""
    for _ in range(_MAX_RETRIES):
        try:
            async with connect(connection.url, voice=voice, api_key=connection.api_key) as session:
                return session.ready_ms, session.ready
        except ConnectionFailed as error:
            if error.status != 503:
                raise
            await asyncio.sleep(_RETRY_S)
    raise ConnectionFailed(f"{connection.url} stays full", status=503)


def _run_level(
    level: Level,
    config: Config,
    texts: TextSource,
    server_pid: int | None,
    on_progress: Callable[[Progress], None],
) -> LevelResult:
    plans = make_plans(level, config, texts)
    context = client_context()
    num_done, num_turns = context.Value("i", 0), sum(plan.num_turns for plan in plans)
    shared = (context.Barrier(len(plans)), num_done)
    result = LevelResult(level, [])
    result.metrics_before = scrape(config.connection.url, config.connection.api_key)
    started_s = time.monotonic()
    with ProcessPoolExecutor(
        len(plans), mp_context=context, initializer=worker.prepare, initargs=shared
    ) as pool:
        try:
            futures = [pool.submit(worker.run, plan) for plan in plans]
            is_over = False
            while not is_over:  # a level that is over at once is shown too
                is_over = not wait(futures, timeout=_POLL_S).not_done
                _watch_server(server_pid, result)
                elapsed_s = time.monotonic() - started_s
                on_progress(Progress(num_done.value, num_turns, elapsed_s, level.seconds))
            result.workers = [future.result() for future in futures]
            result.metrics_after = scrape(config.connection.url, config.connection.api_key)
        except BaseException:
            for process in multiprocessing.active_children():
                process.terminate()  # or the pool would wait until all is said
            raise
    return result


def client_context() -> BaseContext:
    """Fresh processes, from one that has imported what they need: a level's sessions are open in a
    fraction of a second."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bench_ttfa.worker"])
    return context


def _watch_server(pid: int | None, result: LevelResult) -> None:
    now_mib = resident_mib(pid) if pid is not None else None
    if pid is not None and now_mib is not None:
        result.resident_mib.append(now_mib)
        result.cpu.append((time.monotonic(), thread_times(pid)))


def make_plans(level: Level, config: Config, texts: TextSource) -> list[Plan]:
    """One plan for each client process; every text is new."""
    if level.voice is not None:
        config = replace(config, connection=replace(config.connection, voice=level.voice))
    if level.mode == "open":
        return _open_plans(level, config, texts)
    is_paced, step = level.mode == "paced", config.sessions_per_process
    if is_paced:
        step = PACED_PER_PROCESS
    elif config.connection.max_lead_ms is None:
        unpaced = replace(config.connection, max_lead_ms=UNPACED_MS)
        config = replace(config, connection=unpaced)
    share = _turns_of_each(level)
    warmups = [texts.take(0 if is_paced else config.warmup_turns) for _ in share]
    loops = [texts.take(count, level.num_chars) for count in share]
    return [
        Plan(
            config.connection,
            first,
            loops=loops[first : first + step],
            arrivals=[],
            warmups=warmups[first : first + step],
            seconds=level.seconds,
            ramp_s=level.ramp_s,
            is_paced=is_paced,
        )
        for first in range(0, len(loops), step)
    ]


def _turns_of_each(level: Level) -> list[int]:
    """How many texts each session of a closed or paced level has."""
    count = level.concurrency
    if level.seconds is not None:
        seconds = level.ramp_s + level.seconds
        return [math.ceil(MAX_TURNS_PER_S[level.mode] * seconds)] * count
    return [_share(level.num_turns, count, idx) for idx in range(count)]


def _open_plans(level: Level, config: Config, texts: TextSource) -> list[Plan]:
    times_s = poisson_arrivals_s(level.rate_per_s, level.num_turns, config.connection.seed)
    said = texts.take(level.num_turns, level.num_chars)
    arrivals = [Arrival(after_s, text) for after_s, text in zip(times_s, said, strict=True)]
    num_processes = math.ceil(level.rate_per_s / OPEN_LOOP_CONCURRENCY)
    return [
        Plan(
            config.connection,
            idx * level.num_turns,
            loops=[],
            arrivals=arrivals[idx::num_processes],
            warmups=[texts.take(config.warmup_turns)],
        )
        for idx in range(num_processes)
    ]


def _share(total: int, parts: int, idx: int) -> int:
    return total // parts + (idx < total % parts)


def window_s(result: LevelResult) -> float:
    """From the first client's start to the last one's end."""
    return max(each.ended_s for each in result.workers) - min(
        each.started_s for each in result.workers
    )


def utc_stamp() -> str:
    return time.strftime("%Y-%m-%dT%H%M%SZ", time.gmtime())
