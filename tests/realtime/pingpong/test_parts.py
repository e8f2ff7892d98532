"""Slots, mailboxes, clocks: the small structures the engine's threads share."""

import re
import threading
from pathlib import Path

import pytest

from realtime.pingpong.handoff import Mailbox
from realtime.pingpong.messages import SlotRef
from realtime.pingpong.pacing import ClockTable, PlaybackClock
from realtime.pingpong.slots import Slots

MS = 1_000_000


def test_slots_run_out_and_come_back_with_another_generation() -> None:
    slots = Slots(2)
    first, second = slots.acquire(), slots.acquire()
    assert first is not None and second is not None
    assert slots.acquire() is None and slots.num_free == 0
    slots.release(first)
    again = slots.acquire()
    assert again is not None and again.idx == first.idx
    assert again.generation > first.generation
    assert slots.is_current(again) and not slots.is_current(first)


def test_bump_makes_the_old_reference_stale_at_once() -> None:
    slots = Slots(1)
    slot = slots.acquire()
    assert slot is not None
    bumped = slots.bump(slot)
    assert slots.is_current(bumped) and not slots.is_current(slot)
    with pytest.raises(AssertionError):
        slots.bump(slot)
    with pytest.raises(AssertionError):
        slots.release(slot)


def test_offer_refuses_when_full_and_put_waits() -> None:
    box: Mailbox[int] = Mailbox(max_items=1)
    assert box.offer(1) and not box.offer(2)
    writer = threading.Thread(target=box.put, args=(3,))
    writer.start()
    assert box.take() == 1
    assert box.take() == 3
    writer.join(timeout=5)
    assert not writer.is_alive()


def test_poke_and_close_wake_a_waiting_reader() -> None:
    box: Mailbox[int] = Mailbox(max_items=1)
    results: list[list[int]] = []
    reader = threading.Thread(target=lambda: results.append(box.take_all(None)))
    reader.start()
    box.poke()
    reader.join(timeout=5)
    assert results == [[]]
    box.close()
    assert box.take() is None and box.take_all(None) == [] and not box.offer(1)


def test_clock_lead_grows_with_audio_and_shrinks_with_time() -> None:
    clock = PlaybackClock()
    clock.add(40 * MS, 1000 * MS)
    clock.add(40 * MS, 1010 * MS)
    assert clock.lead_ns(1010 * MS) == 70 * MS
    assert clock.lead_ns(2000 * MS) == 0


def test_audio_that_comes_late_is_played_when_it_comes() -> None:
    clock = PlaybackClock()
    clock.add(40 * MS, 1000 * MS)
    clock.add(40 * MS, 1100 * MS)
    assert clock.lead_ns(1100 * MS) == 40 * MS


def test_a_new_generation_starts_without_lead() -> None:
    clocks = ClockTable(1)
    clocks.of(SlotRef(0, 1)).add(1000 * MS, 0)
    assert clocks.of(SlotRef(0, 1)).lead_ns(0) == 1000 * MS
    assert clocks.of(SlotRef(0, 2)).lead_ns(0) == 0


WAITS = re.compile(r"\.(item|cpu|synchronize|nonzero)\(|wait_stream\(")


@pytest.mark.parametrize(
    "module", ["codec_calls", "decode", "frames", "kv_writer", "prefill", "prefill_rows", "vocode"]
)
def test_a_wait_for_the_device_can_only_be_in_one_file(module: str) -> None:
    """`device.py`; what the loops call it by is `wait_on_host`."""
    file = Path(__file__).parents[3] / "realtime" / "pingpong" / f"{module}.py"
    found = [line for line in file.read_text("utf-8").splitlines() if WAITS.search(line)]
    assert not found, found
