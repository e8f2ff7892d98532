"""What a dialogue leaves in the KV: exactly what was said and heard, whatever was cancelled when."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from model.speech_model import SpeechModel
from realtime.pingpong.engine import PingPongEngine
from realtime.pingpong.messages import (
    CancelTurn,
    Command,
    EngineWarning,
    FramePcm,
    OpenSlot,
    SegmentEnd,
    SetText,
    SlotReady,
    TurnBegin,
    TurnEnd,
    VoicePrompt,
)
from realtime.pingpong.prompt_rows import prefix_rows
from realtime.pingpong.steps import Returned, StepBuffer
from realtime.pingpong.tenants import NOTHING_TO_DO, Tenant
from tests.support.engine import (
    Recorder,
    open_slot,
    running,
    sampling,
    speak,
    start_turn,
    tiny_model,
    voice,
)
from tests.support.waiting import wait_until

MAX_FRAMES = 8
WORDS = ("hello.", "again.", "and so on,", "yes!", "a longer one, this.")


@dataclass
class Exchange:
    """One segment: its text and the frames that answered it, i32 [1+K, n]."""

    turn_id: int
    text: str
    frames: Tensor
    num_in_kv: int  # the last frame of a segment that was cut is never read again


class Dialogue:
    """The oracle: the history as rows, prefilled in one go into a cache of its own."""

    def __init__(self, model: SpeechModel, max_positions: int) -> None:
        self._model = model
        self._cache = model.dual_ar.new_cache(1, max_positions)
        self._prefix = prefix_rows(model, (voice(),), "")
        self._room = max_positions - MAX_FRAMES - self._prefix.shape[1]
        self._num_forgotten: dict[int, int] = {}  # frames, by turn
        self.exchanges: list[Exchange] = []
        self.num_shortened = {"in a turn": 0, "after a turn": 0}

    def add(self, exchange: Exchange) -> None:
        """Room is made for its text, and with that for more."""
        num_over = self.rows(exchange.text).shape[1] - self._prefix.shape[1] - self._room
        if self.exchanges and num_over > 0:
            self._shorten(min(self._num_positions - num_over, self._room // 2))
            self.num_shortened["in a turn"] += 1
        self.exchanges.append(exchange)

    def end_turn(self) -> None:
        """A context that fills three quarters of its room keeps half."""
        if self._num_positions > self._room * 3 // 4:
            self._shorten(self._room // 2)
            self.num_shortened["after a turn"] += 1

    @property
    def _num_positions(self) -> int:
        return self.rows().shape[1] - self._prefix.shape[1]

    def _shorten(self, num_kept: int) -> None:
        while self.exchanges and self._num_positions > num_kept:
            old = self.exchanges.pop(0)
            num_frames = self._num_forgotten.get(old.turn_id, 0) + old.frames.shape[1]
            self._num_forgotten[old.turn_id] = num_frames

    def clear(self) -> None:
        self.exchanges = []

    def cancel(self, turn_id: int, heard_frames: int) -> None:
        num_left = heard_frames - self._num_forgotten.get(turn_id, 0)
        kept = []
        for exchange in self.exchanges:
            if exchange.turn_id == turn_id:
                if num_left <= 0:
                    continue
                exchange.num_in_kv = min(exchange.num_in_kv, num_left)
                num_left -= exchange.frames.shape[1]
            kept.append(exchange)
        self.exchanges = kept

    def rows(self, *open_text: str) -> Tensor:
        prompt, parts = self._model.prompt, []
        for exchange in self.exchanges:
            parts += [prompt.next_turn(), prompt.user_text(exchange.text)]
            parts += [prompt.assistant_header(), exchange.frames[:, : exchange.num_in_kv]]
        for text in open_text:
            parts += [prompt.next_turn(), prompt.user_text(text), prompt.assistant_header()]
        return torch.cat([self._prefix, *parts[1:]], 1)

    def kv(self) -> Tensor:
        rows = self.rows()
        self._model.dual_ar.prefill(rows, self._cache, 0, 0)
        return self._cache.read(0, rows.shape[1])


class Talk:
    """One session with an engine, and the oracle that is told the same."""

    def __init__(self, model: SpeechModel, engine: PingPongEngine, recorder: Recorder) -> None:
        self._model, self._engine, self._recorder = model, engine, recorder
        self.slot = open_slot(engine, recorder, seed=3)
        self.turn_id = -1
        self._codes: dict[tuple[int, int, int], Tensor] = {}  # by turn, segment, frame
        self._vocode = engine._vocode.step
        engine._vocode.step = self._listen  # type: ignore[method-assign]
        self._receive = engine._prefill._receive
        engine._prefill._receive = self._note_received  # type: ignore[method-assign]
        self._is_settled = True  # nothing is cancelled that is still decoded
        self._shorten = engine._prefill.kv.shorten
        engine._prefill.kv.shorten = self._note_shortened  # type: ignore[method-assign]
        self._shortened_after: dict[int, int] = {}  # turns, with the frames that each had
        self.dialogue = Dialogue(model, engine._cache.max_len)

    def speak(self, *texts: str) -> int:
        """A whole turn; returns its number of frames."""
        self.turn_id += 1
        pcm = speak(self._engine, self._recorder, self.slot, self.turn_id, *texts)
        for end in self._segment_ends():
            num_in_kv = min(end.num_frames, MAX_FRAMES - 1)
            self._add(texts[end.segment], end.segment, end.num_frames, num_in_kv)
        self.dialogue.end_turn()
        return len(pcm) // self._engine.info.frame_samples

    def interrupt(self, text: str) -> None:
        """Cancel a turn while it is made, and speak another at once. All that came is heard."""
        self.turn_id += 1
        turn_id = self.turn_id
        start_turn(self._engine, self.slot, turn_id, text)
        self._recorder.wait(FramePcm, lambda event: event.turn_id == turn_id)
        before = self.slot
        self.slot = self._engine.slots.bump(before)
        num_heard = len(self._recorder.pcm(before, turn_id)) // self._engine.info.frame_samples
        self._is_settled = False
        self._engine.submit(CancelTurn(self.slot, turn_id, num_heard))
        wait_until(lambda: self._is_settled)
        # Whether all of it was made before it was cancelled is a matter of the moment. It does
        # matter if it made the context so long that it was shortened.
        num_frames = self._shortened_after.get(turn_id)
        if num_frames is None:
            self._add(text, 0, num_heard, min(num_heard, MAX_FRAMES - 1))
        else:
            self._add(text, 0, num_frames, min(num_frames, MAX_FRAMES - 1))
            self.dialogue.end_turn()
            self.dialogue.cancel(turn_id, num_heard)
        # So is whether the last frame that was heard had been read again.
        num_missing = self.dialogue.rows().shape[1] - self._tenant.context_length
        if num_missing:
            assert num_missing == 1
            self.dialogue.exchanges[-1].num_in_kv -= 1
        self.speak("hm.")

    def open(self, prompt: VoicePrompt, seed: int) -> None:
        self._engine.submit(OpenSlot(self.slot, (prompt,), "", sampling(seed), 600_000))
        self._recorder.wait(SlotReady)

    def cancel(self, turn_id: int, heard_frames: int) -> None:
        self.slot = self._engine.slots.bump(self.slot)
        self._engine.submit(CancelTurn(self.slot, turn_id, heard_frames))
        self.dialogue.cancel(turn_id, heard_frames)

    def check(self) -> None:
        self.speak("so.")  # afterwards all that came before has been settled
        wait_until(lambda: self._tenant.urgency() == NOTHING_TO_DO)
        # Its rows are in a call then, which may still run; a command is taken after that.
        self._engine.submit(CancelTurn(self.slot, -1, 0))
        received = self._engine._prefill.num_received
        wait_until(lambda: received == self._engine._num_submitted)
        want = self.dialogue.kv()
        assert self._tenant.context_length == want.shape[3]
        got = self._engine._cache.read(0, want.shape[3])
        np.testing.assert_allclose(got.numpy(), want.numpy(), atol=2e-4)

    @property
    def _tenant(self):  # type: ignore[no-untyped-def]
        return self._engine._prefill._tenants[0]

    def _segment_ends(self) -> list[SegmentEnd]:
        events = self._recorder.events
        ends = [event for event in events if isinstance(event, SegmentEnd)]
        return [end for end in ends if end.turn_id == self.turn_id]

    def _add(self, text: str, segment: int, num_frames: int, num_in_kv: int) -> Exchange:
        begin_id = self._model.dual_ar.config.semantic_begin_id
        assert begin_id is not None
        codes = [self._codes[self.turn_id, segment, frame] for frame in range(num_frames)]
        rows = [torch.cat([frame[:1] + begin_id, frame]) for frame in codes]
        frames = torch.stack(rows, 1) if rows else torch.zeros(5, 0, dtype=torch.int32)
        exchange = Exchange(self.turn_id, text, frames, num_in_kv)
        self.dialogue.add(exchange)
        return exchange

    def _note_shortened(self, tenant: Tenant, *args: int) -> None:
        if tenant.turn is None and tenant.last_turn is not None:
            self._shortened_after[tenant.last_turn.turn_id] = tenant.last_turn.num_frames
        self._shorten(tenant, *args)

    def _note_received(self, message: Command | Returned) -> None:
        self._receive(message)
        if self._tenant.slot == self.slot and not self._tenant.is_decoding:
            self._is_settled = True

    def _listen(self, item: object) -> None:
        if isinstance(item, StepBuffer):
            for row, codes in zip(item.rows, item.codes, strict=False):
                self._codes[row.turn_id, row.segment, row.frame] = codes.clone()
        self._vocode(item)  # type: ignore[arg-type]


@contextmanager
def talking(max_positions: int = 1024, **config: int) -> Iterator[Talk]:
    model = tiny_model(context="dialogue", max_frames=MAX_FRAMES)
    with running(model, num_slots=1, max_positions=max_positions, **config) as (engine, recorder):
        yield Talk(model, engine, recorder)


@pytest.mark.parametrize("num_heard", range(MAX_FRAMES + 2))
def test_a_turn_that_is_made_but_not_heard_to_its_end_is_rolled_back(num_heard: int) -> None:
    """The engine runs ahead of the listener: most barge-ins come after the last frame is made."""
    with talking() as talk:
        talk.speak("hello.")
        num_frames = talk.speak("a long reply,", "in two parts.")
        assert num_frames > 1
        talk.cancel(talk.turn_id, num_heard)
        talk.check()


def test_a_dialogue_goes_on_under_new_sampling_and_ends_with_another_voice() -> None:
    with talking() as talk:
        talk.speak("hello.")
        talk.open(voice(), seed=9)
        talk.speak("again.")
        talk.check()
        talk.open(voice(1), seed=9)
        talk.open(voice(), seed=9)  # the KV holds the other voice by now, or part of it
        talk.dialogue.clear()
        talk.check()


@pytest.mark.parametrize("is_settled", [True, False])
def test_a_turn_that_still_plays_is_rolled_back_after_an_update(is_settled: bool) -> None:
    """New sampling does not end the dialogue, so neither does it end what can be taken back."""
    with talking() as talk:
        talk.speak("hello.")
        talk.speak("a long reply,", "in two parts.")
        update = OpenSlot(talk.slot, (voice(),), "", sampling(9), 600_000)
        talk._engine.submit(update)
        if is_settled:
            talk._recorder.wait(SlotReady)
        talk.cancel(talk.turn_id, 2)
        talk._engine.submit(replace(update, slot=talk.slot))
        talk.check()


def test_a_text_without_room_is_told_of_once_however_often_it_grew() -> None:
    model = tiny_model(context="dialogue", max_frames=MAX_FRAMES)
    with running(model, num_slots=1, max_positions=220) as (engine, recorder):
        slot = open_slot(engine, recorder)
        for num_words in range(20, 60, 10):
            text = "word " * num_words
            engine.submit(SetText(slot, 0, 0, text, is_closed=False))
            wait_until(lambda text=text: engine._prefill._tenants[0].prepared == (text, False))
        start_turn(engine, slot, 0, "word " * 60)
        end = recorder.wait(TurnEnd)
        warnings = [event.code for event in recorder.events if isinstance(event, EngineWarning)]
        assert warnings.count("text_truncated") == 1
        (begin,) = [event for event in recorder.events if isinstance(event, TurnBegin)]
        first_frame = next(event for event in recorder.events if isinstance(event, FramePcm))
        assert recorder.events.index(begin) < recorder.events.index(first_frame)
        assert begin.stamps_ns == end.stamps_ns and "first_pcm" in begin.stamps_ns


@pytest.mark.parametrize("config", [{}, {"kv_page_size": 8, "chunk_positions": 16}])
def test_cancels_at_random_leave_what_was_heard(config: dict[str, int]) -> None:
    rng = np.random.default_rng(1)
    with talking(max_positions=420, **config) as talk:
        for _ in range(16):
            texts = [str(text) for text in rng.choice(WORDS, rng.integers(1, 7))]
            action = rng.random()
            if action < 0.3:
                talk.interrupt(texts[0])
            else:
                num_frames = talk.speak(*texts)
                if action < 0.8:
                    talk.cancel(talk.turn_id, int(rng.integers(0, num_frames + 1)))
            talk.check()
        assert min(talk.dialogue.num_shortened.values()) > 1, talk.dialogue.num_shortened
