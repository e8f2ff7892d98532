"""The engine without a model, with another voice and a test's hand on everything."""

import io
import threading
import wave
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from realtime.errors import EngineError, VoiceError
from realtime.pingpong.messages import (
    Command,
    Event,
    OpenSlot,
    SlotFailed,
    SlotRef,
    VoicePrompt,
)
from realtime.pingpong.tone import Stream, ToneConfig, ToneEngine, Turn

CHARS_PER_FRAME = 2
NUM_CODEBOOKS = 4
MIN_CLIP_S = 0.5
TIMEOUT_S = 10.0
MAX_VOICE_TEXT_CHARS = 1_000
_NO_CAP_MS = 1_000_000_000


class FakeEngine(ToneEngine):
    """Frames come one by one and as fast as they are taken, whatever the listener's lead, unless
    `hold()` stops them until `let(n)` or `let_all()`.

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
        config = ToneConfig(
            num_slots=num_slots,
            step_ms=1000.0 * frame_s,
            chunk_frames=1,
            sample_rate=sample_rate,
            frame_samples=frame_samples,
            chars_per_frame=CHARS_PER_FRAME,
        )
        super().__init__(config)
        self.info = replace(
            self.info,
            model_name="fake",
            num_codebooks=NUM_CODEBOOKS,
            default_voice="tone",
            builtin_voices_path=builtin_voices_path,
            max_segment_chars=200,
        )
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
        self._credit = float("inf")  # frames
        self._changed = threading.Condition()

    # ------------------------------------------------------------------ the test's hand

    def hold(self) -> None:
        self._credit = 0.0

    def let(self, num_frames: int) -> None:
        self._run_soon(lambda: setattr(self, "_credit", self._credit + num_frames))

    def let_all(self) -> None:
        self._run_soon(lambda: setattr(self, "_credit", float("inf")))

    def emit(self, event: Event) -> None:
        """Say something on the engine's thread."""
        self._run_soon(lambda: self._sink(event))

    def die(self) -> None:
        """An engine thread has died: slots fail, commands are refused, nothing is answered."""

        def fail() -> None:
            self.failure = self.failure or "died"
            for stream in self._streams.values():
                self._sink(SlotFailed(stream.slot, "died"))
            self._is_stopping = True

        self.refuse = lambda command: "engine_stopped"
        self._run_soon(fail)

    def wait_until(self, is_true: Callable[[], bool]) -> None:
        """Wait (off the event loop) until a command or a frame has made `is_true` true."""
        with self._changed:
            assert self._changed.wait_for(is_true, TIMEOUT_S), "the engine never got there"

    def pcm(self, slot_idx: int, turn_id: int) -> np.ndarray:
        return np.concatenate(self.emitted[slot_idx, turn_id])

    def seen(self, kind: type[Command]) -> list[Command]:
        return [command for command in self.commands if isinstance(command, kind)]

    # ------------------------------------------------------------------ Engine

    def submit(self, command: Command) -> None:
        if code := self.refuse(command):
            raise EngineError(code, f"refused {type(command).__name__}")
        super().submit(command)

    def set_blocked(self, slot: SlotRef, is_blocked: bool) -> None:
        super().set_blocked(slot, is_blocked)
        with self._changed:
            self.blocked.append((slot, is_blocked))
            self._changed.notify_all()

    def warm_up(self, voices: tuple[VoicePrompt, ...]) -> None:
        assert self.warm_up_gate.wait(TIMEOUT_S)
        if self.warm_up_error is not None:
            raise self.warm_up_error
        self.warmed = voices

    def encode_voice(self, clip: bytes, max_seconds: float) -> np.ndarray:
        assert self.encode_gate.wait(TIMEOUT_S)
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

    # ------------------------------------------------------------------ its thread

    def _run_soon(self, call: Callable[[], None]) -> None:
        assert self._inbox.offer(call)

    def _handle(self, command: Command | Callable[[], None]) -> None:
        if callable(command):
            command()
        else:
            self.commands.append(command)
            uncapped = isinstance(command, OpenSlot)
            super()._handle(replace(command, max_lead_ms=_NO_CAP_MS) if uncapped else command)
        with self._changed:
            self._changed.notify_all()

    def _can_speak(self, stream: Stream) -> bool:
        return self._credit > 0 and super()._can_speak(stream)

    def _speak(self, stream: Stream) -> None:
        if self._credit > 0:  # a stream of the same step may have had the last of it
            super()._speak(stream)

    def _pcm(self, stream: Stream, turn: Turn, num_frames: int) -> np.ndarray:
        """A 440 Hz tone whose loudness tells one second from the next."""
        self._credit -= 1
        first = turn.num_frames * self.info.frame_samples
        t_s = np.arange(first, first + self.info.frame_samples) / self.info.sample_rate
        loudness = 0.2 + 0.1 * np.sin(2 * np.pi * 0.5 * t_s)
        pcm = (loudness * np.sin(2 * np.pi * 440.0 * t_s)).astype(np.float32)
        with self._changed:
            self.emitted[stream.slot.idx, turn.turn_id].append(pcm)
            self._changed.notify_all()
        return pcm.copy()
