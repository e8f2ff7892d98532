"""A packed model prefills the rows of many slots in one call."""

import numpy as np
import pytest
import torch

from realtime.pingpong.device import Event
from realtime.pingpong.engine import EngineConfig, PingPongEngine
from realtime.pingpong.messages import OpenSlot, SetText, SlotFailed, SlotRef, TurnEnd
from realtime.pingpong.prefill_rows import Piece
from realtime.pingpong.steps import Join, Returned
from tests.support.engine import (
    TEXTS,
    ask_slot,
    open_slot,
    running,
    sampling,
    speak,
    start_turn,
    tiny_model,
    voice,
)

pytestmark = pytest.mark.usefixtures("inference")

NUM_SLOTS = len(TEXTS)


class Calls:
    """An engine whose threads do not run, and what its prefill writes, call by call."""

    def __init__(self, **config: int) -> None:
        model = tiny_model(context="dialogue")
        model.dual_ar.use_kernels("bf16")
        self.engine = PingPongEngine(
            model, EngineConfig(num_slots=NUM_SLOTS, kv_page_size=8, **config)
        )
        self.prefill = self.engine._prefill
        self.prefill.hand_over.max_riders = 0  # texts are written in calls
        self.calls: list[list[Piece]] = []
        runner = self.prefill.kv.runner
        write = runner.write

        def noted(pieces: list[Piece]) -> None:
            self.calls.append(pieces)
            write(pieces)

        runner.write = noted  # type: ignore[method-assign,assignment]

    def open(self, seed: int) -> SlotRef:
        return ask_slot(self.engine, voice(seed), seed)

    def say(self, slot: SlotRef, text: str, segment: int = 0, *, is_closed: bool = True) -> None:
        self.engine.submit(SetText(slot, 0, segment, text, is_closed))

    def take_joins(self) -> list[Join]:
        return self.engine._decode.inbox.take_all()

    def give_back(self, join: Join) -> None:
        """As decode does, after three frames."""
        kv = (join.position + 1, join.position + 4)
        stepped = Event(torch.device("cpu"))
        self.prefill.inbox.put(Returned(join.slot, join.turn_id, join.segment, 3, *kv, stepped))

    def run(self) -> list[list[Piece]]:
        """What is written until there is nothing to do."""
        self.calls.clear()
        for _ in range(200):
            if not self.prefill.step():
                return list(self.calls)
        raise AssertionError("it never ends")


def num_rows(call: list[Piece]) -> int:
    return sum(piece.num_rows for piece in call)


def test_texts_of_all_who_wait_are_one_call_and_voices_fill_whole_ones() -> None:
    calls = Calls()
    slots = [calls.open(seed) for seed in range(NUM_SLOTS)]
    voices = calls.run()
    assert [num_rows(call) for call in voices[:-1]] == [128] * (len(voices) - 1)
    for slot, text in zip(slots, TEXTS, strict=True):
        calls.say(slot, text)
    (texts,) = calls.run()
    assert [piece.slot for piece in texts] == [slot.idx for slot in slots]
    assert len(calls.engine._decode.inbox) == NUM_SLOTS, "all joined"


def test_texts_that_are_waited_for_fill_as_big_a_call_as_the_model_takes() -> None:
    calls = Calls()
    slots = [calls.open(seed) for seed in range(NUM_SLOTS)]
    calls.run()
    for slot in slots:
        calls.say(slot, "and so on and so forth " * 2)
    runner = calls.prefill.kv.runner
    texts = calls.run()
    assert [num_rows(call) for call in texts[:-1]] == [runner.max_rows] * (len(texts) - 1)


def test_who_waits_for_audio_is_not_held_up_by_a_bigger_call() -> None:
    calls = Calls()
    first, second = calls.open(0), calls.open(1)
    calls.run()
    calls.prefill.kv.runner.size_for = lambda num_rows: num_rows  # type: ignore[method-assign]
    calls.say(first, "hm.")
    calls.open(2)
    calls.say(second, "so")
    call, *later = calls.run()
    assert [piece.slot for piece in call] == [first.idx, second.idx], "new voices come after"
    assert all(num_rows(call) == 128 for call in later[:-1])


def test_rows_that_would_be_padding_are_used() -> None:
    calls = Calls()
    first = calls.open(0)
    calls.run()
    calls.prefill.kv.runner.size_for = lambda num_rows: 32  # type: ignore[method-assign]
    calls.say(first, "hm.")
    new = calls.open(1)
    call, *_ = calls.run()
    assert [piece.slot for piece in call] == [first.idx, new.idx] and num_rows(call) == 32


def test_a_voice_asked_for_twice_in_one_call_is_written_once() -> None:
    calls = Calls()
    for _ in range(NUM_SLOTS):
        calls.open(0)
    written = calls.run()
    assert {piece.slot for call in written for piece in call} == {0}
    assert len(calls.prefill.kv.prefixes) == 1
    assert {tenant.key_in_kv for tenant in calls.prefill._tenants.values()} != {None}


def test_pages_that_the_call_writes_are_nobody_elses() -> None:
    """Growing text is written together with what takes idle slots' pages to be loaded."""
    calls = Calls(max_positions=256, kv_pages=1 + 42)
    slots = [calls.open(seed) for seed in range(2)]
    calls.run()
    for slot in slots:
        calls.say(slot, "growing", is_closed=False)
    calls.open(2)
    for call in calls.run():
        pages: list[int] = []
        for slot in {piece.slot for piece in call}:
            pages += calls.engine._cache.pages(slot)
        prefixes = calls.prefill.kv.prefixes
        shared = [page for page in pages if page in prefixes.pages]
        assert len(set(pages)) >= len(pages) - len(shared)
    assert all(tenant.prefix is not None for tenant in calls.prefill._tenants.values())


def test_who_is_behind_in_the_line_gives_its_pages_to_the_head() -> None:
    """Although its text is more urgent, and was looked at first."""
    calls = Calls(max_positions=256, kv_pages=1 + 34)
    first = calls.open(0)
    calls.run()
    calls.say(first, "one.")
    calls.say(first, "two.", segment=1)
    calls.run()
    (join,) = calls.take_joins()
    second = calls.open(1)
    assert not calls.run() and calls.prefill.kv.memory.num_waiting == 1
    calls.give_back(join)
    calls.run()
    assert calls.prefill._tenants[second.idx].prefix is not None
    (join,) = calls.take_joins()
    assert (join.slot, join.segment) == (first, 1)


def test_growing_texts_do_not_take_each_others_pages_in_turn_for_ever() -> None:
    calls = Calls(max_positions=256, kv_pages=1 + 34)
    slots = [calls.open(seed) for seed in range(3)]
    calls.run()
    for text in ("gro", "growing", "growing text"):
        for slot in slots:
            calls.say(slot, text, is_closed=False)
        calls.run()
    for slot in slots:
        calls.say(slot, "growing text.")
    calls.run()
    assert len(calls.engine._decode.inbox) > 0


def test_a_call_that_fails_ends_the_engine_not_just_one_of_its_sessions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def explode(*args: object) -> None:
        raise RuntimeError("device lost")

    model = tiny_model()
    model.dual_ar.use_kernels("bf16")
    with running(model, num_slots=2) as (engine, recorder):
        slots = [open_slot(engine, recorder, seed=i) for i in range(2)]
        monkeypatch.setattr(model.dual_ar, "prefill_rows", explode)
        start_turn(engine, slots[0], 0, "hello there, " * 9)  # too long to ride with a frame
        failed = {recorder.wait(SlotFailed).slot for _ in slots}
        assert failed == set(slots) and "device lost" in (engine.failure or "")


def test_packed_says_what_each_says_alone() -> None:
    def said(num_slots: int) -> list[list[np.ndarray]]:
        model = tiny_model(context="dialogue")
        model.dual_ar.use_kernels("bf16")
        with running(model, num_slots=NUM_SLOTS) as (engine, recorder):
            pcm = []
            for begin in range(0, NUM_SLOTS, num_slots):
                numbers = range(begin, begin + num_slots)
                slots = [open_slot(engine, recorder, seed=i, voice_seed=i) for i in numbers]
                if num_slots == 1:
                    pcm.append([speak(engine, recorder, slots[0], t, TEXTS[begin]) for t in (0, 1)])
                    continue
                for turn in (0, 1):
                    for i, slot in zip(numbers, slots, strict=True):
                        start_turn(engine, slot, turn, TEXTS[i])
                    for _ in slots:
                        recorder.wait(TurnEnd)
                pcm += [[recorder.pcm(slot, turn) for turn in (0, 1)] for slot in slots]
            return pcm

    for alone, packed in zip(said(1), said(NUM_SLOTS), strict=True):
        for want, got in zip(alone, packed, strict=True):
            assert len(want) and want.shape == got.shape
            np.testing.assert_allclose(got, want, atol=1e-4)


def test_who_asks_for_another_voice_while_one_is_written_does_not_wait_for_itself() -> None:
    calls = Calls(max_positions=256, kv_pages=1 + 44, chunk_positions=16)
    memory, tenants = calls.prefill.kv.memory, calls.prefill._tenants
    talker = calls.open(0)
    calls.run()
    calls.say(talker, "a" * 60, is_closed=False)
    calls.run()
    slot = ask_slot(calls.engine, voice(1, 20))
    assert calls.prefill.step() and tenants[slot.idx].has_reserved
    calls.say(talker, "a" * 110, is_closed=False)  # more than there is room for
    calls.engine.submit(OpenSlot(slot, (voice(2, 65),), "", sampling(), 1000))  # as well
    calls.run()
    assert tenants[slot.idx].opening is None and memory.num_waiting == 0
    assert calls.prefill.kv.num_stripped == 1
