"""Pieces of several slots in one call: the same keys and values as one by one."""

import pytest
import torch
from torch import Tensor

from model.dual_ar import DualAR
from model.kv_cache import KVCache
from model.sampling import SamplingParams
from realtime.pingpong.frames import FrameRunner
from realtime.pingpong.prefill_rows import Piece, PrefillRunner
from tests.model.small_model import make_random_model, random_prompt

pytestmark = pytest.mark.usefixtures("inference")

LENGTHS = {0: 40, 2: 9, 3: 77}


def new_cache(model: DualAR, page_size: int | None = 16) -> KVCache:
    pages = None if model.device.type == "cuda" else page_size
    return model.new_cache(4, 128, page_size=pages, has_history=True)


def one_by_one(model: DualAR, prompts: dict[int, Tensor]) -> KVCache:
    cache = new_cache(model)
    for slot, prompt in prompts.items():
        model.prefill(prompt.to(model.device), cache, slot, 0)
    return cache


def together(runner: PrefillRunner, prompts: dict[int, Tensor]) -> None:
    """The first parts of all, then the rest of all."""
    runner.write([Piece.of(slot, 0, prompt[:, :5]) for slot, prompt in prompts.items()])
    runner.write([Piece.of(slot, 5, prompt[:, 5:]) for slot, prompt in prompts.items()])


@pytest.mark.parametrize("is_packed", [False, True])
def test_pieces_of_several_slots_leave_what_each_leaves_alone(is_packed):
    model = make_random_model()
    if is_packed:
        model.use_kernels("bf16")
    prompts = {slot: random_prompt(length, slot) for slot, length in LENGTHS.items()}
    expected, cache = one_by_one(model, prompts), new_cache(model)
    runner = PrefillRunner(model, cache)
    together(runner, prompts)
    # The eager model's attention rounds otherwise where a prompt is cut.
    tolerance = {"atol": 0, "rtol": 0} if is_packed else {"atol": 1e-5, "rtol": 1e-5}
    for slot, length in LENGTHS.items():
        torch.testing.assert_close(
            cache.read(slot, length), expected.read(slot, length), **tolerance
        )
        assert torch.equal(cache.recall(slot, 0, length), prompts[slot]), slot
    cache.kv.zero_()
    runner.write([Piece(slot, 0, None, min(length, 40)) for slot, length in LENGTHS.items()])
    for slot, length in LENGTHS.items():
        num = min(length, 40)
        torch.testing.assert_close(cache.read(slot, num), expected.read(slot, num), **tolerance)


def test_a_call_takes_so_many_rows():
    model = make_random_model()
    model.use_kernels("bf16")
    runner = PrefillRunner(model, new_cache(model))
    with pytest.raises(AssertionError):
        runner.write([Piece.of(0, 0, random_prompt(100, 0)), Piece.of(1, 0, random_prompt(29, 0))])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bf16", "bsfp8"])
def test_captured_calls_leave_what_eager_ones_leave(kind):
    model = make_random_model(torch.bfloat16, "cuda")
    model.use_kernels(kind)
    prompts = {slot: random_prompt(length, slot) for slot, length in LENGTHS.items()}
    eager_cache, cache = new_cache(model), new_cache(model)
    together(PrefillRunner(model, eager_cache), prompts)
    runner = PrefillRunner(model, cache)
    runner.capture(iter)
    assert runner.graph_bytes > 0
    together(runner, prompts)
    alone = one_by_one(model, prompts)
    errors = {}
    for slot, length in LENGTHS.items():
        got, eager = cache.read(slot, length), eager_cache.read(slot, length)
        by_itself = alone.read(slot, length).float()
        errors[slot] = [
            float((one.float() - by_itself).norm() / by_itself.norm()) for one in (got, eager)
        ]
        assert torch.equal(cache.recall(slot, 0, length).cpu(), prompts[slot]), slot
    print(f"\n| {kind} | relative error of captured and eager against one by one | {errors}")
    bound = 0.02 if kind == "bf16" else 0.15
    assert all(max(pair) < bound for pair in errors.values()), errors


def frames_of(model, cache, prompts, *, rides):
    """Codes of slots 0 and 1, three frames; slot 1 comes with the second."""
    frames = FrameRunner(model, cache, len(LENGTHS))
    frames.capture(iter)
    last = {slot: prompts[slot].shape[1] - 1 for slot in (0, 1)}
    riders = [Piece.of(1, 0, prompts[1][:, : last[1]])]
    written = [Piece.of(0, 0, prompts[0][:, : last[0]]), *(() if rides else riders)]
    PrefillRunner(model, cache).write(written)
    codes = []
    for slots, joins in (([0], 0), ([0, 1], 1), ([1, 0], None)):
        if joins is not None:
            row, sampling = prompts[joins][:, -1].tolist(), SamplingParams(temperature=0)
            frames.start([frames.state.start_words(joins, row, last[joins], sampling)])
        frame = frames.launch(slots, riders if rides and joins == 1 else ())
        codes.append(frame.codes[: len(slots)].clone())
    return torch.cat(codes), cache.read(1, last[1] + 1)


@pytest.mark.parametrize("kind", ["bf16", "bsfp8"])
def test_rows_that_ride_with_a_frame_leave_what_a_call_leaves(kind):
    check_riders(make_random_model(), kind)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bf16", "bsfp8"])
def test_cuda_rows_that_ride_with_a_captured_frame(kind):
    check_riders(make_random_model(torch.bfloat16, "cuda"), kind)


def check_riders(model, kind):
    model.use_kernels(kind)
    prompts = {slot: random_prompt(length, slot) for slot, length in ((0, 30), (1, 41))}
    (codes, written), (ridden_codes, ridden) = (
        frames_of(model, new_cache(model), prompts, rides=rides) for rides in (False, True)
    )
    error = float((ridden.float() - written.float()).norm() / written.float().norm())
    num_equal = int((codes == ridden_codes).all(1).sum())
    print(
        f"\n| {kind} | riders: relative error {error:.4f}, {num_equal} of {len(codes)} frames the same"
    )
    if model.device.type == "cpu":
        assert torch.equal(codes, ridden_codes)
        assert kind != "bf16" or torch.equal(ridden, written)
    assert error < (0.02 if kind == "bf16" else 0.15)
