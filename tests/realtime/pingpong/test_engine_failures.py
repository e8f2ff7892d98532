"""What the engine refuses, and whose failure it is: a slot's own, or every slot's when a thread dies."""

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from model.errors import ConfigError
from model.speech_model import PlainText
from realtime.errors import EngineError, VoiceError
from realtime.pingpong.decode import DecodeLoop
from realtime.pingpong.engine import EngineConfig, PingPongEngine
from realtime.pingpong.memory import memory_of
from realtime.pingpong.messages import (
    CloseSlot,
    EndTurn,
    OpenSlot,
    SetText,
    SlotFailed,
    TurnEnd,
    VoicePrompt,
)
from tests.support.engine import (
    TEXTS,
    ask_slot,
    close_slot,
    open_slot,
    running,
    sampling,
    speak,
    start_turn,
    tiny_model,
    voice,
)


def test_a_failing_front_end_fails_its_own_session_only() -> None:
    def front_end(text: str) -> PlainText:
        if "boom" in text:
            raise RuntimeError("no such word")
        return PlainText(text)

    with running(tiny_model(front_end=front_end), num_slots=2) as (engine, recorder):
        bad, good = open_slot(engine, recorder), open_slot(engine, recorder)
        start_turn(engine, bad, 0, "boom")
        assert "no such word" in recorder.wait(SlotFailed).message
        assert len(speak(engine, recorder, good, 0, "still here."))
        close_slot(engine, recorder, bad)


def test_a_voice_without_room_for_text_is_refused_and_fails_its_own_session_only() -> None:
    long = replace(voice(), text="much too long " * 40)
    with running(tiny_model(), num_slots=2, max_positions=400) as (engine, recorder):
        good = open_slot(engine, recorder)
        engine.check_voice(voice())
        with pytest.raises(VoiceError, match="there is room for"):
            engine.check_voice(long)
        bad = ask_slot(engine, long)
        assert "there is room for" in recorder.wait(SlotFailed).message
        assert len(speak(engine, recorder, good, 0, "still here."))
        close_slot(engine, recorder, bad)


def test_commands_out_of_order_fail_their_own_session_only() -> None:
    with running(tiny_model(), num_slots=2) as (engine, recorder):
        bad, good = open_slot(engine, recorder), open_slot(engine, recorder)
        engine.submit(SetText(bad, 0, 5, "a segment that skips others", is_closed=True))
        assert recorder.wait(SlotFailed).slot == bad
        assert len(speak(engine, recorder, good, 0, "still here."))
        close_slot(engine, recorder, bad)


def test_a_dead_thread_fails_every_session_and_refuses_commands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with running(tiny_model(), num_slots=2) as (engine, recorder):
        slot = open_slot(engine, recorder)

        def explode(self: DecodeLoop, streams: object) -> None:
            raise RuntimeError("device lost")

        monkeypatch.setattr(DecodeLoop, "_launch", explode)
        start_turn(engine, slot, 0, "hello.")
        assert "device lost" in recorder.wait(SlotFailed).message
        with pytest.raises(EngineError, match="device lost"):
            engine.submit(EndTurn(slot, 1, 0))


def test_a_thread_that_cannot_begin_is_a_dead_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(self: PingPongEngine) -> None:
        raise RuntimeError("that many threads")

    monkeypatch.setattr(PingPongEngine, "_set_threads", explode)
    with running(tiny_model(), num_slots=1) as (engine, _):
        for thread in engine._threads:
            thread.join(10)
        slot = engine.slots.acquire()
        assert slot is not None
        with pytest.raises(EngineError, match="that many threads"):
            engine.submit(EndTurn(slot, 1, 0))


def test_a_slot_that_is_opened_while_a_thread_dies_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(tiny_model(), num_slots=1) as (engine, recorder):
        slot = engine.slots.acquire()
        assert slot is not None

        def die_and_go_on() -> bool:
            engine._die("device lost")
            return False

        monkeypatch.setattr(engine._is_stopping, "is_set", die_and_go_on)
        engine.submit(OpenSlot(slot, (), "", sampling(), 1000))
        monkeypatch.undo()
        assert recorder.wait(SlotFailed).slot == slot


def test_a_slot_that_commands_too_much_is_refused_without_a_wait_and_alone() -> None:
    gate = threading.Event()

    def front_end(text: str) -> PlainText:
        gate.wait(10)
        return PlainText(text)

    with running(tiny_model(front_end=front_end), num_slots=2) as (engine, recorder):
        slot, other = engine.slots.acquire(), engine.slots.acquire()
        assert slot is not None and other is not None
        engine.submit(OpenSlot(slot, (voice(),), "", sampling(), 1000))
        with pytest.raises(EngineError, match="engine_overloaded"):
            for i in range(1000):
                engine.submit(SetText(slot, 0, 0, "a" * i, is_closed=False))
        engine.submit(OpenSlot(other, (voice(),), "", sampling(), 600_000))
        start_turn(engine, other, 0, *TEXTS)
        engine.submit(CloseSlot(engine.slots.bump(slot)))  # never refused
        gate.set()
        recorder.wait(TurnEnd, lambda event: event.slot == other)


def test_a_context_without_room_for_a_segment_is_refused_at_start() -> None:
    model = tiny_model(max_frames=1000)
    assert model.dual_ar.config.slow.max_len < 1128
    with pytest.raises(ConfigError, match="lower plosive.max_frames in config.json"):
        PingPongEngine(model, EngineConfig(num_slots=1))
    with pytest.raises(ConfigError, match="raise --max-context to 136 or more"):
        PingPongEngine(tiny_model(max_frames=8), EngineConfig(num_slots=1, max_positions=10))


def test_slots_that_no_memory_holds_are_refused_with_what_they_need() -> None:
    why = r"1000000 slots with a context of 256 positions each do not fit .* [\d,.]+ GB; .*--max-slots"
    dual_ar = tiny_model().dual_ar
    with pytest.raises(ConfigError, match=why), memory_of(dual_ar, 10**6, 256, "bf16"):
        torch.empty(10**15)
    with pytest.raises(RuntimeError, match="no kernel"), memory_of(dual_ar, 1, 256, "bf16"):
        raise RuntimeError("no kernel")


def test_a_default_voice_without_room_is_said_in_a_sentence() -> None:
    engine = PingPongEngine(tiny_model(), EngineConfig(num_slots=1, max_positions=200))
    codes = np.zeros((engine.info.num_codebooks, 500), np.int32)
    with pytest.raises(VoiceError, match=r"the default voice: .*raise --max-context \(200 now"):
        engine.warm_up((VoicePrompt("long", "a", codes),))
