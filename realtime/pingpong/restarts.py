"""Engines of a fleet that have died are started anew, each on its own, with growing pauses."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from realtime.errors import PlosiveError
from realtime.pingpong.api import Engine
from realtime.threads import name_thread

logger = logging.getLogger(__name__)


class Newcomer(Engine, Protocol):
    """An engine that is being made; `stop` ends that too."""

    def load(self) -> Engine:
        """Wait until it is there. Raises PlosiveError: it cannot be made, as its maker said."""


@dataclass(frozen=True, slots=True)
class Pauses:
    """Seconds."""

    look_s: float = 0.5  # between looks at the engines
    first_s: float = 1.0  # before the first try, doubled after each that did not last
    most_s: float = 60.0
    lasting_s: float = 300.0  # an engine that lives this long has lasted
    making_s: float = 900.0  # at most, until a newcomer is loaded and warm; then it is given up

    def before_try(self, num_tries: int) -> float:
        """`num_tries`: without one that lasted."""
        return min(self.most_s, self.first_s * 2.0 ** min(num_tries, 30))


@dataclass(slots=True)
class _Place:
    """Where an engine is, or one that died was."""

    num_tries: int = 0  # since the last engine that lasted
    since_s: float = 0.0  # the engine that is there lives
    retry_s: float | None = None  # when another is tried; None: the engine lives
    newcomer: Newcomer | None = None  # while it is made


class Deadline:
    """Of the making of an engine: one that is late is stopped, which ends its `load` and `warm_up`."""

    def __init__(self, newcomer: Newcomer, limit_s: float) -> None:
        self.is_missed = False
        self._limit_s = limit_s
        self._newcomer = newcomer
        self._is_over = False
        self._lock = threading.Lock()
        self._timer = threading.Timer(limit_s, self._miss)
        self._timer.daemon = True
        self._timer.start()

    def meet(self) -> None:
        """The engine is made: from here on it is not stopped. Raises PlosiveError: it is late."""
        with self._lock:
            self._is_over = True
        self._timer.cancel()
        if self.is_missed:
            raise PlosiveError("engine_stopped", f"it was not there after {self._limit_s:g} s")

    def _miss(self) -> None:
        with self._lock:
            if self._is_over:
                return
            self.is_missed = self._is_over = True
        self._newcomer.stop()


class Restarts:
    """A thread for each place of a fleet, so that an engine that hangs while it is made holds up no
    other. What they call is called on these threads.

    Args:
        engines: those that should live now, by place.
        bury: ends a dead one.
        begin: starts making an engine for a place.
        welcome: warms a loaded engine up, meets the deadline and takes the engine in; raises
            PlosiveError if it dies before that.
    """

    def __init__(
        self,
        engines: Callable[[], Sequence[Engine]],
        bury: Callable[[int], None],
        begin: Callable[[int], Newcomer],
        welcome: Callable[[int, Engine, Deadline], None],
        pauses: Pauses,
    ) -> None:
        self._engines = engines
        self._bury = bury
        self._begin = begin
        self._welcome = welcome
        self._pauses = pauses
        self._places = [_Place(since_s=time.monotonic()) for _ in engines()]
        self._is_stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=each, name="plosive-restarts", daemon=True)
            for each in enumerate(self._places)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Also ends the making of engines."""
        self._is_stopping.set()
        for place in self._places:
            if (newcomer := place.newcomer) is not None:
                newcomer.stop()
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join()

    def _run(self, idx: int, place: _Place) -> None:
        name_thread("plosive-restarts")
        while not self._is_stopping.wait(self._pauses.look_s):
            self._look(idx, place)

    def _look(self, idx: int, place: _Place) -> None:
        now_s = time.monotonic()
        if place.retry_s is not None:
            if now_s >= place.retry_s and not self._is_stopping.is_set():
                self._try(idx, place)
            return
        engine = self._engines()[idx]
        if engine.failure is None:
            return
        if now_s - place.since_s >= self._pauses.lasting_s:
            place.num_tries = 0
        logger.error("engine %d of %d has died: %s", idx, len(self._places), engine.failure)
        self._bury(idx)
        self._wait(idx, place)

    def _try(self, idx: int, place: _Place) -> None:
        try:
            place.newcomer = newcomer = self._begin(idx)
            self._make(idx, newcomer)
        except Exception as error:
            if place.newcomer is not None:
                place.newcomer.stop()
            if self._is_stopping.is_set():
                return
            is_told = isinstance(error, PlosiveError)  # whose sentence says it all
            logger.error("engine %d cannot be started: %s", idx, error, exc_info=not is_told)
            self._wait(idx, place)
        else:
            logger.warning("engine %d is there again", idx)
            place.retry_s, place.since_s = None, time.monotonic()
        finally:
            place.newcomer = None

    def _make(self, idx: int, newcomer: Newcomer) -> None:
        """Raises whatever says that it is not to be had."""
        deadline = Deadline(newcomer, self._pauses.making_s)
        try:
            if not self._is_stopping.is_set():
                engine = newcomer.load()
            if self._is_stopping.is_set():  # which may not have seen it
                raise PlosiveError("engine_stopped", "the fleet is stopped")
            self._welcome(idx, engine, deadline)
        finally:
            deadline.meet()  # whatever a late one has said, this is why

    def _wait(self, idx: int, place: _Place) -> None:
        pause_s = self._pauses.before_try(place.num_tries)
        place.num_tries += 1
        place.retry_s = time.monotonic() + pause_s
        logger.warning("engine %d is started again in %.0f s", idx, pause_s)
