"""A stream whose numbers are broken breaks no other, whichever kernel attends."""

from functools import partial

import pytest
import torch

from ops import attention
from ops.attended_linear import attended_linear
from ops.attention_launch import PendingAttention, Scratch, launch_whole
from ops.attention_plans import Plan
from ops.attention_shared import shared_attention, shared_decode_attention
from ops.packing import pack_bf16
from tests.ops.attention_cases import EPS, paged

pytestmark = pytest.mark.gpu
S2_PRO = (32, 8, 128)
BROKEN = 5  # of the rows


def whole(case, plan):
    rotary = (case.qk_norm, case.rope, EPS)
    return launch_whole(case.qkv, rotary, case.where, "bf16", plan)


def in_parts(case):
    scratch = Scratch(8, 4, 128, 16, case.qkv.device)
    args = (case.qkv, *case.rotary, *case.where, "bf16")
    return attention.decode_attention(*args, scratch=scratch)


def left_to_the_linear(case):
    weight = pack_bf16(torch.eye(2560, 4096, device="cuda").bfloat16())
    rows = []
    for pair in torch.arange(len(case.slots)).split(2):
        two = case.rows(pair.tolist())
        two.pages = case.pages
        pending = attention.decode_attention(
            two.qkv, *two.rotary, *two.where, "bf16", is_chained=True, wo=weight
        )
        assert isinstance(pending, PendingAttention)
        rows.append(attended_linear(pending, weight))
    return torch.cat(rows)


def shared(case):
    q = attention.rope_append(case.qkv, *case.rotary, *case.where)
    return shared_attention(q, *case.where, "bf16")


def of_one_voice(case):
    return shared_decode_attention(*(case.qkv, *case.rotary, *case.where), "bf16")


WAYS = {
    "one CTA": partial(whole, plan=Plan(1, 4, 4)),
    "cluster": partial(whole, plan=Plan(4, 4, 3, 2)),
    "parts": in_parts,
    "linear": left_to_the_linear,
    "shared": shared,
    "one voice": of_one_voice,
}


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("kv_format", ["bf16", "fp8"])
@pytest.mark.parametrize("way", WAYS)
def test_a_broken_row_disturbs_nobody(way, kv_format, value):
    """When it is written, nor when it is read by the next step; by then its stream has recovered."""
    num_rows = 64 if way == "parts" else 12
    outputs = []
    for is_broken in (False, True):
        case = paged(
            [200 + i for i in range(num_rows)],
            S2_PRO,
            device="cuda",
            kv_format=kv_format,
            max_len=2048,
        )
        next_qkv, next_positions = case.qkv.flip(0).contiguous(), case.positions
        case.positions = case.positions - 1
        if is_broken:
            case.qkv[BROKEN, :, ::3] = value
        made = [WAYS[way](case)]
        case.qkv, case.positions = next_qkv, next_positions
        made.append(WAYS[way](case))
        outputs.append(torch.stack(made))
    sound, beside = outputs
    assert sound.isfinite().all() and beside[1].isfinite().all()
    others = torch.arange(num_rows, device="cuda") != BROKEN
    assert torch.equal(sound[:, others], beside[:, others])
    assert not torch.equal(sound[:, BROKEN], beside[:, BROKEN])
