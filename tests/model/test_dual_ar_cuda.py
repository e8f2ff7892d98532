"""DualAR on a GPU: the same goldens, no wait inside a frame, and a frame as one CUDA graph."""

import pytest
import torch
from safetensors.torch import load_file

from model.loader import load_dual_ar
from model.sampling import SamplingParams
from tests.model.goldens import GOLDEN, NAMES, TOLERANCE, max_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
]


class Stream:
    """One prefilled slot of a golden checkpoint on the GPU."""

    def __init__(self, name: str) -> None:
        file = GOLDEN / name / "expected.safetensors"
        self.expected = {key: tensor.cuda() for key, tensor in load_file(file).items()}
        self.model = load_dual_ar(GOLDEN / name, "cuda", torch.float32)
        self.cache = self.model.new_cache(3, self.model.config.slow.max_len)
        self.state = self.model.new_frame_state(3)
        self.slots = torch.tensor([1], device="cuda")

    def start(self, sampling: SamplingParams) -> None:
        prompt = self.expected["prompt"]
        last = prompt.shape[1] - 1
        self.model.prefill(prompt[:, :last], self.cache, 1, 0)
        self.model.join(self.state, 1, prompt[:, last], last, sampling)

    def step(self) -> None:
        self.model.decode_frame(self.state, self.slots, self.cache)

    def frames(self, step) -> torch.Tensor:
        frames = []
        for _ in range(12):
            step()
            frames.append(self.state.rows[1].clone())
        return torch.stack(frames)


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_golden(name):
    stream = Stream(name)
    logits, _ = stream.model(stream.expected["prompt"])
    expected = stream.expected["prefill_logits"]
    assert max_error(logits[-len(expected) :], expected) <= TOLERANCE
    stream.start(SamplingParams(temperature=0))
    assert torch.equal(stream.frames(stream.step), stream.expected["greedy_frames"])


@torch.inference_mode()
def test_a_frame_never_waits():
    stream = Stream(NAMES[0])
    stream.start(SamplingParams())
    stream.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        stream.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@torch.inference_mode()
def test_a_captured_frame_gives_the_same_codes():
    stream, sampling = Stream(NAMES[0]), SamplingParams(0.8, 0.9, 30, 5)
    stream.start(sampling)
    stream.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stream.step()
    stream.start(sampling)
    eager = stream.frames(stream.step)
    stream.start(sampling)
    assert torch.equal(stream.frames(graph.replay), eager)
