"""The embedded model in other shapes says the same, and is what the shapes say."""

from dataclasses import replace

import pytest
import torch

from bench_ttfa.gate_inputs import Greedy, prompts_of, read_inputs
from bench_ttfa.widened import Copies, s2_pro_shapes, widened
from model.embedded import embedded_path
from model.loader import load_dual_ar
from ops.linear_plans import WidePlan, plan_for

CPU = torch.device("cpu")
# The least that takes the same ways as S2 Pro does: longer heads, groups of queries, a norm's groups.
LEAST = {"dim": 640, "num_heads": 8, "num_kv_heads": 2, "head_dim": 128, "ffn_dim": 1024}


def narrow(**sizes):
    shapes = s2_pro_shapes()
    return replace(shapes, slow=replace(shapes.slow, **sizes), fast=replace(shapes.fast, **sizes))


@pytest.mark.parametrize(
    "sizes", [LEAST, LEAST | {"head_dim": 64, "num_heads": 10, "num_kv_heads": 5, "dim": 960}]
)
def test_it_says_what_the_embedded_model_says(sizes):
    prompts = prompts_of(read_inputs()[:2])
    small = load_dual_ar(embedded_path(), CPU, torch.float32)
    wide = widened(narrow(**sizes), CPU, torch.float32)
    expected, got = Greedy(small, prompts).decode(), Greedy(wide, prompts).decode()
    assert torch.equal(got.frames, expected.frames)
    torch.testing.assert_close(got.leads, expected.leads, rtol=0, atol=1e-4)


def test_every_value_is_read_once_and_from_every_copy():
    read = Copies.of(5, 14).read(torch.eye(5))
    assert torch.equal(read.sum(1), torch.ones(5)) and read.sum() == 5
    assert read[:, :5].sum() == 3 and read[:, 5:10].sum() == 2 and not read[:, 10:].any()
    read = Copies.of_heads((2, 4), (4, 8)).read(torch.eye(8))
    assert torch.equal(read.sum(1), torch.ones(8)) and read.sum() == 8
    assert not read[:, 2::4].any() and not read[:, 3::4].any()  # between the pairs
    assert read[:, :16].sum() == read[:, 16:].sum() == 4


def test_its_linears_are_those_of_s2_pro_and_make_the_norms():
    shapes = s2_pro_shapes()
    for stack in (shapes.slow, shapes.fast):
        for in_features in (stack.q_dim, stack.ffn_dim):
            plan = plan_for("bsfp8", 64, stack.dim, in_features)
            assert isinstance(plan, WidePlan) and plan.can_norm(True, stack.dim)
    for in_features in (320, 640, 832):  # those of the embedded model's own shapes do not
        plan = plan_for("bsfp8", 64, 320, in_features)
        assert isinstance(plan, WidePlan) and not plan.can_norm(True, 320)
