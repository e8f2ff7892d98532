"""The performance gate: what it calls slower, and what it compares at all."""

import argparse
from pathlib import Path

import pytest
import torch

from bench_ttfa import frames
from bench_ttfa.frames import FrameTime

ARGS = argparse.Namespace(model="random:s2-pro")


def result(per_stream: float, batch: int = 16) -> FrameTime:
    rate = per_stream * batch
    return FrameTime("bf16", batch, 600, 1000 * batch / rate, rate, 1.0, 1.0)


def test_five_percent_below_the_baseline_is_slower(tmp_path: Path, capsys) -> None:
    file = tmp_path / "baselines" / "gpu.json"
    frames._freeze(file, ARGS, "GPU", [result(100.0), result(50.0, batch=64)])
    assert frames._gate(file, ARGS, "GPU", [result(95.5), result(60.0, batch=64)]) == 0
    assert frames._gate(file, ARGS, "GPU", [result(94.5), result(50.0, batch=64)]) == 1
    assert "c=16" in capsys.readouterr().out
    assert frames._gate(file, ARGS, "GPU", [result(10.0, batch=2)]) == 0  # nothing frozen for it


def test_freezing_one_batch_keeps_the_others(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    frames._freeze(file, ARGS, "GPU", [result(100.0), result(50.0, batch=64)])
    frames._freeze(file, ARGS, "GPU", [result(120.0)])
    assert frames._gate(file, ARGS, "GPU", [result(50.0, batch=64)]) == 0
    assert frames._gate(file, ARGS, "GPU", [result(110.0)]) == 1


@pytest.mark.parametrize(("model", "gpu"), [("random:tiny", "GPU"), ("random:s2-pro", "Other")])
def test_another_gpu_or_model_has_no_baseline(tmp_path: Path, model: str, gpu: str) -> None:
    file = tmp_path / "gpu.json"
    assert frames._gate(file, ARGS, "GPU", [result(1.0)]) == 2
    frames._freeze(file, ARGS, "GPU", [result(100.0)])
    assert frames._gate(file, argparse.Namespace(model=model), gpu, [result(100.0)]) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_it_says_so(capsys) -> None:
    assert frames.main([]) == 2
    assert "CUDA" in capsys.readouterr().err


@pytest.mark.gpu
def test_a_tiny_model_is_timed_in_every_format() -> None:
    args = frames._parser().parse_args(
        ["--model", "random:s1-mini", "--batch", "1,3", "--context", "64"]
    )
    results, memory = frames.run(args)
    assert len(results) == 6 and all(result.frame_ms > 0 for result in results)
    assert memory["bsfp8"]["weights"] < memory["bf16"]["weights"]
