"""An engine in a process of its own, seen as `realtime.pingpong.api.Engine`.

Its threads then share no interpreter with event loop and Opus, and a device whose driver dies takes
one process along. Costs a message each way.
"""

import atexit
import contextlib
import ctypes
import itertools
import logging
import multiprocessing
import threading
from collections.abc import Callable
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from realtime.child_signals import start_deaf
from realtime.errors import EngineError, PlosiveError, VoiceError
from realtime.pingpong.api import EngineInfo
from realtime.pingpong.messages import (
    CloseSlot,
    Command,
    Event,
    OpenSlot,
    SlotClosed,
    SlotFailed,
    SlotRef,
    VoicePrompt,
)
from realtime.pingpong.slots import Generations, Slots
from realtime.remote import process
from realtime.remote.link import Link, LinkClosed, link_pair
from realtime.remote.process import (
    Answer,
    Begin,
    Blocked,
    Call,
    EngineFactory,
    Failed,
    Health,
    Loaded,
    Shared,
)
from realtime.threads import name_thread

MAX_WAITING_COMMANDS = 64  # of a slot, on their way; as an engine's own limit
_STOP_S = 15.0
_EXIT_S = 1.0  # to know the exit code

logger = logging.getLogger(__name__)


class RemoteEngine:
    """Implements `realtime.pingpong.api.Engine`.

    Args:
        factory: makes the engine around the slots it is given, in the new process; picklable, as a
            `functools.partial` of a module's function is.
    """

    def __init__(self, factory: EngineFactory, num_slots: int, name: str = "engine") -> None:
        """Start the process; `load` waits for it.

        Two constructed before either is loaded load side by side.
        """
        context = multiprocessing.get_context("spawn")
        generations, num_taken = shared_integers(num_slots), shared_integers(num_slots)
        self._name = name
        self._slots = Slots(num_slots, generations)
        self._num_taken = num_taken
        self._num_submitted = [0] * num_slots
        self._opened: dict[int, SlotRef] = {}
        self._info: EngineInfo | None = None
        self._failure: str | None = None
        self._refusal: PlosiveError | None = None
        self._is_loaded = threading.Event()
        self._is_stopping = False
        self._stats: dict[str, float] = {}
        self._sink: Callable[[Event], None] = lambda event: None
        self._call_ids = itertools.count()
        self._calls: dict[int, tuple[threading.Event, list[Any]]] = {}
        ours, theirs = link_pair()
        shared = Shared(generations, num_taken)
        self._process = context.Process(
            target=process.run, args=(theirs, factory, shared), name=f"plosive-{name}"
        )
        self._link = Link(ours, "commands")
        self._reader = threading.Thread(target=self._read, name="plosive-events", daemon=True)
        try:
            start_deaf(self._process)
            theirs.close()
            atexit.register(self.stop)  # before multiprocessing's own, which would wait for it
        except BaseException:  # a signal, which comes when `start_deaf` hears again
            if self._process.pid is not None:
                self._process.kill()
            raise

    def load(self) -> "RemoteEngine":
        """Wait until the engine is there. Threads begin here: one that runs while another process is
        started would take a signal that `start_deaf` holds off.

        Raises:
            PlosiveError: it cannot be made; as the factory said.
        """
        self._reader.start()
        self._is_loaded.wait()
        if self._refusal is not None:
            self.stop()
            raise self._refusal
        return self

    # ------------------------------------------------------------------ Engine

    @property
    def info(self) -> EngineInfo:
        assert self._info is not None, f"{self._name} is not loaded"
        return self._info

    @property
    def slots(self) -> Slots:
        return self._slots

    @property
    def failure(self) -> str | None:
        return self._failure

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def start(self, sink: Callable[[Event], None]) -> None:
        self._sink = sink
        self._send(Begin())

    def submit(self, command: Command) -> None:
        idx, is_close = command.slot.idx, isinstance(command, CloseSlot)
        if isinstance(command, OpenSlot):  # before the look: an engine that dies after it says so
            self._opened[idx] = command.slot
        if self._failure is not None or self._is_stopping:
            raise EngineError("engine_stopped", self._failure or "the engine is stopped")
        num_waiting = self._num_submitted[idx] - self._num_taken[idx]
        if num_waiting >= MAX_WAITING_COMMANDS and not is_close:
            raise EngineError("engine_overloaded", f"{num_waiting} commands of the slot wait")
        self._num_submitted[idx] += 1
        self._send(command)

    def set_blocked(self, slot: SlotRef, is_blocked: bool) -> None:
        if self._failure is None and self._slots.is_current(slot):
            self._send(Blocked(slot, is_blocked))

    def warm_up(self, voices: tuple[VoicePrompt, ...]) -> None:
        self._call("warm_up", voices)

    def encode_voice(self, clip: bytes, max_seconds: float) -> NDArray[np.int32]:
        codes: NDArray[np.int32] = self._call("encode_voice", clip, max_seconds)
        return codes

    def check_voice(self, voice: VoicePrompt) -> None:
        self._call("check_voice", voice)

    def stats(self) -> dict[str, float]:
        """Up to half a second old."""
        num_active = self._slots.num_slots - self._slots.num_free
        return self._stats | {
            "slots_active": num_active,
            "commands_waiting": self._link.num_waiting,
        }

    def stop(self) -> None:
        if self._is_stopping:
            return
        self._is_stopping = True
        atexit.unregister(self.stop)
        self._link.close()  # at which the process stops its engine and ends
        if self._info is None:  # it is still loading and listens to nobody
            self._process.kill()
        self._process.join(_STOP_S)
        if self._process.is_alive():
            logger.warning("%s does not end; killing its process", self._name)
            self._process.kill()
            self._process.join()
        if self._reader.is_alive() and self._reader is not threading.current_thread():
            self._reader.join()

    # ------------------------------------------------------------------ the link

    def _send(self, message: Any) -> None:
        with contextlib.suppress(LinkClosed):  # the reader says so
            self._link.send(message)

    def _call(self, name: str, *args: Any) -> Any:
        call_id, done, box = next(self._call_ids), threading.Event(), list[Any]()
        self._calls[call_id] = (done, box)
        self._send(Call(call_id, name, args))
        while not done.wait(0.5):
            if self._failure is not None or self._is_stopping:
                break
        self._calls.pop(call_id, None)
        if not box:
            raise EngineError("engine_stopped", self._failure or "the engine is stopped")
        if isinstance(box[0], Failed):
            raise _raised(box[0])
        return box[0]

    def _read(self) -> None:
        name_thread("plosive-events")
        try:
            self._link.receive(self._take)
        except Exception:
            logger.exception("%s cannot be understood", self._name)
        if not self._is_stopping:
            told, ended = self._failure, f"the process of {self._name} ended"
            self._failure = told or ended  # now: giving a device's memory back may take it a while
            self._process.join(_EXIT_S)
            failure = f"{ended} (exit code {self._process.exitcode})"
            self._failure = told or failure
            self._die(failure)
        self._is_loaded.set()

    def _take(self, message: Any) -> None:
        match message:
            case Health(failure, stats):
                self._failure, self._stats = self._failure or failure, stats
            case Answer(call_id, value):
                done, box = self._calls.get(call_id, (threading.Event(), []))  # or given up
                box.append(value)
                done.set()
            case Loaded(info):
                self._info = info
                self._is_loaded.set()
            case Failed():
                self._refusal = _raised(message)
            case _:
                if isinstance(message, SlotClosed):
                    self._opened.pop(message.slot.idx, None)
                self._sink(message)

    def _die(self, failure: str) -> None:
        """The process is gone: nothing it was asked for will be answered."""
        if self._info is None and self._refusal is None:
            self._refusal = PlosiveError("model_unusable", failure)
        for slot in list(self._opened.values()):
            self._sink(SlotFailed(slot, failure))


def shared_integers(count: int) -> Generations:
    """Zeros that processes started afterwards can be given."""
    return cast(Generations, multiprocessing.RawArray(ctypes.c_int64, count))


def _raised(failed: Failed) -> PlosiveError:
    kinds = {"VoiceError": VoiceError, "EngineError": EngineError}
    return kinds.get(failed.kind, PlosiveError)(failed.code, failed.message, param=failed.param)
