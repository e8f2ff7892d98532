"""Random turns through both lanes of the codec, where calls of streams far ahead run as late as they may."""

import random

import pytest
import torch

from realtime.pingpong import codec_calls, vocode
from realtime.pingpong.codec_calls import MAX_CALLS, Call
from realtime.pingpong.messages import FramePcm, TurnEnd
from tests.realtime.pingpong.vocode_bench import DeviceBench, row

NUM_SLOTS, NUM_ACTIONS, RING_FRAMES = 8, 800, 16
FAR_NS = 10**18


class LateBench(DeviceBench):
    """The device does a bulk call when its PCM is waited for, when the other lane waits for it, or any
    time before: nothing that it reads may change until then."""

    def __init__(self, monkeypatch, rng):
        for module in (codec_calls, vocode):
            monkeypatch.setattr(module, "RING_FRAMES", RING_FRAMES)
        super().__init__(monkeypatch, num_slots=NUM_SLOTS)
        self.rng, self.lateness = rng, rng.choice([0.3, 0.8, 0.97])
        self.loop._may_pad, self.loop._enough = True, rng.choice([None, 32, 128])
        self.late = {}
        monkeypatch.setattr(self.loop.runner._bulk, "start", self.start)
        for name in ("wait", "wait_on_stream"):
            monkeypatch.setattr(Call, name, self.doing(getattr(Call, name)))

    def start(self, slots, places, chunk):
        runner = self.loop.runner
        call = runner._bulk.calls.pop()
        call.slots = frozenset(slots)

        def do():
            codes = runner._codes[torch.tensor(places)].view(len(slots), chunk, -1).transpose(1, 2)
            made = runner._codec.decode_stream(codes, runner._state, torch.tensor(slots))
            call._pcm = made.numpy()

        self.late[call] = do
        return call

    def do(self, call):
        self.late.pop(call, lambda: None)()

    def doing(self, method):
        def do_and_go_on(call):
            self.do(call)
            return method(call)

        return do_and_go_on

    def is_over(self, call):
        if call in self.late and self.rng.random() < self.lateness:
            return False
        self.do(call)
        return self.rng.random() < 0.6


class Speaker:
    """A slot's turns, one after the other, of segments of random length."""

    def __init__(self, bench):
        self.bench = bench
        self.slot = bench.slots.acquire()
        self.turn_id = self.segment = self.first = self.frame = 0
        self.wanted = {}  # by generation and turn
        self.over = None

    def next(self, rng, *, is_last=False):
        """A row, its code, whether it is an end."""
        ends_segment = is_last or rng.random() < 0.04
        ends_turn = is_last or (ends_segment and rng.random() < 0.5)
        is_end = is_last or (ends_segment and rng.random() < 0.7)
        made = row(
            self.slot,
            self.frame,
            turn_id=self.turn_id,
            segment=self.segment,
            first_frame=self.first,
            is_limit=ends_segment and not is_end,
            ends_turn=ends_turn and rng.random() < 0.6,  # it may be known too late
        )
        code, at = rng.randrange(1000), self.first + self.frame
        frames = self.wanted.setdefault((self.slot, self.turn_id), [])
        if not is_end:
            frames.append((self.turn_id, at, code + 1000 * at))
        self.frame += 1
        if ends_turn:
            self.over = TurnEnd(self.slot, self.turn_id, len(frames), {})
            self.begin()
        elif ends_segment:
            self.segment, self.first, self.frame = self.segment + 1, len(frames), 0
        return made, code, is_end

    def begin(self):
        self.turn_id, self.segment, self.first, self.frame = self.turn_id + 1, 0, 0, 0

    def interrupt(self):
        self.slot = self.bench.slots.bump(self.slot)
        self.begin()


def take(bench, speakers, *, is_last=False):
    steps = [speaker.next(bench.rng, is_last=is_last) for speaker in speakers]
    rows = [(made, code) for made, code, _ in steps]
    bench.step(*rows, ends=[made for made, _, is_end in steps if is_end])
    for speaker in speakers:
        if speaker.over is not None:
            bench.loop.step(speaker.over)
            speaker.over = None


def act(bench, speakers):
    rng, action = bench.rng, bench.rng.random()
    if action < 0.6:
        take(bench, rng.sample(speakers, rng.randint(1, NUM_SLOTS)))
    elif action < 0.64:
        rng.choice(speakers).interrupt()
    elif action < 0.68:
        rng.choice(bench.loop._voices).clock.play_end_ns = rng.choice([0, FAR_NS])
    for _ in range(rng.choice([0, 0, 0, 1, 2, 5])):
        bench.advance()


def check(bench, speaker):
    """What was heard is what each turn began with, in order; all of it where the turn was heard out."""
    events = [event for event in bench.events if event.slot.idx == speaker.slot.idx]
    heard = {key: [] for key in speaker.wanted}
    for event in events:
        frames = heard[event.slot, event.turn_id]
        if isinstance(event, FramePcm):
            numbered = enumerate(event.pcm, event.first_frame)
            frames += [(event.turn_id, frame, int(sample)) for frame, sample in numbered]
        elif isinstance(event, TurnEnd) and event.slot == speaker.slot:
            assert frames == speaker.wanted[event.slot, event.turn_id]
    for key, frames in heard.items():
        assert frames == speaker.wanted[key][: len(frames)]
    turn_ids = [event.turn_id for event in events]
    assert turn_ids == sorted(turn_ids)


@pytest.mark.parametrize("seed", range(4))
def test_both_lanes_lose_nothing_and_mix_nothing(monkeypatch, seed):
    bench = LateBench(monkeypatch, random.Random(seed))
    speakers = [Speaker(bench) for _ in range(NUM_SLOTS)]
    for _ in range(NUM_ACTIONS):
        act(bench, speakers)
    take(bench, speakers, is_last=True)
    while bench.loop._work():
        pass
    assert not any(voice.queue or voice.num_in_flight for voice in bench.loop._voices)
    assert bench.num_free_calls == 2 * MAX_CALLS and not bench.loop.runner._bulk_calls
    for speaker in speakers:
        check(bench, speaker)
    assert sum(isinstance(event, TurnEnd) for event in bench.events) > NUM_SLOTS
    assert 8 in bench.codec.chunks


@pytest.mark.parametrize("seed", range(8))
def test_the_thread_never_sleeps_while_somebody_waits(monkeypatch, seed):
    """It sleeps as long as it says, by a clock of the test's, until all is said."""
    rng, now_ns = random.Random(seed), [10**12]
    bench = LateBench(monkeypatch, rng)
    monkeypatch.setattr(vocode.time, "perf_counter_ns", lambda: now_ns[0])
    speakers = [Speaker(bench) for _ in range(NUM_SLOTS)]
    for _ in range(NUM_ACTIONS // 4):
        act(bench, speakers)
        now_ns[0] += rng.choice([0, 10**6, 10**7, 10**8])
    take(bench, speakers, is_last=seed % 2 == 1)  # else turns go on, but no frame comes
    for voice in bench.loop._voices:
        voice.clock.play_end_ns = min(voice.clock.play_end_ns, now_ns[0] + 10**9)
    for _ in range(3000):
        wait_s = bench.advance()
        if wait_s is None:
            break
        now_ns[0] += round(wait_s * 1e9)
    assert wait_s is None
    assert not any(voice.queue or voice.held for voice in bench.loop._voices)
