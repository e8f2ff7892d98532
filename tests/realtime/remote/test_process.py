"""The engine's side of a process border, with an engine that is made to refuse and to be late."""

import threading

import pytest

from realtime.errors import EngineError
from realtime.pingpong.messages import CancelTurn, CloseSlot, Command, SetText, SlotRef
from realtime.pingpong.slots import Slots
from realtime.remote.link import Link, link_pair
from realtime.remote.process import Blocked, Shared, _Served
from tests.support.tones import make_tone


class BusyEngine:
    """Takes commands only while it is told to, as one whose thread is busy with a long call."""

    info, failure = make_tone(Slots(1)).info, None

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.is_busy = threading.Event()
        self.taken: list[Command] = []
        self.is_blocked = False

    def submit(self, command: Command) -> None:
        if self.is_busy.is_set() and not isinstance(command, CloseSlot):
            raise EngineError("engine_overloaded", "256 commands of the slot wait")
        self.taken.append(command)

    def set_blocked(self, slot: SlotRef, is_blocked: bool) -> None:
        if self.slots.is_current(slot):
            self.is_blocked = is_blocked

    def stats(self) -> dict[str, float]:
        return {}

    def stop(self) -> None:
        pass


@pytest.fixture
def served():
    generations, num_taken = [0, 0], [0, 0]
    engine = BusyEngine(Slots(2, generations))
    ours, theirs = link_pair()
    part = _Served(engine, Link(theirs, "events"), Shared(generations, num_taken))
    thread = threading.Thread(target=part.run)
    thread.start()
    link = Link(ours, "commands")
    yield engine, link, num_taken
    link.close()
    thread.join(10.0)
    assert not thread.is_alive()


def wait_for(is_true) -> None:
    waiting = threading.Event()
    for _ in range(2_000):
        if is_true():
            return
        waiting.wait(0.005)
    raise AssertionError("it never came")


def test_what_the_engine_refuses_is_offered_again_though_nothing_more_comes(served) -> None:
    engine, link, num_taken = served
    slot = engine.slots.acquire()
    engine.is_busy.set()
    sent = [SetText(slot, 0, i, f"segment {i}", is_closed=True) for i in range(20)]
    for command in sent:
        link.send(command)
    other = engine.slots.acquire()
    link.send(CloseSlot(other))  # taken at once: all before it has been looked at
    wait_for(lambda: engine.taken == [CloseSlot(other)])
    assert num_taken == [0, 1]
    engine.is_busy.clear()
    wait_for(lambda: num_taken[slot.idx] == 20)
    assert engine.taken == [CloseSlot(other), *sent]


def test_a_cancel_that_overtakes_it_does_not_keep_a_slot_blocked(served) -> None:
    """The generation is in shared memory, the message is on its way."""
    engine, link, _ = served
    slot = engine.slots.acquire()
    link.send(Blocked(slot, True))
    wait_for(lambda: engine.is_blocked)
    new = engine.slots.bump(slot)
    link.send(Blocked(slot, False))
    link.send(CancelTurn(new, 0, 0))
    wait_for(lambda: engine.taken == [CancelTurn(new, 0, 0)])
    assert not engine.is_blocked
