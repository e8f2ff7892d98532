"""The engine alone: what its report says of calls that overlap, and a run without a device's times."""

import re
from pathlib import Path

import pytest

from bench_ttfa.engine import Bench, Span, Turns, overlap_ms, report, union_ms
from model.speech_model import load_speech_model


def test_the_time_of_calls_that_overlap_counts_once() -> None:
    spans = [
        Span("decode", 4, 0.0, 10.0),
        Span("codec", 8, 5.0, 12.0),
        Span("codec", 8, 20.0, 21.0),
    ]
    assert union_ms(spans) == 13.0
    assert overlap_ms(spans[0], spans[1]) == 5.0 and overlap_ms(spans[1], spans[2]) == 0.0


def test_a_report_says_what_a_step_takes_alone_and_beside_others() -> None:
    turns = Turns(num_frames=8)
    stamps = {"prefill_done": 2_000_000, "first_step": 3_000_000, "first_pcm": 9_000_000}
    turns.add(1_000_000, stamps)
    spans = [
        Span("decode", 4, 0.0, 6.0),
        Span("decode", 4, 7.0, 16.0, has_riders=True),
        Span("codec", 32, 8.0, 10.0),
    ]
    text = report("4 streams", turns, spans, 0.016, "host")
    assert "4 streams: 500 frames/s, 62 turns/s, TTFA ms 8.0/8.0" in text
    assert "first_step 1.0/1.0 first_pcm 6.0/6.0" in text
    assert "a step: alone 6.00 ms (1), riders + codec 9.00 ms (1)" in text
    assert "codec    62/s, busy 12%, size 32.0/32.0, by size <=32: 1 x 2.00 ms" in text
    assert "between steps 6.2%" in text


def test_streams_say_turn_after_turn(capsys: pytest.CaptureFixture[str]) -> None:
    model = load_speech_model(Path("random:tiny?frames=3"))
    bench = Bench(model, num_slots=2, delay_s=0.0)
    bench.start()
    bench.run("two", seconds=0.3, num_streams=2, spread_s=0.0)
    bench.engine.stop()
    text = capsys.readouterr().out
    assert "TTFA ms -" not in text
    assert re.search(r"two: [\d,]*[1-9][\d,]* frames/s", text), text
