"""An engine without a model: its own thread, a tone for a voice, and a test's hand on everything."""

import io
import queue
import threading
import time
import wave
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from realtime.errors import EngineError, VoiceError
from realtime.pingpong.api import EngineInfo
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
    SlotFailed,
    SlotReady,
    SlotRef,
    TurnBegin,
    TurnEnd,
    VoicePrompt,
)
from realtime.pingpong.slots import Slots

CHARS_PER_FRAME = 2
NUM_CODEBOOKS = 4
MIN_CLIP_S = 0.5
MAX_VOICE_TEXT_CHARS = 1_000


@dataclass
class _Turn:
    turn_id: int
    texts: dict[int, str] = field(default_factory=dict)  # closed segments
    num_segments: int | None = None
    segment: int = 0
    segment_frame: int = 0
    num_frames: int = 0
    first_pcm_ns: int = 0


@dataclass
class _Stream:
    slot: SlotRef
    turns: list[_Turn] = field(default_factory=list)

    def turn(self, turn_id: int) -> _Turn:
        for turn in self.turns:
            if turn.turn_id == turn_id:
                return turn
        self.turns.append(_Turn(turn_id))
        return self.turns[-1]


class FakeEngine:
    """Implements `realtime.pingpong.api.Engine`.

    Frames come as fast as they are taken, unless `hold()` stops them until `let(n)` or `let_all()`.
    `emitted[slot.idx, turn_id]` is the PCM that a perfect transport would deliver.
    """

    def __init__(
        self,
        num_slots: int = 2,
        sample_rate: int = 24_000,
        frame_samples: int = 960,
        builtin_voices_path: Path | None = None,
        frame_s: float = 0.0,
    ) -> None:
        self.info = EngineInfo(
            model_name="fake",
            codec_id="tone",
            sample_rate=sample_rate,
            frame_samples=frame_samples,
            num_codebooks=NUM_CODEBOOKS,
            num_slots=num_slots,
            default_temperature=0.7,
            default_top_p=0.9,
            default_top_k=30,
            default_voice="tone",
            builtin_voices_path=builtin_voices_path,
            max_segment_chars=200,
            has_prompt=False,
        )
        self.slots = Slots(num_slots)
        self.failure: str | None = None
        self.commands: list[Command] = []
        self.blocked: list[tuple[SlotRef, bool]] = []
        self.emitted: dict[tuple[int, int], list[np.ndarray]] = defaultdict(list)
        self.warmed: tuple[VoicePrompt, ...] = ()
        self.warm_up_gate = threading.Event()
        self.warm_up_gate.set()
        self.warm_up_error: Exception | None = None
        self.encode_gate = threading.Event()
        self.encode_gate.set()
        self.refuse: Callable[[Command], str | None] = lambda command: None
        self._frame_s = frame_s
        self._credit = float("inf")
        self._is_blocked = [False] * num_slots
        self._streams: dict[int, _Stream] = {}
        self._inbox: queue.Queue[Command | Callable[[], None] | None] = queue.Queue()
        self._sink: Callable[[Event], None] | None = None
        self._is_stopped = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="fake-engine", daemon=True)

    # ------------------------------------------------------------------ the test's hand

    def hold(self) -> None:
        self._credit = 0.0

    def let(self, num_frames: int) -> None:
        self._inbox.put(lambda: setattr(self, "_credit", self._credit + num_frames))

    def let_all(self) -> None:
        self._inbox.put(lambda: setattr(self, "_credit", float("inf")))

    def emit(self, event: Event) -> None:
        """Say something on the engine's thread."""
        assert self._sink is not None
        self._inbox.put(lambda: self._sink(event))

    def wait_until(self, is_true: Callable[[], bool], timeout_s: float = 10.0) -> None:
        """Wait (off the event loop) until a command or a frame has made `is_true` true."""
        with self._changed:
            assert self._changed.wait_for(is_true, timeout_s), "the engine never got there"

    def pcm(self, slot_idx: int, turn_id: int) -> np.ndarray:
        return np.concatenate(self.emitted[slot_idx, turn_id])

    def seen(self, kind: type[Command]) -> list[Command]:
        return [command for command in self.commands if isinstance(command, kind)]

    # ------------------------------------------------------------------ Engine

    def start(self, sink: Callable[[Event], None]) -> None:
        self._sink = sink
        self._thread.start()

    def submit(self, command: Command) -> None:
        code = "engine_stopped" if self._is_stopped else self.refuse(command)
        if code is not None:
            raise EngineError(code, f"refused {type(command).__name__}")
        self._inbox.put(command)

    def set_blocked(self, slot: SlotRef, is_blocked: bool) -> None:
        with self._changed:
            self.blocked.append((slot, is_blocked))
            self._is_blocked[slot.idx] = is_blocked
            self._changed.notify_all()
        self._inbox.put(lambda: None)

    def warm_up(self, voices: tuple[VoicePrompt, ...]) -> None:
        assert self.warm_up_gate.wait(10.0)
        if self.warm_up_error is not None:
            raise self.warm_up_error
        self.warmed = voices

    def encode_voice(self, clip: bytes, max_seconds: float) -> np.ndarray:
        assert self.encode_gate.wait(10.0)
        try:
            with wave.open(io.BytesIO(clip)) as wav:
                num, rate = wav.getnframes(), wav.getframerate()
                pcm = np.frombuffer(wav.readframes(num), "<i2")
        except (wave.Error, EOFError) as error:
            raise VoiceError("invalid_clip", f"not audio: {error}", param="file") from error
        duration_s = num / rate
        if not MIN_CLIP_S <= duration_s <= max_seconds:
            why = f"got {duration_s:.1f} s, expected {MIN_CLIP_S} to {max_seconds:g} s"
            raise VoiceError("invalid_clip", why, param="file")
        if not np.any(pcm):
            raise VoiceError("invalid_clip", "the clip is silent", param="file")
        num_frames = round(duration_s * self.info.frame_rate_hz)
        return np.full((NUM_CODEBOOKS, num_frames), 7, np.int32)

    def check_voice(self, voice: VoicePrompt) -> None:
        if len(voice.text) > MAX_VOICE_TEXT_CHARS:
            raise VoiceError("invalid_voice", "no room for this text")

    def stats(self) -> dict[str, float]:
        return {"frames_total": float(sum(map(len, self.emitted.values())))}

    def stop(self) -> None:
        self._is_stopped = True
        self._inbox.put(None)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(10.0)

    def die(self) -> None:
        """An engine thread has died: slots fail, commands are refused, nothing is answered."""
        self._is_stopped = True
        for stream in list(self._streams.values()):
            self._inbox.put(lambda stream=stream: self._sink(SlotFailed(stream.slot, "died")))
        self._inbox.put(None)

    # ------------------------------------------------------------------ its thread

    def _run(self) -> None:
        while True:
            is_idle = not any(self._is_runnable(stream) for stream in self._streams.values())
            try:
                work = self._inbox.get(block=is_idle)
            except queue.Empty:
                for stream in list(self._streams.values()):
                    if self._is_runnable(stream):
                        self._step(stream)
                continue
            if work is None:
                return
            if callable(work):
                work()
            else:
                self._handle(work)
            with self._changed:
                self._changed.notify_all()

    def _is_runnable(self, stream: _Stream) -> bool:
        if self._credit <= 0 or self._is_blocked[stream.slot.idx] or not stream.turns:
            return False
        turn = stream.turns[0]
        return turn.segment in turn.texts or turn.segment == turn.num_segments

    def _handle(self, command: Command) -> None:
        assert self._sink is not None
        self.commands.append(command)
        stream = self._streams.get(command.slot.idx)
        match command:
            case OpenSlot(slot):
                if stream is None:
                    self._streams[slot.idx] = _Stream(slot)
                self._sink(SlotReady(slot, prefill_ms=1.5, cached=True))
            case SetText(slot, turn_id, segment, text, is_closed):
                if self.slots.is_current(slot) and is_closed and stream is not None:
                    stream.turn(turn_id).texts[segment] = text
            case EndTurn(slot, turn_id, num_segments):
                if self.slots.is_current(slot) and stream is not None:
                    stream.turn(turn_id).num_segments = num_segments
            case CancelTurn(slot):
                assert stream is not None
                stream.slot = slot
                stream.turns.clear()
            case CloseSlot(slot):
                self._streams.pop(slot.idx, None)
                self._sink(SlotClosed(slot))

    def _step(self, stream: _Stream) -> None:
        assert self._sink is not None
        if self._frame_s:
            time.sleep(self._frame_s)  # the model's work, not a wait
        turn = stream.turns[0]
        if turn.segment == turn.num_segments:
            stream.turns.pop(0)
            stamps_ns = {"first_pcm": turn.first_pcm_ns} if turn.num_frames else {}
            self._sink(TurnEnd(stream.slot, turn.turn_id, turn.num_frames, stamps_ns))
            return
        self._credit -= 1
        pcm = self._tone(turn.num_frames)
        if not turn.num_frames:
            turn.first_pcm_ns = time.perf_counter_ns()
            stamps_ns = {"first_pcm": turn.first_pcm_ns}
            self._sink(TurnBegin(stream.slot, turn.turn_id, stamps_ns))
        with self._changed:
            self.emitted[stream.slot.idx, turn.turn_id].append(pcm)
            self._changed.notify_all()
        frame = FramePcm(stream.slot, turn.turn_id, turn.segment, turn.num_frames, 1, pcm.copy())
        turn.num_frames += 1
        turn.segment_frame += 1
        self._sink(frame)
        if turn.segment_frame >= max(1, len(turn.texts[turn.segment]) // CHARS_PER_FRAME):
            self._sink(SegmentEnd(stream.slot, turn.turn_id, turn.segment, turn.segment_frame))
            turn.segment, turn.segment_frame = turn.segment + 1, 0

    def _tone(self, frame: int) -> np.ndarray:
        """A 440 Hz tone whose loudness tells one second from the next."""
        first = frame * self.info.frame_samples
        t_s = np.arange(first, first + self.info.frame_samples) / self.info.sample_rate
        loudness = 0.2 + 0.1 * np.sin(2 * np.pi * 0.5 * t_s)
        return (loudness * np.sin(2 * np.pi * 440.0 * t_s)).astype(np.float32)
