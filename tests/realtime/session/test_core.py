"""The session: life of a turn, barge-in, queueing, updates, closing, and every kind of bad input."""

import json

import pytest

from realtime.errors import EngineError, PlosiveError
from realtime.pingpong.messages import (
    CancelTurn,
    EndTurn,
    EngineWarning,
    OpenSlot,
    SetText,
    SlotClosed,
    SlotFailed,
    SlotReady,
    SlotRef,
)
from realtime.session.actions import Bump, Close, Drop, OpenEncoder, SendAudio, Submit
from realtime.session.core import Session, SessionState
from realtime.session.limits import SessionLimits
from realtime.wire import AudioFormat, EffectiveFormat
from tests.realtime.session.harness import FRAME_SAMPLES, INFO, Harness, find_voice

MS = 1_000_000
FRAME_MS = 40.0


@pytest.fixture
def opened() -> Harness:
    harness = Harness()
    harness.start()
    return harness


def types(messages) -> list[str]:
    return [message.type for message in messages]


def commands(harness: Harness, kind: type) -> list:
    submitted = [a.command for a in harness.actions if isinstance(a, Submit)]
    return [command for command in submitted if isinstance(command, kind)]


# ---------------------------------------------------------------------------- start and update


def test_start_opens_the_slot_with_the_models_defaults():
    harness = Harness()
    harness.receive("session.start")
    encoder, submit = harness.actions
    assert encoder == OpenEncoder(SlotRef(2, 5), AudioFormat())
    opening = submit.command
    assert opening.voices == (find_voice("anna"),) and opening.prompt == ""
    assert opening.max_lead_ms == SessionLimits().max_lead_ms
    sampling = opening.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (
        0.7,
        0.9,
        30,
        77,
    )
    (ready,) = harness.run()
    assert (ready.type, ready.session_id, ready.model, ready.voice) == (
        "session.ready",
        "s-1",
        "fake",
        "anna",
    )
    assert (ready.prefill_ms, ready.cached, ready.frame_rate_hz) == (3.0, False, 25.0)


def test_start_takes_what_the_client_asks_for_within_limits():
    harness = Harness(max_lead_cap_ms=5_000)
    harness.receive(
        "session.start",
        voice="bob",
        prompt="calm",
        sampling={"temperature": 0.0, "top_p": 0.5, "top_k": 1, "seed": 0},
        max_lead_ms=60_000,
        format={"codec": "pcm_s16le", "sample_rate": 8000},
    )
    (opening,) = commands(harness, OpenSlot)
    assert opening.prompt == "calm" and opening.max_lead_ms == 5_000
    sampling = opening.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.0, 0.5, 1, 0)
    (ready,) = harness.run()
    assert (ready.voice, ready.max_lead_ms) == ("bob", 5_000)
    assert (ready.format.codec, ready.format.sample_rate) == ("pcm_s16le", 8000)


def test_the_format_is_described_by_the_encoder():
    described = EffectiveFormat(codec="opus", sample_rate=24_000, pre_skip_samples=156)
    session = Session(
        "s", SlotRef(0, 1), INFO, find_voice, SessionLimits(), lambda: 1, lambda _: described
    )
    session.receive_text('{"type":"session.start"}', 0)
    (send,) = session.engine_event(SlotReady(SlotRef(0, 1), 1.0, True), 0)
    assert send.message.format == described


def test_text_may_come_before_ready():
    harness = Harness()
    harness.receive("session.start")
    harness.say(1, "Hello there.")
    assert types(harness.run())[0] == "session.ready"
    assert harness.client.ends == {1: ["turn.done"]}


def test_update_between_turns_prefills_at_once(opened):
    assert opened.receive("session.update", voice="bob", sampling={"temperature": 0.1}) == []
    (ready,) = opened.run()
    assert ready.voice == "bob"
    opening = commands(opened, OpenSlot)[-1]
    assert opening.sampling.temperature == 0.1 and opening.sampling.top_p == 0.9


def test_update_without_a_change_is_answered_at_once(opened):
    (ready,) = opened.receive("session.update", voice="anna", prompt="")
    assert (ready.type, ready.cached, ready.prefill_ms) == ("session.ready", True, 0.0)
    assert len(commands(opened, OpenSlot)) == 1


def test_update_before_ready_is_answered_by_the_same_ready():
    harness = Harness()
    harness.receive("session.start")
    assert harness.receive("session.update", voice="anna") == []
    assert harness.receive("session.update", voice="bob", max_lead_ms=100) == []
    (ready,) = harness.run()
    assert (ready.voice, ready.max_lead_ms) == ("bob", 100)


def test_update_during_a_turn_counts_from_the_next_new_turn(opened):
    opened.say(1, "One is spoken by Anna.")
    opened.say(2, "Two as well.")
    opened.run(2)
    assert opened.receive("session.update", voice="bob") == []
    opened.say(3, "Three is Bob.")
    messages = opened.run()
    assert opened.client.ends == {i: ["turn.done"] for i in (1, 2, 3)}
    order = [(m.type, getattr(m, "turn_id", None)) for m in messages if m.type != "turn.text"]
    assert order[-4:] == [
        ("turn.done", 2),
        ("session.ready", None),
        ("turn.started", 3),
        ("turn.done", 3),
    ]
    assert [c.voices[0].name for c in commands(opened, OpenSlot)] == ["anna", "bob"]


def test_update_during_the_last_turn_prefills_when_it_ends(opened):
    opened.say(1, "One.")
    opened.receive("session.update", prompt="loud")
    assert types(opened.run())[-2:] == ["turn.done", "session.ready"]
    assert commands(opened, OpenSlot)[-1].prompt == "loud"


def test_a_prompt_that_the_model_cannot_use_is_a_warning():
    session = Session(
        "s",
        SlotRef(0, 1),
        INFO.__class__(**{f: getattr(INFO, f) for f in INFO.__slots__} | {"has_prompt": False}),
        find_voice,
        SessionLimits(),
        lambda: 1,
    )
    warning, _, submit = session.receive_text('{"type":"session.start","prompt":"sad"}', 0)
    assert warning.message.code == "prompt_ignored" and submit.command.prompt == ""
    (warning,) = session.receive_text('{"type":"session.update","prompt":"sad"}', 0)
    assert warning.message.code == "prompt_ignored"


# ---------------------------------------------------------------------------- life of a turn


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
    assert metrics.timeline_ms == expected


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


# ---------------------------------------------------------------------------- several turns


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


# ---------------------------------------------------------------------------- barge-in


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
    opened.run(4)
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


# ---------------------------------------------------------------------------- the end


def test_close_finishes_what_is_committed(opened):
    opened.say(1, "Hello there.")
    opened.receive("text.append", turn_id=2, text="Never to be finished")
    (cancelled,) = opened.receive("session.close")
    assert (cancelled.turn_id, cancelled.remaining_text) == (2, "Never to be finished")
    assert opened.session.state is SessionState.CLOSING
    (error,) = opened.receive("text.append", turn_id=3, text="No.")
    assert (error.code, error.turn_id) == ("session_closing", 3)
    (error,) = opened.receive("session.update", voice="bob")
    assert error.code == "session_closing"
    assert types(opened.run())[-1] == "turn.done"
    assert opened.client.close == Close(1000, "session_closed")
    assert opened.engine.is_closed and opened.session.is_closed


def test_close_of_an_idle_or_unopened_session_is_immediate(opened):
    opened.receive("session.close")
    assert opened.client.close == Close(1000, "session_closed")
    harness = Harness()
    harness.receive("session.close")
    assert harness.client.close == Close(1000, "session_closed") and harness.engine.is_closed


def test_close_with_only_uncommitted_text(opened):
    opened.receive("text.append", turn_id=1, text="Hello there. How")
    opened.run()
    (cancelled,) = opened.receive("session.close")
    assert cancelled.spoken_text + cancelled.remaining_text == "Hello there. How"
    assert opened.client.close == Close(1000, "session_closed")


def test_shut_down_lets_open_turns_end(opened):
    opened.receive("text.append", turn_id=1, text="Hello there. And")
    (closing,) = opened.apply(opened.session.shut_down("shutting_down", 0))
    assert (closing.type, closing.reason, closing.deadline_ms) == (
        "session.closing",
        "shutting_down",
        30_000,
    )
    assert opened.apply(opened.session.shut_down("shutting_down", 0)) == []
    opened.receive("text.append", turn_id=1, text=" bye.")
    opened.receive("turn.commit", turn_id=1)
    assert types(opened.run())[-1] == "turn.done"
    assert opened.client.close == Close(1001, "shutting_down")


def test_shut_down_and_then_close_keeps_the_first_reason(opened):
    opened.receive("text.append", turn_id=1, text="Hello")
    opened.apply(opened.session.shut_down("shutting_down", 0))
    opened.receive("session.close")
    assert opened.client.close == Close(1001, "shutting_down")


def test_shut_down_before_the_start():
    harness = Harness()
    assert types(harness.apply(harness.session.shut_down("maintenance", 0))) == ["session.closing"]
    assert harness.client.close == Close(1001, "maintenance")


def test_disconnect_frees_the_slot_at_once(opened):
    opened.say(1, "Hello there.")
    opened.run(2)
    before = len(opened.actions)
    assert opened.apply(opened.session.disconnected(0)) == []
    bump, submit = opened.actions[before:]
    assert bump == Bump(SlotRef(2, 6)) and submit.command.slot == SlotRef(2, 6)
    assert opened.session.disconnected(0) == []


def test_nothing_has_effect_after_the_end(opened):
    opened.receive("session.close")
    session, slot = opened.session, opened.slot
    assert session.receive_text('{"type":"session.start"}', 0) == []
    assert session.receive_text("{", 0) == []
    assert session.receive_binary(3, 0) == []
    assert session.engine_event(SlotReady(slot, 1.0, True), 0) == []
    assert session.shut_down("shutting_down", 0) == []
    assert session.fail(EngineError("engine_error", "late"), 0) == []
    assert session.disconnected(0) == []


def test_a_failed_slot_ends_every_turn_and_the_session(opened):
    opened.say(1, "Hello there.")
    opened.say(2, "More.")
    messages = opened.apply(opened.session.engine_event(SlotFailed(opened.slot, "boom"), 0))
    assert [(m.code, m.turn_id, m.fatal) for m in messages] == [
        ("engine_error", 1, False),
        ("engine_error", 2, False),
        ("engine_error", None, True),
    ]
    assert opened.client.close == Close(1011, "engine_error")


@pytest.mark.parametrize(
    ("code", "close_code"),
    [("engine_overloaded", 1011), ("client_too_slow", 4001), ("idle_timeout", 4000)],
)
def test_the_server_can_fail_a_session(opened, code, close_code):
    (error,) = opened.apply(opened.session.fail(PlosiveError(code, "why"), 0))
    assert (error.code, error.message, error.fatal) == (code, "why", True)
    assert opened.client.close == Close(close_code, code)


def test_events_that_are_not_the_sessions_business_have_no_effect(opened):
    assert opened.session.engine_event(SlotClosed(opened.slot), 0) == []
    assert opened.session.engine_event(SlotReady(opened.slot, 1.0, True), 0) == []
    assert opened.session.engine_event(SlotReady(SlotRef(2, 4), 1.0, True), 0) == []


def test_events_of_a_turn_that_is_not_open_have_no_effect(opened):
    other = Harness()
    other.start()
    other.say(9, "Hello.")
    while other.engine.step():
        pass
    for event in other.engine.in_flight:
        assert opened.session.engine_event(event, 0) == []


# ---------------------------------------------------------------------------- bad input

BAD_FRAMES = [
    ("{", "invalid_json"),
    ("", "invalid_json"),
    ("\x00", "invalid_json"),
    ("[" * 100_000, "invalid_json"),
    ('{"type":"text.append","turn_id":1,"text":NaN}', "invalid_json"),
    ("[]", "invalid_message"),
    ("{}", "invalid_message"),
    ('{"type":7}', "invalid_message"),
    ('{"type":"text.speak","turn_id":1}', "unknown_type"),
    ('{"type":"turn.done","turn_id":1}', "unknown_type"),
    ('{"type":"text.append","turn_id":1}', "invalid_message"),
    ('{"type":"text.append","turn_id":-1,"text":"a"}', "invalid_message"),
    ('{"type":"text.append","turn_id":"1","text":"a"}', "invalid_message"),
    ('{"type":"text.append","turn_id":4294967296,"text":"a"}', "invalid_message"),
    ('{"type":"turn.cancel","turn_id":1,"played_ms":-1}', "invalid_message"),
    ('{"type":"turn.cancel","turn_id":1,"played_ms":1e999}', "invalid_message"),
    ('{"type":"session.update","sampling":{"temperature":9}}', "invalid_message"),
    ('{"type":"session.update","sampling":{"top_p":0}}', "invalid_message"),
    ('{"type":"session.update","sampling":{"top_k":0}}', "invalid_message"),
    ('{"type":"session.update","voice":"nobody"}', "voice_not_found"),
    ('{"type":"session.start"}', "already_started"),
    (json.dumps({"type": "x", "pad": "y" * 300_000}), "message_too_large"),
]


@pytest.mark.parametrize(("frame", "code"), BAD_FRAMES, ids=range(len(BAD_FRAMES)))
def test_a_bad_frame_in_the_middle_of_a_turn_loses_nothing(opened, frame, code):
    opened.receive("text.append", turn_id=1, text="Hello there. How")
    opened.run(2)
    (error,) = opened.receive_frame(frame)
    assert (error.type, error.code, error.fatal) == ("error", code, False)
    assert error.turn_id is None or (error.turn_id == 1 and error.keeps_turn)
    assert error.message
    opened.receive("text.append", turn_id=1, text=" are you?")
    opened.receive("turn.commit", turn_id=1)
    opened.run()
    assert opened.client.ends == {1: ["turn.done"]}
    assert opened.engine.texts[1] == ["Hello there.", "How are you?"]


def test_a_binary_frame_is_an_error_and_loses_nothing(opened):
    (error,) = opened.apply(opened.session.receive_binary(1_234, 0))
    assert (error.code, error.fatal) == ("binary_not_expected", False)
    assert "1,234" in error.message
    opened.say(1, "Hello.")
    assert types(opened.run())[-1] == "turn.done"


@pytest.mark.parametrize(
    "message",
    [
        {"type": "text.append", "turn_id": 1, "text": "a"},
        {"type": "text.flush", "turn_id": 1},
        {"type": "turn.commit", "turn_id": 1},
        {"type": "turn.cancel", "turn_id": 1},
        {"type": "session.update"},
    ],
)
def test_anything_before_the_start_is_an_error(message):
    harness = Harness()
    (error,) = harness.receive_frame(json.dumps(message))
    assert (error.code, error.fatal) == ("not_started", False)
    assert message["type"] in error.message
    harness.start()


@pytest.mark.parametrize(
    "fields",
    [
        {"voice": "nobody"},
        {"voice": ""},
        {"sampling": {"temperature": 2.5}},
        {"format": {"codec": "opus", "sample_rate": 44_100}},
        {"max_lead_ms": 1},
        {"prompt": "x" * 5_000},
    ],
)
def test_a_bad_start_leaves_the_session_ready_for_a_good_one(fields):
    harness = Harness()
    messages = harness.receive("session.start", **fields)
    if fields != {"voice": ""}:  # empty: the default voice
        assert types(messages) == ["error"] and not messages[0].fatal
        assert not harness.actions[1:]
        harness.start()
    harness.say(1, "Hello.")
    harness.run()
    assert harness.client.ends == {1: ["turn.done"]}


def test_text_that_is_too_long_is_refused_whole(opened):
    opened.receive("text.append", turn_id=1, text="Hello there. ")
    (error,) = opened.receive("text.append", turn_id=1, text="a" * 200_000)
    assert (error.code, error.param, error.turn_id) == ("text_too_long", "text", 1)
    assert error.keeps_turn
    assert "200,000" in error.message and "20,000" in error.message and "turn 1" in error.message
    opened.say(1, "Bye.")
    opened.run()
    assert opened.engine.texts[1] == ["Hello there.", "Bye."]


def test_a_turn_that_grows_too_long_keeps_what_it_has(opened):
    for _ in range(3):
        assert opened.receive("text.append", turn_id=1, text="a " * 10_000) == []
    (error,) = opened.receive("text.append", turn_id=1, text="b")
    assert (error.code, error.turn_id, error.keeps_turn) == ("turn_too_long", 1, True)
    opened.receive("turn.commit", turn_id=1)
    opened.run()
    assert opened.client.ends == {1: ["turn.done"]}
    assert sum(text.count("a") for text in opened.engine.texts[1]) == 30_000


def test_text_beyond_the_permitted_rate_is_refused_until_its_time(opened):
    harness = Harness(max_text_chars_per_s=100, text_burst_chars=200)
    harness.start()
    assert harness.receive("text.append", turn_id=1, text="a " * 100) == []
    harness.now_ns += 100 * MS  # ten characters' worth
    (error,) = harness.receive("text.append", turn_id=1, text="b " * 20)
    assert (error.code, error.turn_id, error.keeps_turn) == ("text_rate_exceeded", 1, True)
    assert error.retry_after_ms == 300 and "0.3 s" in error.message and not error.fatal
    (error,) = harness.receive("text.append", turn_id=2, text="b " * 20)
    assert error.turn_id == 2 and error.retry_after_ms == 300, "of the session, not of the turn"
    harness.now_ns += error.retry_after_ms * MS
    assert harness.receive("text.append", turn_id=1, text="b " * 20) == []
    assert harness.receive("turn.cancel", turn_id=1) != [], "no other message is held back"
    harness.say(3, "")
    harness.run()
    assert harness.client.ends[3] == ["turn.done"]


def test_a_rate_of_zero_permits_any_text():
    harness = Harness(max_text_chars_per_s=0)
    harness.start()
    for turn_id in range(10):
        harness.say(turn_id, "a " * 10_000)


def test_text_after_the_commit_is_an_error_that_names_the_turn(opened):
    opened.say(3, "Hello there.")
    (error,) = opened.receive("text.append", turn_id=3, text="More.")
    assert (error.code, error.turn_id, error.keeps_turn) == ("turn_committed", 3, True)
    assert "turn 3" in error.message
    opened.run()
    assert opened.client.ends == {3: ["turn.done"]}


def test_an_invalid_message_of_a_turn_names_it_and_the_turn_goes_on(opened):
    opened.receive("text.append", turn_id=1, text="Hello there. ")
    (error,) = opened.receive("text.append", turn_id=1, text=5)
    assert (error.code, error.turn_id, error.keeps_turn) == ("invalid_message", 1, True)
    (error,) = opened.receive("text.append", turn_id="one", text="a")
    assert (error.code, error.turn_id, error.keeps_turn) == ("invalid_message", None, False)
    opened.receive("turn.commit", turn_id=1)
    opened.run()
    assert opened.client.ends == {1: ["turn.done"]}


@pytest.mark.parametrize("turn_id", [0, 4, 5])
def test_an_old_turn_id_is_an_error(opened, turn_id):
    opened.say(5, "Hello.")
    opened.run()
    (error,) = opened.receive("text.append", turn_id=turn_id, text="Again.")
    assert (error.code, error.turn_id) == ("turn_id_used", turn_id) and "6" in error.message
    assert opened.receive("turn.commit", turn_id=turn_id) == []
    assert opened.receive("text.flush", turn_id=turn_id) == []
    assert opened.session.num_turns == 0


def test_cancel_of_an_unknown_turn_is_a_warning_and_a_no_op(opened):
    opened.say(1, "Hello.")
    (warning,) = opened.receive("turn.cancel", turn_id=2, played_ms=10)
    assert (warning.type, warning.code, warning.turn_id) == ("warning", "unknown_turn", 2)
    opened.run()
    assert opened.client.ends == {1: ["turn.done"]}


@pytest.mark.parametrize(
    "text",
    [
        "nul \u0000 here.",
        "lone \ud800 half.",
        "\u202eabc\u202c \u200fdef.",
        "bell \u0007.",
        "\ufeffbom.",
    ],
)
def test_odd_characters_are_spoken_around_and_kept_in_the_ledger(opened, text):
    opened.receive("text.append", turn_id=1, text=text)
    opened.receive("turn.commit", turn_id=1)
    opened.run(2)
    (cancelled,) = opened.receive("turn.cancel", turn_id=1, played_ms=200)
    whole = cancelled.spoken_text + cancelled.remaining_text
    assert whole == text.replace("\ud800", "\ufffd")


def test_a_surrogate_pair_in_two_messages_is_one_character(opened):
    opened.receive_frame('{"type":"text.append","turn_id":1,"text":"Hi \\ud83d"}')
    opened.receive_frame('{"type":"text.append","turn_id":1,"text":"\\ude00."}')
    opened.receive("turn.commit", turn_id=1)
    opened.run()
    assert opened.engine.texts[1] == ["Hi \U0001f600."]
    assert opened.client.told[1] == "Hi \U0001f600."


def test_audio_is_sent_with_the_kind_of_the_format():
    harness = Harness()
    harness.start(format={"codec": "pcm_s16le", "sample_rate": 24_000})
    harness.say(1, "Hello.")
    harness.run()
    sends = [a for a in harness.actions if isinstance(a, SendAudio)]
    assert {packet.kind.name for send in sends for packet in send.packets} == {"PCM_S16LE"}
