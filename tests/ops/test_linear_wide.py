"""The kernel for tens of rows, in every way it can be cut: against fp64 sums of the same inputs.

Error bounds: `tests/ops/activated.py`.
"""

from dataclasses import replace

import pytest
import torch

from ops import reference
from ops.linear import gate_up_swiglu, linear
from ops.linear_plans import WidePlan
from ops.quantize import BlockScaled
from tests.ops.activated import MAX_ERROR, assert_activated, error
from tests.ops.compiling import check_compiles
from tests.ops.linear_cases import (
    activation,
    exact,
    exact_rows,
    packed,
    poisoned_launch,
    random_rows,
    random_weight,
)

KINDS = ["bf16", "bsfp8"]
# (width, row groups, column groups): warpgroups side by side, one above the other, both.
CUTS = [
    *((48, 1, 1), (48, 1, 2), (64, 1, 3), (80, 1, 2)),
    *((80, 2, 1), (160, 2, 1), (64, 2, 2), (80, 3, 1)),
]
# The same of gate and up, and the groups of 128 features that a cluster of 1 to 8 CTAs quantises.
GATE_UP_CUTS = [
    (128, 1, 2, 1),
    (64, 1, 2, 1),
    (32, 1, 2, 1),
    (64, 1, 3, 3),
    (48, 1, 2, 3),
    (80, 1, 2, 5),
    (160, 2, 1, 5),
    (64, 2, 2, 1),
]


def rows_to_try(plan):
    """One row, an odd number, all that a CTA takes, some more."""
    return 1, plan.rows - 27, plan.rows, plan.rows + 5


@pytest.mark.parametrize("kind", KINDS)
def test_wide_variants_compile(kind):
    plans = (
        (WidePlan(80, 1, 2, 4, 3, split=8, batch=2), False),
        (WidePlan(160, 2, 1, 3, 4, groups=5, producers=128), True),
        (WidePlan(96, 3, 1, 4, 3, split=2), False),
    )
    variants = [plan.defines(kind == "bsfp8", up, 2560) for plan, up in plans]
    check_compiles([("linear_wide.cu", defines) for defines in variants])


def test_ctas_cover_the_weight_in_whole_clusters():
    plan = WidePlan(80, 1, 2, 4, 4, groups=5)
    assert plan.cluster(True, True) == 8 and plan.num_ctas(304, 8) == 128  # 121.6 have features
    assert plan.cluster(True, False) == 1 and plan.num_ctas(304, 1) == 122
    plan = WidePlan(80, 1, 2, 4, 4, split=8)
    assert plan.cluster(False, True) == 8 and plan.num_ctas(40, 8) == 128


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", [1, 2, 4, 8])
@pytest.mark.parametrize(("width", "row_groups", "col_groups"), CUTS)
def test_every_cut_gives_the_same_sums(width, row_groups, col_groups, split, kind):
    """N = 450 ends inside a CTA, inside 8 features, and its rows are not 16-byte aligned; 832
    values of K are not a multiple of what a rank takes."""
    plan = WidePlan(width, row_groups, col_groups, 4, 4, split)
    for n in (450, 512):
        weight = random_weight(n, 832, "cuda")
        tiles, matrix, bias = (
            packed(weight, kind),
            exact(weight, kind),
            random_rows(1, n, "cuda")[0],
        )
        for num_rows in rows_to_try(plan):
            x, residual = random_rows(num_rows, 832, "cuda"), random_rows(num_rows, n, "cuda")
            product = exact_rows(x, kind) @ matrix.T
            out = poisoned_launch(activation(x, kind), tiles, n, plan=plan)
            assert error(out, product) < MAX_ERROR, (n, num_rows)
            again = poisoned_launch(activation(x, kind), tiles, n, plan=plan)
            assert torch.equal(out, again), (n, num_rows)
            both = poisoned_launch(
                activation(x, kind), tiles, n, plan=plan, bias=bias, residual=residual
            )
            rounded = (product + bias.double()).bfloat16().double()
            assert error(both, rounded + residual.double()) < MAX_ERROR, (n, num_rows)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("width", "row_groups", "col_groups", "groups"), GATE_UP_CUTS)
def test_every_cut_of_gate_and_up(width, row_groups, col_groups, groups, kind):
    """832 features are six and a half groups; CTAs at the end have none."""
    plan = WidePlan(width, row_groups, col_groups, 3, 3, groups=groups)
    weight = random_weight(1664, 832, "cuda")
    tiles, matrix = packed(weight, kind, is_gate_up=True), exact(weight, kind)
    for num_rows in rows_to_try(plan):
        x = random_rows(num_rows, 832, "cuda") * 3
        activated = reference.swiglu((exact_rows(x, kind) @ matrix.T).bfloat16())
        out = poisoned_launch(activation(x, kind), tiles, 832, plan=plan)
        assert isinstance(out, BlockScaled) == (kind == "bsfp8")
        assert_activated(out, activated)


# Ways to stream a tile, of 7 or 8 blocks of K in each half of it (8 bits: 3 or 4).
STREAMS: list[dict[str, int]] = [
    {"stages": 5, "row_stages": 2},
    {"stages": 2, "row_stages": 5},
    {"stages": 4, "row_stages": 4, "batch": 2},
    {"stages": 2, "row_stages": 3, "batch": 3},
    {"stages": 3, "row_stages": 3, "batch": 2, "producers": 128},
]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1024, 832])
@pytest.mark.parametrize("width", [64, 96])
def test_how_a_tile_is_streamed_changes_no_bit(width, k, kind):
    weight = packed(random_weight(512, k, "cuda"), kind)
    plan = WidePlan(width, 2, 1, 4, 4, split=2)
    for num_rows in (1, 100, 137):
        x = activation(random_rows(num_rows, k, "cuda"), kind)
        expected = poisoned_launch(x, weight, 512, plan=plan)
        for stream in STREAMS:
            out = poisoned_launch(x, weight, 512, plan=replace(plan, **stream))
            assert torch.equal(out, expected), (num_rows, stream)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_rows", [33, 64, 65, 128, 192])
def test_a_busy_device_changes_no_bit(num_rows, kind):
    """Hundreds of launches, each on the other's output, beside a stream that keeps SMs and memory
    busy. The inputs take turns, so that what is read too early, or from the launch before, differs."""
    gate_up = packed(random_weight(2 * 1024, 512, "cuda"), kind, is_gate_up=True)
    down = packed(random_weight(512, 1024, "cuda"), kind)
    inputs = [random_rows(num_rows, 512, "cuda") for _ in range(3)]

    def block(x):
        return linear(gate_up_swiglu(activation(x, kind), gate_up), down, residual=x)

    expected = [block(x) for x in inputs]
    torch.cuda.synchronize()
    noise, other = torch.zeros(1 << 26, device="cuda"), torch.cuda.Stream()
    outputs = []
    for turn in range(200):
        if turn % 8 == 0:
            with torch.cuda.stream(other):
                noise.add_(1)
        outputs.append(block(inputs[turn % 3]))
    torch.cuda.synchronize()
    differing = [i for i, out in enumerate(outputs) if not torch.equal(out, expected[i % 3])]
    assert not differing


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_replay_of_wide_kernels_equals_eager(kind):
    """A chain of dependent launches, captured; every kernel sees what the one before it wrote."""
    gate_up = packed(random_weight(2 * 1024, 512, "cuda"), kind, is_gate_up=True)
    down = packed(random_weight(512, 1024, "cuda"), kind)
    plans = WidePlan(64, 1, 2, 4, 4, blocks_per_sm=2), WidePlan(48, 1, 2, 3, 3, 4)
    x = random_rows(64, 512, "cuda")

    def step():
        h = x
        for _ in range(4):
            rows = activation(h, kind)
            hidden = poisoned_launch(rows, gate_up, 1024, plan=plans[0])
            h = poisoned_launch(hidden, down, 512, plan=plans[1], residual=h)
        return h

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for _ in range(3):
        x.copy_(random_rows(64, 512, "cuda"))
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, step())
