"""Several engines as one: placement, translation of slots, and deaths that stay with one engine."""

import asyncio
import random
from pathlib import Path

import numpy as np
import pytest

from realtime import wire
from realtime.errors import CapacityError, EngineError
from realtime.pingpong.fleet import Fleet
from realtime.pingpong.messages import (
    CancelTurn,
    CloseSlot,
    FramePcm,
    OpenSlot,
    SlotClosed,
    SlotFailed,
    SlotReady,
    SlotRef,
    TurnEnd,
    VoicePrompt,
)
from realtime.pingpong.slots import Slots
from tests.fakes import FakeEngine
from tests.realtime.support import Client, make_engine, serving
from tests.support.recorder import Recorder
from tests.support.tones import SAMPLING, make_tone, opened, say


def voice(name: str) -> VoicePrompt:
    codes = np.full((1, 3), len(name), np.int32)
    return VoicePrompt(name, name, codes)


class Rig:
    """A fleet of tone engines, started, and how many slots of each are taken."""

    def __init__(self, num_engines: int = 2, slots_each: int = 2) -> None:
        self.engines = [make_tone(Slots(slots_each)) for _ in range(num_engines)]
        self.fleet = Fleet(self.engines)
        self.recorder = Recorder()
        self.fleet.start(self.recorder)

    @property
    def taken(self) -> list[int]:
        return [engine.info.num_slots - engine.slots.num_free for engine in self.engines]

    def open(self, name: str = "a") -> SlotRef:
        return opened(self.fleet, self.recorder, voices=(voice(name),))

    def engine_of(self, slot: SlotRef) -> int:
        return self.fleet.slots.binding(slot).engine

    def close(self, slot: SlotRef) -> None:
        slot = self.fleet.slots.bump(slot)
        self.fleet.submit(CloseSlot(slot))
        closed = self.recorder.wait(SlotClosed, lambda event: event.slot == slot)
        self.fleet.slots.release(closed.slot)


@pytest.fixture
def make_rig():
    rigs: list[Rig] = []

    def make(num_engines: int = 2, slots_each: int = 2) -> Rig:
        rigs.append(Rig(num_engines, slots_each))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.fleet.stop()


@pytest.mark.parametrize("num_engines", [1, 2, 3, 5])
def test_sessions_go_where_slots_are_free(make_rig, num_engines: int) -> None:
    rig = make_rig(num_engines, slots_each=2)
    assert rig.fleet.info.num_slots == 2 * num_engines
    for number in range(1, num_engines + 1):
        rig.open()
        assert sum(rig.taken) == number and max(rig.taken) == 1
    for _ in range(num_engines):
        rig.open()
    assert rig.taken == [2] * num_engines
    assert rig.fleet.slots.num_free == 0
    assert rig.fleet.slots.acquire() is None


def test_among_equally_free_engines_the_voice_decides(make_rig) -> None:
    rig = make_rig(2, slots_each=24)
    first_a = rig.engine_of(rig.open("a"))
    first_b = rig.engine_of(rig.open("bb"))
    assert first_a != first_b, "two voices that no engine has"
    assert rig.engine_of(rig.open("a")) == first_a
    assert rig.engine_of(rig.open("bb")) == first_b
    homes = [rig.engine_of(rig.open("a")) for _ in range(8)]
    assert homes[:2] == [first_a] * 2, "it stays where its prefix is"
    assert first_b in homes, "until the other engine is much freer"
    assert max(rig.taken) - min(rig.taken) <= 24 / 8 + 1


def test_a_turn_speaks_through_cancel_and_close(make_rig) -> None:
    rig = make_rig(2, slots_each=1)
    slots = [rig.open(), rig.open()]
    for number, slot in enumerate(slots):
        say(rig.fleet, slot, number, "A turn of its own.")
    ends = [rig.recorder.wait(TurnEnd) for _ in slots]
    assert {(end.slot, end.turn_id) for end in ends} == {(slots[0], 0), (slots[1], 1)}
    say(rig.fleet, slots[0], 5, "word " * 2_000)
    rig.recorder.wait(FramePcm, lambda event: event.turn_id == 5)
    slot = rig.fleet.slots.bump(slots[0])
    rig.fleet.submit(CancelTurn(slot, 5, 0))
    say(rig.fleet, slot, 6, "Now this.")
    assert rig.recorder.wait(TurnEnd).slot == slot
    rig.close(slot)
    rig.close(slots[1])
    assert rig.taken == [0, 0]


def test_what_was_never_opened_is_closed(make_rig) -> None:
    rig = make_rig()
    slot = rig.fleet.slots.acquire()
    assert slot is not None
    rig.close(slot)
    assert rig.taken == [0, 0]


def test_a_slot_is_placed_once(make_rig) -> None:
    """Another voice in an open slot does not move it: its dialogue is where it is."""
    rig = make_rig(2, slots_each=24)
    home = rig.engine_of(slot := rig.open("a"))
    assert rig.engine_of(rig.open("bb")) != home
    rig.fleet.submit(OpenSlot(slot, (voice("bb"),), "", SAMPLING, 1_000))
    rig.recorder.wait(SlotReady, lambda event: event.slot == slot)
    assert rig.engine_of(slot) == home


def test_counts_of_engines_are_added_up_and_times_are_not(make_rig, monkeypatch) -> None:
    rig, own = make_rig(2), [{"steps_total": 3.0, "warm_up_voices_s": 2.0, "wait_ms_p95": 5.0}] * 2
    own[1] = {"steps_total": 4.0, "warm_up_voices_s": 1.0, "wait_ms_p95": 6.0}
    for engine, stats in zip(rig.fleet._engines, own, strict=True):
        monkeypatch.setattr(engine, "stats", lambda stats=stats: stats)
    stats = rig.fleet.stats()
    assert [stats[name] for name in own[0]] == [7.0, 2.0, 6.0]


def test_a_dead_engine_fails_its_own_sessions_only(tmp_path: Path) -> None:
    engines = [make_engine(tmp_path, num_slots=2) for _ in range(2)]
    fleet, recorder = Fleet(engines), Recorder()
    fleet.start(recorder)
    slots = [opened(fleet, recorder) for _ in range(3)]
    dead = fleet.slots.binding(slots[0]).engine
    engines[dead].failure = "its device is gone"
    engines[dead].die()
    failed = {recorder.wait(SlotFailed).slot for _ in range(2 if dead == 0 else 1)}
    assert failed == {slot for slot in slots if fleet.slots.binding(slot).engine == dead}
    assert fleet.failure is None
    assert fleet.stats()["engines_alive"] == 1
    for slot in failed:  # what its session does next
        slot = fleet.slots.bump(slot)
        fleet.submit(CloseSlot(slot))
        fleet.slots.release(recorder.wait(SlotClosed).slot)
    (survivor,) = set(slots) - failed
    say(fleet, survivor, 1, "Still here.")
    assert recorder.wait(TurnEnd).slot == survivor
    assert fleet.slots.num_free == 1, "the dead engine's slots are no room"
    opened(fleet, recorder)
    assert fleet.slots.acquire() is None
    engines[1 - dead].failure = "and the other"
    assert fleet.failure == "; ".join(str(engine.failure) for engine in engines)
    engines[1 - dead].die()
    with pytest.raises(EngineError):
        fleet.submit(CloseSlot(survivor))


def test_a_dying_engine_names_a_slot_that_another_has_now(make_rig) -> None:
    rig = make_rig(2, slots_each=1)
    first = rig.open()
    home = rig.engine_of(first)
    local = rig.fleet.slots.binding(first).local(first)
    second = rig.open()
    rig.close(second)
    rig.close(first)
    other = rig.open()  # the fleet's slot of `first` again, on either engine
    if rig.engine_of(other) == home:
        rig.close(other)
        return
    rig.fleet._hear(home, SlotFailed(local, "long ago"))
    assert not any(isinstance(event, SlotFailed) for event in rig.recorder.events)


def test_a_session_that_finds_its_engine_dead_is_told(make_rig) -> None:
    rig = make_rig(2, slots_each=1)
    slot = rig.open()
    dead = rig.engines[rig.engine_of(slot)]
    dead.failure = "gone"
    dead.stop()
    say(rig.fleet, slot, 1, "Anybody?")
    assert rig.recorder.wait(SlotFailed).slot == slot


def test_a_new_session_on_an_engine_that_has_just_died_is_placed_elsewhere(make_rig) -> None:
    rig = make_rig(2, slots_each=2)
    slot = rig.fleet.slots.acquire()
    assert slot is not None
    dead = rig.engine_of(slot)
    rig.engines[dead].failure = "gone"
    rig.fleet.submit(OpenSlot(slot, (), "", SAMPLING, 1_000))
    assert rig.recorder.wait(SlotReady).slot == slot
    assert rig.engine_of(slot) != dead


@pytest.mark.parametrize("dead", [0, 1, 2])
def test_voices_are_asked_of_an_engine_that_lives(make_rig, dead: int) -> None:
    rig = make_rig(3)
    asked: list[int] = []
    for idx, engine in enumerate(rig.engines):
        engine.check_voice = lambda _, idx=idx: asked.append(idx)
        engine.encode_voice = lambda *_, idx=idx: asked.append(idx)
        engine.failure = None if idx == (dead + 1) % 3 else "gone"
    rig.fleet.check_voice(voice("a"))
    rig.fleet.encode_voice(b"", 1.0)
    assert asked == [(dead + 1) % 3] * 2
    for engine in rig.engines:
        engine.failure = None


@pytest.mark.parametrize("seed", range(3))
def test_no_slot_is_lost(make_rig, seed: int) -> None:
    rig, rng = make_rig(3, slots_each=2), random.Random(seed)
    live: list[SlotRef] = []
    for turn_id in range(1, 300):
        action = rng.randrange(4)
        if action == 0 and rig.fleet.slots.num_free:
            live.append(rig.open(rng.choice(("a", "bb", "ccc"))))
        elif action == 1 and live:
            say(rig.fleet, rng.choice(live), turn_id, "word " * rng.randrange(1, 60))
        elif action == 2 and live:
            at = rng.randrange(len(live))
            live[at] = rig.fleet.slots.bump(live[at])
            rig.fleet.submit(CancelTurn(live[at], turn_id, 0))
        elif live:
            rig.close(live.pop(rng.randrange(len(live))))
    for slot in live:
        rig.close(slot)
    assert rig.taken == [0, 0, 0]
    assert rig.fleet.slots.num_free == 6


async def test_a_server_over_two_engines(tmp_path: Path) -> None:
    engines = [make_engine(tmp_path, num_slots=1) for _ in range(2)]
    async with serving(tmp_path, ServedFleet(engines)) as served:  # type: ignore[arg-type]
        async with served.connect() as one, served.connect() as two:
            doomed, spared = Client(one), Client(two)
            for number, client in enumerate((doomed, spared)):
                await client.start()
                assert engines[number].slots.num_free == 0
            for client in (doomed, spared):
                assert (await client.say("Hello from one of two.")).metrics.num_frames == 11
            assert served.hub._what_is_taken() == "all 2 slots are taken"
            engines[0].failure = "its device is gone"
            engines[0].die()
            with pytest.raises(CapacityError, match=r"all 1 slots .* left are .*1 of 2 are lost"):
                served.hub.admit()
            assert (await doomed.until(wire.Error)).fatal
            done = await spared.say("The other speaks on.", turn_id=2)
            assert done.metrics.num_frames == 10
            async with served.http() as http:
                assert (await http.get("/health")).status_code == 200
                assert "plosive_engine_engines_alive 1.0" in (await http.get("/metrics")).text
                ready = await http.get("/ready")
                assert ready.status_code == 200 and ready.json() == {
                    "ready": True,
                    "reason": "degraded: 1 of 2 slots are lost with an engine",
                }
        while not served.hub._engine.slots.num_free:
            await asyncio.wait_for(served.hub.slot_released.wait(), 10.0)
        async with served.connect() as again:
            client = Client(again)
            await client.start()
            assert (await client.say("A new session.")).metrics.num_frames == 7


class ServedFleet(Fleet):
    """With what `serving` expects of a FakeEngine."""

    def __init__(self, engines: list[FakeEngine]) -> None:
        super().__init__(engines)
        self.warm_up_gate, self.encode_gate = engines[0].warm_up_gate, engines[0].encode_gate
