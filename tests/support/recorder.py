"""A recorder for what an engine says."""

import queue
from collections.abc import Callable
from typing import TypeVar

from realtime.pingpong.messages import Event, SlotFailed

TIMEOUT_S = 30.0
E_ = TypeVar("E_", bound=Event)


class Recorder:
    """The sink: keeps every event and lets a test wait for one."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._queue: queue.Queue[Event] = queue.Queue()

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        self._queue.put(event)

    def wait(self, kind: type[E_], where: Callable[[E_], bool] = lambda _: True) -> E_:
        while True:
            event = self._queue.get(timeout=TIMEOUT_S)
            assert kind is SlotFailed or not isinstance(event, SlotFailed), event
            if isinstance(event, kind) and where(event):
                return event
