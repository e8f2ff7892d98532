"""Whose prompt rows ride with decode's steps."""

from realtime.pingpong.messages import TurnEnd
from tests.support.engine import open_slot, running, start_turn, tiny_model
from tests.support.waiting import wait_until

TEXT = "hello there, how are you?"


def test_a_blocked_slot_keeps_nobody_from_riding() -> None:
    """No step takes it along, so that its rows would hold the room that the others' need."""
    model = tiny_model()
    model.dual_ar.use_kernels("bf16")
    with running(model, num_slots=4, max_positions=256) as (engine, recorder):
        slots = [open_slot(engine, recorder) for _ in range(4)]
        hand_over = engine._prefill.hand_over
        for slot in slots[:3]:
            engine.set_blocked(slot, True)
            start_turn(engine, slot, 0, TEXT)
        wait_until(lambda: len(engine._decode._streams) == 3)
        assert hand_over.num_riders == 0
        start_turn(engine, slots[3], 0, TEXT)
        assert recorder.wait(TurnEnd).slot == slots[3]
        assert hand_over.num_riders == engine._decode.num_ridden > len(TEXT)
        for slot in slots[:3]:
            engine.set_blocked(slot, False)
        assert {recorder.wait(TurnEnd).slot for _ in range(3)} == set(slots[:3])
