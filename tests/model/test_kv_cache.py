"""Pages: the same bits as one piece of memory, whatever lies in the pages that nobody reads."""

import random

import pytest
import torch
from torch import Tensor

from model.dual_ar import DualAR
from model.kv_cache import KVCache, KvFormat
from model.pages import PageTable
from model.sampling import SamplingParams
from ops.fp8_rows import Fp8Rows, dequantized
from tests.model.small_model import decode, enter, make_random_model, random_prompt

pytestmark = pytest.mark.usefixtures("inference")

NUM_SLOTS = 3
NUM_FRAMES = 12


@pytest.fixture(scope="module")
def model() -> DualAR:
    return make_random_model()


@pytest.fixture(scope="module", params=["bf16", "fp8"])
def kv_format(request) -> KvFormat:
    """Here "bf16" is fp32, the model's dtype."""
    return request.param


def paged(model: DualAR, page_size: int, kv_format: KvFormat = "bf16") -> KVCache:
    """Pages in random order, more than needed, all of them poisoned."""
    num_pages = 1 + NUM_SLOTS * -(-256 // page_size) + 5
    cache = model.new_cache(
        NUM_SLOTS, 256, page_size=page_size, num_pages=num_pages, kv_format=kv_format
    )
    if isinstance(cache.kv, Fp8Rows):
        cache.kv.data.view(torch.uint8).fill_(0x7F)
        cache.kv.scale.fill_(torch.nan)
    else:
        cache.kv.fill_(torch.nan)
    pages = random.Random(page_size).sample(range(1, num_pages), num_pages - 1)
    for slot in range(NUM_SLOTS):
        cache.assign(slot, pages[slot * cache.max_pages : (slot + 1) * cache.max_pages])
    return cache


def speak(model: DualAR, cache: KVCache, slots: list[int], chunk: int | None = None) -> Tensor:
    """Codes [NUM_FRAMES, B, K] of streams at different lengths."""
    state = model.new_frame_state(NUM_SLOTS)
    for slot in slots:
        sampling = SamplingParams(0.9, 0.95, 40, slot)
        prompt = random_prompt(30 + 21 * slot, slot).to(model.device)
        enter(model, cache, state, slot, prompt, sampling, chunk)
    return decode(model, state, slots, cache, NUM_FRAMES)


@pytest.fixture(scope="module")
def want(model, kv_format) -> tuple[Tensor, list[Tensor]]:
    with torch.inference_mode():
        cache = model.new_cache(NUM_SLOTS, 256, kv_format=kv_format)
        codes = speak(model, cache, [2, 0, 1])
        return codes, [cache.read(slot, 30 + 21 * slot + 11) for slot in range(NUM_SLOTS)]


@pytest.mark.parametrize("page_size", [1, 7, 32, 100])
@pytest.mark.parametrize("chunk", [None, 16])
def test_any_page_size_gives_the_same_bits(model, kv_format, want, page_size, chunk):
    cache = paged(model, page_size, kv_format)
    codes = speak(model, cache, [2, 0, 1], chunk)
    assert torch.equal(codes, want[0])
    if chunk is None:  # else other shapes are multiplied and the last bits differ
        for slot in range(NUM_SLOTS):
            assert torch.equal(cache.read(slot, want[1][slot].shape[3]), want[1][slot])


def test_a_slot_alone_equals_the_slot_beside_neighbours_on_pages(model, kv_format, want):
    for row, slot in enumerate([2, 0, 1]):
        alone = speak(model, paged(model, 8, kv_format), [slot])[:, 0]
        assert torch.equal(alone, want[0][:, row])


def test_pages_hold_no_more_than_the_slots_positions(model, kv_format, want):
    """What is not reserved is not touched: poison stays poison, and page 0 too."""
    cache = paged(model, 8, kv_format)
    for slot in range(NUM_SLOTS):
        num_positions = 30 + 21 * slot - 1 + NUM_FRAMES
        cache.assign(slot, cache.pages(slot)[: cache.num_pages_of(num_positions)])
    assert torch.equal(speak(model, cache, [2, 0, 1]), want[0])
    used = {page for slot in range(NUM_SLOTS) for page in cache.pages(slot)}
    others = [page for page in range(cache.num_pages) if page not in used]
    assert dequantized(cache.kv[:, others], torch.float32).isnan().all()


@pytest.mark.parametrize("page_size", [8, 256])
def test_the_masked_form_reads_no_garbage(model, kv_format, page_size):
    """The form with shapes that depend on no value, as CUDA runs it without kernels."""
    cache = paged(model, page_size, kv_format)
    state = model.new_frame_state(NUM_SLOTS)
    codes = []
    for steps in (cache.steps, cache._steps_masked):
        for slot in range(NUM_SLOTS):
            prompt = random_prompt(30 + 21 * slot, slot)
            enter(model, cache, state, slot, prompt, SamplingParams(temperature=0))
        cache.steps = steps
        codes.append(decode(model, state, [1, 2, 0], cache, 5))
    assert torch.equal(*codes)


def test_a_slot_without_pages_writes_to_page_0_and_hurts_nobody(model, kv_format, want):
    cache = paged(model, 8, kv_format)
    cache.assign(1, ())
    state = model.new_frame_state(NUM_SLOTS)
    for slot in (0, 2):
        sampling = SamplingParams(0.9, 0.95, 40, slot)
        enter(model, cache, state, slot, random_prompt(30 + 21 * slot, slot), sampling)
    model.join(state, 1, random_prompt(4, 1)[:, -1], 3, SamplingParams())
    codes = decode(model, state, [2, 0, 1], cache, NUM_FRAMES)
    assert torch.equal(codes[:, :2], want[0][:, :2])


def test_a_copied_page_is_the_page_bit_for_bit(model, kv_format):
    """Copied, not quantised anew, and no more of it than is asked for."""
    cache = paged(model, 8, kv_format)
    state, prompt = model.new_frame_state(NUM_SLOTS), random_prompt(30, 0)
    enter(model, cache, state, 0, prompt, SamplingParams())
    source, target = cache.pages(0)[1], cache.pages(1)[0]
    cache.copy_page(source, target, 5)
    for part in cache._parts():
        copied, rest = (part[:, target, :, :, rows] for rows in (slice(5), slice(5, 8)))
        assert torch.equal(copied.float(), part[:, source, :, :, :5].float())
        assert rest.float().isnan().all()


def test_the_table_on_the_device_follows_the_host():
    table = PageTable(2, 4, torch.device("cpu"))
    table.assign(0, [3, 1])
    table.assign(1, [2])
    assert table.on_device.tolist() == [[3, 1, 0, 0], [2, 0, 0, 0], [0, 0, 0, 0]]
    table.assign(0, [3])
    assert table.on_device[0].tolist() == [3, 0, 0, 0] and table.of(0) == (3,)
    assert table.page_at(0, 0) == 3 and table.page_at(0, 1) == 0
    for slot, pages in ((2, [1]), (0, [1] * 5)):  # the dummy slot; more than a slot can have
        with pytest.raises(AssertionError):
            table.assign(slot, pages)


def test_prefill_needs_pages(model):
    cache = model.new_cache(2, 64, page_size=8, num_pages=9)
    cache.assign(0, [1])
    with pytest.raises(AssertionError):
        model.prefill(random_prompt(9, 0), cache, 0, 0)


def test_what_was_read_can_be_made_again_somewhere_else(model):
    """The history of a stream, prefilled into another slot, gives the same keys and values."""
    prompt, cache = random_prompt(30, 4), model.new_cache(3, 256, has_history=True)
    state = model.new_frame_state(3)
    enter(model, cache, state, 1, prompt, SamplingParams(0.9, 0.95, 40, 4))
    cache.remember(1, 0, prompt[:, :-1])
    codes = decode(model, state, [1], cache, 6)[:, 0]
    rows = cache.recall(1, 0, 35)
    assert torch.equal(rows[:, :30], prompt)
    assert torch.equal(rows[1:, 30:], codes[:5].t())
    model.prefill(rows, cache, 0, 0)
    torch.testing.assert_close(cache.read(0, 35), cache.read(1, 35), atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
def test_cuda_pages_in_any_order_give_the_same_bits():
    model = make_random_model(device="cuda")
    whole = model.new_cache(NUM_SLOTS, 256, page_size=256)
    want = speak(model, whole, [2, 0, 1])
    assert model.new_cache(1, 256).page_size == 32
    assert torch.equal(speak(model, paged(model, 32), [2, 0, 1]), want)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_cuda_the_table_is_uploaded_without_a_wait():
    table, rng = PageTable(5, 40, torch.device("cuda")), random.Random(3)
    pages: list[list[int]] = [[]] * 5
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(500):
            slot = rng.randrange(5)
            pages[slot] = rng.sample(range(1, 1000), rng.randrange(41))
            table.assign(slot, pages[slot])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    rows = table.on_device.tolist()
    assert rows[5] == [0] * 40
    assert [row[: len(pages[slot])] for slot, row in enumerate(rows[:5])] == pages
    assert all(not any(row[len(pages[slot]) :]) for slot, row in enumerate(rows[:5]))
