"""Who runs: pure policies over leads and times."""

from hypothesis import given
from hypothesis import strategies as st

from realtime.pingpong.pacing import (
    Candidate,
    Rider,
    Waiting,
    next_call,
    pause_ns,
    riders_to_board,
    rows_to_run,
)

MS = 1_000_000
FRAME = 46 * MS
FAR = 600_000 * MS

leads = st.integers(0, 5_000 * MS)
candidates = st.lists(st.builds(Candidate, leads, st.integers(40 * MS, FAR)), max_size=20)


def run(streams, step_ms, bucket_of=lambda n: n):
    return rows_to_run(streams, frame_ns=FRAME, step_ns=step_ms * MS, bucket_of=bucket_of)


def test_whoever_is_below_the_cap_runs_while_the_device_keeps_up():
    streams = [Candidate(0, FAR), Candidate(500 * MS, 500 * MS), Candidate(499 * MS, 500 * MS)]
    assert run(streams, 0) == run(streams, 46) == [0, 2]


def test_beyond_that_those_who_run_dry_go_first():
    streams = [Candidate(lead * MS, FAR) for lead in (400, 90, 3000, 0, 200)]
    assert run(streams, 60) == [1, 3]


def test_rows_that_are_computed_anyway_go_to_the_next_deadlines():
    streams = [Candidate(lead * MS, FAR) for lead in (400, 90, 3000, 0, 200)]
    assert run(streams, 60, bucket_of=lambda _: 4) == [0, 1, 3, 4]


def test_streams_without_a_listener_fill_what_is_idle():
    bulk, paced = Candidate(60_000 * MS, FAR), Candidate(2000 * MS, 2000 * MS)
    assert run([bulk, paced], 60) == [0]
    assert run([bulk, Candidate(10 * MS, 2000 * MS)], 60) == [1]


@given(candidates, st.integers(0, 200))
def test_only_streams_below_their_cap_run_and_somebody_does(streams, step_ms):
    chosen = run(streams, step_ms, bucket_of=lambda n: min(len(streams), 2 * n))
    allowed = [i for i, s in enumerate(streams) if s.lead_ns < s.max_lead_ns]
    assert chosen == sorted(set(chosen)) and set(chosen) <= set(allowed)
    assert bool(chosen) == bool(allowed)
    left_out = set(allowed) - set(chosen)
    assert all(streams[i].lead_ns <= streams[j].lead_ns for i in chosen for j in left_out)


def board(num_rows, num_others=0, waited_ms=0.0):
    riders = [Rider(num, round(waited_ms * MS)) for num in num_rows]
    return riders_to_board(riders, num_others, [64, 192])


def test_beside_few_streams_prompts_ride_as_far_as_there_is_room():
    assert board([]) == []
    assert board([40, 60, 60, 60, 1]) == [0, 1, 2, 4]
    assert board([100, 130, 20]) == [0, 2]


def test_beside_many_streams_prompts_ride_if_they_fill_a_size_or_have_waited():
    assert board([54], num_others=60) == [0]
    assert board([54, 54], num_others=60) == [0], "with both a step would cost three"
    assert board([54, 54, 54], num_others=60) == [0, 1, 2]
    assert board([40], num_others=60) == [0] and board([39], num_others=60) == []
    assert board([20, 19], num_others=60) == []
    assert board([20, 20, 20], num_others=60) == [0, 1, 2]
    assert board([20, 19], num_others=60, waited_ms=12) == [0, 1]
    assert board([100], num_others=60) == [] and board([100], 60, 12) == [0]
    assert board([79, 40], 60) == [1] and board([79, 40], 60, 12) == [0, 1]


@given(st.lists(st.integers(1, 192)), st.integers(0, 64), st.floats(0, 50))
def test_prompts_never_take_more_room_than_there_is_and_the_first_one_rides(rows, others, waited):
    chosen = board(rows, others, waited)
    assert sum(rows[i] for i in chosen) <= 192
    if rows and (waited >= 12 or not others):
        assert chosen[0] == 0


def test_a_pause_ends_when_the_first_lead_is_below_its_cap():
    streams = [Candidate(700 * MS, 500 * MS), Candidate(530 * MS, 500 * MS)]
    assert pause_ns(streams) == 30 * MS
    assert pause_ns([]) is None and pause_ns([Candidate(0, FAR)]) == 0


def plan(waiting, max_chunk=8, max_streams=lambda chunk: 64, enough=None):
    return next_call(waiting, max_chunk=max_chunk, max_streams=max_streams, enough=enough)


def paced(num_frames, lead_ns, is_last=False, interval_ns=FRAME, is_tail=False):
    return Waiting(num_frames, lead_ns, is_last, interval_ns, is_tail)


def test_the_first_frame_leaves_at_once():
    assert plan({3: paced(1, 0)})[:2] == (1, [3])


def test_chunks_grow_with_the_lead():
    wants = {1: 0, 2: 2 * FRAME, 4: 4 * FRAME, 8: 8 * FRAME}
    for chunk, lead_ns in wants.items():
        assert plan({0: paced(15, lead_ns)})[:2] == (8, [0])
        assert chunk == 1 or not plan({0: paced(chunk - 1, lead_ns)}).slots
        assert plan({0: paced(chunk, lead_ns)})[:2] == (chunk, [0])


def test_frames_that_come_fast_are_soon_many():
    assert not plan({0: paced(1, FRAME, interval_ns=FRAME // 8)}).slots
    assert plan({0: paced(4, FRAME, interval_ns=FRAME // 8)})[:2] == (4, [0])
    assert plan({0: paced(1, 19 * MS, interval_ns=MS)})[:2] == (1, [0])  # little in hand


def test_what_is_not_due_becomes_due_as_the_lead_falls():
    waiting = paced(3, 10 * FRAME)  # 4 frames are wanted: one more, and 20 ms
    due_in_ns = plan({0: waiting}).due_in_ns
    assert due_in_ns == 10 * FRAME - 3 * FRAME // 2 - 20 * MS
    assert not plan({0: waiting._replace(lead_ns=waiting.lead_ns - due_in_ns + 1)}).slots
    assert plan({0: waiting._replace(lead_ns=waiting.lead_ns - due_in_ns)}).chunk == 2


def test_an_end_is_not_waited_for():
    assert plan({0: paced(3, 60 * FRAME, is_last=True)})[:2] == (2, [0])


def test_the_most_urgent_goes_first_with_those_of_its_chunk():
    waiting = {
        0: paced(8, 100 * FRAME),
        1: paced(1, FRAME),
        2: paced(1, 0),
        3: paced(2, 5 * FRAME),
    }
    assert plan(waiting)[:2] == (1, [2, 1])
    assert plan(waiting, max_streams=lambda chunk: 1)[:2] == (1, [2])


def test_where_a_call_has_its_price_whoever_has_frames_takes_part():
    fast = FRAME // 8
    far, falling = (paced(num, 20 * FRAME, interval_ns=fast) for num in (1, 3))
    tail = paced(2, 20 * FRAME, is_last=True, is_tail=True)
    waiting = {0: far, 1: paced(1, 0), 2: falling, 3: tail}
    assert plan(waiting)[:2] == (1, [1]), "each frame costs the same"
    assert plan(waiting | {3: tail._replace(num_frames=1)}, enough=128) == (
        1,
        [1, 3, 0, 2],
        0,
        True,
    )
    assert plan(waiting | {1: paced(4, FRAME)}, enough=128)[:2] == (4, [1, 3]), "it is padded"
    assert plan(waiting, enough=128, max_streams=lambda chunk: 2)[1] == [1, 3], (
        "the end comes first"
    )
    del waiting[1]
    assert plan(waiting, enough=128) == (2, [3, 2], 0, False), "nobody waits for it"


def test_many_frames_are_called_for_though_nobody_is_due():
    fast = FRAME // 8
    waiting = {slot: paced(1 + slot // 6, 20 * FRAME, interval_ns=fast) for slot in range(8)}
    assert not plan(waiting).slots and not plan(waiting, enough=11).slots
    assert plan(waiting, enough=10) == (1, list(range(8)), 0, False)
    of_two = {slot: item._replace(num_frames=2) for slot, item in waiting.items()}
    assert plan(of_two, enough=16)[:2] == (2, list(range(8)))
    assert plan(of_two, enough=16, max_streams=lambda chunk: 4 // chunk)[:2] == (2, [0, 1])
    assert not plan({}, enough=1).slots


def test_the_tail_of_a_stream_is_one_call_or_part_of_a_larger_one():
    tail = paced(5, FAR, is_last=True, is_tail=True)
    assert plan({0: tail})[:2] == (8, [0])
    assert plan({0: tail._replace(num_frames=3)})[:2] == (4, [0])
    assert plan({0: tail._replace(num_frames=4)})[:2] == (4, [0])
    assert plan({0: tail._replace(num_frames=11)})[:2] == (8, [0])
    due = {1: paced(8, FRAME), 2: paced(4, 2 * FRAME)}
    assert plan({0: tail._replace(num_frames=1), **due})[:2] == (8, [1, 0])
    assert plan({0: tail._replace(is_tail=False), **due})[:2] == (8, [1])


def test_a_codec_that_cannot_join_frames_gets_one_at_a_time():
    assert plan({0: paced(9, 100 * FRAME)}, max_chunk=1)[:2] == (1, [0])


waits = st.builds(
    Waiting, st.integers(1, 20), leads, st.booleans(), st.integers(MS, FRAME), st.booleans()
)


@given(st.dictionaries(st.integers(0, 63), waits), st.sampled_from([None, 8, 128]))
def test_every_slot_is_due_or_will_be(waiting, enough):
    left = dict(waiting)
    while left:
        made = plan(left, max_streams=lambda chunk: 64 // chunk, enough=enough)
        if not made.slots:
            assert made.due_in_ns is not None and made.due_in_ns > 0
            assert made.due_in_ns <= max(item.lead_ns for item in left.values())
            left = {s: i._replace(lead_ns=i.lead_ns - made.due_in_ns) for s, i in left.items()}
            assert all(item.lead_ns >= 0 for item in left.values())
            continue
        for slot in made.slots:
            item = left.pop(slot)
            assert made.chunk <= item.num_frames or item.is_tail
            if item.num_frames > made.chunk:
                rest = item.num_frames - made.chunk
                left[slot] = item._replace(
                    num_frames=rest, lead_ns=item.lead_ns + made.chunk * FRAME
                )
