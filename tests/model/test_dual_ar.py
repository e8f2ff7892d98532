"""DualAR against the reference implementation, and the promises of batched decoding."""

import threading

import pytest
import torch
from torch import Tensor

from model.dual_ar import DualAR, FrameState
from model.kv_cache import KVCache
from model.loader import load_dual_ar
from model.sampling import SamplingParams
from ops.sampling import FrameSampler
from tests.model.goldens import GOLDEN, NAMES, TOLERANCE, Golden, golden, max_error
from tests.model.small_model import (
    decode,
    embedded_like_config,
    enter,
    make_random_model,
    random_prompt,
)

pytestmark = pytest.mark.usefixtures("inference")

GREEDY = SamplingParams(temperature=0)


@pytest.fixture(params=NAMES)
def checkpoint(request) -> Golden:
    return golden(request.param)


def prefilled(
    model: DualAR, prompt: Tensor, slot: int = 0, num_slots: int = 1, chunk: int | None = None
) -> tuple[KVCache, FrameState]:
    """A slot that is ready for its first frame."""
    cache, state = (
        model.new_cache(num_slots, model.config.slow.max_len),
        model.new_frame_state(num_slots),
    )
    enter(model, cache, state, slot, prompt, GREEDY, chunk)
    return cache, state


class LogitRecorder:
    """Keeps the logits that the sampler sees."""

    def __init__(self, monkeypatch) -> None:
        self.slow: list[Tensor] = []
        self.fast: list[Tensor] = []
        semantic, codebook = FrameSampler.semantic, FrameSampler.codebook

        def record_semantic(sampler, logits, *rest):
            self.slow.append(logits[0])
            return semantic(sampler, logits, *rest)

        def record_codebook(sampler, logits, index):
            self.fast.append(logits[0])
            return codebook(sampler, logits, index)

        monkeypatch.setattr(FrameSampler, "semantic", record_semantic)
        monkeypatch.setattr(FrameSampler, "codebook", record_codebook)


def test_full_forward(checkpoint):
    logits, hidden = checkpoint.model(checkpoint.prompt)
    num_kept = checkpoint.expected["prefill_logits"].shape[0]
    logits_error = max_error(logits[-num_kept:], checkpoint.expected["prefill_logits"])
    hidden_error = max_error(hidden[-num_kept:], checkpoint.expected["prefill_hidden"])
    print(
        f"\n| {checkpoint.name:18} | prefill logits {logits_error:.1e} | hidden {hidden_error:.1e}"
    )
    assert max(logits_error, hidden_error) <= TOLERANCE


def test_full_forward_of_the_frames(checkpoint):
    frames = checkpoint.expected["greedy_frames"]
    sequence = torch.cat([checkpoint.prompt, frames[:-1].t()], dim=1)
    logits, _ = checkpoint.model(sequence)
    error = max_error(logits[-len(frames) :], checkpoint.expected["slow_logits"])
    print(f"\n| {checkpoint.name:18} | decode logits, full forward {error:.1e}")
    assert error <= TOLERANCE


@pytest.mark.parametrize("chunk", [None, 1, 7, 512])
def test_cached_decode(checkpoint, chunk, monkeypatch):
    if chunk == 1 and checkpoint.prompt.shape[1] > 100:
        chunk = 100
    model, expected = checkpoint.model, checkpoint.expected
    recorder = LogitRecorder(monkeypatch)
    cache, state = prefilled(model, checkpoint.prompt, slot=1, num_slots=3, chunk=chunk)
    frames = []
    for _ in expected["greedy_frames"]:
        frame = model.decode_frame(state, torch.tensor([1]), cache)
        frames.append(state.rows[1].clone())
        assert torch.equal(frame.codes[0], state.rows[1, 1:])
        assert frame.is_end.item() == (state.rows[1, 0] == model.config.end_id)
    slow = expected["slow_logits"][:, model.head_tokens]
    slow_error = max_error(torch.stack(recorder.slow), slow)
    fast_error = max_error(torch.stack(recorder.fast).view_as(expected["fast_logits"]),
                           expected["fast_logits"])  # fmt: skip
    print(
        f"\n| {checkpoint.name:18} | chunk {chunk!s:4} | slow logits {slow_error:.1e} "
        f"| fast logits {fast_error:.1e}"
    )
    assert torch.equal(torch.stack(frames), expected["greedy_frames"])
    assert max(slow_error, fast_error) <= TOLERANCE


def test_bf16_runs_and_stays_close(checkpoint):
    half = load_dual_ar(GOLDEN / checkpoint.name, "cpu", torch.bfloat16)
    logits, _ = half(checkpoint.prompt)
    full, _ = checkpoint.model(checkpoint.prompt)
    assert torch.nn.functional.cosine_similarity(logits, full).min() > 0.999


# ---------------------------------------------------------------------- batches of slots


@pytest.fixture(scope="module")
def random_model() -> DualAR:
    return make_random_model()


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_codes_do_not_depend_on_the_batch(random_model, temperature):
    """Bit for bit: alone, in batches of every size up to 8, at any row, whatever the others do."""
    num_slots = 8
    prompts = [random_prompt(20 + 13 * slot, slot) for slot in range(num_slots)]
    cache = random_model.new_cache(num_slots, 256)
    state = random_model.new_frame_state(num_slots)

    def start(slots: list[int]) -> None:
        for slot in slots:
            sampling = SamplingParams(temperature, 0.95, 30 + slot, 1000 + slot)
            enter(random_model, cache, state, slot, prompts[slot], sampling)

    alone = {}
    for slot in range(num_slots):
        start([slot])
        codes = decode(random_model, state, [slot], cache, 4)[:, 0]
        alone[slot] = codes, cache.read(slot, len(prompts[slot][0]) + 3)
    assert len({tuple(codes.flatten().tolist()) for codes, _ in alone.values()}) == num_slots
    for batch in ([1, 0], [2, 0, 1], [3, 5, 7, 0], [4, 3, 2, 1, 0], [0, 1, 2, 3, 4, 5, 6, 7]):
        start(batch)
        codes = decode(random_model, state, batch, cache, 4)
        for row, slot in enumerate(batch):
            assert torch.equal(codes[:, row], alone[slot][0]), (batch, slot)
            kv = cache.read(slot, len(prompts[slot][0]) + 3)
            assert torch.equal(kv, alone[slot][1]), (batch, slot)


def test_streams_join_and_leave_between_frames(random_model):
    prompts = [random_prompt(30, 5), random_prompt(41, 6)]
    sampling = SamplingParams(1.0, 0.9, 50, 3)
    cache, state = random_model.new_cache(2, 256), random_model.new_frame_state(2)
    enter(random_model, cache, state, 0, prompts[0], sampling)
    alone = decode(random_model, state, [0], cache, 9)[:, 0]
    enter(random_model, cache, state, 0, prompts[0], sampling)
    first = decode(random_model, state, [0], cache, 3)[:, 0]
    enter(random_model, cache, state, 1, prompts[1], sampling)
    both = decode(random_model, state, [1, 0], cache, 3)[:, 1]
    rest = decode(random_model, state, [0], cache, 3)[:, 0]
    assert torch.equal(torch.cat([first, both, rest]), alone)


def test_roll_back_is_only_a_shorter_length(random_model):
    prompt = random_prompt(30, 7)
    cache, state = random_model.new_cache(1, 256), random_model.new_frame_state(1)
    enter(random_model, cache, state, 0, prompt, GREEDY)
    once = decode(random_model, state, [0], cache, 4)
    random_model.join(state, 0, prompt[:, -1], prompt.shape[1] - 1, GREEDY)
    assert torch.equal(decode(random_model, state, [0], cache, 4), once)


def test_a_copied_prefix_equals_a_prefilled_one(random_model):
    prompt = random_prompt(40, 8)
    cache, state = random_model.new_cache(2, 256), random_model.new_frame_state(2)
    random_model.prefill(prompt[:, :25], cache, 0, 0)
    (source,), (target,) = cache.pages(0), cache.pages(1)
    cache.copy_page(source, target, 25)
    cache.kv[:, source].fill_(7.0)  # the copy has storage of its own
    random_model.prefill(prompt[:, 25:-1], cache, 1, 25)
    random_model.join(state, 1, prompt[:, -1], 39, GREEDY)
    copied = decode(random_model, state, [1], cache, 5)
    enter(random_model, cache, state, 0, prompt, GREEDY)
    assert torch.equal(copied, decode(random_model, state, [0], cache, 5))


def test_prefill_and_decode_run_on_two_threads(random_model):
    prompts = [random_prompt(30, 9), random_prompt(60, 10)]
    cache, state = random_model.new_cache(2, 256), random_model.new_frame_state(2)
    enter(random_model, cache, state, 0, prompts[0], GREEDY)
    alone = decode(random_model, state, [0], cache, 8)
    enter(random_model, cache, state, 0, prompts[0], GREEDY)

    def prefill_often() -> None:
        with torch.inference_mode():
            for _ in range(6):
                random_model.prefill(prompts[1], cache, 1, 0)

    thread = threading.Thread(target=prefill_often)
    thread.start()
    assert torch.equal(decode(random_model, state, [0], cache, 8), alone)
    thread.join()


def test_masked_attention_equals_the_attention_of_the_cpu(random_model):
    """The form with shapes that depend on no value decodes the same codes."""
    prompts = [random_prompt(30, 11), random_prompt(57, 12)]
    cache, state = random_model.new_cache(3, 128), random_model.new_frame_state(3)
    results = []
    for steps in (KVCache._steps_by_row, KVCache._steps_masked):
        for slot, prompt in enumerate(prompts):
            enter(random_model, cache, state, slot, prompt, GREEDY)

        def forced(slots, positions, steps=steps):
            is_host = steps is KVCache._steps_by_row
            arguments = (slots.tolist(), positions.tolist()) if is_host else (slots, positions)
            return steps(cache, *arguments)

        cache.steps = forced
        results.append(decode(random_model, state, [1, 0], cache, 4))
    assert torch.equal(*results)


def test_decode_needs_no_value_on_the_host():
    """On the meta device tensors have no values: anything that waits for one fails."""
    model = DualAR(embedded_like_config(), torch.device("meta"), torch.bfloat16)
    model.finish_loading()
    cache, state = model.new_cache(4, 64), model.new_frame_state(4)
    frame = model.decode_frame(state, torch.zeros(3, dtype=torch.int64, device="meta"), cache)
    assert frame.codes.shape == (3, 8) and frame.codes.dtype == torch.int32
    assert frame.is_end.shape == (3,) and frame.is_end.dtype == torch.bool
    model.prefill(torch.zeros(9, 7, dtype=torch.int32, device="meta"), cache, 1, 0)


# ---------------------------------------------------------------------- what a stream remembers


def test_first_token_is_never_in_the_window(random_model):
    cache, state = prefilled(random_model, random_prompt(20, 13))
    state.window.fill_(9)
    random_model.join(state, 0, random_prompt(20, 13)[:, -1], 19, SamplingParams(seed=1))
    tokens = []
    for _ in range(13):
        random_model.decode_frame(state, torch.tensor([0]), cache)
        tokens.append(int(state.rows[0, 0]))
    assert state.window[0, :, 0].tolist() == tokens[-10:]
    random_model.join(state, 0, random_prompt(20, 13)[:, -1], 19, SamplingParams(seed=1))
    for expected in ([0] * 10, [0] * 9 + tokens[1:2], [0] * 8 + tokens[1:3]):
        random_model.decode_frame(state, torch.tensor([0]), cache)
        assert state.window[0, :, 0].tolist() == expected


def test_the_same_seed_gives_the_same_codes_and_another_seed_others(random_model):
    prompt = random_prompt(20, 14)
    cache, state = random_model.new_cache(1, 256), random_model.new_frame_state(1)
    runs = []
    for seed in (5, 5, 6, -5):
        enter(random_model, cache, state, 0, prompt, SamplingParams(1.0, 0.95, 60, seed))
        runs.append(decode(random_model, state, [0], cache, 4))
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2]) and not torch.equal(runs[0], runs[3])


def test_codes_follow_the_token(random_model):
    prompt = random_prompt(20, 15)
    cache, state = random_model.new_cache(1, 256), random_model.new_frame_state(1)
    enter(random_model, cache, state, 0, prompt, SamplingParams(1.0, 1.0, 128, 2))
    for frame_idx in range(1, 6):
        frame = random_model.decode_frame(state, torch.tensor([0]), cache)
        assert frame.codes.dtype == torch.int32 and frame.codes.shape == (1, 8)
        if not frame.is_end:
            assert state.rows[0, 0] == frame.codes[0, 0] + 256
        assert state.position.tolist() == [19 + frame_idx, 0]  # the dummy slot's is always 0
        assert state.frame_idx.tolist() == [frame_idx, 0]
