"""The captured frame: what fills it up."""

import pytest
import torch

from model.sampling import SamplingParams
from realtime.pingpong.frames import FrameRunner
from realtime.pingpong.prefill_rows import Piece, PrefillRunner
from tests.model.small_model import make_random_model, random_prompt

pytestmark = pytest.mark.usefixtures("inference")


def codes_of_three(model, *, is_captured):
    """Codes of four frames of three streams: in a graph of four rows, or so many told by hand."""
    cache = model.new_cache(4, 128)
    frames = FrameRunner(model, cache, 4, (4,))
    slots = [0, 1, 2]
    prompts = [random_prompt(30 + slot, slot) for slot in slots]
    if is_captured:
        frames.capture(iter)
    PrefillRunner(model, cache).write([Piece.of(slot, 0, prompts[slot][:, :-1]) for slot in slots])
    frames.start(
        [
            frames.state.start_words(
                slot, prompts[slot][:, -1].tolist(), 29 + slot, SamplingParams(seed=slot)
            )
            for slot in slots
        ]
    )
    listed = slots if is_captured else [*slots, frames.state.dummy_slot]
    codes = [frames.launch(listed).codes[:3].clone() for _ in range(4)]
    assert frames._slots.tolist() == [*slots, frames.state.dummy_slot]
    return torch.stack(codes), frames.state.position[:3].tolist()


@pytest.mark.gpu
def test_cuda_rows_that_fill_a_graph_leave_the_streams_alone():
    model = make_random_model(torch.bfloat16, "cuda")
    model.use_kernels("bf16")
    codes, positions = codes_of_three(model, is_captured=True)
    expected, _ = codes_of_three(model, is_captured=False)
    assert positions == [33, 34, 35]
    assert torch.equal(codes, expected)
