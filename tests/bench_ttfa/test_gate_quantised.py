"""The gate of 8-bit weights is open for what we have, and shuts on the known bug."""

import json

import pytest
import torch

from bench_ttfa import gate_quantised
from bench_ttfa.gate_quantised import EMBEDDED, INPUTS, NUM_FRAMES, judge, main
from model import dual_ar_cuda
from ops import reference_fp8

CPU = torch.device("cpu")


def with_the_other_stride(scale: torch.Tensor) -> torch.Tensor:
    """The same memory, read as if it had been written along the other dimension."""
    return scale.t().contiguous().view(scale.shape)


def test_the_embedded_model_speaks_the_same_in_8_bits():
    verdict = judge(EMBEDDED, CPU)
    print(f"\n{verdict}")
    assert not verdict.problems
    assert verdict.tokens_equal == verdict.forced_tokens_equal == 1.0
    assert verdict.num_inputs == len(INPUTS) >= 8 and NUM_FRAMES == 5


def test_random_weights_are_judged_by_their_logits(tmp_path, capsys):
    assert main(["--model", "random:tiny", "--device", "cpu", "--json", str(tmp_path / "v")]) == 0
    verdict = json.loads((tmp_path / "v").read_text())
    assert not verdict["problems"] and 0 < verdict["logit_error"] < 0.18
    assert "margins" in capsys.readouterr().out


@pytest.mark.parametrize("side", ["weights", "activations"])
def test_the_gate_shuts_when_scales_are_read_with_the_other_stride(side, monkeypatch, capsys):
    """Full speed, wrong logits: the trap that the types make impossible, put back by force."""
    module, name = {
        "weights": (dual_ar_cuda, "quantize_weight"),
        "activations": (reference_fp8, "quantize_rows"),
    }[side]
    quantize = getattr(module, name)

    def wrong(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        data, scale = quantize(x)
        return data, with_the_other_stride(scale)

    monkeypatch.setattr(module, name, wrong)
    assert main(["--device", "cpu"]) == 1
    printed = capsys.readouterr().out
    assert "CLOSED: the logits' relative error" in printed
    assert "CLOSED: other semantic tokens" in printed


@pytest.mark.gpu
def test_the_embedded_model_speaks_the_same_in_8_bits_on_a_gpu():
    verdict = judge(EMBEDDED, torch.device("cuda"))
    print(f"\n{verdict}")
    assert not verdict.problems


def test_inputs_are_distinct_voices_and_sentences():
    assert len(set(INPUTS)) == len(INPUTS)
    assert len({voice for voice, _ in INPUTS}) >= 4
    assert gate_quantised.LOGIT_BOUNDS[EMBEDDED] < 0.25
