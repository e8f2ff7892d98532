"""A fleet's dead engines come back: after growing pauses, warm, and without mixing up sessions."""

import asyncio
import logging
import queue
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from websockets.exceptions import InvalidStatus

from realtime import wire
from realtime.errors import PlosiveError
from realtime.hub import State
from realtime.pingpong.fleet import Fleet
from realtime.pingpong.messages import (
    CancelTurn,
    CloseSlot,
    SlotClosed,
    SlotFailed,
    SlotRef,
    TurnEnd,
    VoicePrompt,
)
from realtime.pingpong.restarts import Deadline, Pauses
from realtime.pingpong.slots import Slots
from realtime.pingpong.tone import ToneConfig, ToneEngine
from tests.fakes import FakeEngine
from tests.realtime.support import Client, make_engine, serving
from tests.support.recorder import Recorder
from tests.support.tones import opened, say
from tests.support.waiting import wait_until

QUICK = Pauses(look_s=0.005, first_s=0.0, most_s=0.0)
WAIT_S = 20.0
VOICE = VoicePrompt("a", "a voice", np.zeros((1, 3), np.int32))


class Mortal(ToneEngine):
    """Made at once, or not at all, or never."""

    def __init__(self, num_slots: int, how: str = "lives") -> None:
        super().__init__(ToneConfig(num_slots=num_slots, step_ms=0.5), Slots(num_slots))
        self.how = how
        self.warm_with: list[tuple] = []
        self.is_stopped = threading.Event()
        self.is_loading = threading.Event()
        self.is_warming = threading.Event()

    def load(self) -> "Mortal":
        self.is_loading.set()
        if self.how == "hangs":
            assert self.is_stopped.wait(WAIT_S)
        if self.how == "refuses":
            raise PlosiveError("model_unusable", "the device is gone")
        return self

    def warm_up(self, voices: tuple) -> None:
        self.warm_with.append(voices)
        self.is_warming.set()
        if self.how == "hangs warming up":
            assert self.is_stopped.wait(WAIT_S)
        if self.how == "dies warming up":
            raise PlosiveError("engine_stopped", "it died")

    def stop(self) -> None:
        self.is_stopped.set()
        super().stop()

    def die(self) -> None:
        self.failure = "device lost"


class Rig:
    """Two engines of a slot each, and newcomers that behave as `hows` say, then live."""

    def __init__(self, *hows: str, pauses: Pauses = QUICK, slots_each: int = 1) -> None:
        self.hows = list(hows)
        self.slots_each = slots_each
        self.begun: queue.Queue[tuple[int, Mortal]] = queue.Queue()
        self.engines = [Mortal(slots_each), Mortal(slots_each)]
        self.fleet = Fleet(self.engines, revive=self.begin, pauses=pauses)
        self.recorder = Recorder()
        self.came = threading.Event()
        add = self.fleet.slots.add

        def told(*args: object, **options: object) -> None:
            add(*args, **options)
            self.came.set()

        self.fleet.slots.add = told
        self.fleet.start(self.recorder)
        self.fleet.warm_up(())

    def begin(self, place: int) -> Mortal:
        newcomer = Mortal(self.slots_each, self.hows.pop(0) if self.hows else "lives")
        self.begun.put((place, newcomer))
        return newcomer

    def next(self) -> tuple[int, Mortal]:
        return self.begun.get(timeout=WAIT_S)

    def close(self, slot: SlotRef) -> None:
        slot = self.fleet.slots.bump(slot)
        self.fleet.submit(CloseSlot(slot))
        self.recorder.wait(SlotClosed, lambda event: event.slot == slot)
        self.fleet.slots.release(slot)


@pytest.fixture
def make_rig():
    rigs: list[Rig] = []

    def make(*hows: str, **options) -> Rig:
        rigs.append(Rig(*hows, **options))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.fleet.stop()


def test_a_dead_engine_is_replaced_and_speaks(make_rig) -> None:
    rig = make_rig()
    slots = [opened(rig.fleet, rig.recorder) for _ in range(2)]
    dead = rig.fleet.slots.binding(slots[0]).engine
    rig.engines[dead].die()
    place, newcomer = rig.next()
    assert rig.came.wait(WAIT_S)
    assert place == dead and rig.engines[dead].is_stopped.is_set()
    assert newcomer.warm_with == [()], "warm before anybody comes"
    assert rig.fleet.slots.num_lost == 0 and rig.fleet.failure is None
    assert rig.fleet.stats()["engines"] == rig.fleet.stats()["engines_alive"] == 2
    assert rig.fleet.stats()["restarts"] == 1
    say(rig.fleet, slots[1], 1, "The other never noticed.")
    assert rig.recorder.wait(TurnEnd).slot == slots[1]
    rig.close(slots[0])
    again = opened(rig.fleet, rig.recorder)
    assert newcomer.slots.num_free == 0
    say(rig.fleet, again, 1, "On the new one.")
    assert rig.recorder.wait(TurnEnd, lambda event: event.slot == again)
    rig.close(again)
    rig.close(slots[1])
    assert rig.fleet.slots.num_free == 2


def test_slots_are_lost_until_it_is_back(make_rig) -> None:
    rig = make_rig("hangs", slots_each=3)
    rig.engines[0].die()
    _, newcomer = rig.next()
    assert newcomer.is_loading.wait(WAIT_S)
    assert rig.fleet.slots.num_lost == 3 and rig.fleet.slots.num_free == 3
    assert rig.fleet.stats()["engines_alive"] == 1
    newcomer.is_stopped.set()  # goes on
    assert rig.came.wait(WAIT_S)
    assert rig.fleet.slots.num_lost == 0 and rig.fleet.slots.num_free == 6


def test_what_cannot_be_started_is_tried_again(make_rig, caplog) -> None:
    rig = make_rig("refuses", "dies warming up")
    rig.engines[1].die()
    tried = [rig.next() for _ in range(3)]
    assert rig.came.wait(WAIT_S)
    assert [place for place, _ in tried] == [1, 1, 1]
    assert all(newcomer.is_stopped.is_set() for _, newcomer in tried[:2])
    assert not tried[2][1].is_stopped.is_set()
    told = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert told[0].endswith("has died: device lost") and "the device is gone" in told[1]
    assert not any(record.exc_info for record in caplog.records)


def test_pauses_grow_and_end_at_the_most() -> None:
    pauses = Pauses(first_s=1.0, most_s=60.0)
    assert [pauses.before_try(tries) for tries in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert pauses.before_try(10_000) == 60


@pytest.mark.parametrize(("lasting_s", "expected_s"), [(1e9, [1.0, 2.0]), (0.0, [1.0, 1.0])])
def test_an_engine_that_lasted_is_started_soon(
    make_rig, monkeypatch, lasting_s, expected_s
) -> None:
    asked: list[int] = []

    def no_pause(self: Pauses, num_tries: int) -> float:
        asked.append(num_tries)
        return 0.0

    monkeypatch.setattr(Pauses, "before_try", no_pause)
    rig = make_rig(pauses=Pauses(look_s=0.005, lasting_s=lasting_s))
    rig.engines[0].die()
    _, newcomer = rig.next()
    assert rig.came.wait(WAIT_S)
    rig.came.clear()
    newcomer.die()
    rig.next()
    assert rig.came.wait(WAIT_S)
    monkeypatch.undo()
    assert [Pauses().before_try(tries) for tries in asked] == expected_s


HANGS = pytest.mark.parametrize("how", ["hangs", "hangs warming up"])


@HANGS
def test_an_engine_that_hangs_holds_up_no_other(make_rig, how) -> None:
    rig = make_rig(how)
    rig.engines[0].die()
    _, stuck = rig.next()
    assert (stuck.is_loading if how == "hangs" else stuck.is_warming).wait(WAIT_S)
    rig.engines[1].die()
    place, _ = rig.next()
    assert place == 1 and rig.came.wait(WAIT_S)
    first = opened(rig.fleet, rig.recorder)
    assert rig.fleet.slots.acquire() is None
    rig.came.clear()
    stuck.is_stopped.set()  # goes on
    assert rig.came.wait(WAIT_S)
    second = opened(rig.fleet, rig.recorder)
    assert [rig.fleet.slots.binding(slot).engine for slot in (first, second)] == [2, 3]
    for slot in (first, second):
        say(rig.fleet, slot, 1, "Each on its own engine.")
        assert rig.recorder.wait(TurnEnd, lambda event, slot=slot: event.slot == slot)
        rig.close(slot)


@HANGS
def test_an_engine_that_hangs_is_given_up(make_rig, caplog, how) -> None:
    rig = make_rig(how, pauses=replace(QUICK, making_s=0.05))
    rig.engines[1].die()
    _, stuck = rig.next()
    assert stuck.is_stopped.wait(WAIT_S)
    rig.next()
    assert rig.came.wait(WAIT_S)
    assert (
        "engine 1 cannot be started: engine_stopped: it was not there after 0.05 s" in caplog.text
    )
    assert stuck not in rig.fleet._engines


@pytest.mark.parametrize("is_late", [False, True])
def test_a_deadline_stops_who_misses_it_and_nobody_else(is_late) -> None:
    newcomer = Mortal(1)
    deadline = Deadline(newcomer, 0.0 if is_late else 1e6)
    if is_late:
        assert newcomer.is_stopped.wait(WAIT_S)
        with pytest.raises(PlosiveError):
            deadline.meet()
    else:
        deadline.meet()
        deadline._miss()  # the timer, a moment after
        deadline.meet()
        assert not newcomer.is_stopped.is_set()


def test_when_all_have_died_slots_come_back_with_the_engines(make_rig) -> None:
    rig = make_rig("hangs", "hangs")
    slots = [opened(rig.fleet, rig.recorder) for _ in range(2)]
    for engine in rig.engines:
        engine.die()
        engine.stop()
    newcomers = [rig.next()[1] for _ in rig.engines]
    assert rig.fleet.failure == "device lost; device lost"
    rig.fleet.submit(CancelTurn(slots[0], 1, 0))
    assert rig.recorder.wait(SlotFailed).slot == slots[0]
    for slot in slots:  # as their sessions do
        rig.close(slot)
    assert rig.fleet.slots.acquire() is None
    for newcomer in newcomers:
        newcomer.is_stopped.set()
    wait_until(lambda: rig.fleet.slots.num_free == 2)
    assert rig.fleet.failure is None
    again = [opened(rig.fleet, rig.recorder) for _ in range(2)]
    for slot in again:
        say(rig.fleet, slot, 1, "Both again.")
    assert {rig.recorder.wait(TurnEnd).slot for _ in again} == set(again)
    for slot in again:
        rig.close(slot)


async def test_a_server_is_ready_again_when_an_engine_is_back(tmp_path: Path) -> None:
    dead, newcomers = [make_engine(tmp_path, num_slots=1) for _ in range(2)], queue.Queue()
    may_come = threading.Event()

    def begin(place: int) -> FakeEngine:
        newcomer = make_engine(tmp_path, num_slots=1)
        newcomer.load = lambda: newcomer if may_come.wait(WAIT_S) else None
        newcomers.put(newcomer)
        return newcomer

    fleet = Fleet(dead, revive=begin, pauses=QUICK)
    fleet.warm_up_gate, fleet.encode_gate = dead[0].warm_up_gate, dead[0].encode_gate
    came = threading.Event()
    add = fleet.slots.add
    fleet.slots.add = lambda *args, **options: (add(*args, **options), came.set())
    async with serving(tmp_path, fleet) as served, served.http() as http:
        async with served.connect() as socket:
            client = Client(socket)
            await client.start()
            for engine in dead:
                engine.die()
            assert (await client.until(wire.Error)).fatal
        assert (await http.get("/health")).status_code == 503
        assert (await http.get("/ready")).json()["reason"] == "the engine has failed"
        with pytest.raises(InvalidStatus):
            await served.connect()
        assert "plosive_ready 0.0" in (await http.get("/metrics")).text
        may_come.set()
        assert await asyncio.to_thread(came.wait, WAIT_S)
        assert (await http.get("/health")).status_code == 200
        assert "plosive_ready 1.0" in (await http.get("/metrics")).text
        async with served.connect() as socket:
            client = Client(socket)
            await client.start()
            assert (await client.say("Back again.")).metrics.num_frames == 5
    assert served.hub.state is State.DRAINING


def test_stop_does_not_wait_for_an_engine_that_loads(make_rig) -> None:
    rig = make_rig("hangs")
    rig.engines[0].die()
    _, newcomer = rig.next()
    assert newcomer.is_loading.wait(WAIT_S)
    rig.fleet.stop()
    assert newcomer.is_stopped.is_set() and not rig.came.is_set()


def test_an_engine_of_another_model_is_not_let_in(make_rig, caplog) -> None:
    rig = make_rig()
    begin = rig.begin
    rig.hows = ["lives", "lives"]

    def other_model(place: int) -> Mortal:
        newcomer = begin(place)
        if rig.hows:
            newcomer.info = ToneEngine(ToneConfig(num_slots=1, sample_rate=8_000)).info
        return newcomer

    rig.fleet._restarts._begin = other_model
    rig.engines[0].die()
    rig.next()
    rig.next()
    assert rig.came.wait(WAIT_S)
    assert "engines of different models" in caplog.text


def test_a_slot_whose_close_died_with_its_engine_is_free_again(make_rig) -> None:
    rig = make_rig()
    slots = [opened(rig.fleet, rig.recorder) for _ in range(2)]
    dead = rig.engines[rig.fleet.slots.binding(slots[0]).engine]
    dead.submit = lambda command: None  # its device hangs: what it takes it never answers
    closed = rig.fleet.slots.bump(slots[0])
    rig.fleet.submit(CloseSlot(closed))
    dead.die()
    assert rig.recorder.wait(SlotClosed).slot == closed
    rig.fleet.slots.release(closed)
    assert rig.came.wait(WAIT_S)
    again = opened(rig.fleet, rig.recorder)
    assert rig.fleet.slots.binding(again).engine == 2
    rig.close(again)
    rig.close(slots[1])
    closes = [event.slot for event in rig.recorder.events if isinstance(event, SlotClosed)]
    assert len(closes) == 3, closes


def test_a_session_opens_while_an_engine_comes_in(make_rig) -> None:
    """Its warm voices are known a moment before sessions may be placed on it."""
    rig = make_rig()
    add, has_opened = rig.fleet.slots.add, threading.Event()

    def add_after_opening(*args: object, **options: object) -> None:
        assert has_opened.wait(WAIT_S)
        add(*args, **options)

    rig.fleet.slots.add = add_after_opening
    rig.fleet._voices = (VOICE,)
    rig.engines[0].die()
    rig.next()
    wait_until(lambda: len(rig.fleet._prefixes) == 3)
    try:
        slot = opened(rig.fleet, rig.recorder, voices=(VOICE,))
    finally:
        has_opened.set()
    assert rig.fleet.slots.binding(slot).engine == 1
    rig.close(slot)
