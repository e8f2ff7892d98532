"""The engine alone: what its report says of calls that overlap, and a run without a device's times."""

import json
from pathlib import Path

import pytest

from bench_ttfa.engine import main
from bench_ttfa.engine_figures import Span, Turns, figures, overlap_ms, told, union_ms
from bench_ttfa.provenance import source_digest


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
    text = told("4 streams", figures(turns, spans, 0.016, {"a step": 7.2}))
    assert "4 streams: 500 frames/s, 62 turns/s, TTFA ms 8.0/8.0" in text
    assert "first_step 1.0/1.0 first_pcm 6.0/6.0" in text
    assert "a step: alone 6.00 ms (1), riders + codec 9.00 ms (1)" in text
    assert "codec    62/s, busy 12%, size 32.0/32.0, by size <=32: 1 x 2.00 ms" in text
    assert "between steps 6.2%" in text


def test_streams_say_turn_after_turn_and_the_record_says_how(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "record.json"
    options = ["--model", "random:tiny?frames=3", "--device", "cpu", "--streams", "2"]
    assert main([*options, "--seconds", "0.3", "--delay-ms", "0", "--json", str(path)]) == 0
    record = json.loads(path.read_text("utf-8"))
    assert list(record["runs"]) == ["2 streams", "2 that begin at once"]
    text = capsys.readouterr().out
    for name, run in record["runs"].items():
        assert run["frames_per_s"] > 0 and run["ttfa_ms"]["n"] > 0
        assert told(name, run) in text
    assert record["software"]["sources"] == source_digest() and record["machine"]["cpu"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--streams", "0"], "got '0', expected a whole number of at least 1"),
        (["--seconds", "0"], "got '0', expected a number of more than 0"),
        (["--delay-ms", "-1"], "expected a number of more than 0"),
    ],
)
def test_what_cannot_be_run_is_told_at_once(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as status:
        main(["--device", "cpu", *options])
    assert status.value.code == 2 and message in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_told_before_the_model_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench_ttfa.engine.load_speech_model", None)
    assert main(["--device", "cpu", "--json", str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"bench_ttfa.engine: {tmp_path}: Is a directory\n"
