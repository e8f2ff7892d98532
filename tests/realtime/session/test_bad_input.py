"""What a client does wrong: it gets an error, and nothing is lost but the message."""

import json

import pytest

from tests.realtime.session.harness import MS, Harness, types

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
    (error,) = opened.apply(opened.session.receive_binary(1_234))
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
