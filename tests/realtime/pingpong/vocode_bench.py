"""A vocode loop by itself: a codec whose samples say which frame of which stream they are, steps made by
hand, and a device whose calls take a while."""

from collections import Counter
from types import SimpleNamespace

import torch

from model.speech_model import Serving
from realtime.pingpong.codec_calls import MAX_CALLS, Call
from realtime.pingpong.device import Event as DeviceEvent
from realtime.pingpong.messages import FramePcm
from realtime.pingpong.slots import Slots
from realtime.pingpong.steps import StepBuffer, StepRow
from realtime.pingpong.vocode import VocodeLoop

CPU = torch.device("cpu")
NUM_SLOTS = 3


class CountingCodec:
    """One sample per frame: its first code plus 1000 times the frames before it in its stream."""

    sample_rate, frame_samples, num_codebooks, codebook_sizes = 50, 1, 2, (1000, 1000)

    def __init__(self, has_exact_chunks=True):
        self.has_exact_chunks = has_exact_chunks
        self.chunks = []

    def init_state(self, num_slots):
        return torch.zeros(num_slots, dtype=torch.int64)

    def state_tensors(self, state):
        return [state]

    def reset_state(self, state, rows):
        state[rows] = 0

    def decode_stream(self, codes, state, rows):
        chunk = codes.shape[2]
        self.chunks.append(chunk)
        frames = state[rows][:, None] + torch.arange(chunk)
        state[rows] += chunk
        return (codes[:, 0] + 1000 * frames).float()


class Bench:
    """A vocode loop whose steps are made by hand."""

    def __init__(self, *, is_length_fixed=False, num_slots=NUM_SLOTS, **kwargs):
        self.codec = CountingCodec(**kwargs)
        self.slots = Slots(num_slots)
        self.events, self.freed = [], []
        serving = Serving(is_length_fixed=is_length_fixed)
        model = SimpleNamespace(codec=self.codec, device=CPU, serving=serving)
        self.loop = VocodeLoop(model, self.slots, self.freed.append, self.events.append)

    def step(self, *rows, ends=()):
        """rows: StepRow and the frame's first code."""
        buffer = StepBuffer(
            torch.tensor([[code, 0] for _, code in rows], dtype=torch.int32),
            DeviceEvent(CPU), DeviceEvent(CPU), DeviceEvent(CPU),
            rows=[row for row, _ in rows],
            is_end=[row in ends for row, _ in rows],
        )  # fmt: skip
        self.loop.step(buffer)
        assert self.freed.pop() is buffer

    @property
    def num_free_calls(self):
        runner = self.loop.runner
        return len(runner._urgent.calls) + len(runner._bulk.calls)

    def pcm(self, slot):
        """(turn, frame, sample) of every frame of a slot."""
        return [
            (event.turn_id, event.first_frame + i, int(sample))
            for event in self.events
            if isinstance(event, FramePcm) and event.slot == slot
            for i, sample in enumerate(event.pcm)
        ]


class DeviceBench(Bench):
    """A device whose calls take a while: they are over at the next look but one."""

    def __init__(self, monkeypatch, **kwargs):
        super().__init__(**kwargs)
        self.looks = Counter()
        monkeypatch.setattr(Call, "is_over", lambda call: self.is_over(call))
        self.loop._device = SimpleNamespace(type="other")

    def is_over(self, call):
        self.looks[call] += 1
        if self.looks[call] > 2:
            del self.looks[call]
            return True
        return False

    def advance(self):
        wait_s = self.loop._advance()
        urgent, others = (self.loop._in_flight[is_urgent] for is_urgent in (True, False))
        assert len(urgent) <= MAX_CALLS and len(others) <= 1
        assert all(flight.plan.is_urgent for flight in urgent)
        return wait_s


def row(slot, frame, turn_id=0, segment=0, first_frame=0, is_limit=False, ends_turn=False):
    return StepRow(slot, turn_id, segment, first_frame, frame, is_limit, {}, ends_turn)
