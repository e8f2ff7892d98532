"""The vocode thread: every frame of every stream is heard, in order, and no call leaks."""

import random

import pytest

from realtime.pingpong.codec_calls import MAX_CALLS, RING_FRAMES, Call
from realtime.pingpong.messages import EngineWarning, FramePcm, SegmentEnd, TurnBegin, TurnEnd
from tests.realtime.pingpong.vocode_bench import NUM_SLOTS, Bench, DeviceBench, row


def test_first_frame_at_once_then_together_and_all_before_the_end():
    bench = Bench()
    slot = bench.slots.acquire()
    for frame in range(40):
        bench.step((row(slot, frame), frame))
        if frame == 0:
            assert bench.pcm(slot) == [(0, 0, 0)]
    assert bench.codec.chunks[0] == 1 and 8 in bench.codec.chunks
    end = row(slot, 40)
    bench.step((end, 777), ends=[end])
    bench.loop.step(TurnEnd(slot, 0, 40, {}))
    assert bench.pcm(slot) == [(0, frame, frame + 1000 * frame) for frame in range(40)]
    assert [type(event) for event in bench.events[-2:]] == [SegmentEnd, TurnEnd]
    assert bench.events[-2].num_frames == 40


@pytest.mark.parametrize("ends_turn", [True, False])
def test_the_tail_of_a_turn_is_one_call_and_its_padding_is_not_heard(ends_turn):
    for num_frames in range(17, 26):
        bench = Bench()
        bench.loop._may_pad = True
        slot, num_calls, num_waiting = bench.slots.acquire(), 0, 0
        for frame in range(num_frames):
            num_calls = len(bench.codec.chunks)
            num_waiting = bench.loop._voices[slot.idx].num_waiting + 1
            is_limit = frame == num_frames - 1
            bench.step((row(slot, frame, is_limit=is_limit, ends_turn=ends_turn), frame))
        num_calls = len(bench.codec.chunks) - num_calls
        if ends_turn:
            assert num_calls == -(-num_waiting // 8), num_frames
        else:
            assert sum(bench.codec.chunks) == num_frames, "the next segment goes on from here"
        assert bench.pcm(slot) == [(0, frame, 1001 * frame) for frame in range(num_frames)]
        bench.step((row(slot, 0, turn_id=1), 7))
        assert bench.pcm(slot)[-1] == (1, 0, 7), "the next turn starts anew"


def test_a_segment_before_the_tail_is_not_padded(monkeypatch):
    """Both wait for the device: the last one's frames go on where the first one's ended."""
    bench = DeviceBench(monkeypatch)
    bench.loop._may_pad = True
    slot = bench.slots.acquire()
    for frame in range(6):
        segment, in_segment = divmod(frame, 3)
        fields = {"segment": segment, "first_frame": 3 * segment, "is_limit": in_segment == 2}
        bench.step((row(slot, in_segment, ends_turn=segment == 1, **fields), frame))
    while bench.loop._voices[slot.idx].queue or any(bench.loop._in_flight.values()):
        bench.advance()
    assert bench.pcm(slot) == [(0, frame, 1001 * frame) for frame in range(6)]


def test_the_first_frame_of_the_next_turn_leaves_at_once_however_much_was_said_before():
    bench = Bench()
    slot = bench.slots.acquire()
    for turn in range(3):
        for frame in range(30):
            bench.step((row(slot, frame, turn_id=turn), frame))
            if frame < 2:
                assert bench.pcm(slot)[-1][:2] == (turn, frame)
        end = row(slot, 30, turn_id=turn)
        bench.step((end, 0), ends=[end])


def test_one_frame_at_a_time_where_chunks_would_be_heard():
    bench = Bench(has_exact_chunks=False)
    slot = bench.slots.acquire()
    for frame in range(20):
        bench.step((row(slot, frame), frame))
        assert len(bench.pcm(slot)) == frame + 1
    assert set(bench.codec.chunks) == {1}


def other_events_of_a_cut_segment(bench):
    slot = bench.slots.acquire()
    bench.step((row(slot, 0), 5))
    bench.step((row(slot, 1, is_limit=True), 6))
    kinds = [type(event) for event in bench.events if not isinstance(event, FramePcm)]
    assert len(bench.pcm(slot)) == 2
    bench.step((row(slot, 2), 7))  # the surplus frame of a segment that is over
    assert len(bench.pcm(slot)) == 2
    return kinds


def test_a_cut_segment_says_so_after_its_last_frame():
    assert other_events_of_a_cut_segment(Bench()) == [TurnBegin, EngineWarning, SegmentEnd]


def test_a_segment_whose_length_is_given_is_not_called_cut():
    bench = Bench(is_length_fixed=True)
    assert other_events_of_a_cut_segment(bench) == [TurnBegin, SegmentEnd]


def test_what_waits_of_a_generation_that_is_over_is_not_heard():
    bench = Bench()
    old = bench.slots.acquire()
    for frame in range(30):  # so far ahead that some frames wait
        bench.step((row(old, frame), frame))
    num_heard = len(bench.pcm(old))
    assert num_heard < 30
    new = bench.slots.bump(old)
    bench.loop.step(TurnEnd(old, 0, 30, {}))
    bench.step((row(new, 0, turn_id=1), 5), (row(old, 30), 6))
    assert len(bench.pcm(old)) == num_heard
    assert bench.pcm(new) == [(1, 0, 5)]
    assert any(isinstance(event, TurnEnd) for event in bench.events)


def test_random_streams_lose_nothing_and_leak_no_call():
    rng, bench = random.Random(1), Bench()
    slots = [bench.slots.acquire() for _ in range(NUM_SLOTS)]
    frames, turns, wanted = [0] * NUM_SLOTS, [0] * NUM_SLOTS, {}
    for _ in range(400):
        rows, ends = [], []
        for i in rng.sample(range(NUM_SLOTS), rng.randint(1, NUM_SLOTS)):
            made = row(slots[i], frames[i], turn_id=turns[i])
            code = rng.randrange(1000)
            rows.append((made, code))
            if frames[i] and rng.random() < 0.03:
                ends.append(made)
                frames[i], turns[i] = 0, turns[i] + 1
                continue
            sample = code + 1000 * frames[i]
            wanted.setdefault(i, []).append((turns[i], frames[i], sample))
            frames[i] += 1
        bench.step(*rows, ends=ends)
    last = [row(slots[i], frames[i], turn_id=turns[i]) for i in range(NUM_SLOTS)]
    bench.step(*[(made, 0) for made in last], ends=last)
    for i in range(NUM_SLOTS):
        assert bench.pcm(slots[i]) == wanted[i]
    assert bench.num_free_calls == 2 * MAX_CALLS
    assert max(bench.codec.chunks) > 1


def test_calls_in_flight_lose_nothing_and_one_that_is_not_urgent_runs_alone(monkeypatch):
    rng, bench = random.Random(2), DeviceBench(monkeypatch)
    slots = [bench.slots.acquire() for _ in range(NUM_SLOTS)]
    wanted = [[] for _ in slots]
    for frame in range(120):
        rows = [(row(slot, frame), rng.randrange(1000)) for slot in slots]
        for frames, (_, code) in zip(wanted, rows, strict=True):
            frames.append((0, frame, code + 1000 * frame))
        bench.step(*rows)
        for _ in range(rng.randint(0, 3)):
            bench.advance()
    ends = [row(slot, 120) for slot in slots]
    bench.step(*[(end, 0) for end in ends], ends=ends)
    bench.loop.step(TurnEnd(slots[0], 0, 120, {}))
    while bench.advance() is not None:
        pass
    assert [bench.pcm(slot) for slot in slots] == wanted
    assert isinstance(bench.events[-1], TurnEnd) or SegmentEnd in map(type, bench.events[-3:])
    assert bench.num_free_calls == 2 * MAX_CALLS and 8 in bench.codec.chunks


def test_who_has_nothing_to_hear_does_not_wait_for_the_calls_of_those_far_ahead(monkeypatch):
    bench = DeviceBench(monkeypatch)
    slot, other = bench.slots.acquire(), bench.slots.acquire()
    bench.step((row(slot, 0), 0))
    while not bench.pcm(slot):
        bench.advance()
    bench.loop._voices[slot.idx].clock.play_end_ns = 10**18
    for frame in range(1, 9):
        bench.step((row(slot, frame), frame))
    monkeypatch.setattr(bench, "is_over", lambda call: call not in bench.loop.runner._bulk_calls)
    bench.advance()
    (slow,) = bench.loop._in_flight[False]
    assert [voice.idx for voice, _, _ in slow.rows] == [slot.idx]
    bench.step((row(other, 0), 7))
    bench.advance()
    assert bench.pcm(other) == [(0, 0, 7)] and list(bench.loop._in_flight[False]) == [slow]


FAR_NS = 10**18


def calls_of(bench):
    """Frames of each call, by slot, in the order of the calls."""
    calls, call = [], bench.loop._call

    def noted(plan):
        calls.append((plan.chunk, sorted(plan.slots), plan.is_urgent))
        call(plan)

    bench.loop._call = noted
    return calls


def test_a_first_frame_takes_along_whoever_has_frames(monkeypatch):
    """A call costs the device as much as 35 frames."""
    bench = DeviceBench(monkeypatch)
    bench.loop._enough = 128
    first, other, late = (bench.slots.acquire() for _ in range(3))
    bench.step((row(first, 0), 1), (row(other, 0), 2))
    while bench.advance() is not None:
        pass
    for slot in (first, other):
        bench.loop._voices[slot.idx].clock.play_end_ns = FAR_NS
    calls = calls_of(bench)
    bench.step((row(first, 1), 3), (row(other, 1), 4))
    assert bench.advance() is not None and calls == [], "nobody waits for them"
    bench.step((row(first, 2), 5), (row(late, 0), 6))
    bench.advance()
    assert calls == [(1, [first.idx, other.idx, late.idx], True)]
    assert bench.pcm(late) == [(0, 0, 6)]


def test_frames_that_wait_are_not_written_over(monkeypatch):
    """However late the thread is, there is room for what comes, or calls are made first."""
    bench = DeviceBench(monkeypatch)
    slot = bench.slots.acquire()
    for frame in range(3 * RING_FRAMES):
        bench.step((row(slot, frame), frame))  # and never looks after its calls
    end = row(slot, 3 * RING_FRAMES)
    bench.step((end, 0), ends=[end])
    while bench.advance() is not None:
        pass
    frames = range(3 * RING_FRAMES)
    assert bench.pcm(slot) == [(0, frame, frame + 1000 * frame) for frame in frames]


def test_a_turn_begins_after_all_of_the_one_before_though_its_events_wait(monkeypatch):
    """While a call runs, the end of its segment waits before the frames of the next one."""
    bench = DeviceBench(monkeypatch)
    slot = bench.slots.acquire()
    bench.step((row(slot, 0), 5))
    bench.loop._call(bench.loop._plan())
    for made, code, is_end in (
        (row(slot, 1), 0, True),
        (row(slot, 0, segment=1, first_frame=1), 6, False),
        (row(slot, 1, segment=1, first_frame=1), 0, True),
        (row(slot, 0, turn_id=1), 7, False),
        (row(slot, 1, turn_id=1), 0, True),
    ):
        bench.step((made, code), ends=[made] if is_end else [])
    while bench.advance() is not None:
        pass
    assert bench.pcm(slot) == [(0, 0, 5), (0, 1, 1006), (1, 0, 7)]
    assert bench.loop._voices[slot.idx].num_events == 0


@pytest.mark.parametrize("is_over", [False, True])
def test_the_end_of_a_segment_far_ahead_holds_nobody_up(monkeypatch, is_over):
    """Beside streams whose frames wait as well, so that a call of one slot is not large enough."""
    bench = DeviceBench(monkeypatch, num_slots=6)
    bench.loop._may_pad, bench.loop._enough = True, 128
    slots = [bench.slots.acquire() for _ in range(6)]
    bench.step(*[(row(slot, 0), 0) for slot in slots])
    while bench.advance() is not None:
        pass
    for slot in slots:
        bench.loop._voices[slot.idx].clock.play_end_ns = 10**18
    slot = slots.pop()
    bench.step(*[(row(other, 1), 0) for other in slots])
    for frame in range(1, 9):
        bench.step((row(slot, frame), frame))
    end = row(slot, 9, ends_turn=is_over)
    bench.step((end, 0), ends=[end])
    fields = {"turn_id": 1} if is_over else {"segment": 1, "first_frame": 9}
    for frame in range(2 * RING_FRAMES):
        bench.step((row(slot, frame, **fields), frame))
        for _ in range(0 if is_over else 3):
            bench.advance()
    frames = [(0, frame, 1001 * frame) for frame in range(9)]
    assert bench.pcm(slot)[:9] == frames
    assert len(bench.pcm(slot)) > RING_FRAMES


@pytest.mark.parametrize("num_calls", [1, 3])
def test_a_cancel_while_room_is_made_for_a_frame_ends_nothing_else(monkeypatch, num_calls):
    """The event loop bumps the generation at any time: also between two looks at it."""
    bench = DeviceBench(monkeypatch)
    slot, other = bench.slots.acquire(), bench.slots.acquire()
    for frame in range(RING_FRAMES):
        bench.step((row(slot, frame), frame))
    bench.step((row(other, 0), 3))
    read = bench.loop._read_oldest

    def read_and_be_late(lane):
        read(lane)
        if bench.loop.num_calls >= num_calls and bench.slots.is_current(slot):
            bench.slots.bump(slot)

    monkeypatch.setattr(bench.loop, "_read_oldest", read_and_be_late)
    frame = RING_FRAMES
    while bench.slots.is_current(slot):
        bench.step((row(slot, frame), frame))
        frame += 1
    new = slot._replace(generation=slot.generation + 1)
    last = [row(new, 1, turn_id=1), row(other, 1)]
    bench.step((row(new, 0, turn_id=1), 9))
    bench.step(*[(end, 0) for end in last], ends=last)
    while bench.advance() is not None:
        pass
    assert bench.pcm(new) == [(1, 0, 9)] and bench.pcm(other) == [(0, 0, 3)]
    assert not any(voice.queue for voice in bench.loop._voices)


def test_a_cancel_while_the_turn_before_is_finished_ends_nothing_else(monkeypatch):
    bench = DeviceBench(monkeypatch)
    slot = bench.slots.acquire()
    bench.step((row(slot, 0), 5))
    end = row(slot, 1)
    bench.step((end, 0), ends=[end])
    plan = bench.loop._plan

    def plan_late(**kwargs):
        if bench.slots.is_current(slot):
            bench.slots.bump(slot)
        return plan(**kwargs)

    monkeypatch.setattr(bench.loop, "_plan", plan_late)
    bench.step((row(slot, 0, turn_id=1), 6))
    while bench.advance() is not None:
        pass
    assert not bench.pcm(slot)


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_what_waits_behind_the_events_of_a_call_does_not_wait_for_the_next_item(
    monkeypatch, is_cancelled
):
    bench = DeviceBench(monkeypatch)
    slot = bench.slots.acquire()
    bench.step((row(slot, 0), 5))
    bench.loop._call(bench.loop._plan())
    end, last = row(slot, 1), row(slot, 1, segment=1, first_frame=1)
    bench.step((end, 0), ends=[end])
    bench.step((row(slot, 0, segment=1, first_frame=1), 6))
    bench.step((last, 0), ends=[last])
    if is_cancelled:
        bench.slots.bump(slot)
    bench.loop.step(TurnEnd(slot, 0, 2, {}))
    monkeypatch.setattr(Call, "is_over", lambda call: True)
    while bench.advance() is not None:
        pass
    assert bench.pcm(slot) == ([] if is_cancelled else [(0, 0, 5), (0, 1, 1006)])
    assert isinstance(bench.events[-1], TurnEnd)
