"""Engines without a model, as functions that another process can call, and what is said to them."""

import sys
import threading

from realtime.errors import PlosiveError
from realtime.pingpong.messages import (
    CancelTurn,
    CloseSlot,
    EndTurn,
    FramePcm,
    OpenSlot,
    SamplingParams,
    SetText,
    SlotClosed,
    SlotReady,
    SlotRef,
    TurnEnd,
)
from realtime.pingpong.slots import Slots
from realtime.pingpong.tone import ToneConfig, ToneEngine
from tests.support.recorder import Recorder

SAMPLING = SamplingParams(0.7, 0.9, 30, seed=1)


def make_tone(slots: Slots) -> ToneEngine:
    return ToneEngine(ToneConfig(num_slots=slots.num_slots, step_ms=0.5), slots)


def make_slow_tone(slots: Slots) -> ToneEngine:
    """Its thread takes commands between steps of a second only."""
    return ToneEngine(ToneConfig(num_slots=slots.num_slots, step_ms=1000.0), slots)


def tell_patience(slots: Slots) -> ToneEngine:
    """How long a thread of the engine's process waits before it asks for the interpreter."""
    raise PlosiveError("model_unusable", f"{sys.getswitchinterval():g}")


def refuse(slots: Slots) -> ToneEngine:
    raise PlosiveError("model_unusable", f"no engine with {slots.num_slots} slots")


def load_forever(slots: Slots) -> ToneEngine:
    threading.Event().wait()
    raise AssertionError("nobody set it")


def fall_over(slots: Slots) -> ToneEngine:
    raise MemoryError("no room for the weights")


def opened(engine, recorder: Recorder, max_lead_ms: int = 60_000, **open_slot) -> SlotRef:
    slot = engine.slots.acquire()
    assert slot is not None
    fields = {"voices": (), "prompt": "", "sampling": SAMPLING, "max_lead_ms": max_lead_ms}
    engine.submit(OpenSlot(slot, **(fields | open_slot)))
    recorder.wait(SlotReady, lambda event: event.slot == slot)
    return slot


def say(engine, slot: SlotRef, turn_id: int, *texts: str) -> None:
    for segment, text in enumerate(texts):
        engine.submit(SetText(slot, turn_id, segment, text, is_closed=True))
    engine.submit(EndTurn(slot, turn_id, len(texts)))


def check_stale_is_dropped(engine) -> None:
    """A turn is cancelled while it is spoken and its text still comes; the next one is heard."""
    recorder = Recorder()
    engine.start(recorder)
    slot = opened(engine, recorder, max_lead_ms=200)
    say(engine, slot, 1, "word " * 200)
    recorder.wait(FramePcm)
    old, slot = slot, engine.slots.bump(slot)
    engine.submit(SetText(old, 1, 1, "never spoken", is_closed=True))
    engine.submit(CancelTurn(slot, 1, 0))
    say(engine, slot, 2, "Now this.")
    assert recorder.wait(TurnEnd).turn_id == 2
    slot = engine.slots.bump(slot)
    engine.submit(CloseSlot(slot))
    engine.slots.release(recorder.wait(SlotClosed).slot)
    assert engine.stats()["slots_active"] == 0
    assert engine.slots.num_free == engine.info.num_slots
