"""The linears over packed weights: definitions, plans, kernels against fp64 sums.

Error bounds of the kernels, relative to the norm of the output: 3e-3 for bf16 results of exact
products (the rounding to bf16 alone is 1.7e-3), and as much for block-scaled FP8 against the
dequantised inputs; the tensor cores keep at least 13 bits of a sum of 128, the rest is fp32.
Against bf16 inputs that were never quantised the cosine is above 0.998.
"""

from dataclasses import replace

import pytest
import torch

from ops import reference
from ops.linear import gate_up_swiglu, linear, pack_bf16, pack_fp8, unpack
from ops.linear_plans import Plan, WidePlan, plan_for
from ops.quantize import (
    MAX_PENDING_ROWS,
    BlockScaled,
    PendingNorm,
    norm_for_linear,
    quantize_rows,
    quantize_weight,
    rms_norm,
)
from tests.ops.activated import MAX_ERROR, assert_activated, error
from tests.ops.compiling import check_compiles
from tests.ops.linear_cases import (
    GATE_UP,
    OTHERS,
    ROWS,
    S2_PRO,
    activation,
    exact,
    exact_rows,
    packed,
    poisoned_launch,
    random_rows,
    random_weight,
)


@pytest.mark.parametrize("kind", ["bf16", "bsfp8"])
@pytest.mark.parametrize("num_rows", [1, 5])
def test_definitions(kind, num_rows):
    x, weight = random_rows(num_rows, 320), random_weight(192, 320)
    bias, residual = random_rows(1, 192)[0], random_rows(num_rows, 192)
    out = linear(activation(x, kind), packed(weight, kind), bias=bias, residual=residual)
    expected = exact_rows(x, kind) @ exact(weight, kind).T + bias.double() + residual.double()
    assert out.dtype == torch.bfloat16 and error(out, expected) < MAX_ERROR
    both = random_weight(256, 320)
    activated = gate_up_swiglu(activation(x, kind), packed(both, kind, is_gate_up=True))
    product = (exact_rows(x, kind) @ exact(both, kind).T).bfloat16()
    expected = reference.swiglu(product)
    if kind == "bsfp8":
        assert isinstance(activated, BlockScaled)
        activated, expected = activated.dequantize(), quantize_rows(expected).dequantize()
    assert error(activated, expected.double()) < 5e-3


def test_the_definition_carries_fp32_and_the_references_bits():
    x, weight = torch.randn(3, 320), torch.randn(192, 320)
    expected = reference.linear(x, reference.pack_weight(weight))
    assert torch.equal(linear(x, pack_bf16(weight)), expected)


def test_what_does_not_fit_is_refused():
    weight = random_weight(192, 320)
    data, scale = quantize_weight(weight)
    with pytest.raises(AssertionError, match=r"\(2, 3\)"):
        pack_fp8(data, scale.t().contiguous())
    square, its_scale = quantize_weight(random_weight(384, 384))
    with pytest.raises(AssertionError, match="row-major"):
        pack_fp8(square, its_scale.t())
    with pytest.raises(AssertionError, match="bsfp8 weight"):
        linear(random_rows(1, 320), pack_fp8(data, scale))
    with pytest.raises(AssertionError, match="bf16 weight"):
        linear(quantize_rows(random_rows(1, 320)), pack_bf16(weight))
    with pytest.raises(AssertionError, match="640"):
        linear(random_rows(1, 640), pack_bf16(weight))
    with pytest.raises(AssertionError, match="interleaved"):
        linear(random_rows(1, 320), pack_bf16(weight, is_gate_up=True))


PLANS = [
    (shape, num_rows, kind, is_gate_up)
    for is_gate_up, shapes in ((False, S2_PRO + OTHERS), (True, GATE_UP))
    for shape in shapes
    for num_rows in ROWS
    for kind in ("bf16", "bsfp8")
]


def plans():
    """Every plan of the shapes above: (plan, kind, N, K, rows, is gate and up)."""
    for (n, k), num_rows, kind, up in PLANS:
        yield plan_for(kind, num_rows, n, k, is_gate_up=up), kind, n, k, num_rows, up
        if num_rows <= MAX_PENDING_ROWS and k <= 2560:
            plan = plan_for(kind, num_rows, n, k, is_gate_up=up, has_norm=True)
            yield plan, kind, n, k, num_rows, up


def test_every_plan_fits_an_sm():
    for plan, kind, n, k, num_rows, up in plans():
        blocks = -(-k // 128) * (1 if kind == "bsfp8" else 2)
        shared = plan.shared_bytes(kind == "bsfp8", up, blocks)
        assert shared <= 227 * 1024, (plan, n, k)
        tiles = -(-n // 256) * 4 if up else -(-n // 128) * 2
        cluster = plan.cluster(up, kind == "bsfp8")
        assert plan.split <= min(blocks, 8) and cluster <= 8
        assert plan.num_ctas(tiles, cluster) % cluster == 0, (plan, n)
        if isinstance(plan, Plan):
            assert plan.own_rows == 0 or num_rows <= plan.own_rows <= plan.cols, (plan, num_rows)


@pytest.mark.parametrize(("kind", "most"), [("bf16", 2), ("bsfp8", 4)])
@pytest.mark.parametrize(("n", "k"), S2_PRO)
def test_a_few_rows_are_taken_without_the_copy_engine(n, k, kind, most):
    plans = [plan_for(kind, num_rows, n, k) for num_rows in (1, most, most + 1)]
    assert [(plan.own_rows, plan.is_copied) for plan in plans] == [
        (1, True),
        (most, True),
        (0, False),
    ]
    assert not plan_for(kind, 1, n, k, has_norm=True).is_copied


def test_more_rows_than_a_shape_was_measured_with_are_wide():
    plans = [plan_for("bf16", num_rows, 19456, 2560, is_gate_up=True) for num_rows in (16, 17, 64)]
    assert [type(plan) for plan in plans] == [Plan, WidePlan, WidePlan]


def test_rows_too_long_for_registers_go_through_the_copy_engine():
    plans = [plan_for("bf16", num_rows, 1 << 15, 1 << 13, is_gate_up=True) for num_rows in (1, 2)]
    assert [plan.is_copied for plan in plans] == [True, False]


def variants():
    """Kernel and defines of every variant in use."""
    unique = {
        (plan.kernel, *plan.defines(kind == "bsfp8", up, k).items())
        for plan, kind, _, k, _, up in plans()
    }
    return [(name, dict(defines)) for name, *defines in sorted(unique)]


def test_variants_of_every_kind_and_width_compile():
    by_width = {
        (
            *(name, v["IS_FP8"], v["GATE_UP"], v.get("COLS", v.get("WIDTH"))),
            *(v.get("OWN_ROWS", 0) > 0, v.get("IS_COPIED")),
        ): v
        for name, v in variants()
    }
    assert len(by_width) > 20
    check_compiles([(f"{name}.cu", v) for (name, *_), v in by_width.items()])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bf16", "bsfp8"])
@pytest.mark.parametrize(("n", "k"), S2_PRO + OTHERS)
def test_linear_kernels(n, k, kind):
    weight = random_weight(n, k, "cuda")
    tiles, matrix = packed(weight, kind), exact(weight, kind)
    source = weight if kind == "bf16" else quantize_weight(weight)[0]
    assert torch.equal(unpack(tiles).float(), source.float())
    bias = random_rows(1, n, "cuda")[0]
    for num_rows in ROWS:
        x, residual = random_rows(num_rows, k, "cuda"), random_rows(num_rows, n, "cuda")
        product = exact_rows(x, kind) @ matrix.T
        out = poisoned_launch(activation(x, kind), tiles, n)
        assert error(out, product) < MAX_ERROR, (num_rows, error(out, product))
        plain = linear(activation(x, kind), tiles)
        assert torch.equal(out, plain), num_rows
        both = linear(activation(x, kind), tiles, bias=bias, residual=residual)
        rounded = (product + bias.double()).bfloat16().double()
        assert error(both, rounded + residual.double()) < MAX_ERROR, num_rows
        truth = (x.double() @ weight.double().T).flatten()
        assert torch.cosine_similarity(out.double().flatten(), truth, dim=0) > 0.998


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bf16", "bsfp8"])
@pytest.mark.parametrize(("n", "k"), [(2560, 4096), (450, 832)])
def test_rows_of_a_residual_may_lie_apart(n, k, kind):
    weight = packed(random_weight(n, k, "cuda"), kind)
    for num_rows in (1, 16, 32, 64, 100, 130):
        x = activation(random_rows(num_rows, k, "cuda"), kind)
        apart = random_rows(2 * num_rows, 8 * (n // 8 + 1), "cuda")[1::2, :n]
        expected = linear(x, weight, residual=apart.contiguous())
        assert torch.equal(linear(x, weight, residual=apart), expected), num_rows


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bf16", "bsfp8"])
@pytest.mark.parametrize(("n", "k"), GATE_UP)
def test_gate_up_kernels(n, k, kind):
    weight = random_weight(n, k, "cuda")
    tiles, matrix = packed(weight, kind, is_gate_up=True), exact(weight, kind)
    source = weight if kind == "bf16" else quantize_weight(weight)[0]
    assert torch.equal(unpack(tiles).float(), source.float())
    for num_rows in ROWS:
        x = random_rows(num_rows, k, "cuda") * 3
        activated = reference.swiglu((exact_rows(x, kind) @ matrix.T).bfloat16())
        out = poisoned_launch(activation(x, kind), tiles, n // 2)
        assert isinstance(out, BlockScaled) == (kind == "bsfp8")
        assert_activated(out, activated)
        if kind == "bf16":
            continue
        truth = reference.swiglu(x @ weight.T).double().flatten()
        cosine = torch.cosine_similarity(out.dequantize().double().flatten(), truth, dim=0)
        assert cosine > 0.997, (num_rows, float(cosine))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bf16", "bsfp8"])
@pytest.mark.parametrize(("n", "k"), [(6144, 2560), (2048, 1024), (448, 320), (4097, 2560)])
def test_kernels_that_normalise(n, k, kind):
    """The bits of the two ops."""
    weight = packed(random_weight(n, k, "cuda"), kind)
    both = packed(random_weight(1280, k, "cuda"), kind, is_gate_up=True)
    norm = random_rows(1, k, "cuda")[0]
    for num_rows in range(1, MAX_PENDING_ROWS + 1):
        x = random_rows(num_rows, k, "cuda") * 5
        pending, normed = norm_for_linear(x, norm, 1e-6, kind), rms_norm(x, norm, 1e-6, kind)
        assert isinstance(pending, PendingNorm)
        assert torch.equal(poisoned_launch(pending, weight, n), linear(normed, weight)), num_rows
        activated, expected = poisoned_launch(pending, both, 640), gate_up_swiglu(normed, both)
        if kind == "bsfp8":
            assert torch.equal(activated.scale, expected.scale), num_rows
            activated, expected = activated.dequantize(), expected.dequantize()
        assert torch.equal(activated, expected), num_rows
    many = random_rows(MAX_PENDING_ROWS + 1, k, "cuda")
    assert not isinstance(norm_for_linear(many, norm, 1e-6, kind), PendingNorm)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bf16", "bsfp8"])
@pytest.mark.parametrize(("n", "k"), [*S2_PRO, (448, 320)])
def test_rows_through_the_copy_engine_give_the_same_bits(n, k, kind):
    weight = packed(random_weight(n, k, "cuda"), kind)
    both = packed(random_weight(1280, k, "cuda"), kind, is_gate_up=True)
    for num_rows in (1, 2) if kind == "bf16" else (1, 2, 3, 4):
        x = activation(random_rows(num_rows, k, "cuda"), kind)
        for matrix, num_features in ((weight, n), (both, 640)):
            up = matrix.is_gate_up
            plan = plan_for(kind, num_rows, matrix.out_features, k, is_gate_up=up)
            assert plan.is_copied or (up and k > 2560), plan
            outputs = [
                poisoned_launch(x, matrix, num_features, plan=one)
                for one in (plan, replace(plan, own_rows=0, is_copied=False))
            ]
            if up and kind == "bsfp8":
                assert torch.equal(*(out.scale for out in outputs))
                outputs = [out.dequantize() for out in outputs]
            assert torch.equal(*outputs), (num_rows, up)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bf16", "bsfp8"])
def test_a_row_does_not_depend_on_its_neighbours(kind):
    """Bit for bit while the plan is the same one."""
    weight = packed(random_weight(2560, 4096, "cuda"), kind)
    x = random_rows(128, 4096, "cuda")
    whole = linear(activation(x, kind), weight)
    for first, last in ((0, 128), (3, 128), (50, 128), (64, 128)):
        plan = plan_for(kind, 128, 2560, 4096)
        part = poisoned_launch(activation(x[first:last], kind), weight, 2560, plan=plan)
        assert torch.equal(part, whole[first:last])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bf16", "bsfp8"])
@pytest.mark.parametrize("num_rows", [129, 300])
def test_more_rows_than_a_tile_holds(kind, num_rows):
    weight = random_weight(448, 320, "cuda")
    x = random_rows(num_rows, 320, "cuda")
    out = linear(activation(x, kind), packed(weight, kind))
    assert error(out, exact_rows(x, kind) @ exact(weight, kind).T) < MAX_ERROR
    both = packed(random_weight(1280, 320, "cuda"), kind, is_gate_up=True)
    activated = gate_up_swiglu(activation(x, kind), both)
    halves = [
        gate_up_swiglu(activation(x[i : i + 128], kind), both)
        for i in (0, 128, 256)[:3]
        if i < num_rows
    ]
    if kind == "bf16":
        assert error(activated, torch.cat(halves).double()) < MAX_ERROR
    else:
        joined = torch.cat([half.dequantize() for half in halves])
        assert error(activated.dequantize(), joined.double()) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bf16", "bsfp8"])
@pytest.mark.parametrize("num_rows", [1, 16, 64, 128])
def test_replay_equals_eager(kind, num_rows):
    """A chain of dependent launches, captured; every kernel sees what the one before it wrote."""
    gate_up = packed(random_weight(2 * 1024, 512, "cuda"), kind, is_gate_up=True)
    down = packed(random_weight(512, 1024, "cuda"), kind)
    x = random_rows(num_rows, 512, "cuda")

    def step():
        h = x
        for _ in range(4):
            h = linear(gate_up_swiglu(activation(h, kind), gate_up), down, residual=h)
        return h

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for _ in range(3):
        x.copy_(random_rows(num_rows, 512, "cuda"))
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, step())


@pytest.mark.gpu
@pytest.mark.parametrize("split", [1, 2, 4, 8])
@pytest.mark.parametrize("warpgroups", [1, 2])
@pytest.mark.parametrize("cols", [8, 16, 32])
def test_every_way_to_cut_k_gives_the_same_sums(cols, warpgroups, split):
    for kind in ("bf16", "bsfp8"):
        weight = random_weight(512, 832, "cuda")
        x = random_rows(min(cols, 100), 832, "cuda")
        plan = Plan(cols, warpgroups, 2, split)
        out = poisoned_launch(activation(x, kind), packed(weight, kind), 512, plan=plan)
        assert error(out, exact_rows(x, kind) @ exact(weight, kind).T) < MAX_ERROR


@pytest.mark.gpu
@pytest.mark.parametrize("warpgroups", [1, 2])
@pytest.mark.parametrize("cols", [8, 16, 32])
def test_every_number_of_ctas_that_quantise_together(cols, warpgroups):
    """The group of 128 features is shared by two CTAs or four."""
    weight = random_weight(1536, 1664, "cuda")
    tiles = packed(weight, "bsfp8", is_gate_up=True)
    for num_rows in (1, cols - 3, cols, cols + 5):
        x = quantize_rows(random_rows(num_rows, 1664, "cuda"))
        product = x.dequantize().double() @ exact(weight, "bsfp8").T
        out = poisoned_launch(x, tiles, 768, plan=Plan(cols, warpgroups, 3, 1))
        assert_activated(out, reference.swiglu(product.bfloat16()))
