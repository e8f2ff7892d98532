"""A tiny speech model with random weights, and a recorder for what an engine says."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from model.codec import Codec, load_codec
from model.loader import load_dual_ar
from model.prompt import PromptBuilder
from model.speech_model import PlainText, Serving, SpeechModel
from realtime.pingpong.engine import EngineConfig, PingPongEngine
from realtime.pingpong.messages import (
    CloseSlot,
    FramePcm,
    OpenSlot,
    SamplingParams,
    SlotClosed,
    SlotReady,
    SlotRef,
    TurnEnd,
    VoicePrompt,
)
from tests.support import recorder
from tests.support.tones import say as start_turn

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
TEXTS = ("hello there.", "how are you today?", "fine, thanks.", "see you soon!")


def tiny_tokenizer() -> Tokenizer:
    """One token per character; the control strings of the prompt are single tokens; ids fit the
    golden DualAR (semantic 200..263, end 270)."""
    special = {
        "<|im_start|>": 0,
        "<|im_end|>": 270,
        "<|voice|>": 2,
        "<|unk|>": 3,
        **{f"<|semantic:{i}|>": 200 + i for i in range(64)},
    }
    characters = "\n abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,!?:;'|<>"
    vocab = special | {character: 10 + i for i, character in enumerate(characters)}
    tokenizer = Tokenizer(WordLevel(vocab, unk_token="<|unk|>"))
    tokenizer.pre_tokenizer = Split("", "isolated")
    tokenizer.add_special_tokens(list(special))
    return tokenizer


@cache
def tiny_codec(device: torch.device) -> Codec:
    """One for all models: its state is not its own."""
    return load_codec(GOLDEN / "codec", device, torch.float32)


def tiny_model(
    checkpoint: str = "dual_ar_long",
    front_end: Callable[[str], PlainText] = PlainText,
    device: str = "cpu",
    **serving: object,
) -> SpeechModel:
    torch_device = torch.device(device)
    defaults: dict[str, object] = {"max_frames": 10, "default_voice": "a", "context": "prefix"}
    dual_ar = load_dual_ar(GOLDEN / checkpoint, torch_device, torch.float32)
    tokenizer = tiny_tokenizer()
    prompt = PromptBuilder(tokenizer, dual_ar.config)
    return SpeechModel(
        name="tiny",
        path=GOLDEN,
        device=torch_device,
        dual_ar=dual_ar,
        codec=tiny_codec(torch_device),
        codec_id="tiny",
        prompt=prompt,
        front_end=front_end,
        serving=Serving(**(defaults | serving)),  # type: ignore[arg-type]
    )


def voice(seed: int = 0, num_frames: int = 12) -> VoicePrompt:
    codes = np.random.default_rng(seed).integers(0, 32, (4, num_frames)).astype(np.int32)
    return VoicePrompt(f"voice{seed}", "a voice", codes)


def sampling(seed: int = 1) -> SamplingParams:
    """Hot, so that a small change of the logits (another voice, another context) is heard."""
    return SamplingParams(temperature=2.0, top_p=1.0, top_k=64, seed=seed)


class Recorder(recorder.Recorder):
    """With what a slot has said as one array."""

    def pcm(self, slot: SlotRef, turn_id: int) -> np.ndarray:
        frames = [
            event
            for event in self.events
            if isinstance(event, FramePcm) and event.slot == slot and event.turn_id == turn_id
        ]
        firsts = [frame.first_frame for frame in frames]
        assert firsts == list(range(len(frames))), firsts
        return np.concatenate([frame.pcm for frame in frames]) if frames else np.zeros(0)


@contextmanager
def running(model: SpeechModel, **config: object) -> Iterator[tuple[PingPongEngine, Recorder]]:
    engine = PingPongEngine(model, EngineConfig(**config))  # type: ignore[arg-type]
    recorder = Recorder()
    engine.start(recorder)
    try:
        yield engine, recorder
    finally:
        engine.stop()


def ask_slot(
    engine: PingPongEngine, prompt: VoicePrompt, seed: int = 1, max_lead_ms: int = 600_000
) -> SlotRef:
    """A slot that is not ready yet."""
    slot = engine.slots.acquire()
    assert slot is not None
    engine.submit(OpenSlot(slot, (prompt,), "", sampling(seed), max_lead_ms))
    return slot


def open_slot(
    engine: PingPongEngine, recorder: Recorder, seed: int = 1, voice_seed: int = 0, **kwargs: int
) -> SlotRef:
    slot = ask_slot(engine, voice(voice_seed), seed, **kwargs)
    recorder.wait(SlotReady, lambda event: event.slot == slot)
    return slot


def speak(
    engine: PingPongEngine, recorder: Recorder, slot: SlotRef, turn_id: int, *texts: str
) -> np.ndarray:
    """Say the segments and return the turn's PCM."""
    start_turn(engine, slot, turn_id, *texts)
    recorder.wait(TurnEnd, lambda event: event.slot == slot and event.turn_id == turn_id)
    return recorder.pcm(slot, turn_id)


def wait_for_ends(recorder: Recorder, slots: Iterable[SlotRef], turn_id: int = 0) -> None:
    """Of a turn of each slot, in whatever order they come: what is waited past is gone."""
    speaking = set(slots)
    while speaking:
        speaking.discard(recorder.wait(TurnEnd, lambda end: end.turn_id == turn_id).slot)


def speak_together(
    engine: PingPongEngine, recorder: Recorder, slots: list[SlotRef]
) -> list[np.ndarray]:
    """Two turns of every slot, each at the same time as the others'; PCM by slot, then by turn."""
    for turn in range(2):
        for i, slot in enumerate(slots):
            start_turn(engine, slot, turn, TEXTS[i], TEXTS[(i + turn) % len(TEXTS)])
        wait_for_ends(recorder, slots, turn)
    return [recorder.pcm(slot, turn) for slot in slots for turn in range(2)]


def close_slot(engine: PingPongEngine, recorder: Recorder, slot: SlotRef) -> None:
    bumped = engine.slots.bump(slot)
    engine.submit(CloseSlot(bumped))
    recorder.wait(SlotClosed, lambda event: event.slot == bumped)
    engine.slots.release(bumped)
