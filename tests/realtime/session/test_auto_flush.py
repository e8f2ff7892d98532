"""A sentence that no text follows is spoken without a flush; what may still go on waits."""

import pytest

from realtime.session.segmenter import Segmenter, SegmentPolicy
from tests.realtime.session.harness import Harness

MS = 1_000_000
GAP_MS = 300


@pytest.fixture
def harness() -> Harness:
    harness = Harness(auto_flush_ms=GAP_MS)
    harness.start()
    return harness


def pause(harness: Harness, ms: int) -> None:
    """As a server does: ask when, then say that it is then."""
    end_ns = harness.now_ns + ms * MS
    while (due_ns := harness.session.auto_flush_ns) is not None and due_ns <= end_ns:
        harness.now_ns = max(harness.now_ns, due_ns)
        harness.apply(harness.session.auto_flush(harness.now_ns))
    harness.now_ns = end_ns


@pytest.mark.parametrize(
    ("text", "is_over"),
    [
        ("Hello there.", True),
        ("Hello there. Yes.", True),
        ('He said "no."', True),
        ("Really?!", True),
        ("It was in 2024.", True),
        ("\u4f60\u597d\u3002", True),
        ("Hello there. A title\n\n", True),
        ("Let me check that,", False),
        ("Let me check\n", False),
        ("Let me check that", False),
        ("I have met Dr.", False),
        ("She lives in the U.S.", False),
        ("Hello there. And", False),
        ("I will [", False),
        ("...", False),
        ("", False),
    ],
)
def test_what_is_over_without_what_follows(text, is_over):
    segmenter = Segmenter(SegmentPolicy(max_chars=200))
    segmenter.append(text)
    assert segmenter.ends_a_sentence == is_over


def test_the_last_sentence_is_spoken_when_nothing_follows(harness):
    harness.receive("text.append", turn_id=1, text="One moment, please. Yes.")
    harness.run()
    pause(harness, GAP_MS - 1)
    assert harness.engine.texts[1] == ["One moment, please."]
    pause(harness, 1)
    harness.run()
    assert harness.engine.texts[1] == ["One moment, please.", "Yes."]
    assert 1 not in harness.client.ends  # the turn stays open
    harness.say(1, " And now more.")
    harness.run()
    assert harness.engine.texts[1] == ["One moment, please.", "Yes.", "And now more."]
    assert harness.client.ends == {1: ["turn.done"]}


def test_empty_text_is_no_text(harness):
    harness.receive("text.append", turn_id=1, text="One moment, please. Yes.")
    for _ in range(3):
        pause(harness, GAP_MS // 2)
        harness.receive("text.append", turn_id=1, text="")
    assert harness.engine.texts[1] == ["One moment, please.", "Yes."]


def test_text_that_goes_on_in_time_is_one_sentence(harness):
    for piece in ("It costs ", "$3.", "50 in ", "all."):
        harness.receive("text.append", turn_id=1, text=piece)
        pause(harness, GAP_MS - 1)
    assert 1 not in harness.engine.texts or not harness.engine.texts[1]
    pause(harness, 1)
    assert harness.engine.texts[1] == ["It costs $3.50 in all."]


def test_half_a_sentence_waits_for_the_rest(harness):
    harness.receive("text.append", turn_id=1, text="Let me check that for you")
    pause(harness, 10_000)
    assert not harness.engine.texts.get(1)
    harness.receive("text.append", turn_id=1, text=" now.")
    pause(harness, GAP_MS)
    assert harness.engine.texts[1] == ["Let me check that for you now."]


def test_nothing_is_due_when_nothing_waits(harness):
    assert harness.session.auto_flush_ns is None
    harness.receive("text.append", turn_id=1, text="Hello there.")
    assert harness.session.auto_flush_ns == harness.now_ns + GAP_MS * MS
    harness.receive("text.flush", turn_id=1)
    assert harness.session.auto_flush_ns is None
    harness.say(1, "Bye.")
    assert harness.session.auto_flush_ns is None
    harness.receive("text.append", turn_id=2, text="Hello there.")
    harness.receive("turn.cancel", turn_id=2)
    assert harness.session.auto_flush_ns is None
    harness.receive("text.append", turn_id=3, text="Hello there.")
    harness.apply(harness.session.disconnected())
    assert harness.session.auto_flush_ns is None
    assert harness.session.auto_flush(harness.now_ns) == []


def test_it_can_be_switched_off():
    harness = Harness(auto_flush_ms=0)
    harness.start()
    harness.receive("text.append", turn_id=1, text="Hello there.")
    assert harness.session.auto_flush_ns is None
