"""Sessions that come, speak, interrupt, leave and break off, thousands of times, on too few pages:
nothing leaks, nothing hangs, everybody is served."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from model.config import DualARConfig, StackConfig
from model.dual_ar import DualAR
from model.prompt import PromptBuilder
from model.speech_model import PlainText, Serving, SpeechModel
from realtime.pingpong.engine import EngineConfig, PingPongEngine
from realtime.pingpong.messages import (
    CancelTurn,
    CloseSlot,
    EndTurn,
    Event,
    OpenSlot,
    SetText,
    SlotClosed,
    SlotFailed,
    SlotRef,
    TurnEnd,
)
from realtime.pingpong.steps import StepBuffer
from realtime.pingpong.tenants import TEXT_GROWS
from tests.model.small_model import fill_random
from tests.support.engine import sampling, tiny_tokenizer, voice

NUM_SLOTS, PAGE, MAX_POSITIONS, MAX_FRAMES = 6, 8, 288, 5
NUM_PAGES = 60  # a context needs 36, a voice about 19
NUM_ACTIONS = 10_000
WORDS = ("hi.", "how are you?", "fine,", "#", "well then, see you.")


class SilentCodec:
    """One sample per frame."""

    sample_rate, frame_samples, num_codebooks, codebook_sizes = 100, 1, 4, (64,) * 4
    has_exact_chunks = False

    def init_state(self, num_slots: int) -> Tensor:
        return torch.zeros(num_slots)

    def reset_state(self, state: Tensor, rows: Tensor) -> None:
        state[rows] = 0

    def decode_stream(self, codes: Tensor, state: Tensor, rows: Tensor) -> Tensor:
        state[rows] += 1
        return state[rows][:, None]


def smallest_model(context: str, *, is_packed: bool) -> SpeechModel:
    """One layer of 16 channels: a frame costs little but the calls."""
    slow = StackConfig(1, 16, 1, 1, 16, 32, 1e4, 1e-6, MAX_POSITIONS, False, False, False)
    fast = StackConfig(1, 16, 1, 1, 16, 32, 1e4, 1e-6, 5, False, False, False)
    config = DualARConfig(slow, fast, 272, 4, 64, True, 200, 263, 270)
    dual_ar = DualAR(config, torch.device("cpu"), torch.float32)
    fill_random(dual_ar)
    dual_ar.finish_loading()
    if is_packed:
        dual_ar.use_kernels("bf16")
    return SpeechModel(
        name="smallest",
        path=Path(),
        device=torch.device("cpu"),
        dual_ar=dual_ar,
        codec=SilentCodec(),  # type: ignore[arg-type]
        codec_id="silent",
        prompt=PromptBuilder(tiny_tokenizer(), config),
        front_end=lambda text: PlainText(text.replace("#", "")),
        serving=Serving(context=context, max_frames=MAX_FRAMES, default_voice="a"),  # type: ignore[arg-type]
    )


class Churn:
    """An engine whose threads do not run: their steps are called here, in random measure."""

    def __init__(self, context: str, seed: int, *, is_packed: bool) -> None:
        self.rng = np.random.default_rng(seed)
        config = EngineConfig(
            num_slots=NUM_SLOTS,
            max_positions=MAX_POSITIONS,
            kv_pages=1 + NUM_PAGES,
            kv_page_size=PAGE,
        )
        self.engine = PingPongEngine(smallest_model(context, is_packed=is_packed), config)
        self.engine._sink = self._take
        self.allocator = self.engine._prefill.kv.allocator
        self.slots: dict[int, SlotRef] = {}
        self.turns: dict[int, int] = {}  # the latest of each slot; over, if it is in `ended`
        self.ended: set[tuple[int, int]] = set()
        self.counts: Counter[str] = Counter()
        self._pending: StepBuffer | None = None
        self._num_turns = 0

    def _take(self, event: Event) -> None:
        assert not isinstance(event, SlotFailed), event
        self.counts[type(event).__name__] += 1
        if isinstance(event, SlotClosed):
            self.engine.slots.release(event.slot)
        if isinstance(event, TurnEnd):
            self.ended.add((event.slot.idx, event.turn_id))

    def act(self) -> None:
        """What a client might do."""
        action = self.rng.random()
        if action < 0.2 and (slot := self.engine.slots.acquire()):
            self.slots[slot.idx] = slot
            self.open(slot)
        if not self.slots:
            return
        slot = self.slots[int(self.rng.choice(list(self.slots)))]
        turn_id = self.turns.get(slot.idx, -1)
        is_silent = turn_id < 0 or (slot.idx, turn_id) in self.ended
        if action < 0.26:
            self.open(slot)
        elif action < 0.40:
            del self.slots[slot.idx]
            self.turns.pop(slot.idx, None)
            self.engine.submit(CloseSlot(self.engine.slots.bump(slot)))
            self.counts["close"] += 1
        elif action < 0.60 and turn_id >= 0:
            self.slots[slot.idx] = self.engine.slots.bump(slot)
            heard = int(self.rng.integers(0, 3 * MAX_FRAMES))
            self.engine.submit(CancelTurn(self.slots[slot.idx], turn_id, heard))
            self.ended.add((slot.idx, turn_id))
            self.counts["cancel"] += 1
        elif action < 0.65:
            self.engine.set_blocked(slot, bool(self.rng.random() < 0.3))
        elif is_silent:
            self.speak(slot)

    def open(self, slot: SlotRef) -> None:
        prompt = voice(int(self.rng.integers(5)), num_frames=60)
        self.engine.submit(OpenSlot(slot, (prompt,), "", sampling(), 600_000))
        self.counts["open"] += 1

    def speak(self, slot: SlotRef) -> None:
        self._num_turns += 1
        turn_id = self.turns[slot.idx] = self._num_turns
        texts = [str(text) for text in self.rng.choice(WORDS, self.rng.integers(1, 4))]
        for segment, text in enumerate(texts):
            for stop in sorted(self.rng.integers(1, len(text) + 1, self.rng.integers(3))):
                self.engine.submit(SetText(slot, turn_id, segment, text[:stop], is_closed=False))
            if self.rng.random() < 0.05:
                return  # the client says no more; it can be cancelled, or closed
            self.engine.submit(SetText(slot, turn_id, segment, text, is_closed=True))
        self.engine.submit(EndTurn(slot, turn_id, len(texts)))
        self.counts["turn"] += 1

    def step(self) -> bool:
        """What the threads do meanwhile. False when they have nothing to do."""
        engine = self.engine
        has_work = engine._prefill.step()
        self.counts["waits"] += engine._prefill.kv.memory.num_waiting > 0
        self._pending = engine._decode.step(self._pending)
        has_work |= self._pending is not None
        while len(engine._vocode.inbox):
            item = engine._vocode.inbox.take()
            assert item is not None
            engine._vocode.step(item)
            has_work = True
        return has_work

    def settle(self) -> None:
        while self.step() or self.engine._decode.inbox or self.engine._prefill.inbox:
            pass

    def check_pages(self) -> None:
        """Every page has exactly the users that it seems to have."""
        engine, users = self.engine, Counter(self.engine._prefill.kv.prefixes.pages)
        for slot in range(NUM_SLOTS):
            pages = engine._cache.pages(slot)
            users.update(pages)
            assert not pages or slot in engine._prefill._tenants
            assert engine._cache.page_table[slot, : len(pages)].tolist() == list(pages)
        assert 0 not in users
        for page in range(1, engine._cache.num_pages):
            assert self.allocator.num_users(page) == users[page], page


@pytest.mark.parametrize(("context", "is_packed"), [("prefix", False), ("dialogue", True)])
def test_ten_thousand_actions_leak_no_page_and_no_slot(context: str, is_packed: bool) -> None:
    with torch.inference_mode():
        churn = Churn(context, seed=7, is_packed=is_packed)
        engine = churn.engine
        rows = engine._default_voice_rows(voice(0, num_frames=60))
        engine._prefill.kv.warm_up(rows)
        for i in range(NUM_ACTIONS // 2):
            churn.act()
            for _ in range(int(churn.rng.integers(4))):
                churn.step()
            if i % 100 == 0:
                churn.check_pages()
        for slot in churn.slots.values():
            engine.set_blocked(slot, False)
        churn.settle()
        churn.check_pages()
        tenants = engine._prefill._tenants.values()
        # Text that still grows may go without pages; nobody else does.
        assert all(tenant.urgency() >= TEXT_GROWS for tenant in tenants)
        for slot in churn.slots.values():
            engine.submit(CloseSlot(engine.slots.bump(slot)))
        churn.settle()
        churn.check_pages()
    assert engine._prefill.kv.num_stripped > 50
    for kind in ("waits", "cancel", "close", "TurnEnd", "SlotReady"):
        assert churn.counts[kind] > 50, churn.counts
    assert engine.slots.num_free == NUM_SLOTS
    assert not engine._prefill._tenants and not engine._decode._streams
    assert engine._prefill.kv.memory.num_waiting == 0
    assert len(engine._decode.free_buffers) == 4
    prefixes = engine._prefill.kv.prefixes
    assert churn.allocator.num_used == len(prefixes.pages)
    while prefixes.evict_one():
        pass
    assert churn.allocator.num_used == prefixes.num_pinned_pages > 0
