"""Who is under way with pages in hand, and who may take them."""

import torch

from realtime.pingpong.engine import EngineConfig, PingPongEngine
from realtime.pingpong.messages import EndTurn, Event, OpenSlot, SetText, SlotRef, TurnEnd
from realtime.pingpong.steps import StepBuffer
from tests.support.engine import sampling, tiny_model, voice

NUM_STEPS = 400  # ten times what it takes


class Rig:
    """Two slots of different voices on pages for both voices and little more; no threads."""

    def __init__(self) -> None:
        model = tiny_model(max_frames=40)
        config = EngineConfig(num_slots=2, max_positions=288, kv_page_size=8, kv_pages=1 + 50)
        self.engine = PingPongEngine(model, config)
        self.kv = self.engine._prefill.kv
        self.ended: set[SlotRef] = set()
        self.engine._sink = self._take
        self._pending: StepBuffer | None = None

    def _take(self, event: Event) -> None:
        if isinstance(event, TurnEnd):
            self.ended.add(event.slot)

    def open(self, voice_seed: int) -> SlotRef:
        slot = self.engine.slots.acquire()
        assert slot is not None
        self.engine.submit(OpenSlot(slot, (voice(voice_seed, 60),), "", sampling(), 600_000))
        while self.engine._prefill.step():
            pass
        return slot

    def with_a_growing_text(self) -> tuple[SlotRef, SlotRef]:
        """Two slots whose voices' pages are gone; the first's text is there in part."""
        growing, waiting = self.open(0), self.open(1)
        assert self.kv._reclaim(waiting.idx) and self.kv.prefixes.evict_one()
        self.engine.submit(SetText(growing, 0, 0, "hel", is_closed=False))
        self.engine._prefill.step()
        return growing, waiting

    def step(self) -> None:
        self.engine._prefill.step()
        self._pending = self.engine._decode.step(self._pending)
        while len(self.engine._vocode.inbox):
            item = self.engine._vocode.inbox.take()
            assert item is not None
            self.engine._vocode.step(item)


def test_who_needs_more_pages_than_it_has_is_under_way_no_more() -> None:
    """A voice is being made again for text that grows; the text is closed, and its frames need pages
    that another slot waits for, which waits for the first to be done."""
    with torch.inference_mode():
        rig = Rig()
        growing, waiting = rig.with_a_growing_text()
        assert rig.engine._prefill._tenants[growing.idx].is_under_way
        for slot in (waiting, growing):
            rig.engine.submit(SetText(slot, 0, 0, "hello.", is_closed=True))
            rig.engine.submit(EndTurn(slot, 0, 1))
        for _ in range(NUM_STEPS):
            rig.step()
        assert rig.ended == {growing, waiting}
        assert rig.kv.memory.num_waiting == 0


def test_who_has_nothing_to_say_after_all_keeps_its_pages_from_nobody() -> None:
    with torch.inference_mode():
        rig = Rig()
        growing, waiting = rig.with_a_growing_text()
        rig.engine.submit(SetText(growing, 0, 0, " ", is_closed=False))
        rig.engine.submit(SetText(waiting, 0, 0, "hello.", is_closed=True))
        rig.engine.submit(EndTurn(waiting, 0, 1))
        for _ in range(NUM_STEPS):
            rig.step()
        assert rig.ended == {waiting}
