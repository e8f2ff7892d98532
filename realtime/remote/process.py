"""The engine's side of a process border: an engine of its own process, driven by messages.

`realtime.remote.engine` is the other side. Generations of slots are read from shared memory, so that
what is late is dropped here too; everything else travels through the link.
"""

import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

from realtime.child_signals import ignore_signals
from realtime.errors import EngineError, PlosiveError
from realtime.garbage import spare_what_is_loaded
from realtime.pingpong.api import Engine, EngineInfo
from realtime.pingpong.messages import CloseSlot, Command, Event, SlotFailed, SlotRef
from realtime.pingpong.slots import Generations, Slots
from realtime.remote.link import Link, LinkClosed
from realtime.threads import name_thread, share_interpreter

EngineFactory = Callable[[Slots], Engine]

CALLS = ("warm_up", "encode_voice", "check_voice")
_HEALTH_S = 0.5
_RETRY_S = 0.005
_MAX_CALLS = 4  # at a time; they come from start-up and from uploads of voices

logger = logging.getLogger(__name__)


class Loaded(NamedTuple):
    info: EngineInfo


class Failed(NamedTuple):
    """The engine could not be made, or a call raised."""

    kind: str
    code: str
    message: str
    param: str | None = None


class Health(NamedTuple):
    failure: str | None
    stats: dict[str, float]


class Begin(NamedTuple):
    """Start the threads."""


class Blocked(NamedTuple):
    slot: SlotRef
    is_blocked: bool


class Call(NamedTuple):
    call_id: int
    name: str
    args: tuple[Any, ...]


class Answer(NamedTuple):
    call_id: int
    value: Any


@dataclass(frozen=True)
class Shared:
    """Memory of both processes, 64-bit integers by slot."""

    generations: Generations  # written by the server
    num_taken: Generations  # commands that the engine has taken; written here


def run(sock: socket.socket, factory: EngineFactory, shared: Shared) -> None:
    """The main function of the process. Signals are for the server, which drains and then ends this
    process; should the server be gone, the link ends and so does this."""
    ignore_signals()
    name_thread("plosive-engine")
    share_interpreter()
    link = Link(sock, "events")
    try:
        engine = factory(Slots(len(shared.generations), shared.generations))
    except Exception as error:  # told to the server, which says so and ends
        if not isinstance(error, PlosiveError):
            logger.exception("the engine cannot be made")
        link.send(_failed(error))
        link.drain(timeout_s=5.0)
        os._exit(1)
    _Served(engine, link, shared).run()
    os._exit(0)  # threads of libraries must not keep a device's memory


class _Served:
    def __init__(self, engine: Engine, link: Link, shared: Shared) -> None:
        self._engine = engine
        self._link = link
        self._generations = shared.generations
        self._num_taken = shared.num_taken
        self._waiting: dict[int, deque[Command]] = {}  # by slot.idx: what the engine did not take
        self._has_waiting = threading.Event()
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._calls = ThreadPoolExecutor(_MAX_CALLS, thread_name_prefix="plosive-calls")

    def run(self) -> None:
        self._send(Loaded(self._engine.info))
        for part in (self._tell_health, self._retry):
            threading.Thread(target=part, daemon=True).start()
        self._link.receive(self._take)
        self._is_over.set()
        self._link.close()
        self._engine.stop()

    def _take(self, message: Any) -> None:
        match message:
            case Call():
                self._calls.submit(self._answer, message)
            case Blocked(slot, is_blocked):
                self._set_blocked(slot.idx, is_blocked)
            case Begin():
                self._engine.start(self._sink)
            case _:
                self._submit(message)

    def _set_blocked(self, idx: int, is_blocked: bool) -> None:
        """Of the slot's tenant, whose generation the server compared before it sent this and may
        have bumped since. Another tenant comes only after the close that is behind this."""
        generation = -1
        while generation != self._generations[idx]:
            generation = self._generations[idx]
            self._engine.set_blocked(SlotRef(idx, generation), is_blocked)

    def _send(self, message: Any, *, is_patient: bool = False) -> None:
        try:
            self._link.send(message, is_patient=is_patient)
        except LinkClosed:
            self._is_over.set()

    def _sink(self, event: Event) -> None:
        if isinstance(event, SlotFailed) and self._engine.failure is not None:
            self._send(self._health())  # first, so that no session is admitted meanwhile
        self._send(event, is_patient=True)

    def _health(self) -> Health:
        return Health(self._engine.failure, self._engine.stats())

    def _tell_health(self) -> None:
        while not self._is_over.wait(_HEALTH_S):
            self._send(self._health())

    def _answer(self, call: Call) -> None:
        assert call.name in CALLS, call.name
        try:
            value: Any = getattr(self._engine, call.name)(*call.args)
            if call.name == "warm_up":
                spare_what_is_loaded()
                self._send(self._health())  # what it took is told with the news
        except Exception as error:  # raised again by the caller, in the server
            if not isinstance(error, PlosiveError):
                logger.exception("%s failed", call.name)
            value = _failed(error)
        self._send(Answer(call.call_id, value))

    # ------------------------------------------------------------------ commands

    def _submit(self, command: Command) -> None:
        idx = command.slot.idx
        with self._lock:
            waiting = self._waiting.setdefault(idx, deque())
            if isinstance(command, CloseSlot):
                self._num_taken[idx] += len(waiting)  # without effect in a closed slot
                waiting.clear()
            waiting.append(command)
            self._pass_on(idx)

    def _pass_on(self, idx: int) -> None:
        """Call with the lock."""
        waiting = self._waiting[idx]
        while waiting:
            try:
                self._engine.submit(waiting[0])
            except EngineError as error:
                if error.code == "engine_overloaded":
                    return self._has_waiting.set()  # tried again soon
                self._num_taken[idx] += len(waiting)
                waiting.clear()
                return self._send(self._health())
            waiting.popleft()
            self._num_taken[idx] += 1
        return None

    def _retry(self) -> None:
        while not self._is_over.is_set():
            if not self._has_waiting.wait(_HEALTH_S):
                continue
            self._is_over.wait(_RETRY_S)
            with self._lock:
                self._has_waiting.clear()
                for idx, waiting in self._waiting.items():
                    if waiting:
                        self._pass_on(idx)


def _failed(error: Exception) -> Failed:
    if isinstance(error, PlosiveError):
        return Failed(type(error).__name__, error.code, error.message, error.param)
    return Failed("EngineError", "model_unusable", f"{type(error).__name__}: {error}")
