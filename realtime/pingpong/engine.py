"""The ping-pong engine: prefill, decode and vocode on their own threads, seen as one object.

    event loop --commands--> prefill --Join--> decode --StepBuffer--> vocode --events--> sink
                                ^------Returned---'        ^--free buffers--'
    a thread that dies --SlotFailed of every open slot--> sink

Every slot is owned by exactly one of prefill and decode; ownership travels with the messages. The
generation of a slot, written by the event loop alone, makes whatever is late recognisable.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from model.errors import ClipError, ConfigError, ModelError, PromptError
from model.kv_cache import KVCache, KvFormat, default_page_size
from model.speech_model import SpeechModel
from model.tensor_bytes import tensor_bytes
from ops import nvrtc
from realtime.errors import EngineError, VoiceError
from realtime.pingpong.api import EngineInfo
from realtime.pingpong.clip_process import read_clip_apart
from realtime.pingpong.decode import DecodeLoop
from realtime.pingpong.hand_over import HandOver
from realtime.pingpong.memory import memory_of, pool_pages
from realtime.pingpong.messages import (
    CancelTurn,
    CloseSlot,
    Command,
    Event,
    OpenSlot,
    SlotFailed,
    SlotRef,
    VoicePrompt,
)
from realtime.pingpong.prefill import MAX_WAITING_COMMANDS, PrefillLoop
from realtime.pingpong.prompt_rows import MIN_TEXT_POSITIONS
from realtime.pingpong.slots import Slots
from realtime.pingpong.steps import Returned
from realtime.pingpong.vocode import VocodeLoop
from realtime.threads import name_thread

logger = logging.getLogger(__name__)


DEFAULT_SLOTS = {"cpu": 4, "cuda": 64}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes of the engine; all memory is taken at construction."""

    num_slots: int | None = None  # None: DEFAULT_SLOTS
    max_positions: int = 4096  # of a slot: prefix, dialogue and current segment
    max_prefix_positions: int = 65_536  # room for cached prefixes, besides the slots' contexts
    kv_pages: int | None = None  # of slots and prefixes together; None: for all of them, or what
    kv_memory_fraction: float = 0.8  # of the free device memory has room for
    kv_format: KvFormat = "bf16"  # of keys and values; on a CPU that is the model's dtype
    kv_page_size: int | None = None  # positions; None: `model.kv_cache.default_page_size`
    chunk_positions: int | None = None  # prefilled at a time; None: 64, or what kernels take
    num_threads: int = 1  # intra-op threads of each engine thread (CPU)
    in_order: bool = False  # no overlap: the oracle


class PingPongEngine:
    """Implements `realtime.pingpong.api.Engine`."""

    def __init__(
        self, model: SpeechModel, config: EngineConfig, slots: Slots | None = None
    ) -> None:
        max_positions = min(config.max_positions, model.dual_ar.config.slow.max_len)
        num_needed = model.serving.max_frames + 2 * MIN_TEXT_POSITIONS
        if max_positions < num_needed:
            way_out = "lower plosive.max_frames in config.json"
            if num_needed <= model.dual_ar.config.slow.max_len:
                way_out = f"raise --max-context to {num_needed} or more"
            raise ConfigError(
                f"a context of {max_positions} positions has no room for a segment of "
                f"{model.serving.max_frames} frames (plosive.max_frames) with its text and voice; "
                f"{way_out}"
            )
        self._model = model
        self._config = config
        if slots is None:
            slots = Slots(config.num_slots or DEFAULT_SLOTS[model.device.type])
        self._slots, num_slots = slots, slots.num_slots
        with (
            torch.inference_mode(),
            memory_of(model.dual_ar, num_slots, max_positions, config.kv_format),
        ):
            self._cache = _new_cache(model, config, num_slots, max_positions)
            self._vocode = VocodeLoop(
                model,
                self._slots,
                free=lambda buffer: self._decode.free_buffers.put(buffer),
                sink=lambda event: self._sink(event),
            )
            self._decode = DecodeLoop(
                model,
                self._cache,
                self._slots,
                give_back=self._give_back,
                vocode=lambda buffer: self._vocode.inbox.put(buffer),
                in_order=config.in_order,
            )
            self._prefill = PrefillLoop(
                model,
                self._cache,
                self._slots,
                emit=lambda event: self._vocode.inbox.put(event),
                hand_over=HandOver(
                    model.device,
                    join=lambda join: self._decode.inbox.put(join),
                    max_frames=model.serving.max_frames,
                    max_riders=self._decode.frames.max_riders,
                    num_ridden=lambda: self._decode.num_ridden,
                    is_blocked=self._decode.is_blocked,
                ),
                chunk_positions=config.chunk_positions,
            )
        self._weight_bytes = {
            "weight_bytes": model.dual_ar.nbytes,
            "codec_weight_bytes": tensor_bytes(model.codec),
        }
        self._warm_up_s: dict[str, float] = {}  # by stage
        self._sink: Callable[[Event], None] = _no_sink
        self._threads: list[threading.Thread] = []
        self._is_stopping = threading.Event()
        self._failure: str | None = None
        self._opened: dict[int, SlotRef] = {}  # written by the event loop
        self._num_submitted = [0] * num_slots  # commands, written by the event loop

    # ------------------------------------------------------------------ the event loop's side

    @property
    def info(self) -> EngineInfo:
        model, serving = self._model, self._model.serving
        voices_path = model.path / "voices"
        return EngineInfo(
            model_name=model.name,
            codec_id=model.codec_id,
            sample_rate=model.codec.sample_rate,
            frame_samples=model.codec.frame_samples,
            num_codebooks=model.codec.num_codebooks,
            num_slots=self._slots.num_slots,
            default_temperature=serving.temperature,
            default_top_p=serving.top_p,
            default_top_k=serving.top_k,
            default_voice=serving.default_voice,
            builtin_voices_path=voices_path if voices_path.is_dir() else None,
            max_segment_chars=serving.max_segment_chars,
            has_prompt=serving.has_prompt,
            has_speakers=serving.front_end == "none",  # others would read the tags out
        )

    @property
    def slots(self) -> Slots:
        return self._slots

    @property
    def failure(self) -> str | None:
        return self._failure

    def start(self, sink: Callable[[Event], None]) -> None:
        assert not self._threads, "the engine is started once"
        self._sink = sink
        for name, run in (
            ("vocode", self._vocode.run),
            ("decode", self._decode.run),
            ("prefill", self._prefill.run),
        ):
            thread = threading.Thread(
                target=self._run, args=(name, run), name=f"plosive-{name}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def submit(self, command: Command) -> None:
        if isinstance(command, OpenSlot):  # before the look: a thread that dies after it says so
            self._opened[command.slot.idx] = command.slot
        if self._failure is not None or self._is_stopping.is_set():
            raise EngineError("engine_stopped", self._failure or "the engine is stopped")
        idx = command.slot.idx
        num_waiting = self._num_submitted[idx] - self._prefill.num_received[idx]
        if num_waiting >= MAX_WAITING_COMMANDS and not isinstance(command, CloseSlot):
            raise EngineError("engine_overloaded", f"{num_waiting} commands of the slot wait")
        self._num_submitted[idx] += 1
        self._prefill.inbox.put(command)  # its size covers every slot's share
        if isinstance(command, CancelTurn | CloseSlot):
            self._decode.inbox.poke()  # a paused stream is dropped now, not at its next frame

    def set_blocked(self, slot: SlotRef, is_blocked: bool) -> None:
        if self._slots.is_current(slot) and self._decode.is_blocked[slot.idx] != is_blocked:
            self._decode.is_blocked[slot.idx] = is_blocked
            self._decode.inbox.poke()

    def stats(self) -> dict[str, float]:
        prefill, decode, vocode = self._prefill, self._decode, self._vocode
        return {
            "slots_active": self._slots.num_slots - self._slots.num_free,
            "decode_steps_total": decode.num_steps,
            "decode_rows_total": decode.num_rows,
            "decode_step_ms": decode.times.step_ns / 1e6,
            "decode_host_us": decode.times.host_ns / 1e3,
            "decode_busy_share": decode.times.busy_share,
            "vocode_frames_total": vocode.num_frames,
            "vocode_calls_total": vocode.num_calls,
            "vocode_host_us": vocode.host_ns / 1e3 / max(1, vocode.num_calls),
            "prefill_positions_total": prefill.kv.num_positions,
            "prefill_queue": len(prefill.inbox),
            "vocode_queue": len(vocode.inbox),
            "prefixes_cached": len(prefill.kv.prefixes),
            "prefix_hits_total": prefill.kv.prefixes.num_hits,
            "prefix_misses_total": prefill.kv.prefixes.num_misses,
            "kv_pages": self._cache.num_pages - 1,
            "kv_pages_used": prefill.kv.allocator.num_used,
            "kv_bytes": self._cache.kv.nbytes,
            **self._weight_bytes,
            "graph_bytes": decode.frames.graph_bytes,
            "codec_graph_bytes": vocode.runner.graph_bytes,
            "prefill_graph_bytes": prefill.kv.runner.graph_bytes,
            "codec_state_bytes": vocode.runner.state_bytes,
            "slots_waiting_for_pages": prefill.kv.memory.num_waiting,
            "slots_that_lost_their_pages_total": prefill.kv.num_stripped,
            **self._warm_up_s,
        }

    def stop(self) -> None:
        """Stop the threads; what is in flight is dropped. Idempotent."""
        self._is_stopping.set()
        for mailbox in (
            self._prefill.inbox,
            self._decode.inbox,
            self._decode.free_buffers,
            self._vocode.inbox,
        ):
            mailbox.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=10.0)

    # ------------------------------------------------------------------ start-up and voices

    def warm_up(self, voices: tuple[VoicePrompt, ...]) -> None:
        """Capture the graphs of every batch size, or where there are none run each once, and cache
        the voices' prefixes. No session may be open."""
        frames, codec, prefill = self._decode.frames, self._vocode.runner, self._prefill.kv.runner
        with torch.inference_mode():
            rows = [self._default_voice_rows(voice) for voice in voices]
            with self._timed("kernels"), nvrtc.compiling():
                for runner in (frames, codec, prefill):
                    runner.compile()
            with self._timed("frame_graphs"):
                frames.capture(_progress)
            with self._timed("codec_graphs"):
                codec.capture(_progress)
            with self._timed("prefill_graphs"):
                prefill.capture(_progress)
            with self._timed("voices"):  # `/ready` promises them
                for each in rows:
                    self._prefill.kv.warm_up(each)
            for num_rows in range(1, self._slots.num_slots + 1):
                self._warm_batch(num_rows)

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        begun_s = time.monotonic()
        yield
        self._warm_up_s[f"warm_up_{stage}_s"] = time.monotonic() - begun_s

    def _default_voice_rows(self, voice: VoicePrompt) -> torch.Tensor:
        try:
            return self._prefill.checked_prefix_rows((voice,), "")
        except PromptError as error:
            has_more = self._cache.max_len < self._model.dual_ar.config.slow.max_len
            way_out = f", or raise --max-context ({self._cache.max_len} now)" if has_more else ""
            raise VoiceError("invalid_voice", f"the default voice: {error}{way_out}") from error

    def encode_voice(self, clip: bytes, max_seconds: float) -> NDArray[np.int32]:
        self._set_threads()
        codec = self._model.codec
        try:
            samples = read_clip_apart(clip, codec.sample_rate, max_seconds)
        except ClipError as error:
            raise VoiceError("invalid_clip", str(error), param="file") from error
        with torch.inference_mode():
            codes = codec.encode_reference(torch.from_numpy(samples)[None].to(self._model.device))
        return codes[0].to(torch.int32).cpu().numpy()

    def check_voice(self, voice: VoicePrompt) -> None:
        try:
            self._prefill.checked_prefix_rows((voice,), "")
        except ModelError as error:
            raise VoiceError("invalid_voice", str(error)) from error

    def _warm_batch(self, num_rows: int) -> None:
        model, num_slots = self._model, self._slots.num_slots
        if model.device.type != "cpu":  # capturing has run everything
            return
        state = model.dual_ar.new_frame_state(num_slots)
        codec_state = model.codec.init_state(num_slots)
        slots = torch.arange(num_rows)
        codes = torch.zeros(num_rows, model.codec.num_codebooks, 1, dtype=torch.int32)
        for _ in range(2):
            model.dual_ar.decode_frame(state, slots, self._cache)
            model.codec.decode_stream(codes, codec_state, slots)

    # ------------------------------------------------------------------ threads

    def _set_threads(self) -> None:
        if self._model.device.type == "cpu":
            torch.set_num_threads(self._config.num_threads)

    def _run(self, name: str, run: Callable[[Callable[[], bool]], None]) -> None:
        name_thread(f"plosive-{name}")
        try:
            self._set_threads()
            run(self._is_stopping.is_set)
        except Exception as error:
            if not self._is_stopping.is_set():
                logger.exception("engine thread %s died", name)
                self._die(f"{name}: {type(error).__name__}: {error}")

    def _die(self, failure: str) -> None:
        """One thread is gone: nobody may wait for the others any longer. The dying thread tells the
        sink itself, past vocode and what still waits there: nothing after it counts."""
        self._failure = failure
        for slot in list(self._opened.values()):
            self._sink(SlotFailed(slot, failure))

    def _give_back(self, returned: Returned) -> None:
        self._prefill.inbox.put(returned)


def _new_cache(
    model: SpeechModel, config: EngineConfig, num_slots: int, max_positions: int
) -> KVCache:
    page_size = config.kv_page_size or default_page_size(model.device, max_positions)
    num_pages = config.kv_pages or pool_pages(
        model.dual_ar,
        num_slots,
        max_positions,
        config.max_prefix_positions,
        page_size,
        config.kv_memory_fraction,
        config.kv_format,
    )
    num_needed = 1 + -(-max_positions // page_size)
    if num_pages < num_needed:
        raise ConfigError(
            f"the KV cache has {num_pages} pages of {page_size} positions, one context of "
            f"{max_positions} positions needs {num_needed} (page 0 is never used)"
        )
    is_dialogue = model.serving.context == "dialogue"
    return model.dual_ar.new_cache(
        num_slots,
        max_positions,
        page_size=page_size,
        num_pages=num_pages,
        has_history=is_dialogue,
        kv_format=config.kv_format,
    )


def _progress(sizes: Iterable[int]) -> Iterable[int]:
    """A bar on a terminal, nothing elsewhere."""
    bar: Iterable[int] = tqdm(sizes, desc="CUDA graphs", unit="graph", disable=None)
    return bar


def _no_sink(event: Event) -> None:
    raise AssertionError(f"{event} before start ({time.monotonic():.1f} s)")
