"""The egress thread: order, stale frames, waiting queues, and failures that stay with one slot."""

import asyncio
import threading

import numpy as np
import pytest

from realtime import egress as egress_module
from realtime.egress import EgressThreads, encoders_for
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
from realtime.session.actions import EncodedAudio
from realtime.wire import AudioFormat
from tests.support.waiting import wait_until

PCM = AudioFormat(codec="pcm_s16le")


class Rig:
    """An egress on the running loop, and what it delivers."""

    def __init__(self, num_slots: int = 2, num_threads: int | None = None) -> None:
        self.slots = Slots(num_slots)
        self.metrics = Metrics()
        self.events: list[LoopEvent] = []
        self.num_wakes = 0
        self._changed = asyncio.Event()
        self.egress = EgressThreads(
            24_000, num_slots, self.slots, self._deliver, self.metrics, num_threads
        )

    def _deliver(self, event: LoopEvent) -> None:
        self.events.append(event)
        self._changed.set()

    async def until(self, num_events: int) -> list[LoopEvent]:
        async with asyncio.timeout(10.0):
            while len(self.events) < num_events:
                self._changed.clear()
                await self._changed.wait()
        return self.events

    async def until_frames(self, num_frames: int) -> list[LoopEvent]:
        async with asyncio.timeout(10.0):
            while (
                sum(e.num_frames for e in self.events if isinstance(e, EncodedAudio)) < num_frames
            ):
                self._changed.clear()
                await self._changed.wait()
        return self.events

    def open(self, audio_format: AudioFormat = PCM) -> SlotRef:
        slot = self.slots.acquire()
        assert slot is not None
        self.egress.open_encoder(slot, audio_format)
        return slot

    async def __aenter__(self) -> "Rig":
        self.egress.start(asyncio.get_running_loop())
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.egress.stop)


def frame(slot: SlotRef, turn_id: int, index: int) -> FramePcm:
    return FramePcm(slot, turn_id, 0, index, 1, np.full(960, 0.1, np.float32))


def frames_of(events: list[LoopEvent], slot: SlotRef) -> list[int]:
    """The numbers of the slot's frames, whatever pieces they came in."""
    audio = [e for e in events if isinstance(e, EncodedAudio) and e.slot == slot]
    return [number for e in audio for number in range(e.first_frame, e.first_frame + e.num_frames)]


def turn_end(slot: SlotRef, turn_id: int, num_frames: int) -> TurnEnd:
    return TurnEnd(slot, turn_id, num_frames, {})


async def test_events_keep_their_order_and_turns_get_a_tail() -> None:
    async with Rig() as rig:
        slot = rig.open()
        segment_end = SegmentEnd(slot, 1, 0, 2)
        for event in (
            SlotReady(slot, 1.0, True),
            frame(slot, 1, 0),
            frame(slot, 1, 1),
            segment_end,
            turn_end(slot, 1, 2),
            turn_end(slot, 2, 0),
        ):
            rig.egress.put(event)
        ready, first, rest, second, segment, tail, end, empty_end = await rig.until(8)
        assert isinstance(ready, SlotReady)
        assert isinstance(first, EncodedAudio) and not first.is_last
        assert len(first.packets) == 1 and first.num_samples == 480
        assert isinstance(rest, EncodedAudio) and rest.num_frames == 0
        assert len(rest.packets) == 1 and rest.num_samples == 960
        assert isinstance(second, EncodedAudio) and second.first_frame == 1
        assert second.packets[0].pts_samples == 960
        assert segment == segment_end
        assert isinstance(tail, EncodedAudio) and tail.is_last
        assert (tail.num_frames, tail.first_frame, tail.num_samples) == (0, 2, 1920)
        assert isinstance(end, TurnEnd) and isinstance(empty_end, TurnEnd)


async def test_stale_frames_are_dropped_before_encoding() -> None:
    async with Rig() as rig:
        slot = rig.open()
        rig.egress.put(frame(slot, 1, 0))
        await rig.until(2)
        bumped = rig.slots.bump(slot)
        rig.egress.put(frame(slot, 1, 1))
        rig.egress.put(turn_end(slot, 1, 2))
        rig.egress.put(frame(bumped, 2, 0))
        events = await rig.until(5)
        first_and_rest = [EncodedAudio, EncodedAudio]  # of a turn's first frame
        assert [type(event) for event in events] == [*first_and_rest, TurnEnd, *first_and_rest]
        fresh = events[3]
        assert isinstance(fresh, EncodedAudio)
        assert fresh.packets[0].pts_samples == 0, "the encoder starts afresh"
        assert rig.metrics.registry.get_sample_value("plosive_stale_frames_total") == 1
        assert rig.metrics.registry.get_sample_value("plosive_frames_total") == 2


async def test_the_encoder_is_freed_with_the_slot() -> None:
    async with Rig() as rig:
        slot = rig.open()
        assert rig.egress.num_encoders == 1
        closed = rig.slots.bump(slot)
        rig.egress.put(SlotClosed(closed))
        await rig.until(1)
        assert rig.egress.num_encoders == 0
        rig.egress.put(frame(closed, 1, 0))
        rig.egress.put(SlotReady(closed, 1.0, True))
        assert [type(event) for event in await rig.until(2)] == [SlotClosed, SlotReady]


async def test_one_streams_failure_stays_with_it() -> None:
    async with Rig() as rig:
        bad, good = rig.open(), rig.open()
        rig.egress.put(FramePcm(bad, 1, 0, 0, 1, np.array(["no", "pcm"] * 300)))
        rig.egress.put(frame(good, 1, 0))
        failed, *audio = await rig.until(3)
        assert isinstance(failed, SlotFailed) and failed.slot == bad
        assert all(isinstance(piece, EncodedAudio) and piece.slot == good for piece in audio)


async def test_a_burst_wakes_the_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(egress_module, "_MAX_BURST_S", 10.0)
    async with Rig() as rig:
        loop = asyncio.get_running_loop()
        wakes: list[object] = []
        call_soon_threadsafe = loop.call_soon_threadsafe

        def counting(callback: object, *args: object, **kwargs: object) -> object:
            if callback == rig.egress._take:
                wakes.append(callback)
            return call_soon_threadsafe(callback, *args, **kwargs)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counting)
        slot = rig.open()
        for index in range(100):
            rig.egress.put(frame(slot, 1, index))  # the loop is not free in between
        await rig.until_frames(100)
        assert len(wakes) < 100 / 5


async def test_a_busy_loop_makes_the_engine_wait_and_loses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(egress_module, "_MAX_OUTBOX", 16)
    async with Rig() as rig:
        rig.egress._inboxes[0].maxsize = 8
        slot = rig.open()
        num_frames, num_put = 2_000, 0

        def feed() -> None:
            nonlocal num_put
            for index in range(num_frames):
                rig.egress.put(frame(slot, 1, index))
                num_put += 1

        feeder = threading.Thread(target=feed)
        feeder.start()
        feeder.join(0.3)  # the loop does not run meanwhile
        assert feeder.is_alive(), "the engine's thread waits"
        num_waiting = len(rig.egress._outbox) + rig.egress.num_queued
        assert num_put < num_frames and num_waiting < 16 + 8 + 100
        assert frames_of(await rig.until_frames(num_frames), slot) == list(range(num_frames))
        feeder.join()


async def test_many_slots_are_spread_over_threads() -> None:
    async with Rig(num_slots=5, num_threads=3) as rig:
        slots = [rig.open() for _ in range(5)]
        for index in range(20):
            for slot in slots:
                rig.egress.put(frame(slot, 1, index))
        events = await rig.until_frames(100)
        assert len(rig.egress._threads) == 3
        for slot in slots:
            assert frames_of(events, slot) == list(range(20))


async def test_a_new_turn_does_not_wait_behind_audio_that_is_needed_later() -> None:
    rig = Rig()  # not started yet: everything waits
    busy, fresh = rig.open(), rig.open()
    rig.egress.put(SlotReady(busy, 1.0, True))
    for index in range(100):
        rig.egress.put(frame(busy, 1, index))
    rig.egress.put(frame(fresh, 1, 0))
    async with rig:
        events = await rig.until_frames(101)
    slots = [event.slot for event in events if isinstance(event, EncodedAudio)]
    assert slots.index(fresh) <= 2
    assert frames_of(events, busy) == list(range(100))
    assert len(slots) < 100 / 5, "frames that wait are encoded together"


async def test_the_first_frame_does_not_wait_for_those_it_came_with() -> None:
    async with Rig() as rig:
        slot = rig.open()
        pcm = np.full(8 * 960, 0.1, np.float32)
        rig.egress.put(FramePcm(slot, 1, 0, 0, 8, pcm))
        rig.egress.put(FramePcm(slot, 1, 0, 8, 8, pcm))
        events = await rig.until(4)
        audio = [event for event in events if isinstance(event, EncodedAudio)]
        frames = [(each.first_frame, each.num_frames) for each in audio]
        assert frames == [(0, 1), (0, 0), (1, 7), (8, 8)]
        assert [len(each.packets) for each in audio] == [1, 1, 14, 16]


async def test_stop_releases_a_thread_that_waits_for_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(egress_module, "_MAX_OUTBOX", 1)
    rig = Rig(num_threads=1)
    slot = rig.open()
    rig.egress.start(asyncio.get_running_loop())
    for turn_id in range(3):
        rig.egress.put(frame(slot, turn_id, 0))
    wait_until(lambda: bool(rig.egress._outbox))  # the loop does not run meanwhile
    rig.egress.stop()
    assert rig.events == []


async def test_stop_releases_a_waiting_engine() -> None:
    rig = Rig()  # never started: its queue stays full
    rig.egress._inboxes[0].maxsize = 1
    slot = rig.open()
    feeder = threading.Thread(
        target=lambda: [rig.egress.put(frame(slot, 1, index)) for index in range(3)]
    )
    feeder.start()
    rig.egress.stop()
    feeder.join(5.0)
    assert not feeder.is_alive()


@pytest.mark.parametrize(
    ("num_slots", "num_cores", "expected"),
    [(4, 2, 1), (64, 2, 1), (4, 64, 1), (64, 16, 8), (512, 16, 8), (24, 32, 3), (512, 128, 12)],
)
def test_threads_are_bounded_by_slots_and_cores(
    num_slots: int, num_cores: int, expected: int
) -> None:
    assert encoders_for(num_slots, num_cores) == expected
