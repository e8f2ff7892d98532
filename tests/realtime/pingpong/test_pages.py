"""The engine on small pages, and on fewer of them than its slots could use."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from model.errors import ConfigError
from model.speech_model import load_speech_model
from realtime.pingpong.engine import EngineConfig, PingPongEngine
from realtime.pingpong.messages import CancelTurn, FramePcm, SlotReady, SlotRef, TurnEnd
from realtime.pingpong.tenants import NOTHING_TO_DO, Tenant
from tests.support.engine import (
    TEXTS,
    ask_slot,
    close_slot,
    open_slot,
    running,
    speak,
    speak_together,
    start_turn,
    tiny_model,
    voice,
)
from tests.support.waiting import wait_until

PAGE = 8


def pages_of(engine: PingPongEngine, slot: SlotRef) -> tuple[int, ...]:
    return engine._cache.pages(slot.idx)


def has_nothing_to_do(tenant: Tenant) -> bool:
    return tenant.urgency() == NOTHING_TO_DO


def poison_free_pages(engine: PingPongEngine) -> None:
    """Whatever is free, or becomes free, is NaN."""
    kv, allocator = engine._cache.kv, engine._prefill.kv.allocator
    release = allocator.release

    def release_and_poison(pages: Iterable[int]) -> None:
        pages = list(pages)
        release(pages)
        kv[:, [page for page in pages if not allocator.num_users(page)]] = torch.nan

    with torch.inference_mode():
        kv.fill_(torch.nan)
    allocator.release = release_and_poison  # type: ignore[method-assign]


def say_all(*, is_poisoned: bool = False, **config: int) -> list[np.ndarray]:
    """Four sessions speak two turns each, all at the same time, in two voices."""
    model = tiny_model(context="dialogue")
    with running(model, num_slots=4, max_positions=512, **config) as (engine, recorder):
        if is_poisoned:
            poison_free_pages(engine)
        slots = [ask_slot(engine, voice(i % 2), seed=i) for i in range(4)]
        return speak_together(engine, recorder, slots)


def test_small_pages_give_the_same_audio_bit_for_bit() -> None:
    whole, small = say_all(), say_all(kv_page_size=PAGE)
    for want, got in zip(whole, small, strict=True):
        assert len(want)
        np.testing.assert_array_equal(got, want)


def test_a_voice_is_prefilled_once_for_all_who_ask_at_the_same_time() -> None:
    with running(tiny_model(), num_slots=4, kv_page_size=PAGE, chunk_positions=16) as (engine, rec):
        for _ in range(4):
            ask_slot(engine, voice())
        is_cached = [rec.wait(SlotReady).cached for _ in range(4)]
        assert sorted(is_cached) == [False, True, True, True]
        length = engine._prefill._tenants[0].prefix_length
        assert engine.stats()["prefill_positions_total"] == length
        num_full = length // PAGE
        assert len({engine._cache.pages(slot)[:num_full] for slot in range(4)}) == 1
        assert engine.stats()["kv_pages_used"] == num_full + 5  # and everybody's last page


def test_voices_that_share_codebook_0_share_no_page() -> None:
    base, twin = voice(0), voice(0)
    twin.codes[1:] = (twin.codes[1:] + 1) % 32
    with running(tiny_model(), num_slots=2, kv_page_size=PAGE) as (engine, recorder):
        slots = [ask_slot(engine, prompt) for prompt in (base, twin)]
        for _ in slots:
            assert not recorder.wait(SlotReady).cached
        pages = [set(pages_of(engine, slot)) for slot in slots]
        assert pages[0] and pages[1] and not pages[0] & pages[1]


def test_who_finds_no_pages_waits_and_then_says_the_same() -> None:
    """Nobody fails, and what is said is what is said with room for all."""
    with running(tiny_model(), num_slots=3, max_positions=256, kv_page_size=PAGE) as (engine, rec):
        slots = [open_slot(engine, rec, seed=i, voice_seed=i) for i in range(3)]
        want = [speak(engine, rec, slot, 0, "hello.", "again.") for slot in slots]
    pool = {"max_positions": 256, "kv_page_size": PAGE, "kv_pages": 1 + 34}
    with running(tiny_model(), num_slots=3, **pool) as (engine, rec):
        slots = [ask_slot(engine, voice(i), seed=i) for i in range(3)]
        for _ in slots:
            rec.wait(SlotReady)
        num_needed = sum(-(-t.prefix_length // PAGE) for t in engine._prefill._tenants.values())
        assert num_needed > engine.stats()["kv_pages"]
        for slot in slots:
            start_turn(engine, slot, 0, "hello.", "again.")
        for _ in slots:
            rec.wait(TurnEnd)
        got = [rec.pcm(slot, 0) for slot in slots]
        for slot in slots:
            close_slot(engine, rec, slot)
        assert engine.stats()["slots_waiting_for_pages"] == 0
    for alone, crowded in zip(want, got, strict=True):
        assert len(alone)
        np.testing.assert_array_equal(crowded, alone)


def test_a_segment_gives_back_what_it_did_not_need() -> None:
    with running(tiny_model(max_frames=100), num_slots=1, kv_page_size=PAGE) as (engine, recorder):
        slot = open_slot(engine, recorder)
        num_before = engine.stats()["kv_pages_used"]
        engine.set_blocked(slot, True)
        start_turn(engine, slot, 0, "hello.")
        wait_until(lambda: bool(engine._decode._streams))
        assert engine.stats()["kv_pages_used"] >= num_before + 100 // PAGE
        engine.set_blocked(slot, False)
        recorder.wait(TurnEnd)
        assert engine.stats()["kv_pages_used"] == num_before


def test_a_barge_in_keeps_the_pages_of_what_was_heard() -> None:
    model = tiny_model(context="dialogue", max_frames=40)
    with running(model, num_slots=1, kv_page_size=PAGE) as (engine, recorder):
        slot = open_slot(engine, recorder)
        num_cached_only = engine.stats()["kv_pages_used"] - len(pages_of(engine, slot))
        start_turn(engine, slot, 0, "a long first turn", "and more", "and more of it")
        recorder.wait(FramePcm)
        slot = engine.slots.bump(slot)
        engine.submit(CancelTurn(slot, 0, heard_frames=1))
        tenant = engine._prefill._tenants[slot.idx]
        wait_until(lambda: tenant.context_length > tenant.prefix_length)
        speak(engine, recorder, slot, 1)  # whoever answers that has done all that came before
        assert len(pages_of(engine, slot)) == -(-tenant.context_length // PAGE)
        assert len(pages_of(engine, slot)) == engine.stats()["kv_pages_used"] - num_cached_only


def test_poison_in_free_pages_is_never_heard() -> None:
    clean = say_all(kv_page_size=PAGE)
    for want, got in zip(clean, say_all(kv_page_size=PAGE, is_poisoned=True), strict=True):
        np.testing.assert_array_equal(got, want)


def test_too_few_pages_are_refused_at_start_in_one_sentence() -> None:
    config = {"num_slots": 1, "max_positions": 256, "kv_page_size": PAGE}
    with pytest.raises(ConfigError, match="needs 33"):
        PingPongEngine(tiny_model(), EngineConfig(**config, kv_pages=32))
    engine = PingPongEngine(tiny_model(), EngineConfig(**config, kv_pages=40))
    with pytest.raises(ConfigError, match="too few for the default voice"):
        engine.warm_up((voice(),))


@pytest.mark.gpu
def test_cuda_poison_in_free_pages_is_never_heard() -> None:
    """One session at a time: on the GPU bits depend on the size of the batch."""
    said = []
    for is_poisoned in (False, True):
        model = tiny_model(device="cuda", context="dialogue")
        with running(model, num_slots=2, max_positions=512) as (engine, recorder):
            assert engine._cache.page_size == 32
            if is_poisoned:
                poison_free_pages(engine)
            slots = [open_slot(engine, recorder, seed=i, voice_seed=i) for i in range(2)]
            said += [
                speak(engine, recorder, slot, turn, *TEXTS[turn : turn + 2])
                for turn in range(3)
                for slot in slots
            ]
    for want, got in zip(said[:6], said[6:], strict=True):
        assert len(want)
        np.testing.assert_array_equal(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("context", ["prefix", "dialogue"])
def test_cuda_kernels_on_too_few_poisoned_pages_say_the_same(context: str) -> None:
    """Graphs and kernels; slots that take each other's pages; a dialogue that is shortened."""
    said = []
    for is_poisoned in (False, True):
        model = load_speech_model(Path("random:tiny?frames=12"), device="cuda")
        model = replace(model, serving=replace(model.serving, context=context))  # type: ignore[arg-type]
        pool = {"max_positions": 400, "kv_pages": 1 + 20}
        with running(model, num_slots=3, **pool) as (engine, recorder):
            engine.warm_up((voice(0),))
            if is_poisoned:
                poison_free_pages(engine)
            slots = [open_slot(engine, recorder, seed=i, voice_seed=i + 1) for i in range(3)]
            tenants = engine._prefill._tenants
            for turn in range(8):
                for slot in slots:
                    said.append(speak(engine, recorder, slot, turn, TEXTS[turn % 4]))
                    wait_until(partial(has_nothing_to_do, tenants[slot.idx]))
            assert engine.stats()["slots_that_lost_their_pages_total"] > 0
            if context == "dialogue":
                assert all(1 < len(tenants[slot.idx].exchanges) < 8 for slot in slots)
    for want, got in zip(said[:24], said[24:], strict=True):
        assert len(want) == 12 * model.codec.frame_samples
        np.testing.assert_array_equal(got, want)
