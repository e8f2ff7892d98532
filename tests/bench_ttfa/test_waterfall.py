"""Stages from stamps, and their picture in characters."""

import pytest

from bench_ttfa.waterfall import WIDTH, draw, stages, timelines


def turn(ttfa_ms: float = 12.0, error: str | None = None, **timeline_ms: float) -> dict:
    return {"error": error, "timeline_ms": timeline_ms, "ttfa_ms": ttfa_ms}


def test_stages_follow_their_median_time_and_count_from_the_one_before() -> None:
    turns = [turn(prefill_done=2.0, first_step=3.0, first_pcm=9.0) for _ in range(3)]
    turns.append(turn(ttfa_ms=30.0, prefill_done=4.0, first_pcm=20.0))  # no first_step told
    found = stages(timelines(turns))
    assert [each["stage"] for each in found] == [
        "prefill_done",
        "first_step",
        "first_pcm",
        "client",
    ]
    assert [each["at"]["p50"] for each in found] == [2.0, 3.0, 9.0, 12.0]
    assert [each["took"]["p50"] for each in found] == [2.0, 1.0, 6.0, 3.0]
    assert found[1]["took"]["n"] == 3
    assert found[2]["took"]["max"] == 16.0, "since prefill_done, which that turn had last"


def test_turns_that_failed_or_were_cut_have_no_stages() -> None:
    turns = [turn(error="timeout", first_pcm=1.0), turn(), turn(ttfa_ms=None, first_pcm=1.0)]
    assert timelines(turns) == []
    assert draw("c=1", stages([])) == "c=1: the server told no stages"


def test_bars_stand_where_the_time_went() -> None:
    lines = draw("c=1", stages(timelines([turn(ttfa_ms=40.0, first_step=10.0, first_pcm=30.0)])))
    _, first_step, first_pcm, client = lines.splitlines()
    assert first_step.endswith("|" + 10 * "#")
    assert first_pcm.endswith("|" + 10 * " " + 20 * "#")
    assert client.endswith("|" + 30 * " " + 10 * "#")
    assert "+20.00 / +20.00" in first_pcm


def test_no_bar_is_longer_than_the_picture() -> None:
    turns = [turn(ttfa_ms=40.0, first_step=-20.0, first_pcm=40.0)]
    _, _, first_pcm, _ = draw("c=1", stages(timelines(turns))).splitlines()
    assert first_pcm.endswith("|" + WIDTH * "#")


@pytest.mark.parametrize("first_ms", [-30.0, 0.0])
def test_stages_before_the_commit_have_no_bar(first_ms: float) -> None:
    """Text that streams is spoken before it is complete."""
    text = draw("c=1", stages(timelines([turn(ttfa_ms=first_ms + 1, first_step=first_ms)])))
    assert "first_step" in text and "client" in text
