"""The fused rows on the CPU: the eager model's codes in fp32, bit for bit, and close to them in 8 bits."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from model import dual_ar_cuda, fused_stack
from model.dual_ar import DualAR
from model.frame_state import Riders
from model.layers import MATRICES, Block
from model.loader import load_dual_ar
from model.sampling import SamplingParams
from model.wide_rows import MOST_NARROW_ROWS
from ops import nvrtc
from ops.quantize import quantize_weight
from ops.reference_fp8 import dequantize_weight
from tests.model.goldens import GOLDEN, NAMES, golden
from tests.model.small_model import (
    decode,
    embedded_like_config,
    enter,
    fill_random,
    make_random_model,
    random_prompt,
)

pytestmark = pytest.mark.usefixtures("inference")

GREEDY = SamplingParams(temperature=0)
HOT = SamplingParams(1.2, 0.95, 60, 7)
# Relative error of the hidden state from activations in e4m3 alone. Measured 0.07: twelve times
# (four in each of three layers) the 2.6 % of rounding to three bits add up like noise.
E4M3_ERROR = 0.1


def fused_golden(name: str) -> DualAR:
    model = load_dual_ar(GOLDEN / name, "cpu", torch.float32)
    model.use_kernels("bf16")
    return model


def rounded_to_e4m3() -> DualAR:
    """A random model whose blocks' matrices are exact in block-scaled e4m3."""
    model = DualAR(embedded_like_config(), torch.device("cpu"), torch.float32)
    fill_random(model)
    for matrix in block_matrices(model):
        matrix.copy_(dequantize_weight(*quantize_weight(matrix)))
    return model


def block_matrices(model: DualAR) -> list[Tensor]:
    blocks = [block for block in model.modules() if isinstance(block, Block)]
    return [block.get_parameter(name) for block in blocks for name in MATRICES]


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("sampling", [GREEDY, HOT])
@pytest.mark.parametrize("name", NAMES)
def test_codes_equal_the_eager_model(name, sampling, page_size):
    prompt, results = golden(name).prompt, []
    for model, size in ((golden(name).model, None), (fused_golden(name), page_size)):
        cache = model.new_cache(3, model.config.slow.max_len, page_size=size)
        state = model.new_frame_state(3)
        enter(model, cache, state, 1, prompt, sampling, chunk=7 if prompt.shape[1] < 100 else 150)
        enter(model, cache, state, 2, prompt[:, :-5], sampling)
        results.append(decode(model, state, [2, 1], cache, 12))
    assert torch.equal(*results)
    if sampling is GREEDY:
        assert torch.equal(results[1][:, 1], golden(name).expected["greedy_frames"][:, 1:])


def test_codes_do_not_depend_on_the_batch_nor_on_padding():
    """Bit for bit: alone, at any row, beside others that join and leave, and padding rows."""
    model = make_random_model()
    model.use_kernels("bf16")
    num_slots = 5
    cache = model.new_cache(num_slots, 256, page_size=32)
    state = model.new_frame_state(num_slots)
    dummy = state.dummy_slot
    prompts = [random_prompt(20 + 13 * slot, slot) for slot in range(num_slots)]

    def start(slot: int) -> None:
        enter(model, cache, state, slot, prompts[slot], SamplingParams(0.9, 0.95, 30, slot))

    start(3)
    alone = decode(model, state, [3], cache, 6)[:, 0]
    start(3)
    batches = ([3, dummy], [0, 3, dummy], [4, 1, 0, 3], [dummy, 3, dummy, 1], [3], [2, 3, 1, 4, 0])
    for frame, batch in enumerate(batches):
        for slot in batch:
            if slot not in (3, dummy):
                start(slot)
        codes = decode(model, state, batch, cache, 1)[0]
        assert torch.equal(codes[batch.index(3)], alone[frame]), batch
    assert state.position[dummy] == 0


@pytest.mark.parametrize("has_history", [False, True])
def test_a_prompt_that_rides_with_its_first_frame_is_prefilled(has_history):
    """Beside a stream that is under way and behind padding, bit for bit in fp32 on the CPU."""
    model = make_random_model()
    model.use_kernels("bf16")
    prompts, results = [random_prompt(20, 0), random_prompt(33, 1)], []
    for num_riders in (0, 9):
        cache = model.new_cache(3, 128, page_size=16, has_history=has_history)
        state = model.new_frame_state(3)
        enter(model, cache, state, 0, prompts[0], GREEDY)
        codes = list(decode(model, state, [0], cache, 2)[:, 0])
        last = prompts[1].shape[1] - 1
        model.prefill(prompts[1][:, : last - num_riders], cache, 1, 0)
        model.join(state, 1, prompts[1][:, last], last, GREEDY)
        riders = None
        if num_riders:
            rows = torch.zeros(12, 1 + model.config.num_codebooks, dtype=torch.int32)
            rows[:9] = prompts[1][:, last - 9 : last].t()
            slots = torch.tensor([1] * 9 + [state.dummy_slot] * 3)
            riders = Riders(rows, slots, torch.tensor([*range(last - 9, last), 0, 0, 0]))
        slots = torch.tensor([0, 1, state.dummy_slot])
        codes += list(model.decode_frame(state, slots, cache, riders=riders).codes[:2])
        codes += list(decode(model, state, [1, 0], cache, 3).flatten(0, 1))
        history = cache.recall(1, last - 9, last + 3) if has_history and num_riders else None
        results.append((torch.stack(codes), cache.read(1, last + 4)))
        if history is not None:
            assert torch.equal(history[:, :10], prompts[1][:, last - 9 :])
    for plain, ridden in zip(*results, strict=True):
        assert torch.equal(plain, ridden)


@pytest.fixture
def mlp_rows(monkeypatch) -> list[int]:
    """How many rows each MLP has taken."""
    num_rows = []

    def gate_up(x, weight, run=fused_stack.gate_up_swiglu):
        num_rows.append(len(x))
        return run(x, weight)

    monkeypatch.setattr(fused_stack, "gate_up_swiglu", gate_up)
    return num_rows


def test_rows_that_only_fill_memory_need_the_last_layers_keys_and_values_alone(mlp_rows):
    """Prompts in a call, and those that ride with a frame."""
    model = make_random_model()
    model.use_kernels("bf16")
    cache, state = model.new_cache(2, 128), model.new_frame_state(2)
    enter(model, cache, state, 0, random_prompt(20, 0), GREEDY)
    num_layers = model.config.slow.num_layers
    assert mlp_rows == [19] * (num_layers - 1)
    mlp_rows.clear()
    rows = torch.zeros(7, 1 + model.config.num_codebooks, dtype=torch.int32)
    riders = Riders(rows, torch.full((7,), 1), torch.arange(7))
    model.decode_frame(state, torch.tensor([0]), cache, riders=riders)
    assert mlp_rows[:num_layers] == [8] * (num_layers - 1) + [1]


def test_position_0_of_the_fast_ar_needs_the_last_layers_keys_and_values_alone(mlp_rows):
    model = make_random_model()
    model.use_kernels("bf16")
    cache, state = model.new_cache(3, 128), model.new_frame_state(3)
    for slot in range(3):
        enter(model, cache, state, slot, random_prompt(9, slot), GREEDY)
    mlp_rows.clear()
    model.decode_frame(state, torch.arange(3), cache)
    num_layers = model.config.fast.num_layers
    passes = mlp_rows[model.config.slow.num_layers :]
    assert passes[:num_layers] == [6] * (num_layers - 1) + [3]
    assert passes[num_layers:] == [3] * num_layers * (model.config.num_codebooks - 2)


def test_a_frame_that_reads_shared_pages_once_makes_the_same_codes():
    model, codes = make_random_model(), []
    model.use_kernels("bf16")
    for shares_pages in (False, True):
        cache, state = model.new_cache(3, 128, page_size=16), model.new_frame_state(3)
        for slot in range(3):
            enter(model, cache, state, slot, random_prompt(20 + slot, slot), GREEDY)
        slots = torch.tensor([2, 0, 1])
        codes.append(model.decode_frame(state, slots, cache, shares_pages=shares_pages).codes)
    assert torch.equal(*codes)


def test_the_ends_are_known_before_the_fast_ar_runs(monkeypatch):
    model = make_random_model()
    model.use_kernels("bf16")
    cache, state = model.new_cache(2, 128), model.new_frame_state(2)
    enter(model, cache, state, 0, random_prompt(20, 1), GREEDY)
    calls = []
    run = model._fused._decode_codes
    monkeypatch.setattr(
        model._fused, "_decode_codes", lambda *args: (calls.append("fast AR"), run(*args))
    )

    def on_choice(is_end: Tensor) -> None:
        calls.append(is_end.clone())

    frame = model.decode_frame(state, torch.tensor([0]), cache, on_choice)
    assert torch.equal(calls[0], frame.is_end) and calls[1] == "fast AR"


@pytest.mark.parametrize("is_fused", [False, True])
def test_a_host_is_told_when_little_of_a_frame_is_left(is_fused):
    model = make_random_model()
    if is_fused:
        model.use_kernels("bf16")
    cache, state = model.new_cache(2, 128), model.new_frame_state(2)
    enter(model, cache, state, 0, random_prompt(20, 1), GREEDY)
    told = []
    slots = torch.tensor([0])
    model.decode_frame(
        state, slots, cache, lambda _: told.append("ends"), lambda: told.append("tail")
    )
    assert told == ["ends", "tail"]


@pytest.mark.parametrize("kind", ["bf16", "bsfp8"])
def test_many_rows_go_through_plain_matrices(kind, monkeypatch):
    """With the same codes: in fp32 the products are the same; 8-bit activations are not rounded."""
    prompts = [random_prompt(40 + 9 * slot, slot) for slot in range(5)]
    results, hidden = [], []
    for most_rows in (1000, 2):
        model = rounded_to_e4m3()
        model.finish_loading()
        monkeypatch.setattr(dual_ar_cuda, "has_room", lambda blocks, rows=most_rows: rows == 2)
        monkeypatch.setitem(MOST_NARROW_ROWS, kind, most_rows)
        num_bytes = model.nbytes
        model.use_kernels(kind)
        is_wide = most_rows == 2
        assert model.max_prefill_rows == (512 if is_wide else 128)
        assert (model.nbytes > num_bytes) == is_wide
        cache, state = model.new_cache(5, 128), model.new_frame_state(5)
        for slot, prompt in enumerate(prompts):
            enter(model, cache, state, slot, prompt, GREEDY)
        hidden.append(model._fused._decode_hidden(state, torch.arange(5), cache))
        results.append(decode(model, state, [0, 1, 2, 3, 4], cache, 4))
    if kind == "bf16":
        assert torch.equal(*results)
    error = (hidden[1] - hidden[0]).norm() / hidden[0].norm()
    assert error <= (0 if kind == "bf16" else E4M3_ERROR), error


def test_packing_frees_what_it_packs_and_leaves_slots_only():
    model = make_random_model()
    num_bytes = model.nbytes
    model.use_kernels("bf16")
    assert model.kind == "bf16" and model.nbytes == num_bytes
    block = model.slow.layers[0]
    assert not any(hasattr(block, name) for name in MATRICES)
    with pytest.raises(AssertionError, match="slots only"):
        model(random_prompt(4, 0))
    with pytest.raises(AssertionError, match="called once"):
        model.use_kernels("bf16")


def test_eight_bits_stay_close_when_the_weights_are_exact():
    """The same weights both ways, so that only the activations' rounding differs."""
    hidden = []
    for kind in ("bf16", "bsfp8"):
        model = rounded_to_e4m3()
        model.finish_loading()
        model.use_kernels(kind)
        cache, state = model.new_cache(1, 256), model.new_frame_state(1)
        enter(model, cache, state, 0, random_prompt(60, 3), GREEDY)
        hidden.append(model._fused._decode_hidden(state, torch.tensor([0]), cache))
    error = (hidden[1] - hidden[0]).norm() / hidden[0].norm()
    print(f"\n| relative error of the hidden state from e4m3 activations | {error:.4f}")
    assert 1e-4 < error < E4M3_ERROR


def test_a_code_looks_its_first_norm_up():
    """The same codes as where a norm is made of what the code looked up."""
    results = []
    for has_table in (True, False):
        model = make_random_model()
        model.use_kernels("bsfp8")
        assert model._fused._normed_embeddings is not None
        if not has_table:
            model._fused._normed_embeddings = None
        cache, state = model.new_cache(3, 256), model.new_frame_state(3)
        for slot in range(3):
            enter(model, cache, state, slot, random_prompt(20 + slot, slot), HOT)
        results.append(decode(model, state, [0, 1, 2], cache, 4))
    assert torch.equal(*results)


@pytest.mark.parametrize("is_wide", [False, True])
def test_a_quantised_model_is_the_model_quantised_on_loading(is_wide, monkeypatch):
    monkeypatch.setattr(dual_ar_cuda, "has_room", lambda blocks: is_wide)
    monkeypatch.setitem(MOST_NARROW_ROWS, "bsfp8", 0 if is_wide else 128)
    source = rounded_to_e4m3()
    quantised = DualAR(
        embedded_like_config(), torch.device("cpu"), torch.float32, is_quantised=True
    )
    for name, target in quantised.named_parameters():
        if not name.endswith("_scale"):
            matrix = source.get_parameter(name)
            if target.dtype == torch.float8_e4m3fn:
                matrix, scale = quantize_weight(matrix)
                quantised.get_parameter(f"{name}_scale").copy_(scale)
            target.copy_(matrix)
    results = []
    for model in (source, quantised):
        model.finish_loading()
        model.use_kernels("bsfp8")
        cache, state = model.new_cache(1, 256), model.new_frame_state(1)
        enter(model, cache, state, 0, random_prompt(40, 4), HOT)
        results.append(decode(model, state, [0], cache, 4))
    assert torch.equal(*results)


def test_a_quantised_model_runs_packed_only():
    model = DualAR(embedded_like_config(), torch.device("cpu"), torch.float32, is_quantised=True)
    model.finish_loading()
    with pytest.raises(AssertionError):
        model.use_kernels("bf16")


def test_a_round_that_only_compiles_runs_three_blocks_of_a_stack(monkeypatch):
    """All others launch the same kernels."""
    run = []
    block = SimpleNamespace(attention_norm=None)
    block.forward = lambda x, normed, layer, attend, norm: run.append(layer) or (x, normed)
    fused_stack.run_blocks([block] * 36, torch.zeros(1), None)
    assert run == list(range(36))
    run.clear()
    with nvrtc.compiling():
        fused_stack.run_blocks([block] * 36, torch.zeros(1), None)
    assert run == [0, 1, 2]
