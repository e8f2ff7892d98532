"""PCM that is held, to be said with the next: of whoever has enough to hear, and never for long."""

import time

import pytest

from realtime.pingpong import vocode
from realtime.pingpong.messages import FramePcm, SegmentEnd
from tests.realtime.pingpong.vocode_bench import DeviceBench, row

FAR_NS = 10**18


class SpeakingBench(DeviceBench):
    """One slot, whose frames are a call each."""

    def __init__(self, monkeypatch):
        super().__init__(monkeypatch)
        self.loop._enough = 1
        self.slot = self.slots.acquire()
        self.voice = self.loop._voices[self.slot.idx]

    def say(self, frame, **fields):
        """Until it is PCM, whether said or held."""
        self.step((row(self.slot, frame, **fields), frame))
        while self.voice.num_waiting or self.voice.num_in_flight:
            self.advance()

    def said(self):
        return [event.num_frames for event in self.events if isinstance(event, FramePcm)]


@pytest.fixture
def bench(monkeypatch):
    return SpeakingBench(monkeypatch)


def test_pcm_of_who_has_enough_to_hear_is_said_eight_frames_at_a_time(bench):
    for frame in range(3):
        bench.say(frame)
    assert bench.said() == [1, 1, 1], "it has little to hear"
    bench.voice.clock.play_end_ns = FAR_NS
    for frame in range(3, 14):
        bench.say(frame)
    assert bench.said() == [1, 1, 1, 8] and set(bench.codec.chunks) == {1}
    bench.say(14, is_limit=True)
    assert bench.said() == [1, 1, 1, 8, 4], "its segment is over"
    assert isinstance(bench.events[-1], SegmentEnd)
    assert bench.pcm(bench.slot) == [(0, frame, 1001 * frame) for frame in range(15)]


def test_pcm_that_is_held_is_said_when_its_listener_needs_it(bench):
    """Though nothing comes any more: decode may have paused the stream."""
    for frame in range(2):
        bench.say(frame)
        bench.voice.clock.play_end_ns = time.perf_counter_ns() + 60 * 10**9
    wait_s, frame_ns = bench.advance(), bench.loop._frame_ns
    assert 59 < wait_s <= 60 - 3 * frame_ns / 1e9 + 0.001
    assert bench.pcm(bench.slot) == [(0, 0, 0)]
    bench.voice.clock.play_end_ns = time.perf_counter_ns() + 6 * frame_ns - 1
    bench.step((row(bench.slot, 2), 2))
    waiting = bench.loop._waiting(bench.voice, bench.voice.clock.play_end_ns)
    assert waiting.lead_ns == frame_ns, "it can be said at any time"
    while bench.advance() is not None:
        pass
    assert bench.pcm(bench.slot) == [(0, frame, 1001 * frame) for frame in range(3)]


def test_what_is_held_is_little_beside_what_its_listener_has(bench, monkeypatch):
    """Else a lead of half a second would be mostly here, and a stall of the network would be heard."""
    monkeypatch.setattr(vocode.time, "perf_counter_ns", lambda: 10**12)
    bench.say(0)
    bench.voice.clock.play_end_ns = 10**12 + 15 * bench.loop._frame_ns
    for frame in range(1, 7):
        bench.say(frame)
    assert bench.said() == [1, 6] and not bench.voice.held


def test_pcm_that_is_held_of_a_generation_that_is_over_is_not_said(bench):
    bench.say(0)
    bench.voice.clock.play_end_ns = FAR_NS
    bench.say(1)
    new = bench.slots.bump(bench.slot)
    bench.step((row(new, 0, turn_id=1), 7))
    while bench.advance() is not None:
        pass
    assert bench.pcm(bench.slot) == [(0, 0, 0)] and bench.pcm(new) == [(1, 0, 7)]
    assert not bench.voice.held and not bench.loop._holding
