"""The engine with keys and values in 8 bits: all that holds in bf16 holds, on memory half as large."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch

from model.speech_model import SpeechModel, load_speech_model
from ops.fp8_rows import Fp8Rows
from realtime.pingpong.engine import PingPongEngine
from tests.support.engine import TEXTS, open_slot, running, speak, speak_together, tiny_model

PAGE = 8


def make_model(*, is_packed: bool) -> SpeechModel:
    model = tiny_model(context="dialogue")
    if is_packed:
        model.dual_ar.use_kernels("bf16")
    return model


def poison_free_pages(engine: PingPongEngine) -> None:
    """Whatever is free, or becomes free, is NaN, in data and scale."""
    kv, allocator = engine._cache.kv, engine._prefill.kv.allocator
    assert isinstance(kv, Fp8Rows)
    release = allocator.release

    def poison(pages: list[int]) -> None:
        kv.data.view(torch.uint8)[:, pages] = 0x7F
        kv.scale[:, pages] = torch.nan

    def release_and_poison(pages: Iterable[int]) -> None:
        pages = list(pages)
        release(pages)
        poison([page for page in pages if not allocator.num_users(page)])

    with torch.inference_mode():
        poison(list(range(kv.shape[1])))
    allocator.release = release_and_poison  # type: ignore[method-assign]


def say_all(
    model: SpeechModel, *, is_poisoned: bool = False, kv_format: str = "fp8", **config: object
) -> list[np.ndarray]:
    """Four sessions speak two turns each, all at the same time, in two voices."""
    config = {"num_slots": 4, "max_positions": 512, "kv_format": kv_format, **config}
    with running(model, **config) as (engine, recorder):
        if is_poisoned:
            poison_free_pages(engine)
        slots = [open_slot(engine, recorder, seed=i, voice_seed=i % 2) for i in range(4)]
        return speak_together(engine, recorder, slots)


def assert_equal(got: list[np.ndarray], want: list[np.ndarray]) -> None:
    for one, other in zip(got, want, strict=True):
        assert len(one)
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("is_packed", [False, True])
def test_overlapped_equals_in_order_on_poisoned_pages_of_any_size(is_packed: bool) -> None:
    want = say_all(make_model(is_packed=is_packed), in_order=True)
    model = make_model(is_packed=is_packed)
    assert_equal(say_all(model, kv_page_size=PAGE, is_poisoned=True), want)
    in_bf16 = say_all(make_model(is_packed=is_packed), kv_format="bf16")
    assert any(not np.array_equal(a, b) for a, b in zip(in_bf16, want, strict=True))


def test_a_stream_does_not_depend_on_its_neighbours() -> None:
    crowd = say_all(make_model(is_packed=False))
    for i in (0, 3):
        model = make_model(is_packed=False)
        with running(model, num_slots=1, max_positions=512, kv_format="fp8") as (engine, recorder):
            slot = open_slot(engine, recorder, seed=i, voice_seed=i % 2)
            for turn in range(2):
                alone = speak(engine, recorder, slot, turn, TEXTS[i], TEXTS[(i + turn) % 4])
                assert alone.shape == crowd[2 * i + turn].shape
                np.testing.assert_allclose(alone, crowd[2 * i + turn], atol=1e-5)


def test_the_memory_report_knows_the_format() -> None:
    sizes = {}
    for kv_format in ("bf16", "fp8"):
        model = make_model(is_packed=False)
        with running(model, num_slots=2, kv_format=kv_format) as (engine, _):
            sizes[kv_format] = engine.stats()["kv_bytes"]
    head_dim = model.dual_ar.config.slow.head_dim
    itemsize = model.dual_ar.dtype.itemsize
    assert sizes["fp8"] * head_dim * itemsize == sizes["bf16"] * (head_dim + 2)


@pytest.mark.gpu
def test_cuda_graphs_and_kernels_on_poisoned_pages_say_the_same() -> None:
    said = []
    for is_poisoned in (False, True):
        model = load_speech_model(Path("random:tiny?frames=12"), device="cuda")
        config = {"num_slots": 2, "max_positions": 400, "kv_format": "fp8"}
        with running(model, **config) as (engine, recorder):
            if is_poisoned:
                poison_free_pages(engine)
            slots = [open_slot(engine, recorder, seed=i, voice_seed=i) for i in range(2)]
            said.append([speak(engine, recorder, slot, 0, TEXTS[0]) for slot in slots])
    assert_equal(said[1], said[0])
