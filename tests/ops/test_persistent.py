"""What the launch of a whole stack is planned like; its sources compile without a GPU."""

import itertools

import pytest

from ops import nvrtc
from ops.persistent_plans import ROWS, UNIT_ROWS, Geometry, Plan, deal, is_supported, plan_for

S2_PRO = Geometry(2560, 9728, 32, 8, 128)
S1_MINI = Geometry(1024, 3072, 16, 8, 128)
S1_MINI_FAST = Geometry(1024, 3072, 16, 8, 64)
EMBEDDED = Geometry(320, 832, 5, 1, 64)
VARIANTS = [(geometry, kind) for geometry in (S2_PRO, S1_MINI) for kind in ("bf16", "bsfp8")]
SM_BYTES = 227 * 1024
NUM_LOGITS = 4097


@pytest.mark.parametrize("num_ctas", [132, 114, 78, 1])
@pytest.mark.parametrize("geometry", [S2_PRO, S1_MINI])
def test_every_unit_is_dealt_once(geometry, num_ctas):
    dealt = deal(geometry, NUM_LOGITS, num_ctas)
    rows = [*(num_rows for num_rows, _ in geometry.matrices), 4112]
    for begins, num_rows in zip(dealt, rows, strict=True):
        assert len(begins) == num_ctas + 1 and begins[0] == 0
        assert begins == sorted(begins)
        assert begins[-1] * UNIT_ROWS == num_rows


def test_every_cta_streams_as_much():
    """As far as units are small: a CTA with two units of `down` has as many fewer of gate and up."""
    loads = [0] * 132
    for begins, (_, depth) in zip(deal(S2_PRO, NUM_LOGITS, 132), S2_PRO.matrices, strict=False):
        for cta, (begin, end) in enumerate(itertools.pairwise(begins)):
            loads[cta] += (end - begin) * depth
    assert max(loads) - min(loads) <= S2_PRO.dim, (min(loads), max(loads))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("geometry", "kind"), VARIANTS)
def test_shared_memory_fits_and_holds_the_rows(geometry, kind, rows):
    plan = Plan(rows)
    deepest = max(depth for _, depth in geometry.matrices)
    assert plan.shared_bytes(geometry, kind) <= SM_BYTES
    assert plan.operand_bytes(geometry, kind) >= rows * deepest * (1 if kind == "bsfp8" else 2)
    assert plan.operand_bytes(geometry, kind) % 1024 == 0
    assert plan.stages(geometry, kind) >= 4


def test_what_the_kernel_cannot_run():
    assert is_supported(S2_PRO, "bf16") and is_supported(S1_MINI, "bsfp8")
    assert not is_supported(S1_MINI_FAST, "bsfp8"), "heads of 64"
    assert not is_supported(EMBEDDED, "bf16"), "K is no multiple of four tiles"


def test_many_rows_are_no_case_for_it():
    assert plan_for("bsfp8", 5) is None and plan_for("bf16", 5) is None


def test_splits_do_not_depend_on_how_many_rows_there_are():
    """Or a row's bits would depend on its neighbours."""
    assert [Plan(rows).max_splits(S2_PRO, 132) for rows in ROWS] == [8, 4]


@pytest.mark.parametrize("page_size", [32, None])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("geometry", "kind"), VARIANTS)
def test_compiles(geometry, kind, rows, page_size):
    pytest.importorskip("cuda.bindings.nvrtc")
    defines = Plan(rows).defines(geometry, kind, page_size)
    assert nvrtc.compile_source("persistent.cu", "sm_90a", defines)[:4] == b"\x7fELF"


def test_other_architectures_are_refused():
    """It multiplies with instructions that Hopper alone has."""
    pytest.importorskip("cuda.bindings.nvrtc")
    with pytest.raises(nvrtc.KernelError, match="sm_90a"):
        nvrtc.compile_source("persistent.cu", "sm_120a", Plan(2).defines(S2_PRO, "bsfp8", 32))
