"""What the rest of `realtime` may know of the engine: this file and `messages`, never torch."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from realtime.pingpong.messages import Command, Event, SlotRef, VoicePrompt


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts of the loaded model that sessions need."""

    model_name: str
    codec_id: str  # of the codec's weights: codes are meaningless to any other codec
    sample_rate: int  # Hz, of the codec's PCM
    frame_samples: int
    num_codebooks: int
    num_slots: int
    default_temperature: float
    default_top_p: float
    default_top_k: int
    default_voice: str
    builtin_voices_path: Path | None
    max_segment_chars: int  # longer segments are outside what the model can speak well
    has_prompt: bool  # False: `prompt` is ignored with a warning
    has_speakers: bool = False  # `<|speaker:N|>` in a text is said by the N-th speaker of its voice

    @property
    def frame_rate_hz(self) -> float:
        return self.sample_rate / self.frame_samples

    @property
    def frame_ms(self) -> float:
        return 1000.0 * self.frame_samples / self.sample_rate


class SlotTable(Protocol):
    """Which slots are free and each slot's current generation. Written by the event loop only."""

    @property
    def num_free(self) -> int: ...

    @property
    def num_lost(self) -> int:
        """Of an engine that died while others live: neither free nor taken."""

    def acquire(self) -> SlotRef | None:
        """A free slot with a fresh generation, or None."""

    def bump(self, slot: SlotRef) -> SlotRef:
        """Make everything in flight for the slot stale at once; returns the new reference."""

    def is_current(self, slot: SlotRef) -> bool:
        """Callable from any thread."""

    def release(self, slot: SlotRef) -> None:
        """Call on `SlotClosed`, and only then."""


class Engine(Protocol):
    """The ping-pong engine, seen from the event loop. No method waits for the device."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def slots(self) -> SlotTable: ...

    @property
    def failure(self) -> str | None:
        """Why the engine cannot speak; None while it can. Of a fleet it ends when an engine is back."""

    def start(self, sink: Callable[[Event], None]) -> None:
        """Start the threads. `sink` is called on an engine thread, in order per slot, and must
        return quickly (put the event into a bounded queue)."""

    def submit(self, command: Command) -> None:
        """Hand a command to the engine; never waits.

        Raises:
            EngineError: code `engine_overloaded` while many commands of this slot wait (never for
                `CloseSlot`): try again soon; `engine_stopped` after `stop` or after an engine
                thread died.
        """

    def set_blocked(self, slot: SlotRef, is_blocked: bool) -> None:
        """Pause or resume generation because the tenant's socket does not drain."""

    def warm_up(self, voices: tuple[VoicePrompt, ...]) -> None:
        """Run every shape once and put the voices' prefixes into the cache (start-up only)."""

    def encode_voice(self, clip: bytes, max_seconds: float) -> NDArray[np.int32]:
        """Reference clip (any container) -> codes i32 [K, T]. Slow: call it on a worker thread.

        Raises:
            VoiceError: code `invalid_clip`, saying what was got and what is expected.
        """

    def check_voice(self, voice: VoicePrompt) -> None:
        """Whether a session could be opened with it. Slow like `encode_voice`.

        Raises:
            VoiceError: code `invalid_voice`, saying what was got and what is expected.
        """

    def stats(self) -> dict[str, float]:
        """Gauges and counters for /metrics (active slots, steps, frames, queue lengths, ...)."""

    def stop(self) -> None:
        """Stop the threads; idempotent."""
