"""The performance gate: what it calls slower, what it compares, and how a baseline moves."""

import json
from pathlib import Path

import pytest

from bench_ttfa.gate_speed import BASELINE, freeze, gate, main, rates_of


def record(*per_stream: tuple[int, float], **facts: str) -> dict:
    """A run of bf16, by batch size."""
    frames = [
        {"format": "bf16", "batch": batch, "context": 600, "frames_per_s": rate * batch}
        for batch, rate in per_stream
    ]
    whole = {"model": "random:s2-pro", "gpu": "GPU", "software": {"commit": None}, "frames": frames}
    return whole | facts


@pytest.fixture
def baseline(tmp_path: Path) -> Path:
    file = tmp_path / "baselines" / "gpu.json"
    assert freeze(record((16, 100.0), (64, 50.0)), file) == 0
    return file


def test_five_percent_below_the_baseline_is_slower(baseline: Path, capsys) -> None:
    assert gate(record((16, 95.5), (64, 60.0)), baseline) == 0
    assert gate(record((16, 94.5), (64, 50.0)), baseline) == 1
    told = capsys.readouterr().out
    assert "bf16 c=16 context=600: 94.5 frames/s per stream, -5.5%" in told
    assert "2 of its 2 figures" in told


def test_a_run_that_measures_nothing_frozen_is_no_pass(baseline: Path) -> None:
    assert gate(record((2, 10.0)), baseline) == 2
    assert gate(record((16, 100.0), (2, 10.0)), baseline) == 0


@pytest.mark.parametrize("facts", [{"model": "random:tiny"}, {"gpu": "Other"}])
def test_another_gpu_or_model_has_no_baseline(baseline: Path, facts: dict[str, str]) -> None:
    assert gate(record((16, 1.0), **facts), baseline) == 2
    assert gate(record((16, 1.0)), baseline.with_name("none.json")) == 2


def test_freezing_one_batch_keeps_the_others(baseline: Path) -> None:
    assert freeze(record((16, 120.0)), baseline) == 0
    assert gate(record((64, 47.0)), baseline) == 1
    assert gate(record((16, 110.0)), baseline) == 1


def test_a_baseline_is_lowered_with_a_reason_only(baseline: Path, capsys) -> None:
    before = baseline.read_text()
    assert freeze(record((16, 94.0), (64, 60.0)), baseline) == 1
    assert "c=16 context=600: 94.0" in capsys.readouterr().out
    assert baseline.read_text() == before
    assert freeze(record((16, 94.0), (64, 60.0)), baseline, "a check that was missing") == 0
    assert json.loads(baseline.read_text())["lowered"] == [
        {
            "figure": "bf16 c=16 context=600",
            "from": 100.0,
            "to": 94.0,
            "reason": "a check that was missing",
        }
    ]


def test_noise_does_not_lower_a_baseline(baseline: Path) -> None:
    assert freeze(record((16, 98.0), (64, 60.0)), baseline) == 0
    figures = json.loads(baseline.read_text())["frames_per_s_per_stream"]
    assert list(figures.values()) == [100.0, 60.0]


def test_a_record_is_judged_where_there_is_no_gpu(baseline: Path, tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    command = [str(file), "--baseline", str(baseline)]
    file.write_text(json.dumps(record((16, 90.0))))
    assert main(command) == 1
    assert main([*command, "--freeze"]) == 1
    assert main([*command, "--freeze", "--lower", "more work"]) == 0
    assert main(command) == 0


def test_the_shipped_baseline_has_what_the_gate_is_for() -> None:
    frozen = json.loads(BASELINE.read_text("utf-8"))
    figures = frozen["frames_per_s_per_stream"]
    for form in ("bf16", "bsfp8"):
        assert all(figures[f"{form} c={batch} context=600"] > 0 for batch in (1, 16, 64))
    assert rates_of({"frames": []}) == {}
