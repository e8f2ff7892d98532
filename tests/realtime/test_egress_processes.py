"""Encoding in other processes: what the event loop gets is what threads would have given it."""

import asyncio
import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

from clients import Sampling, connect
from clients.local_server import LocalServer
from realtime.egress import EgressThreads
from realtime.egress_processes import _RESPAWN_S, EgressProcesses, processes_for
from realtime.encoders import LoopEvent
from realtime.metrics import Metrics
from realtime.pingpong.messages import (
    FramePcm,
    SegmentEnd,
    SlotClosed,
    SlotFailed,
    SlotReady,
    SlotRef,
    TurnEnd,
)
from realtime.pingpong.slots import Slots
from realtime.remote.engine import shared_integers
from realtime.remote.link import MAX_BACKLOG
from realtime.session.actions import EncodedAudio
from realtime.wire import AudioFormat

OPUS = AudioFormat()
TIMEOUT_S = 60.0


class Rig:
    def __init__(self, num_processes: int = 2, num_slots: int = 4) -> None:
        self.slots = Slots(num_slots, shared_integers(num_slots))
        self.metrics = Metrics()
        self.events: list[LoopEvent] = []
        self._changed = asyncio.Event()
        if num_processes:
            self.egress: EgressProcesses | EgressThreads = EgressProcesses(
                44_100, self.slots, self._deliver, self.metrics, num_processes
            )
        else:
            self.egress = EgressThreads(44_100, 4, self.slots, self._deliver, self.metrics)

    def _deliver(self, event: LoopEvent) -> None:
        self.events.append(event)
        self._changed.set()

    async def wait(self, kind: type, slot: SlotRef, turn_id: int | None = None) -> LoopEvent:
        def found() -> LoopEvent | None:
            mine = (e for e in self.events if isinstance(e, kind) and e.slot == slot)
            return next((e for e in mine if turn_id in (None, getattr(e, "turn_id", None))), None)

        async with asyncio.timeout(TIMEOUT_S):
            while (event := found()) is None:
                self._changed.clear()
                await self._changed.wait()
        return event

    def open(self) -> SlotRef:
        slot = self.slots.acquire()
        assert slot is not None
        self.egress.open_encoder(slot, OPUS)
        return slot

    def say(self, slot: SlotRef, turn_id: int, num_frames: int = 20) -> None:
        for index in range(num_frames):
            self.egress.put(frame(slot, turn_id, index))
        self.egress.put(SegmentEnd(slot, turn_id, 0, num_frames))
        self.egress.put(TurnEnd(slot, turn_id, num_frames, {}))

    def packets(self, slot: SlotRef, turn_id: int) -> list[bytes]:
        return [
            packet.payload
            for event in self.events
            if isinstance(event, EncodedAudio) and (event.slot, event.turn_id) == (slot, turn_id)
            for packet in event.packets
        ]

    def metric(self, name: str) -> float:
        return self.metrics.registry.get_sample_value(name) or 0.0

    async def __aenter__(self) -> "Rig":
        self.egress.start(asyncio.get_running_loop())
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.egress.stop)


def frame(slot: SlotRef, turn_id: int, index: int) -> FramePcm:
    pcm = 0.1 * np.sin(np.arange(2_048) * (0.01 + 0.001 * slot.idx) + index)
    return FramePcm(slot, turn_id, 0, index, 1, pcm.astype(np.float32))


async def test_the_same_packets_as_from_threads() -> None:
    heard = []
    for num_processes in (0, 2):
        async with Rig(num_processes) as rig:
            slots = [rig.open() for _ in range(3)]
            for slot in slots:
                rig.egress.put(SlotReady(slot, 1.0, True))
                rig.say(slot, 1)
            for slot in slots:
                await rig.wait(TurnEnd, slot)
            heard.append([rig.packets(slot, 1) for slot in slots])
            for slot in slots:
                mine = [event for event in rig.events if event.slot == slot]
                assert isinstance(mine[0], SlotReady) and isinstance(mine[-1], TurnEnd)
                assert isinstance(mine[-2], EncodedAudio) and mine[-2].is_last
                audio = [event for event in mine if isinstance(event, EncodedAudio)]
                assert sum(event.num_frames for event in audio) == 20
            assert rig.metric("plosive_frames_total") == 60
            assert rig.metric("plosive_packets_total") == sum(map(len, heard[-1]))
    assert heard[0] == heard[1]


async def test_stale_frames_are_dropped_over_there() -> None:
    async with Rig(1) as rig:
        slot = rig.open()
        rig.egress.put(frame(slot, 1, 0))
        await rig.wait(EncodedAudio, slot)
        bumped = rig.slots.bump(slot)
        rig.egress.put(frame(slot, 1, 1))
        rig.egress.put(frame(bumped, 2, 0))
        fresh = await rig.wait(EncodedAudio, bumped)
        assert isinstance(fresh, EncodedAudio) and fresh.packets[0].pts_samples == 0
        assert rig.metric("plosive_stale_frames_total") == 1
        rig.egress.put(SlotClosed(bumped))
        assert rig.egress.num_encoders == 1
        await rig.wait(SlotClosed, bumped)
        assert rig.egress.num_encoders == 0


def pid_of(rig: Rig, worker: int) -> int:
    assert isinstance(rig.egress, EgressProcesses)
    pid = rig.egress._workers[worker].process.pid
    assert pid is not None
    return pid


async def stop_while_speaking(rig: Rig) -> tuple[SlotRef, int]:
    """A session that has been heard, and the process of its encoder, which is held up."""
    slot = rig.open()
    rig.say(slot, 1, num_frames=1)
    await rig.wait(TurnEnd, slot)
    pid = pid_of(rig, 0)
    os.kill(pid, signal.SIGSTOP)
    return slot, pid


async def test_a_process_that_dies_takes_its_own_sessions_only() -> None:
    async with Rig(2) as rig:
        slots = [rig.open() for _ in range(2)]
        for slot in slots:
            rig.say(slot, 1, num_frames=2)
            await rig.wait(TurnEnd, slot)
        doomed, spared = sorted(slots, key=lambda slot: slot.idx % 2)
        os.kill(pid_of(rig, doomed.idx % 2), signal.SIGKILL)
        failed = await rig.wait(SlotFailed, doomed)
        assert isinstance(failed, SlotFailed) and "died" in failed.message
        rig.say(spared, 2)
        assert (await rig.wait(TurnEnd, spared)).slot == spared
        bumped = rig.slots.bump(doomed)
        rig.egress.open_encoder(bumped, OPUS)  # by the slot's next session, which comes too soon
        await rig.wait(SlotFailed, bumped)
        await asyncio.sleep(_RESPAWN_S + 0.1)
        bumped = rig.slots.bump(bumped)
        rig.egress.open_encoder(bumped, OPUS)
        rig.say(bumped, 3)
        await rig.wait(TurnEnd, bumped)
        assert rig.packets(bumped, 3)
        assert not any(isinstance(e, SlotFailed) and e.slot == spared for e in rig.events)


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_slot_that_is_closed_when_its_process_dies_comes_free(is_late: bool) -> None:
    async with Rig(1) as rig:
        slot, pid = await stop_while_speaking(rig)
        closed = rig.slots.bump(slot)
        if not is_late:
            rig.egress.put(SlotClosed(closed))
        os.kill(pid, signal.SIGKILL)
        await rig.wait(SlotFailed, slot)
        if is_late:
            rig.egress.put(SlotClosed(closed))
        await rig.wait(SlotClosed, closed)
        assert rig.egress.num_encoders == 0
        assert sum(isinstance(event, SlotClosed) for event in rig.events) == 1


async def test_a_process_that_is_behind_makes_the_engine_wait_and_loses_nothing() -> None:
    async with Rig(1) as rig:
        slot, pid = await stop_while_speaking(rig)
        engine = threading.Thread(target=rig.say, args=(slot, 2, 2_000))
        engine.start()
        engine.join(0.5)
        assert engine.is_alive() and rig.egress.num_queued <= MAX_BACKLOG + 2
        os.kill(pid, signal.SIGCONT)
        await rig.wait(TurnEnd, slot, turn_id=2)
        frames = [e for e in rig.events if isinstance(e, EncodedAudio) and e.turn_id == 2]
        numbers = [e.first_frame + i for e in frames for i in range(e.num_frames)]
        assert numbers == list(range(2_000))
        engine.join()


async def test_stop_ends_the_processes() -> None:
    async with Rig(3) as rig:
        assert isinstance(rig.egress, EgressProcesses)
        pids = [worker.process.pid or 0 for worker in rig.egress._workers]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_who_gets_processes() -> None:
    shared, private = Slots(64, shared_integers(64)), Slots(64)
    assert processes_for(shared, 64, num_cores=16) == 8
    assert processes_for(shared, 64, num_cores=2) == 0
    assert processes_for(shared, 4, num_cores=16) == 0, "one thread does"
    assert processes_for(private, 64, num_cores=16) == 0


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
def test_serve_with_encoding_processes() -> None:
    """The same bytes as with threads, and nothing is left of it."""
    heard: list[list[bytes]] = []
    for number in ("0", "2"):
        options = ["--model", "tone:1,0", "--device", "cpu", "--encode-processes", number]
        with LocalServer(options) as server:
            found = spawned(server.pid)
            heard.append(asyncio.run(payloads(server.url)))
    assert heard[0] == heard[1] and len(heard[0]) > 20
    assert len(found) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in found)


def spawned(pid: int) -> list[str]:
    """Processes of `pid`; multiprocessing's tracker is none."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [c for c in found if "spawn_main" in Path(f"/proc/{c}/cmdline").read_text()]


async def payloads(url: str) -> list[bytes]:
    async with connect(url, sampling=Sampling(seed=1)) as session:
        return [packet.payload async for packet in session.say("Said once, encoded anywhere.")]
