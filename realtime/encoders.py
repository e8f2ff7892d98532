"""From engine events to what the event loop gets, for any number of slots: the work of egress.

It knows no thread, no queue and no socket; `realtime.egress` runs it on threads,
`realtime.egress_processes` in processes.
"""

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from realtime.audio_encoder import AudioEncoder
from realtime.pingpong.api import SlotTable
from realtime.pingpong.messages import Event, FramePcm, SlotClosed, SlotFailed, SlotRef, TurnEnd
from realtime.session.actions import EncodedAudio, EncodedPacket
from realtime.wire import AudioFormat

logger = logging.getLogger(__name__)

LoopEvent = Event | EncodedAudio


class Tally(NamedTuple):
    """What one event comes to in `/metrics`."""

    num_frames: int = 0
    num_packets: int = 0
    num_bytes: int = 0
    num_stale: int = 0  # frames that nobody wants any more
    seconds: float | None = None  # that encoding took


class Encoded(NamedTuple):
    events: list[LoopEvent]
    tally: Tally = Tally()


@dataclass(slots=True)
class _Stream:
    """A slot's encoder and the turn it is in."""

    encoder: AudioEncoder
    slot: SlotRef
    turn_id: int = -1
    segment: int = 0
    num_frames: int = 0
    played_s: float = 0.0  # when a listener has heard what is encoded

    def is_at(self, slot: SlotRef, turn_id: int) -> bool:
        return self.slot == slot and self.turn_id == turn_id

    def start_turn(self, slot: SlotRef, turn_id: int) -> None:
        self.encoder.reset()
        self.slot, self.turn_id, self.segment, self.num_frames = slot, turn_id, 0, 0
        self.played_s = 0.0

    def encoded(self, num_samples: int, codec_rate: int, now_s: float) -> None:
        self.played_s = max(self.played_s, now_s) + num_samples / codec_rate


class Encoders:
    """A slot's events must come in order, and from one thread at a time."""

    def __init__(self, codec_rate: int, slots: SlotTable) -> None:
        self._codec_rate = codec_rate
        self._slots = slots
        self._streams: dict[int, _Stream] = {}  # by slot.idx

    def __len__(self) -> int:
        return len(self._streams)

    def clear(self) -> None:
        self._streams.clear()

    def open(self, slot: SlotRef, audio_format: AudioFormat) -> None:
        """Make the slot's encoder (30 to 110 us)."""
        self._streams[slot.idx] = _Stream(AudioEncoder(audio_format, self._codec_rate), slot)

    def deadline(self, event: Event) -> float:
        """When the listener has played what is encoded of the slot, in `time.perf_counter` seconds. At
        once for what begins a turn, and for what costs nothing."""
        stream = self._streams.get(event.slot.idx)
        if stream is None or not isinstance(event, FramePcm | TurnEnd):
            return 0.0
        return stream.played_s if stream.is_at(event.slot, event.turn_id) else 0.0

    def encode(self, event: Event) -> Iterator[Encoded]:
        """Pass on each part before the next is made. Never raises: one stream's failure must not silence
        the others."""
        try:
            match event:
                case FramePcm():
                    yield from self._encode_frames(event)
                case TurnEnd():
                    yield self._encode_tail(event)
                case SlotClosed():
                    self._streams.pop(event.slot.idx, None)
                    yield Encoded([event])
                case _:
                    yield Encoded([event])
        except Exception as error:
            logger.exception("encoding failed")
            yield Encoded([SlotFailed(event.slot, f"encoding failed: {error}")])

    def _encode_frames(self, event: FramePcm) -> Iterator[Encoded]:
        stream = self._streams.get(event.slot.idx)
        if stream is None or not self._slots.is_current(event.slot):
            yield Encoded([], Tally(num_stale=event.num_frames))
            return
        started_s = time.perf_counter()
        is_start = not stream.is_at(event.slot, event.turn_id)
        if is_start:
            stream.start_turn(event.slot, event.turn_id)
        stream.segment = event.segment
        stream.num_frames += event.num_frames
        packets = stream.encoder.push(event.pcm, max_packets=1 if is_start else None)
        stream.encoded(len(event.pcm), self._codec_rate, time.perf_counter())
        yield _encoded(stream, event, packets, started_s, event.num_frames)
        if is_start:
            started_s = time.perf_counter()
            yield _encoded(stream, event, stream.encoder.rest(), started_s, num_frames=0)

    def _encode_tail(self, event: TurnEnd) -> Encoded:
        """What the turn's end pushes out of the encoder, before the end itself."""
        stream = self._streams.get(event.slot.idx)
        if stream is None or not self._slots.is_current(event.slot):
            return Encoded([event])
        if not stream.is_at(event.slot, event.turn_id):
            return Encoded([event])  # a turn without frames
        started_s = time.perf_counter()
        packets = stream.encoder.finish()
        tail = EncodedAudio(
            event.slot,
            event.turn_id,
            stream.segment,
            stream.num_frames,
            num_frames=0,
            packets=packets,
            is_last=True,
            num_samples=stream.encoder.num_samples,
            encoded_ns=time.perf_counter_ns(),
        )
        stream.turn_id = -1
        return Encoded([tail, event], _tally(packets, started_s))


def _encoded(
    stream: _Stream,
    frames: FramePcm,
    packets: tuple[EncodedPacket, ...],
    started_s: float,
    num_frames: int,
) -> Encoded:
    audio = EncodedAudio(
        frames.slot,
        frames.turn_id,
        frames.segment,
        frames.first_frame,
        num_frames,
        packets,
        is_last=False,
        num_samples=stream.encoder.num_samples,
        encoded_ns=time.perf_counter_ns(),
    )
    return Encoded([audio], _tally(packets, started_s, num_frames))


def _tally(packets: tuple[EncodedPacket, ...], started_s: float, num_frames: int = 0) -> Tally:
    num_bytes = sum(len(packet.payload) for packet in packets)
    seconds = time.perf_counter() - started_s
    return Tally(num_frames, len(packets), num_bytes, seconds=seconds)


# ---------------------------------------------------------------------------- runs of events


def in_pieces(run: list[Event]) -> tuple[Event, ...]:
    """What `DeadlineQueue.get` gives, as events to encode: consecutive frames as one, but the first
    frame of a turn apart from the others that came with it. 8 frames of S2 are 2 to 5 ms of
    encoding, of which the first packets need an eighth."""
    event = _joined(run)
    if not isinstance(event, FramePcm) or not begins_turn(event) or event.num_frames == 1:
        return (event,)
    size = len(event.pcm) // event.num_frames
    rest = replace(event, first_frame=1, num_frames=event.num_frames - 1, pcm=event.pcm[size:])
    return (replace(event, num_frames=1, pcm=event.pcm[:size]), rest)


def begins_turn(event: Event) -> bool:
    return isinstance(event, FramePcm) and event.first_frame == 0


def _joined(run: list[Event]) -> Event:
    """One event of one slot, or its consecutive frames as one."""
    first = run[0]
    if len(run) == 1 or not isinstance(first, FramePcm):
        return first
    frames = [event for event in run if isinstance(event, FramePcm)]
    pcm = np.concatenate([frame.pcm for frame in frames])
    return replace(first, num_frames=sum(frame.num_frames for frame in frames), pcm=pcm)
