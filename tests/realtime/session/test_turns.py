"""The life of a turn, alone and behind others."""

import pytest

from realtime.pingpong.messages import EndTurn, EngineWarning, SetText
from realtime.session.actions import Bump, Drop, Submit
from tests.realtime.session.harness import FRAME_MS, FRAME_SAMPLES, MS, Harness, commands, types


def test_text_reaches_the_engine_while_it_is_written(opened):
    for piece in ["Hel", "lo there. ", "How are", " you", "?"]:
        opened.receive("text.append", turn_id=7, text=piece)
    opened.receive("turn.commit", turn_id=7)
    slot = opened.slot
    assert [a.command for a in opened.actions[2:] if isinstance(a, Submit)] == [
        SetText(slot, 7, 0, "Hello there.", True),
        SetText(slot, 7, 1, "How", False),
        SetText(slot, 7, 1, "How are", False),
        SetText(slot, 7, 1, "How are you?", True),
        EndTurn(slot, 7, 2),
    ]


def test_a_turn_is_started_spoken_and_done(opened):
    opened.now_ns = 100 * MS
    opened.say(1, "Hello there.")
    opened.now_ns = 130 * MS
    messages = opened.run()
    assert types(messages)[0] == "turn.started" and types(messages)[-1] == "turn.done"
    assert messages[-2].text == "Hello there."
    packets = opened.client.packets[1]
    assert [packet.is_last for packet in packets] == [False] * 23 + [True]
    assert [packet.pts_samples for packet in packets] == [i * FRAME_SAMPLES for i in range(24)]
    metrics = messages[-1].metrics
    assert (metrics.num_frames, metrics.num_packets, metrics.num_segments) == (24, 24, 1)
    assert metrics.num_samples == 24 * FRAME_SAMPLES and metrics.audio_ms == 24 * FRAME_MS
    assert metrics.server_ttfa_ms == 30.0
    expected = {"first_text": 0.0, "first_step": -95.0, "first_packet": 30.0}
    assert metrics.timeline_ms == messages[0].timeline_ms == expected


@pytest.mark.parametrize(
    ("text_ms", "gap_ms"),
    [(40, 500), (500, 0), (960, 0)],  # the first sentence is heard until 960 ms
)
def test_a_gap_is_an_underrun_unless_its_text_came_late(opened, text_ms, gap_ms):
    opened.receive("text.append", turn_id=1, text="Hello there. ")
    opened.receive("text.flush", turn_id=1)
    opened.run()
    end_ms = 23 * FRAME_MS  # one frame is still in the encoder
    opened.now_ns = round(text_ms * MS)
    opened.receive("text.append", turn_id=1, text="This is the rest.")
    opened.receive("turn.commit", turn_id=1)
    opened.now_ns = round((end_ms + gap_ms) * MS) if gap_ms else max(opened.now_ns, 900 * MS)
    done = opened.run()[-1]
    assert done.metrics.num_underruns == (1 if gap_ms else 0)
    assert done.metrics.worst_gap_ms == gap_ms


def test_audio_starts_before_the_commit(opened):
    opened.receive("text.append", turn_id=1, text="Hello there. I am still thinking")
    assert types(opened.run()) == ["turn.started", *["turn.text"] * 2]
    assert opened.client.packets[1]
    opened.receive("turn.commit", turn_id=1)
    assert types(opened.run())[-1] == "turn.done"
    assert opened.client.packets[1][-1].is_last


def test_turn_text_costs_bytes_that_grow_with_the_text_only(opened):
    text = "Some words of a long story. " * 200
    opened.say(1, text)
    messages = opened.run()
    texts = [message.text for message in messages if message.type == "turn.text"]
    assert texts[-1] == text and sum(map(len, texts)) < 20 * len(text)


def test_a_flush_speaks_what_is_there(opened):
    opened.receive("text.append", turn_id=1, text="Let me think")
    assert opened.run() == []
    assert opened.receive("text.flush", turn_id=1) == []
    assert types(opened.run())[0] == "turn.started"
    assert opened.receive("text.flush", turn_id=1) == []
    assert len(commands(opened, SetText)) == 2


def test_flush_of_an_unknown_or_committed_turn_has_no_effect(opened):
    assert opened.receive("text.flush", turn_id=9) == []
    opened.say(10, "Hi.")
    num_actions = len(opened.actions)
    assert opened.receive("text.flush", turn_id=10) == []
    assert len(opened.actions) == num_actions and opened.session.num_turns == 1


def test_the_engines_warnings_are_passed_on(opened):
    event = EngineWarning(opened.slot, 1, "text_changed", "read '&' as 'and'")
    (warning,) = opened.apply(opened.session.engine_event(event, 0))
    assert (warning.type, warning.code, warning.turn_id) == ("warning", "text_changed", 1)


@pytest.mark.parametrize("text", ["", "   ", "...", "\n***\n", "\u0000"])
def test_a_turn_without_speech_is_done_with_a_warning(opened, text):
    opened.say(1, text)
    messages = opened.run()
    assert types(messages) == ["turn.started", "warning", "turn.done"]
    assert messages[1].code == "nothing_to_speak" and messages[1].turn_id == 1
    assert messages[2].metrics.num_frames == 0 == messages[2].metrics.num_segments


def test_commit_of_an_empty_turn_is_done_and_a_second_commit_is_harmless(opened):
    assert opened.receive("turn.commit", turn_id=4) == []
    assert opened.receive("turn.commit", turn_id=4) == []
    assert types(opened.run()) == ["turn.started", "warning", "turn.done"]
    assert opened.receive("turn.commit", turn_id=4) == []
    assert opened.client.ends == {4: ["turn.done"]}


def test_later_turns_wait_and_follow_in_order(opened):
    opened.say(1, "First one here.")
    opened.say(2, "Second one here.")
    opened.receive("text.append", turn_id=3, text="Third.")
    assert {c.turn_id for c in commands(opened, SetText)} == {1}
    opened.run()
    assert opened.client.ends == {1: ["turn.done"], 2: ["turn.done"]}
    opened.receive("turn.commit", turn_id=3)
    opened.run()
    assert list(opened.client.packets) == [1, 2, 3]


def test_a_waiting_turn_is_cancelled_without_touching_the_engine(opened):
    opened.say(1, "First one here.")
    opened.say(2, "Second one here.")
    (cancelled,) = opened.receive("turn.cancel", turn_id=2, played_ms=500)
    assert (cancelled.spoken_text, cancelled.remaining_text) == ("", "Second one here.")
    assert cancelled.played_ms == 0.0
    assert not any(isinstance(a, Bump | Drop) for a in opened.actions)
    opened.run()
    assert opened.client.ends == {1: ["turn.done"], 2: ["turn.cancelled"]}


def test_too_many_turns_are_refused_and_nothing_is_lost():
    harness = Harness(max_queued_turns=2)
    harness.start()
    for turn_id in (1, 2, 3):
        harness.say(turn_id, "Words.")
    (error,) = harness.receive("text.append", turn_id=4, text="More.")
    assert (error.code, error.turn_id, error.fatal) == ("too_many_turns", 4, False)
    harness.client.ends.clear()
    harness.run()
    harness.say(4, "More.")
    harness.run()
    assert list(harness.client.ends) == [1, 2, 3, 4]
