"""The gate of 8-bit weights is open for what we have, and shuts on known bugs."""

import functools
import json
from dataclasses import replace

import pytest
import torch

from bench_ttfa import gate_inputs, gate_quantised
from bench_ttfa.gate_inputs import (
    NUM_FRAMES,
    GateInput,
    Greedy,
    are_of_these_weights,
    choose,
    prompts_of,
    read_inputs,
)
from bench_ttfa.gate_models import EMBEDDED, WIDENED, said_in_bf16
from bench_ttfa.gate_quantised import EQUAL_SHARE, RANDOM_KV_BOUND, SURE_LEAD, judge, main
from model import dual_ar_cuda, fused_stack
from model.embedded import embedded_path
from model.speech_model import load_speech_model
from ops import reference_fp8
from ops.quantize import UnscaledNorm

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def said_once():
    """What bf16 says is the same for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gate_quantised, "said_in_bf16", functools.cache(said_in_bf16))
        yield


def with_the_other_stride(scale: torch.Tensor) -> torch.Tensor:
    """The same memory, read as if it had been written along the other dimension."""
    return scale.t().contiguous().view(scale.shape)


def of_the_group_before(scale: torch.Tensor) -> torch.Tensor:
    return scale.roll(1, scale.dim() - 1)


FAULTS = {
    "other stride": with_the_other_stride,
    "group before": of_the_group_before,
    "dropped": torch.ones_like,
}


def test_the_embedded_model_speaks_the_same_in_8_bits():
    verdict = judge(EMBEDDED, CPU)
    print(f"\n{verdict}")
    assert not verdict.problems
    assert verdict.tokens_equal == verdict.forced_tokens_equal == 1.0
    assert verdict.num_inputs == len(read_inputs()) >= 8 and NUM_FRAMES == 5
    assert verdict.sureness is not None
    assert verdict.sureness.num_sure > 50 and verdict.sureness.flipped_lead < SURE_LEAD
    assert EQUAL_SHARE <= verdict.sureness.equal_share < 1.0
    assert verdict.rounding is not None and verdict.rounding.tokens_equal == 1.0
    assert verdict.codes_equal < verdict.rounding.codes_equal < 1.0  # bf16 is not equal to itself


def test_inputs_in_parts_are_judged_as_all_together():
    parts = judge("random:tiny", CPU, streams=5)
    whole = judge("random:tiny", CPU)
    assert parts.num_inputs == whole.num_inputs == 12
    assert parts.logit_error == pytest.approx(whole.logit_error, rel=1e-3)
    assert parts.tokens_equal == whole.tokens_equal


def test_more_streams_than_inputs_say_some_of_them_again():
    whole = judge("random:tiny", CPU)
    twice = judge("random:tiny", CPU, streams=24)
    assert (twice.num_inputs, twice.streams, whole.streams) == (24, 24, 12)
    assert twice.logit_error == pytest.approx(whole.logit_error, rel=1e-3)
    assert twice.tokens_equal == whole.tokens_equal
    assert f"{twice}".splitlines()[0].endswith("24 inputs, 5 frames, 24 streams at once")


def test_random_weights_are_judged_by_their_logits(tmp_path, capsys):
    assert main(["--model", "random:tiny", "--device", "cpu", "--json", str(tmp_path / "v")]) == 0
    verdict = json.loads((tmp_path / "v").read_text())
    assert not verdict["problems"] and 0 < verdict["logit_error"] < 0.18
    assert verdict["software"]["sources"] and verdict["machine"]["cpu_cores"]
    assert sum(count for _, count, _ in verdict["equal_by_margin"]) == 12 * NUM_FRAMES
    assert "equal by margin from 0:" in capsys.readouterr().out


@pytest.mark.parametrize(("model", "most"), [(EMBEDDED, 0.03), ("random:tiny", RANDOM_KV_BOUND)])
def test_8_bit_keys_and_values_are_judged_as_well(model, most):
    verdict = judge(model, CPU, "bf16", "fp8")
    print(f"\n{verdict}")
    assert not verdict.problems
    assert 0.005 < verdict.logit_error < most < 0.15  # it is 8 bits, and less than those of weights


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("side", ["weights", "activations"])
def test_the_gate_shuts_on_wrong_scales(side, fault, monkeypatch, capsys):
    """Full speed, wrong logits: the traps that the types make impossible, put back by force."""
    module, name = {
        "weights": (fused_stack, "quantize_weight"),
        "activations": (reference_fp8, "quantize_rows"),
    }[side]
    quantize, spoil = getattr(module, name), FAULTS[fault]

    def wrong(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        data, scale = quantize(x)
        if side == "weights":  # [N / 128, K / 128]
            return data, spoil(scale)
        return data, spoil(scale.t()).t().contiguous()  # K-major [K / 128, M]

    monkeypatch.setattr(module, name, wrong)
    assert main(["--device", "cpu"]) == 1
    printed = capsys.readouterr().out
    assert "CLOSED: the logits' relative error" in printed
    if (side, fault) != ("weights", "group before"):  # whose scales are much the same
        assert "CLOSED: reading its own codes, other semantic tokens" in printed
        assert "is overturned" in printed
        assert "are the same, expected at least" in printed


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("model", "streams"), [(EMBEDDED, None), (EMBEDDED, 1), (WIDENED, 5), (WIDENED, 64)]
)
@pytest.mark.parametrize(
    ("kind", "kv_format"), [("bsfp8", "bf16"), ("bf16", "fp8"), ("bsfp8", "fp8")]
)
def test_a_trained_model_speaks_the_same_in_8_bits_on_a_gpu(kind, kv_format, model, streams):
    verdict = judge(model, torch.device("cuda"), kind, kv_format, streams)
    print(f"\n{verdict}")
    assert not verdict.problems


@pytest.mark.gpu
@pytest.mark.parametrize("side", ["weights", "norms"])
def test_the_gate_shuts_on_wrong_scales_of_many_streams_on_a_gpu(side, monkeypatch):
    """Also on those of the norms that linears of 17 to 64 rows make."""
    if side == "weights":
        quantize = fused_stack.quantize_weight

        def wrong(x):
            data, scale = quantize(x)
            return data, with_the_other_stride(scale)

        monkeypatch.setattr(fused_stack, "quantize_weight", wrong)
    else:
        linear_and_norm = fused_stack.linear_and_norm

        def wrong(*args, **options):
            x, normed = linear_and_norm(*args, **options)
            if isinstance(normed, UnscaledNorm):
                scale = with_the_other_stride(normed.rows.scale)
                normed = replace(normed, rows=replace(normed.rows, scale=scale))
            return x, normed

        monkeypatch.setattr(fused_stack, "linear_and_norm", wrong)
    verdict = judge(WIDENED, torch.device("cuda"), streams=64)
    print(f"\n{verdict}")
    assert "the logits' relative error" in verdict.problems[0]
    assert any("other semantic tokens" in problem for problem in verdict.problems)


def test_inputs_are_those_of_the_embedded_weights():
    """Else: python -m bench_ttfa.gate_inputs --write"""
    assert are_of_these_weights()
    inputs = read_inputs()
    assert len({(each.voice, each.text) for each in inputs}) == len(inputs)
    assert len({each.voice for each in inputs}) >= 3
    assert all(each.margin > 0 for each in inputs)


def test_recorded_margins_are_what_the_plain_model_says():
    inputs = read_inputs()[:2]
    model = load_speech_model(embedded_path(), device="cpu", dtype=torch.float32).dual_ar
    least = Greedy(model, prompts_of(inputs)).decode().leads.amin(1)
    for each, leads in zip(inputs, least, strict=True):
        assert float(leads[0]) == pytest.approx(each.plain_margin, abs=2e-3)
        assert float(leads[1:].min()) == pytest.approx(each.residual_margin, abs=2e-3)


def test_forced_frames_are_made_and_their_leads_told():
    model = load_speech_model(embedded_path(), device="cpu", dtype=torch.float32).dual_ar
    greedy = Greedy(model, prompts_of(read_inputs()[:2]))
    plain = greedy.decode()
    again = greedy.decode(forced=plain.frames)
    assert torch.equal(again.frames, plain.frames) and torch.equal(again.leads, plain.leads)
    other = plain.frames.clone()
    other[1, 2, 4] = (other[1, 2, 4] + 1) % 1024
    forced = greedy.decode(forced=other)
    assert torch.equal(forced.frames, other)
    assert float(forced.leads[1, 2, 3]) < 0 <= float(plain.leads.min())
    assert torch.equal(forced.leads[0], plain.leads[0])


def test_the_clearest_are_chosen():
    inputs = [
        GateInput("a", str(i), margin, margin, 0.0) for i, margin in enumerate([1.0, -0.5, 2.0])
    ]
    assert [each.text for each in choose(inputs, 2)] == ["2", "0"]


def test_candidates_are_judged_in_bf16_alone(monkeypatch):
    monkeypatch.setattr(dual_ar_cuda, "FusedDualAR", None)  # what runs 8 bits
    monkeypatch.setattr(gate_inputs, "ROUNDS", ((1, 2), (2, 1)))
    (best,) = next(iter(gate_inputs.candidates(gate_inputs.heldout_sentences()[:3])))
    assert best.margin <= best.plain_margin
