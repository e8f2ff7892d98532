"""Cancelled turns: every character is accounted for, whatever was under way."""

import pytest

from realtime.pingpong.messages import CancelTurn, EngineWarning, OpenSlot, SlotReady, SlotRef
from realtime.session.actions import Bump, Drop
from tests.realtime.session.harness import FRAME_MS, FRAME_SAMPLES, MS, Harness, commands, types


def test_cancel_bumps_drops_and_accounts_for_every_character(opened):
    text = "Hello there. This is a longer sentence. "
    opened.receive("text.append", turn_id=1, text=text)
    opened.run(6)
    stale = [*opened.engine.in_flight]
    opened.engine.step()
    before = len(opened.actions)
    (cancelled,) = opened.receive("turn.cancel", turn_id=1, played_ms=FRAME_MS * 24 + 1)
    bump, submit, drop, _ = opened.actions[before:]
    assert bump == Bump(SlotRef(2, 6))
    assert submit.command == CancelTurn(SlotRef(2, 6), 1, 25)
    assert drop == Drop(1)
    assert cancelled.spoken_text == "Hello there."
    assert cancelled.spoken_text + cancelled.remaining_text == text
    for event in [*stale, *opened.engine.in_flight]:
        assert opened.session.engine_event(event, 0) == []
    opened.engine.in_flight.clear()
    opened.say(2, "Yes?")
    opened.run()
    assert opened.client.ends == {1: ["turn.cancelled"], 2: ["turn.done"]}


def test_what_the_engine_says_of_the_time_before_a_cancel_has_no_effect():
    harness = Harness()
    assert harness.receive("session.start") == []
    old = harness.slot
    harness.say(1, "Hello.")
    harness.receive("turn.cancel", turn_id=1)
    assert harness.slot.generation == old.generation + 1
    for event in (SlotReady(old, 3.0, False), EngineWarning(old, 1, "text_changed", "read as")):
        assert harness.session.engine_event(event, 0) == []
    assert types(harness.run()) == ["session.ready"]  # of the slot that was opened again


def test_cancel_without_a_clock_uses_the_servers_estimate(opened):
    opened.say(1, "Hello there. This is a longer sentence.")
    opened.run(5)  # 27 packets
    opened.now_ns = 400 * MS
    (cancelled,) = opened.receive("turn.cancel", turn_id=1)
    assert cancelled.played_ms == 400.0
    assert commands(opened, CancelTurn)[0].heard_frames == 10
    assert cancelled.spoken_text == "Hello"


def test_a_cancelled_turn_tells_its_stages(opened):
    opened.now_ns = 10 * MS
    opened.receive("text.append", turn_id=1, text="Hello there. This is a longer sentence. ")
    opened.now_ns = 30 * MS
    started = opened.run(4)[0]
    from_first_text = {"first_text": 0.0, "first_step": -5.0, "first_packet": 20.0}
    assert (started.type, started.timeline_ms) == ("turn.started", from_first_text)
    opened.now_ns = 40 * MS
    opened.receive("turn.commit", turn_id=1)
    (cancelled,) = opened.receive("turn.cancel", turn_id=1)
    metrics = cancelled.metrics
    assert metrics.timeline_ms == {"first_text": -30.0, "first_step": -35.0, "first_packet": -10.0}
    assert metrics.server_ttfa_ms == -10.0
    num_packets = len(opened.client.packets[1])
    assert (metrics.num_packets, metrics.num_frames) == (num_packets, num_packets + 1)
    assert metrics.num_samples == num_packets * FRAME_SAMPLES


def test_the_stages_of_a_turn_cancelled_before_its_commit_count_from_its_first_text(opened):
    opened.now_ns = 10 * MS
    opened.receive("text.append", turn_id=1, text="Hello there. This is a longer sentence. ")
    opened.now_ns = 30 * MS
    opened.run(4)
    (cancelled,) = opened.receive("turn.cancel", turn_id=1)
    timeline_ms = cancelled.metrics.timeline_ms
    assert timeline_ms == {"first_text": 0.0, "first_step": -5.0, "first_packet": 20.0}
    assert cancelled.metrics.server_ttfa_ms is None


def test_cancel_before_any_audio(opened):
    opened.receive("text.append", turn_id=1, text="Hello there, you")
    (cancelled,) = opened.receive("turn.cancel", turn_id=1)
    assert (cancelled.spoken_text, cancelled.remaining_text) == ("", "Hello there, you")
    assert commands(opened, CancelTurn)[0].heard_frames == 0
    assert cancelled.metrics.num_packets == 0
    assert cancelled.metrics.timeline_ms == {"first_text": 0.0}


def test_cancel_of_a_turn_that_the_engine_has_not_heard_of(opened):
    opened.receive("text.append", turn_id=1, text="Hel")
    (cancelled,) = opened.receive("turn.cancel", turn_id=1)
    assert cancelled.remaining_text == "Hel" and not commands(opened, CancelTurn)


def test_a_clock_beyond_the_audio_is_clamped(opened):
    opened.say(1, "Hello there. Bye.")
    opened.run(4)
    (cancelled,) = opened.receive("turn.cancel", turn_id=1, played_ms=1e9)
    assert cancelled.played_ms == 23 * FRAME_MS
    assert cancelled.spoken_text == "Hello there."


def test_a_done_turn_can_be_cancelled_while_it_plays(opened):
    opened.say(1, "Hello there. This is long.")
    opened.run()
    assert opened.client.ends == {1: ["turn.done"]}
    opened.now_ns = 500 * MS
    (cancelled,) = opened.receive("turn.cancel", turn_id=1, played_ms=24 * FRAME_MS)
    assert cancelled.spoken_text == "Hello there." and Drop(1) in opened.actions
    assert commands(opened, CancelTurn) == [CancelTurn(opened.slot, 1, 24)]
    (warning,) = opened.receive("turn.cancel", turn_id=1)
    assert warning.code == "unknown_turn"


def test_a_done_turn_is_forgotten_when_it_has_been_heard(opened):
    opened.say(1, "Hello.")
    opened.run()
    opened.now_ns = round(12 * FRAME_MS * MS) + 1_001 * MS
    (warning,) = opened.receive("turn.cancel", turn_id=1)
    assert (warning.code, warning.turn_id) == ("unknown_turn", 1)


def test_cancel_of_a_playing_turn_leaves_the_next_one_alone(opened):
    opened.say(1, "Hello there.")
    opened.say(2, "This is the next one.")
    opened.run(8)
    assert opened.client.ends == {1: ["turn.done"]} and opened.client.packets[2]
    (cancelled,) = opened.receive("turn.cancel", turn_id=1, played_ms=10.0)
    assert cancelled.remaining_text == "Hello there." and not commands(opened, CancelTurn)
    opened.run()
    assert opened.client.ends[2] == ["turn.done"]


def test_the_estimate_of_a_turn_starts_when_the_one_before_has_been_heard(opened):
    opened.say(1, "Hello there.")  # 24 frames: heard until 960 ms
    opened.say(2, "This is the next one.")
    opened.run()
    opened.now_ns = 1_360 * MS
    (cancelled,) = opened.receive("turn.cancel", turn_id=2)
    assert cancelled.played_ms == pytest.approx(400.0)


def test_cancel_before_ready_opens_the_slot_again_under_the_new_generation():
    harness = Harness()
    harness.receive("session.start", voice="bob")
    harness.say(1, "Hello there.")
    harness.receive("turn.cancel", turn_id=1)
    first, again = commands(harness, OpenSlot)
    assert again.slot == SlotRef(2, 6) and again.voices == first.voices
    assert types(harness.run()) == ["session.ready"]


def test_cancel_of_a_turn_after_the_slot_was_opened_again_does_not_roll_back(opened):
    opened.say(1, "Hello there.")
    opened.run()
    opened.receive("session.update", voice="bob")
    (cancelled,) = opened.receive("turn.cancel", turn_id=1, played_ms=0)
    assert cancelled.remaining_text == "Hello there." and not commands(opened, CancelTurn)


@pytest.mark.parametrize("is_ready", [True, False])
def test_cancel_of_a_playing_turn_rolls_back_under_new_sampling_too(opened, is_ready):
    """Voice and prompt stay, and with them what the model remembers."""
    opened.say(1, "Hello there.")
    opened.run()
    opened.receive("session.update", sampling={"temperature": 0.1}, max_lead_ms=100)
    if is_ready:
        opened.run()
    opened.receive("turn.cancel", turn_id=1, played_ms=10 * FRAME_MS)
    assert commands(opened, CancelTurn) == [CancelTurn(opened.slot, 1, 10)]
    assert types(opened.run()) == [] if is_ready else ["session.ready"]
