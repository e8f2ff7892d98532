"""Order within a slot, urgency between slots, and a bound over all."""

import random
import threading

import numpy as np
import pytest

from realtime.deadline_queue import DeadlineQueue
from realtime.pingpong.messages import FramePcm, SegmentEnd, SlotRef


def item(slot: int, number: int) -> SegmentEnd:
    return SegmentEnd(SlotRef(slot, 1), 1, number, 0)


def drain(queue: DeadlineQueue) -> list[tuple[int, int]]:
    got = []
    while events := queue.get(waits=False):
        got += [(event.slot.idx, event.segment) for event in events]
    return got


def test_the_most_urgent_slot_goes_first_and_keeps_its_order() -> None:
    deadlines = {0: 5.0, 1: 1.0, 2: 3.0}
    queue = DeadlineQueue(100, lambda event: deadlines[event.slot.idx])
    for number in range(2):
        for slot in (0, 1, 2):
            queue.put(item(slot, number))
    assert drain(queue) == [(1, 0), (1, 1), (2, 0), (2, 1), (0, 0), (0, 1)]
    assert queue.qsize() == 0 and queue.get(waits=False) == []


def test_equal_deadlines_go_by_arrival() -> None:
    queue = DeadlineQueue(100, lambda event: 0.0)
    for slot in (2, 0, 1):
        queue.put(item(slot, 0))
    assert [slot for slot, _ in drain(queue)] == [2, 0, 1]


def test_a_slots_deadline_is_asked_once_its_last_event_is_done() -> None:
    """What was encoded meanwhile has moved it."""
    played_s = {0: 0.0, 1: 1.5}
    queue = DeadlineQueue(100, lambda event: played_s[event.slot.idx])
    for number in range(3):
        queue.put(item(0, number))
    queue.put(item(1, 0))
    order = []
    while events := queue.get(waits=False):
        (event,) = events
        order.append(event.slot.idx)
        played_s[event.slot.idx] += 1.0
        if len(order) == 1:
            queue.put(item(0, 3))  # while the reader is at this slot
    assert order == [0, 0, 1, 0, 0]


def started(function, *args) -> threading.Thread:
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    return thread


def test_a_full_queue_makes_the_writer_wait() -> None:
    queue = DeadlineQueue(2, lambda event: 0.0)
    for slot in range(2):
        queue.put(item(slot, 0))
    writer = started(queue.put, item(2, 0))
    writer.join(0.01)
    assert writer.is_alive() and queue.qsize() == 2
    queue.get()
    writer.join(10.0)
    assert not writer.is_alive() and queue.qsize() == 2


def test_closed_it_makes_nobody_wait_takes_nothing_and_gives_nothing() -> None:
    full, empty = (DeadlineQueue(1, lambda event: 0.0) for _ in range(2))
    full.put(item(0, 0))
    waiting = [started(full.put, item(1, 0)), started(empty.get)]
    for queue in (full, empty):
        queue.close()
    for thread in waiting:
        thread.join(10.0)
        assert not thread.is_alive()
    full.put(item(1, 0))
    assert full.qsize() == 1 and full.get() == [] == empty.get()


@pytest.mark.parametrize("seed", range(3))
def test_many_writers_lose_nothing(seed: int) -> None:
    rng = random.Random(seed)
    queue = DeadlineQueue(16, lambda event: rng.random())
    num_slots, num_items = 7, 200

    def write(slot: int) -> None:
        for number in range(num_items):
            queue.put(item(slot, number))

    for slot in range(num_slots):
        started(write, slot)
    got: dict[int, list[int]] = {slot: [] for slot in range(num_slots)}
    for _ in range(num_slots * num_items):
        (event,) = queue.get()
        got[event.slot.idx].append(event.segment)
    assert all(numbers == list(range(num_items)) for numbers in got.values())


def test_frames_that_wait_come_together_but_for_the_first() -> None:
    def frame(number: int, turn_id: int = 1, segment: int = 0, num_frames: int = 1) -> FramePcm:
        pcm = np.zeros(1, np.float32)
        return FramePcm(SlotRef(0, 1), turn_id, segment, number, num_frames, pcm)

    queue = DeadlineQueue(100, lambda event: 0.0)
    frames = [frame(number) for number in range(12)]
    late = [item(0, 0), frame(12, segment=1), frame(13, segment=1), frame(14, num_frames=7)]
    for event in (*frames, *late, frame(0, turn_id=2), frame(1, turn_id=2)):
        queue.put(event)
    runs = []
    while events := queue.get(waits=False):
        runs.append([getattr(event, "first_frame", None) for event in events])
    assert runs == [[0], [1, 2, 3, 4, 5, 6, 7, 8], [9, 10, 11], [None], [12, 13], [14], [0], [1]]
    assert queue.qsize() == 0
