"""An engine without a model: it hums at the pace a model would speak, and needs no torch.

`plosive serve --model tone` is a server to write clients against, and the load with which
`python -m bench_ttfa.host` measures what surrounds an engine: event loop, Opus and sockets. Tests put
a hand on it (`tests/fakes.py`).
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import NDArray

from realtime.errors import EngineError, PlosiveError, VoiceError
from realtime.pingpong.api import EngineInfo
from realtime.pingpong.handoff import Mailbox
from realtime.pingpong.messages import (
    CancelTurn,
    CloseSlot,
    Command,
    EndTurn,
    Event,
    FramePcm,
    OpenSlot,
    SegmentEnd,
    SetText,
    SlotClosed,
    SlotReady,
    SlotRef,
    TurnBegin,
    TurnEnd,
    VoicePrompt,
)
from realtime.pingpong.pacing import PlaybackClock
from realtime.pingpong.slots import Slots
from realtime.threads import name_thread

MODEL = "tone"
_HUM_S = 4.0  # then it repeats
_NUM_SINGLE = 4  # frames of a turn that come one by one
_NUM_LATE = 2_000  # steps whose lateness is kept
_CALIBRATION = 20_000  # turns of the loop that stands for a model's host work


@dataclass(frozen=True, slots=True)
class ToneConfig:
    """Sizes and pace; the defaults are those of S2 Pro's codec."""

    num_slots: int = 4
    step_ms: float = 5.0  # one frame of every stream
    host_ms: float = 0.0  # of it, Python's work, as a decode loop launches and drains a step
    chunk_frames: int = 4  # that come at once but at the start of a turn, as a codec takes them
    sample_rate: int = 44_100
    frame_samples: int = 2_048
    chars_per_frame: float = 0.7  # of English speech: 15 a second

    @classmethod
    def parse(cls, model: str, num_slots: int) -> "ToneConfig":
        """`tone` or `tone:STEP_MS,HOST_MS,CHUNK_FRAMES`, of which the last may be left out.

        Raises:
            PlosiveError: code `model_unusable`.
        """
        numbers = model.partition(":")[2].split(",") if ":" in model else []
        try:
            step_ms, host_ms = (float(text) for text in [*numbers[:2], "5", "0"][:2])
            config = cls(num_slots, step_ms, host_ms, int([*numbers[2:], "4"][0]))
        except ValueError:
            config = cls(step_ms=-1.0)
        is_possible = 0.0 <= config.host_ms <= config.step_ms < 1e6 and config.chunk_frames > 0
        if not is_possible or len(numbers) not in (0, 2, 3):
            why = f"got {model!r}, expected {MODEL} or {MODEL}:STEP_MS,HOST_MS (like tone:5,0.3)"
            raise PlosiveError("model_unusable", why)
        return config


@dataclass
class Turn:
    turn_id: int
    frames: deque[int] = field(default_factory=deque)  # of each closed segment that is not over
    num_segments: int | None = None
    segment: int = 0
    segment_frames: int = 0
    num_frames: int = 0
    stamps_ns: dict[str, int] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        return self.segment == self.num_segments


@dataclass
class Stream:
    slot: SlotRef
    max_lead_ns: int
    turns: deque[Turn] = field(default_factory=deque)
    clock: PlaybackClock = field(default_factory=PlaybackClock)
    is_blocked: bool = False

    def turn(self, turn_id: int) -> Turn:
        if not self.turns or self.turns[-1].turn_id != turn_id:
            self.turns.append(Turn(turn_id))
        return self.turns[-1]

    @property
    def has_work(self) -> bool:
        return bool(self.turns) and (bool(self.turns[0].frames) or self.turns[0].is_over)


class ToneEngine:
    """Implements `realtime.pingpong.api.Engine` on one thread: commands, a step, its frames."""

    def __init__(self, config: ToneConfig, slots: Slots | None = None) -> None:
        self._config = config
        self.info = EngineInfo(
            model_name=MODEL,
            codec_id=MODEL,
            sample_rate=config.sample_rate,
            frame_samples=config.frame_samples,
            num_codebooks=1,
            num_slots=config.num_slots,
            default_temperature=0.7,
            default_top_p=0.9,
            default_top_k=30,
            default_voice="default",
            builtin_voices_path=None,
            max_segment_chars=300,
            has_prompt=False,
        )
        self.slots = slots or Slots(config.num_slots)
        self.failure: str | None = None
        self._frame_ns = round(1e9 * config.frame_samples / config.sample_rate)
        self._hum = _hum(config.sample_rate)
        self._streams: dict[int, Stream] = {}
        self._inbox: Mailbox[Command] = Mailbox(max_items=1_000 + 100 * config.num_slots)
        self._sink: Callable[[Event], None] = lambda event: None
        self._is_stopping = False
        self._num_steps = self._num_frames = 0
        self._late_ms: deque[float] = deque(maxlen=_NUM_LATE)
        self._work_per_ms = 0.0
        self._thread = threading.Thread(target=self._run, name="plosive-tone", daemon=True)

    # ------------------------------------------------------------------ Engine

    def start(self, sink: Callable[[Event], None]) -> None:
        self._sink = sink
        started_s = time.perf_counter()
        _work(_CALIBRATION)
        self._work_per_ms = _CALIBRATION / (1000.0 * (time.perf_counter() - started_s))
        self._thread.start()

    def submit(self, command: Command) -> None:
        if self._is_stopping:
            raise EngineError("engine_stopped", "the engine is stopped")
        if not self._inbox.offer(command):
            raise EngineError("engine_overloaded", f"{len(self._inbox)} commands wait")

    def set_blocked(self, slot: SlotRef, is_blocked: bool) -> None:
        stream = self._streams.get(slot.idx)
        if stream is not None and self.slots.is_current(slot):
            stream.is_blocked = is_blocked
            self._inbox.poke()

    def warm_up(self, voices: tuple[VoicePrompt, ...]) -> None:
        pass

    def encode_voice(self, clip: bytes, max_seconds: float) -> NDArray[np.int32]:
        raise VoiceError("invalid_clip", "this engine only hums; it can learn no voice")

    def check_voice(self, voice: VoicePrompt) -> None:
        pass

    def stats(self) -> dict[str, float]:
        late_ms = sorted(self._late_ms) or [0.0]
        return {
            "slots_active": self.info.num_slots - self.slots.num_free,
            "decode_steps_total": self._num_steps,
            "decode_rows_total": self._num_frames,
            "step_late_ms_p50": late_ms[len(late_ms) // 2],
            "step_late_ms_p99": late_ms[len(late_ms) * 99 // 100],
        }

    def stop(self) -> None:
        self._is_stopping = True
        self._inbox.close()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(10.0)

    # ------------------------------------------------------------------ its thread

    def _run(self) -> None:
        name_thread("plosive-tone")
        timeout_s: float | None = None
        while not self._is_stopping:
            for command in self._inbox.take_all(timeout_s):
                self._handle(command)
            rows = self._runnable(time.perf_counter_ns())
            if rows:
                self._step(rows)
            timeout_s = 0.0 if rows else self._pause_s()

    def _runnable(self, now_ns: int) -> list[Stream]:
        return [
            stream
            for stream in self._streams.values()
            if self._can_speak(stream) and stream.clock.lead_ns(now_ns) < stream.max_lead_ns
        ]

    def _can_speak(self, stream: Stream) -> bool:
        return stream.has_work and not stream.is_blocked

    def _pause_s(self) -> float | None:
        """Until a stream's lead is below its cap; None: until something comes."""
        now_ns = time.perf_counter_ns()
        waiting = [
            stream.clock.lead_ns(now_ns) - stream.max_lead_ns
            for stream in self._streams.values()
            if self._can_speak(stream)
        ]
        return max(0.0, min(waiting) / 1e9) if waiting else None

    def _step(self, rows: list[Stream]) -> None:
        config = self._config
        started_ns = time.perf_counter_ns()
        for stream in rows:
            stream.turns[0].stamps_ns.setdefault("first_step", started_ns)
        due_ns = started_ns + round(1e6 * config.step_ms)
        _work(round(config.host_ms * self._work_per_ms))
        time.sleep(max(0.0, (due_ns - time.perf_counter_ns()) / 1e9))  # the device works
        self._late_ms.append((time.perf_counter_ns() - due_ns) / 1e6)
        self._num_steps += 1
        for stream in rows:
            self._speak(stream)

    def _speak(self, stream: Stream) -> None:
        """One frame of the turn, or its end."""
        turn, slot = stream.turns[0], stream.slot
        if turn.is_over:
            stream.turns.popleft()
            self._sink(TurnEnd(slot, turn.turn_id, turn.num_frames, turn.stamps_ns))
            return
        now_ns = time.perf_counter_ns()
        if turn.num_frames == 0:
            turn.stamps_ns["first_pcm"] = now_ns
            self._sink(TurnBegin(slot, turn.turn_id, dict(turn.stamps_ns)))
        num_frames = 1
        if turn.num_frames >= _NUM_SINGLE:
            num_frames = min(self._config.chunk_frames, turn.frames[0] - turn.segment_frames)
        stream.clock.add(num_frames * self._frame_ns, now_ns)
        pcm = self._pcm(stream, turn, num_frames)
        self._sink(FramePcm(slot, turn.turn_id, turn.segment, turn.num_frames, num_frames, pcm))
        turn.num_frames += num_frames
        turn.segment_frames += num_frames
        self._num_frames += num_frames
        if turn.segment_frames >= turn.frames[0]:
            self._sink(SegmentEnd(slot, turn.turn_id, turn.segment, turn.segment_frames))
            turn.frames.popleft()
            turn.segment, turn.segment_frames = turn.segment + 1, 0

    def _pcm(self, stream: Stream, turn: Turn, num_frames: int) -> NDArray[np.float32]:
        """f32 [num_frames * frame_samples]: what the turn says next."""
        size = num_frames * self._config.frame_samples
        first = stream.slot.idx * 977 + turn.num_frames * self._config.frame_samples
        first %= len(self._hum) - size
        return self._hum[first : first + size]

    def _handle(self, command: Command) -> None:
        stream = self._streams.get(command.slot.idx)
        match command:
            case OpenSlot(slot):
                if stream is None:
                    stream = self._streams[slot.idx] = Stream(slot, 0)
                stream.slot, stream.max_lead_ns = slot, round(1e6 * command.max_lead_ms)
                self._sink(SlotReady(slot, prefill_ms=0.0, cached=True))
            case CancelTurn(slot):
                if stream is not None:
                    stream.slot = slot
                    stream.turns.clear()
                    stream.clock = PlaybackClock()
            case CloseSlot(slot):
                self._streams.pop(slot.idx, None)
                self._sink(SlotClosed(slot))
            case SetText() | EndTurn():
                if stream is not None and self.slots.is_current(command.slot):
                    self._take_text(stream.turn(command.turn_id), command)

    def _take_text(self, turn: Turn, command: SetText | EndTurn) -> None:
        if isinstance(command, EndTurn):
            turn.num_segments = command.num_segments
        elif command.is_closed:
            turn.stamps_ns.setdefault("prefill_done", time.perf_counter_ns())
            turn.frames.append(max(1, int(len(command.text) / self._config.chars_per_frame)))


def _work(num_turns: int) -> None:
    """Python's work, which holds the GIL."""
    value = 0
    for number in range(num_turns):
        value ^= number


@cache  # 25 ms
def _hum(sample_rate: int) -> NDArray[np.float32]:
    """f32 [_HUM_S * sample_rate]: as hard for Opus as a voice (gliding harmonics, syllables, breath)."""
    t_s = np.arange(round(_HUM_S * sample_rate)) / sample_rate
    pitch_hz = 120.0 + 20.0 * np.sin(2 * np.pi * 0.5 * t_s)
    phase = 2 * np.pi * np.cumsum(pitch_hz) / sample_rate
    voice = sum(np.sin(k * phase) / k for k in range(1, 25))
    breath = np.random.default_rng(0).standard_normal(len(t_s))
    loudness = 0.55 + 0.45 * np.sin(2 * np.pi * 4.0 * t_s)
    hum: NDArray[np.float32] = (0.1 * loudness * (voice + 0.1 * breath)).astype(np.float32)
    return hum
