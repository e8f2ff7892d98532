"""The engine without a model keeps the protocol of an engine."""

import time

import pytest

from realtime.errors import EngineError, PlosiveError, VoiceError
from realtime.pingpong.messages import (
    CloseSlot,
    Event,
    FramePcm,
    SegmentEnd,
    SlotRef,
    TurnEnd,
)
from realtime.pingpong.tone import ToneConfig, ToneEngine
from tests.support.recorder import Recorder
from tests.support.tones import check_stale_is_dropped, opened, say


@pytest.fixture
def engine():
    engine = ToneEngine(ToneConfig(num_slots=3, step_ms=0.5))
    yield engine
    engine.stop()


def test_a_turn_is_whole(engine: ToneEngine) -> None:
    recorder = Recorder()
    engine.start(recorder)
    slot = opened(engine, recorder)
    say(engine, slot, 1, "A first segment.", "And a second.")
    end = recorder.wait(TurnEnd)
    frames = [event for event in recorder.events if isinstance(event, FramePcm)]
    numbers = [f.first_frame + i for f in frames for i in range(f.num_frames)]
    assert numbers == list(range(end.num_frames))
    assert all(frame.pcm.shape == (2_048 * frame.num_frames,) for frame in frames)
    assert {frame.num_frames for frame in frames[:4]} == {1}
    assert max(frame.num_frames for frame in frames) == 4
    ends = [event for event in recorder.events if isinstance(event, SegmentEnd)]
    assert [each.segment for each in ends] == [0, 1]
    assert sum(each.num_frames for each in ends) == end.num_frames
    assert list(end.stamps_ns) == ["prefill_done", "first_step", "first_pcm"]
    assert list(end.stamps_ns.values()) == sorted(end.stamps_ns.values())
    assert engine.stats()["decode_rows_total"] == end.num_frames


def test_lead_is_held_below_its_cap() -> None:
    """A frame is 10 ms here, and the last comes when all before it but the cap have been heard."""
    engine = ToneEngine(ToneConfig(step_ms=0.5, chunk_frames=1, frame_samples=441))
    recorder, times_ms = Recorder(), []

    def sink(event: Event) -> None:
        if isinstance(event, FramePcm):
            times_ms.append(1000.0 * time.perf_counter())
        recorder(event)

    engine.start(sink)
    slot = opened(engine, recorder, max_lead_ms=100)
    say(engine, slot, 1, "Words for half a second of them.")
    end = recorder.wait(TurnEnd)
    engine.stop()
    assert end.num_frames == len(times_ms) > 40
    first_ms = end.stamps_ns["first_pcm"] / 1e6
    for number, time_ms in enumerate(times_ms):
        assert 10.0 * number - (time_ms - first_ms) < 100.0


def test_what_is_stale_is_dropped(engine: ToneEngine) -> None:
    check_stale_is_dropped(engine)


def test_it_refuses_what_it_cannot_do(engine: ToneEngine) -> None:
    with pytest.raises(VoiceError, match="learn no voice"):
        engine.encode_voice(b"RIFF", 30.0)
    engine.stop()
    with pytest.raises(EngineError, match="stopped"):
        engine.submit(CloseSlot(SlotRef(0, 1)))


def test_pace_is_an_option() -> None:
    config = ToneConfig.parse("tone:8,0.5", num_slots=7)
    assert (config.num_slots, config.step_ms, config.host_ms) == (7, 8.0, 0.5)
    assert ToneConfig.parse("tone:8,0.5,1", num_slots=7).chunk_frames == 1
    assert ToneConfig.parse("tone", 2).step_ms == 5.0
    for model in (
        "tone:fast",
        "tone:1,2",
        "tone:-1,0",
        "tone:nan,0",
        "tone:5",
        "tone:5,0,0",
        "tone:",
    ):
        with pytest.raises(PlosiveError, match="expected tone"):
            ToneConfig.parse(model, 1)
