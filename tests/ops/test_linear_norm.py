"""A linear that makes the next norm but for its rows' factors, and the linears that apply these."""

from dataclasses import replace

import pytest
import torch

from ops import linear as packed_linear
from ops import reference
from ops.linear import gate_up_swiglu, linear, linear_and_norm
from ops.linear_plans import WidePlan, plan_for
from ops.quantize import (
    BlockScaled,
    UnscaledNorm,
    empty_unscaled_norm,
    norm_for_linear,
    quantize_rows,
    unscaled_norm,
)
from tests.ops.activated import MAX_ERROR, assert_activated, error
from tests.ops.compiling import check_compiles
from tests.ops.linear_cases import exact, packed, random_rows, random_weight

EPS = 1e-6
# What the plans are for, and two of their CTAs; 61: scales and squares behind the last row.
ROWS = [33, 40, 47, 61, 64, 101, 128]


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """At every run, so that no run finds the one scale in thousands whose sums round the other way."""
    torch.manual_seed(0)


def inputs(num_rows, n, k, device="cpu"):
    """Hidden rows, residual, a norm's weight; one row small, one large."""
    hidden = quantize_rows(random_rows(num_rows, k, device))
    residual = random_rows(num_rows, n, device) * 3
    residual[1] *= 1e-3
    residual[-1] *= 100
    return hidden, residual, random_rows(1, n, device)[0] + 1


def test_the_definition_is_the_norm_that_is_not_rounded():
    x, weight = random_rows(37, 320) * 5, random_rows(1, 320)[0] + 1
    x[3] = 0
    normed = unscaled_norm(x, weight, EPS)
    exact_norm = torch.rms_norm(x.double(), (320,), weight.double(), EPS)
    got = normed.dequantize()
    assert torch.equal(got[3], torch.zeros(320))
    assert ((got - exact_norm).abs() <= exact_norm.abs() / 16 + 1e-4).all()
    assert not normed.squares[:, 37:].any() and normed.squares.shape == (3, 40)
    expected = reference.rms_norm(x, weight, EPS).double()
    assert error(got, exact_norm) < 1.05 * error(
        norm_for_linear(x, weight, EPS, "bsfp8").dequantize(), expected
    )


@pytest.mark.parametrize("num_rows", [2, 33, 64, 65])
def test_the_next_linear_gets_a_norm_either_way(num_rows):
    """On the CPU as on a GPU: which way is the plan's."""
    weight, after = (
        packed(random_weight(256, 1024), "bsfp8"),
        packed(random_weight(192, 256), "bsfp8"),
    )
    hidden, residual, norm = inputs(num_rows, 256, 1024)
    x, normed = linear_and_norm(hidden, weight, norm, EPS, residual=residual)
    assert torch.equal(x, linear(hidden, weight, residual=residual))
    assert isinstance(normed, UnscaledNorm) == (num_rows > 32)
    expected = linear(norm_for_linear(x, norm, EPS, "bsfp8"), after).double()
    assert error(linear(normed, after), expected) < 0.03
    both = packed(random_weight(512, 256), "bsfp8", is_gate_up=True)
    assert gate_up_swiglu(normed, both).shape == (num_rows, 256)


def test_only_whole_groups_are_normed():
    plan = WidePlan(64, 1, 1, 4, 4, split=4)
    assert plan.can_norm(True, 2560) and not plan.can_norm(True, 320)
    assert not plan.can_norm(False, 2560)
    for other in ({"width": 96}, {"split": 2}, {"split": 1}, {"split": 8}):
        assert not replace(plan, **other).can_norm(True, 2560), other
    for other in ({"width": 128, "split": 8}, {"row_groups": 2}, {"col_groups": 2}):
        assert replace(plan, **other).can_norm(True, 2560), other
    assert replace(plan, norms=True).cluster(False, True) == 8


def test_variants_compile():
    plan = plan_for("bsfp8", 64, 2560, 9728)
    variants = (
        replace(plan, norms=True).defines(True, False, 9728),
        replace(plan, scales_rows=True).defines(True, False, 2560),
        replace(plan_for("bsfp8", 64, 19456, 2560), scales_rows=True).defines(True, True, 2560),
    )
    check_compiles([("linear_wide.cu", defines) for defines in variants])


def poisoned(num_rows, num_columns):
    normed = empty_unscaled_norm(num_rows, num_columns, EPS, torch.device("cuda"))
    normed.rows.data.view(torch.uint8).fill_(0x7F)
    normed.rows.scale.fill_(torch.nan)
    normed.squares.fill_(torch.nan)
    return normed


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize(
    ("n", "k", "plan"),
    [
        (2560, 9728, None),
        (2560, 4096, None),
        (128, 512, WidePlan(64, 1, 1, 4, 4, split=4)),
        (384, 1664, WidePlan(128, 1, 1, 3, 3, split=8)),
        (384, 1664, WidePlan(64, 1, 2, 4, 4, split=4)),
        (384, 1664, WidePlan(64, 2, 1, 4, 4, split=4)),
    ],
)
def test_the_norm_that_a_linear_makes(n, k, plan, num_rows):
    """The rows are the linear's, bit for bit; the norm is the definition of them."""
    weight = packed(random_weight(n, k, "cuda"), "bsfp8")
    hidden, residual, norm = inputs(num_rows, n, k, "cuda")
    plan = plan or plan_for("bsfp8", min(num_rows, 64), n, k)
    expected = torch.full_like(residual, torch.nan)
    packed_linear.launch(hidden, weight, expected, residual=residual, plan=plan)
    normed, out = poisoned(num_rows, n), torch.full_like(residual, torch.nan)
    packed_linear.launch(
        *(hidden, weight, out),
        residual=residual,
        plan=replace(plan, norms=True),
        norm=(norm, normed),
    )
    assert torch.equal(out, expected), int((out != expected).sum())
    definition = unscaled_norm(out, norm, EPS)
    assert torch.equal(normed.rows.scale, definition.rows.scale)
    assert torch.equal(normed.rows.data.float(), definition.rows.data.float())
    assert torch.equal(normed.squares, definition.squares)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize(("n", "k"), [(6144, 2560), (450, 832)])
def test_linears_of_a_norm_without_factors(n, k, num_rows):
    weight, gate_up = random_weight(n, k, "cuda"), random_weight(1280, k, "cuda")
    tiles, both = packed(weight, "bsfp8"), packed(gate_up, "bsfp8", is_gate_up=True)
    bias, residual = random_rows(1, n, "cuda")[0], random_rows(num_rows, n, "cuda")
    _, x, norm = inputs(num_rows, k, 128, "cuda")
    norm /= 2  # gates near -6 would magnify a last bit of a sum
    normed = unscaled_norm(x, norm, EPS)
    rows = normed.dequantize().double()
    product = rows @ exact(weight, "bsfp8").T
    assert error(linear(normed, tiles), product) < MAX_ERROR
    out = linear(normed, tiles, bias=bias, residual=residual)
    rounded = (product + bias.double()).bfloat16().double()
    assert error(out, rounded + residual.double()) < MAX_ERROR
    activated = gate_up_swiglu(normed, both)
    assert isinstance(activated, BlockScaled)
    assert_activated(activated, reference.swiglu((rows @ exact(gate_up, "bsfp8").T).bfloat16()))


@pytest.mark.gpu
def test_what_is_added_and_the_norm_are_checked_as_in_linear():
    weight = packed(random_weight(2560, 4096, "cuda"), "bsfp8")
    hidden, residual, norm = inputs(64, 2560, 4096, "cuda")
    for wrong in ({"residual": residual.float()}, {"residual": residual[:32]}, {"bias": norm[:64]}):
        with pytest.raises(AssertionError):
            linear_and_norm(hidden, weight, norm, EPS, **wrong)
    for other in (norm.float(), norm[:128]):
        with pytest.raises(AssertionError):
            linear_and_norm(hidden, weight, other, EPS, residual=residual)
    with pytest.raises(AssertionError):
        linear_and_norm(hidden.dequantize().bfloat16(), weight, norm, EPS, residual=residual)
