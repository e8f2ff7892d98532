"""Engines of a fleet that have died are started anew, one after the other, with growing pauses."""

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

    def before_try(self, num_tries: int) -> float:
        """`num_tries`: without one that lasted."""
        return min(self.most_s, self.first_s * 2.0 ** min(num_tries, 30))


@dataclass(slots=True)
class _Place:
    """Where an engine is, or one that died was."""

    num_tries: int = 0  # since the last engine that lasted
    since_s: float = 0.0  # the engine that is there lives
    retry_s: float | None = None  # when another is tried; None: the engine lives


class Restarts:
    """A thread of a fleet. What it calls is called on that thread.

    Args:
        engines: those that should live now, by place.
        bury: ends a dead one.
        begin: starts making an engine for a place.
        welcome: takes a loaded engine in; raises PlosiveError if it dies while it is warmed up.
    """

    def __init__(
        self,
        engines: Callable[[], Sequence[Engine]],
        bury: Callable[[int], None],
        begin: Callable[[int], Newcomer],
        welcome: Callable[[int, Engine], None],
        pauses: Pauses,
    ) -> None:
        self._engines = engines
        self._bury = bury
        self._begin = begin
        self._welcome = welcome
        self._pauses = pauses
        self._places = [_Place(since_s=time.monotonic()) for _ in engines()]
        self._newcomer: Newcomer | None = None
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="plosive-restarts", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Also ends the making of an engine."""
        self._is_stopping.set()
        if (newcomer := self._newcomer) is not None:
            newcomer.stop()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        name_thread("plosive-restarts")
        while not self._is_stopping.wait(self._pauses.look_s):
            for idx, place in enumerate(self._places):
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
            self._newcomer = self._begin(idx)
            if not self._is_stopping.is_set():
                engine = self._newcomer.load()
            if self._is_stopping.is_set():  # which may not have seen it
                self._newcomer.stop()
                return
            self._welcome(idx, engine)
        except Exception as error:
            if self._is_stopping.is_set():
                return
            is_told = isinstance(error, PlosiveError)  # whose sentence says it all
            logger.error("engine %d cannot be started: %s", idx, error, exc_info=not is_told)
            if self._newcomer is not None:
                self._newcomer.stop()
            self._wait(idx, place)
        else:
            logger.warning("engine %d is there again", idx)
            place.retry_s, place.since_s = None, time.monotonic()
        finally:
            self._newcomer = None

    def _wait(self, idx: int, place: _Place) -> None:
        pause_s = self._pauses.before_try(place.num_tries)
        place.num_tries += 1
        place.retry_s = time.monotonic() + pause_s
        logger.warning("engine %d is started again in %.0f s", idx, pause_s)
