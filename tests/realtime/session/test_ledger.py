"""The interruption ledger: whole words, verbatim sums, clamped clocks."""

import random

import pytest

from realtime.session.ledger import Ledger, SpeakingRate
from realtime.session.playback import PlaybackEstimate

FRAME_MS = 40.0
MS = 1_000_000


def make_ledger(text: str, *ends: int) -> Ledger:
    ledger = Ledger(FRAME_MS, SpeakingRate.typical(FRAME_MS))
    ledger.add_text(text)
    for end in ends:
        ledger.add_segment(end)
    return ledger


def spoken(ledger: Ledger, played_ms: float) -> str:
    return ledger.text[: ledger.num_spoken_chars(played_ms)]


def test_nothing_is_spoken_before_audio():
    ledger = make_ledger("One two.", 8)
    assert spoken(ledger, 0) == "" == spoken(ledger, 10_000)
    assert ledger.num_heard_frames(10_000) == 0


def test_words_are_shared_out_over_the_frames_of_an_ended_segment():
    ledger = make_ledger("aaaa bbbb cccc dddd", 19)
    ledger.add_frames(0, 0, 40)
    ledger.end_segment(0, 40)
    assert [spoken(ledger, ms) for ms in (0, 100, 300, 700, 1100, 1500, 1600, 9999)] == [
        "",
        "",
        "aaaa",
        "aaaa bbbb",
        "aaaa bbbb cccc",
        "aaaa bbbb cccc dddd",
        "aaaa bbbb cccc dddd",
        "aaaa bbbb cccc dddd",
    ]


def test_segments_follow_each_other_and_rounding_does_not_lose_the_last_word():
    ledger = make_ledger("One two. Three four. ", 8, 20)
    ledger.add_frames(0, 0, 20)
    ledger.end_segment(0, 20)
    ledger.add_frames(1, 20, 25)
    ledger.end_segment(1, 25)
    assert spoken(ledger, 20 * FRAME_MS - 5) == "One two."
    assert spoken(ledger, 45 * FRAME_MS - 5) == "One two. Three four."
    ledger.end_turn()
    assert spoken(ledger, 45 * FRAME_MS - 5) == "One two. Three four. "
    assert spoken(ledger, 20 * FRAME_MS) == "One two."


def test_a_silent_segment_is_passed_over():
    ledger = make_ledger("One. \U0001f600. Two.", 4, 7, 12)
    ledger.add_frames(0, 0, 10)
    ledger.end_segment(0, 10)
    ledger.end_segment(1, 0)
    ledger.add_frames(2, 10, 10)
    ledger.end_segment(2, 10)
    assert spoken(ledger, 10 * FRAME_MS) == "One."
    assert spoken(ledger, 12 * FRAME_MS) == "One. \U0001f600."
    assert spoken(ledger, 20 * FRAME_MS) == "One. \U0001f600. Two."


def test_a_running_segment_is_estimated_and_never_complete():
    ledger = make_ledger("word " * 19 + "word.", 100)
    ledger.add_frames(0, 0, 50)
    halfway = spoken(ledger, 50 * FRAME_MS)
    assert 5 <= halfway.count("word") <= 8
    ledger.add_frames(0, 50, 500)  # far slower than thought
    assert ledger.num_heard_frames(1e9) == 550


def test_the_rate_adapts_to_the_voice():
    rate = SpeakingRate.typical(FRAME_MS)
    before = rate.num_frames(100)
    for _ in range(10):
        rate.learn(100, 400)
    assert before < 200 < rate.num_frames(100) == pytest.approx(400, rel=0.1)
    rate.learn(0, 10)
    rate.learn(10, 0)
    assert rate.num_frames(100) == pytest.approx(400, rel=0.1)


def test_control_tags_take_no_time_and_numbers_take_more():
    ledger = make_ledger("<|speaker:0|> 1984 no", 21)
    ledger.add_frames(0, 0, 16)
    ledger.end_segment(0, 16)
    # The number weighs 13 letters of 16, its space among them, and is told when half of it is heard.
    assert spoken(ledger, 6.4 * FRAME_MS) == "<|speaker:0|>"
    assert spoken(ledger, 6.6 * FRAME_MS) == "<|speaker:0|> 1984"


def test_text_without_spaces_is_split_between_characters():
    ledger = make_ledger("\u4f60\u597d\u4e16\u754c\u3002", 5)
    ledger.add_frames(0, 0, 10)
    ledger.end_segment(0, 10)
    assert spoken(ledger, 5 * FRAME_MS) == "\u4f60\u597d\u4e16"


def test_spoken_text_grows_with_time_and_splits_at_word_borders():
    rng = random.Random(3)
    for _ in range(100):
        words = ["x" * rng.randint(1, 9) for _ in range(rng.randint(1, 30))]
        text = " ".join(words)
        ends = sorted({rng.randint(1, len(text)) for _ in range(3)} | {len(text)})
        ledger = make_ledger(text, *ends)
        first = 0
        for segment in range(rng.randint(1, len(ends))):
            count = rng.randint(0, 40)
            ledger.add_frames(segment, first, count)
            first += count
            ledger.end_segment(segment, count)
        ends_of_words = {i for i in range(len(text) + 1) if i == len(text) or text[i] == " "}
        seen = [ledger.num_spoken_chars(ms) for ms in range(0, 5000, 37)]
        assert seen == sorted(seen) and seen[0] == 0
        assert set(seen) <= ends_of_words | set(ends) | {0}


def test_the_listener_plays_as_it_arrives_and_waits_when_there_is_nothing():
    playback = PlaybackEstimate(not_before_ns=0)
    playback.sent(100, now_ns=50 * MS, text_ns=0)
    assert playback.end_ns == 150 * MS
    assert [playback.played_ms(t * MS) for t in (50, 80, 150, 300)] == [0, 30, 100, 100]
    playback.sent(160, now_ns=300 * MS, text_ns=0)  # after a gap of 150 ms
    assert [playback.played_ms(t * MS) for t in (300, 330, 360)] == [100, 130, 160]
    assert (playback.num_underruns, playback.worst_gap_ms) == (1, 150.0)
    playback.sent(200, now_ns=500 * MS, text_ns=400 * MS)  # whose text came after its end
    playback.sent(240, now_ns=510 * MS, text_ns=400 * MS)
    assert (playback.num_underruns, playback.worst_gap_ms) == (1, 150.0)


def test_the_listener_finishes_the_turn_before_first():
    playback = PlaybackEstimate(not_before_ns=500 * MS)
    playback.sent(100, now_ns=50 * MS, text_ns=0)
    assert playback.num_underruns == 0
    assert [playback.played_ms(t * MS) for t in (50, 500, 550, 600)] == [0, 0, 50, 100]
