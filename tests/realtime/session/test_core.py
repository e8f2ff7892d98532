"""A session's start, its updates, and its ends."""

import pytest

from realtime.errors import EngineError, PlosiveError
from realtime.pingpong.messages import OpenSlot, SlotClosed, SlotFailed, SlotReady, SlotRef
from realtime.session.actions import Bump, Close, OpenEncoder, SendAudio
from realtime.session.core import Session, SessionState
from realtime.session.limits import SessionLimits
from realtime.wire import AudioFormat, EffectiveFormat
from tests.realtime.session.harness import INFO, Harness, commands, find_voice, types

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
    (closing,) = opened.apply(opened.session.shut_down("shutting_down"))
    assert (closing.type, closing.reason, closing.deadline_ms) == (
        "session.closing",
        "shutting_down",
        30_000,
    )
    assert opened.apply(opened.session.shut_down("shutting_down")) == []
    opened.receive("text.append", turn_id=1, text=" bye.")
    opened.receive("turn.commit", turn_id=1)
    assert types(opened.run())[-1] == "turn.done"
    assert opened.client.close == Close(1001, "shutting_down")


def test_shut_down_and_then_close_keeps_the_first_reason(opened):
    opened.receive("text.append", turn_id=1, text="Hello")
    opened.apply(opened.session.shut_down("shutting_down"))
    opened.receive("session.close")
    assert opened.client.close == Close(1001, "shutting_down")


def test_shut_down_before_the_start():
    harness = Harness()
    assert types(harness.apply(harness.session.shut_down("maintenance"))) == ["session.closing"]
    assert harness.client.close == Close(1001, "maintenance")


def test_disconnect_frees_the_slot_at_once(opened):
    opened.say(1, "Hello there.")
    opened.run(2)
    before = len(opened.actions)
    assert opened.apply(opened.session.disconnected()) == []
    bump, submit = opened.actions[before:]
    assert bump == Bump(SlotRef(2, 6)) and submit.command.slot == SlotRef(2, 6)
    assert opened.session.disconnected() == []


def test_nothing_has_effect_after_the_end(opened):
    opened.receive("session.close")
    session, slot = opened.session, opened.slot
    assert session.receive_text('{"type":"session.start"}', 0) == []
    assert session.receive_text("{", 0) == []
    assert session.receive_binary(3) == []
    assert session.engine_event(SlotReady(slot, 1.0, True), 0) == []
    assert session.shut_down("shutting_down") == []
    assert session.fail(EngineError("engine_error", "late")) == []
    assert session.disconnected() == []


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
    (error,) = opened.apply(opened.session.fail(PlosiveError(code, "why")))
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


def test_audio_is_sent_with_the_kind_of_the_format():
    harness = Harness()
    harness.start(format={"codec": "pcm_s16le", "sample_rate": 24_000})
    harness.say(1, "Hello.")
    harness.run()
    sends = [a for a in harness.actions if isinstance(a, SendAudio)]
    assert {packet.kind.name for send in sends for packet in send.packets} == {"PCM_S16LE"}
