"""The captured frame is timed; what is done with the times is `test_gate_speed`."""

import pytest

from bench_ttfa import frames


@pytest.mark.gpu
def test_a_tiny_model_is_timed_in_every_format() -> None:
    args = frames._parser().parse_args(
        ["--model", "random:s1-mini", "--batch", "1,3", "--context", "64"]
    )
    results, memory = frames.run(args)
    assert len(results) == 6 and all(result.frame_ms > 0 for result in results)
    assert memory["bsfp8"]["weights"] < memory["bf16"]["weights"]
