"""A whole stack in one launch against its definition in fp32, the same in a graph and again."""

import pytest
import torch

from ops.persistent_plans import Plan
from tests.ops.persistent_cases import S1_MINI, S2_PRO, Case, relative_error, values

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEBUG = {"SPIN_LIMIT": 20_000_000}  # a wait that never ends is an error after some seconds
# Of every step from what the kernel made before it, whose sums are added up in another order.
STEP_BOUND = 0.004
# Of three blocks. A value of bf16 may be rounded the other way, and from there one of e4m3, which is
# up to 2^-4 of it.
BOUNDS = {"bf16": 0.02, "bsfp8": 0.1}
STEPS = ("qkv", "attended", "middle", "hidden", "last")
MIXED = [33, 17, 700, 1000]


@pytest.fixture(autouse=True)
def poisoned():
    """Memory that outputs will be taken from holds NaN."""
    fills = [torch.full((n,), torch.nan, device="cuda") for n in (1 << 22, 1 << 16, 1 << 12)]
    del fills


CASES = [
    (S2_PRO, "bsfp8", 2, [600]),
    (S2_PRO, "bsfp8", 2, [1, 1000]),
    (S2_PRO, "bsfp8", 4, [17, 33, 700]),
    (S2_PRO, "bf16", 2, [600, 16]),
    (S2_PRO, "bf16", 4, [600, 32, 5]),
    (S1_MINI, "bsfp8", 2, [100]),
    (S1_MINI, "bsfp8", 4, [64, 65, 1, 1000]),
    (S1_MINI, "bf16", 4, [64, 65, 1, 1000]),
]
FRAMES = [
    (S2_PRO, "bsfp8", 2, 1, 0, 2),
    (S2_PRO, "bsfp8", 2, 2, 9, 1),
    (S2_PRO, "bf16", 4, 2, 0, 2),
    (S1_MINI, "bf16", 4, 3, 5, 1),
]


def decode(case, stack, x):
    """(normed, logits) by the kernel."""
    count = len(x)
    return stack.decode(
        x, case.page_table, case.slots[:count].contiguous(), case.positions[:count].contiguous()
    )


def made_by(stack, num_rows):
    """What the last block left on the way."""
    return {name: values(getattr(stack._scratch, name))[:num_rows] for name in STEPS}


def check(case, got, expected, bound):
    errors = {name: relative_error(got[name], expected[name]) for name in got}
    assert max(errors.values()) <= bound, errors
    for layer, plain in zip(case.layers, case.plain, strict=True):
        assert relative_error(layer.memory, plain.memory) <= bound


@pytest.mark.parametrize(("geometry", "kind", "rows", "lengths"), CASES)
def test_every_step_of_decode_is_its_definition(geometry, kind, rows, lengths):
    case = Case(geometry, kind, 1, lengths=lengths)
    stack = case.stack(Plan(rows), defines=DEBUG)
    x = case.rows(len(lengths))
    normed, logits = decode(case, stack, x)
    got = made_by(stack, len(x))
    expected = case.step_by_step(x, got)
    check(case, {**got, "normed": normed, "logits": logits}, expected, STEP_BOUND)


@pytest.mark.parametrize(("geometry", "kind", "rows", "lengths"), CASES)
def test_blocks_follow_each_other(geometry, kind, rows, lengths):
    case = Case(geometry, kind, 3, lengths=lengths)
    x = case.rows(len(lengths))
    normed, logits = decode(case, case.stack(Plan(rows), defines=DEBUG), x)
    check(case, {"normed": normed, "logits": logits}, case.define(x), BOUNDS[kind])


@pytest.mark.parametrize(("geometry", "kind", "rows", "streams", "start", "num_positions"), FRAMES)
def test_every_step_of_a_frame_is_its_definition(
    geometry, kind, rows, streams, start, num_positions
):
    case = Case(geometry, kind, 1, num_streams=streams + 1)
    stack = case.stack(Plan(rows), defines=DEBUG)
    x = case.rows(streams * num_positions)
    logits = stack.frame(x, start, num_positions)
    got = made_by(stack, len(x))
    expected = case.step_by_step(x, got, start, num_positions)
    check(case, {**got, "logits": logits}, expected, STEP_BOUND)


@pytest.mark.parametrize("kind", ["bf16", "bsfp8"])
def test_a_graph_gives_the_same_again_and_again(kind):
    case = Case(S2_PRO, kind, 3, lengths=[600, 31])
    stack = case.stack(Plan(2), defines=DEBUG)
    x = case.rows(2)
    eager = decode(case, stack, x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = decode(case, stack, x)
    for _ in range(20):
        for tensor in captured:
            tensor.fill_(torch.nan)
        graph.replay()
        assert all(map(torch.equal, captured, eager))


@pytest.mark.parametrize("rows", [2, 4])
def test_a_row_does_not_depend_on_its_neighbours(rows):
    """Alone, and in company: the same bits, as long as the variant is the same."""
    lengths = MIXED[-rows:]
    case = Case(S2_PRO, "bsfp8", 2, lengths=lengths)
    stack = case.stack(Plan(rows), defines=DEBUG)
    x = case.rows(rows)
    together = decode(case, stack, x)
    for row in range(rows):
        alone = x[row : row + 1].clone()
        where = case.slots[row : row + 1].clone(), case.positions[row : row + 1].clone()
        normed, logits = stack.decode(alone, case.page_table, *where)
        assert torch.equal(normed[0], together[0][row])
        assert torch.equal(logits[0], together[1][row])


def test_too_many_rows_are_refused():
    case = Case(S1_MINI, "bf16", 1, lengths=[5, 5, 5])
    with pytest.raises(AssertionError, match="3"):
        decode(case, case.stack(Plan(2)), case.rows(3))
