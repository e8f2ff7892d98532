"""Who waits for whom: the engine's loops one step at a time, without threads and without a clock."""

import pytest

from realtime.pingpong import frames
from realtime.pingpong import prefill as prefill_module
from realtime.pingpong.engine import EngineConfig, PingPongEngine
from realtime.pingpong.messages import EndTurn, Event, SetText, SlotRef
from realtime.pingpong.prefill_rows import Piece
from realtime.pingpong.steps import StepBuffer
from tests.support.engine import ask_slot, tiny_model, voice

pytestmark = pytest.mark.usefixtures("inference")


class OnItsWay:
    """An event that is over when the test says so."""

    def __init__(self) -> None:
        self.is_done = False
        self.num_waits = 0

    def is_over(self) -> bool:
        return self.is_done

    def wait_on_stream(self) -> None:
        self.num_waits += not self.is_done

    def wait_on_host(self) -> None:
        self.num_waits += not self.is_done
        self.is_done = True


class Stepped:
    def __init__(self, *, is_packed: bool = False, in_order: bool = False) -> None:
        model = tiny_model(max_frames=50)
        if is_packed:
            model.dual_ar.use_kernels("bf16")
        config = EngineConfig(num_slots=3, kv_page_size=8, in_order=in_order)
        self.engine = PingPongEngine(model, config)
        self.events: list[Event] = []
        self.engine._sink = self.events.append
        self.pending: StepBuffer | None = None

    def open(self, seed: int) -> SlotRef:
        slot = ask_slot(self.engine, voice(), seed)
        self.prefill()
        return slot

    def say(self, slot: SlotRef, text: str = "hello.", *, is_closed: bool = True) -> None:
        self.engine.submit(SetText(slot, 0, 0, text, is_closed))

    def prefill(self) -> None:
        while self.engine._prefill.step():
            pass

    def join(self, slot: SlotRef) -> OnItsWay:
        """Its prefill is launched, and is over when the test says so."""
        self.say(slot)
        self.prefill()
        joins = self.engine._decode.inbox.take_all()
        event = OnItsWay()
        object.__setattr__(joins[-1], "prefilled", event)
        for join in joins:
            self.engine._decode.inbox.put(join)
        return event

    def decode(self) -> list[int]:
        """One step; the slots that it has launched."""
        self.pending = self.engine._decode.step(self.pending)
        for item in self.engine._vocode.inbox.take_all():
            self.engine._vocode.step(item)
        return [] if self.pending is None else [row.slot.idx for row in self.pending.rows]


def test_a_stream_joins_when_its_prefill_is_over_and_holds_up_nobody() -> None:
    stepped = Stepped()
    first, second = stepped.open(1), stepped.open(2)
    stepped.join(first).is_done = True
    assert stepped.decode() == [first.idx]
    prefilled = stepped.join(second)
    assert stepped.decode() == [first.idx]
    assert stepped.decode() == [first.idx]
    prefilled.is_done = True
    assert stepped.decode() == [first.idx, second.idx]
    assert prefilled.num_waits == 0


def test_who_is_prefilled_later_does_not_wait_for_who_came_sooner() -> None:
    stepped = Stepped()
    slots = [stepped.open(seed) for seed in range(3)]
    stepped.join(slots[0]).is_done = True
    stepped.decode()
    still_written = stepped.join(slots[1])
    stepped.join(slots[2]).is_done = True
    assert stepped.decode() == [slots[0].idx, slots[2].idx]
    still_written.is_done = True
    assert stepped.decode() == [slots[0].idx, slots[2].idx, slots[1].idx]


def test_where_nobody_else_speaks_the_device_waits_for_the_prefill() -> None:
    stepped = Stepped()
    slot = stepped.open(1)
    prefilled = stepped.join(slot)
    assert stepped.decode() == [slot.idx]
    assert prefilled.num_waits == 1


def test_in_order_who_takes_part_does_not_depend_on_time() -> None:
    stepped = Stepped(in_order=True)
    slots = [stepped.open(seed) for seed in range(2)]
    stepped.join(slots[0]).is_done = True
    stepped.decode()
    prefilled = stepped.join(slots[1])
    stepped.decode()
    assert prefilled.num_waits == 1


def test_a_frame_is_launched_at_the_end_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who joins until then takes part; the ends are handed on in the middle."""
    stepped = Stepped()
    first, second = stepped.open(1), stepped.open(2)
    stepped.join(first).is_done = True
    stepped.decode()
    decode, calls = stepped.engine._decode, []

    def wait() -> None:
        calls.append(len(stepped.engine._vocode.inbox))
        stepped.join(second).is_done = True

    monkeypatch.setattr(decode.frames, "wait_for_tail", wait)
    assert stepped.decode() == [first.idx, second.idx]
    assert calls == [1], "the step was handed on before"


def test_texts_that_come_while_a_call_runs_are_one_call() -> None:
    stepped = Stepped(is_packed=True)
    slots = [stepped.open(seed) for seed in range(3)]
    stepped.engine._prefill.hand_over.max_riders = 0
    kv, calls = stepped.engine._prefill.kv, []
    runner, running = kv.runner, OnItsWay()
    write = runner.write

    def noted(pieces: list[Piece]) -> None:
        calls.append([piece.slot for piece in pieces])
        write(pieces)

    runner.write = noted  # type: ignore[method-assign,assignment]
    stepped.say(slots[0])
    assert stepped.engine._prefill.step()

    def come_meanwhile() -> None:
        stepped.say(slots[1])
        stepped.say(slots[2])

    running.wait_on_host = come_meanwhile  # type: ignore[method-assign]
    kv._launched = running  # type: ignore[assignment]
    assert stepped.engine._prefill.step()
    assert calls == [[slots[0].idx], [slots[1].idx, slots[2].idx]]


def test_a_text_and_its_commit_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    stepped = Stepped(is_packed=True)
    slot = stepped.open(1)
    prefill, now_ns = stepped.engine._prefill, [0]
    prefill.settle_ns, prefill.hand_over.max_riders = 2_000_000, 0
    monkeypatch.setattr(prefill_module.time, "perf_counter_ns", lambda: now_ns[0])
    num_before = prefill.kv.num_positions
    stepped.say(slot, "hello the", is_closed=False)
    assert not prefill.step(), "it may still grow"
    now_ns[0] = 1_000_000
    stepped.say(slot, "hello there", is_closed=False)
    assert not prefill.step() and prefill.kv.num_positions == num_before
    assert prefill._sleep_s(None) == 0.002
    now_ns[0] = 2_900_000
    assert not prefill.step()
    now_ns[0] = 3_000_000
    assert prefill.step() and prefill.kv.num_positions > num_before, "it has settled"
    stepped.say(slot, "hello there.")
    assert prefill.step() and len(stepped.engine._decode.inbox) == 1, "a commit does not wait"


def ridden(stepped: Stepped, monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    """Of each step from now on: its slots, and the slots of those whose prompt rides with it."""
    frames, steps = stepped.engine._decode.frames, []
    launch = frames.launch

    def noted(slots: list[int], riders: list[Piece]) -> object:
        steps.append((slots, [piece.slot for piece in riders]))
        return launch(slots, riders)

    monkeypatch.setattr(frames, "launch", noted)
    return steps


def test_a_prompt_rides_with_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    stepped = Stepped(is_packed=True)
    first, second = (stepped.open(seed) for seed in range(2))
    steps, runner = ridden(stepped, monkeypatch), stepped.engine._prefill.kv.runner
    monkeypatch.setattr(runner, "write", lambda pieces: pytest.fail("a call of its own"))
    stepped.say(first)
    stepped.prefill()
    stepped.decode()
    stepped.say(second)
    stepped.prefill()
    for _ in range(2):
        stepped.decode()
    idxs = [first.idx, second.idx]
    assert steps == [(idxs[:1], idxs[:1]), (idxs, idxs[1:]), (idxs, [])]


LONG = "word " * 16  # more than 84 rows; a step has room for 125


def test_who_finds_no_room_in_the_next_two_steps_has_a_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Texts beyond it are faster in a call."""
    stepped = Stepped(is_packed=True)
    slots = [stepped.open(seed) for seed in range(3)]
    steps, written = ridden(stepped, monkeypatch), []
    runner = stepped.engine._prefill.kv.runner
    write = runner.write
    monkeypatch.setattr(
        runner, "write", lambda ps: written.append([p.slot for p in ps]) or write(ps)
    )
    for slot in slots:
        stepped.say(slot, LONG)
    stepped.prefill()
    first, second, third = (slot.idx for slot in slots)
    assert {slot for call in written for slot in call} == {third}
    for _ in range(2):
        stepped.decode()
    assert steps == [([first, third], [first]), ([first, second, third], [second])]
    assert stepped.engine._decode.num_ridden > 160


def test_who_is_gone_makes_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    stepped = Stepped(is_packed=True)
    first, second = (stepped.open(seed) for seed in range(2))
    prefill, decode = stepped.engine._prefill, stepped.engine._decode
    stepped.say(first, LONG)
    stepped.prefill()
    stepped.engine.slots.bump(first)
    stepped.decode()
    assert prefill.hand_over.num_riders == decode.num_ridden > 80
    steps = ridden(stepped, monkeypatch)
    stepped.say(second, LONG)
    stepped.prefill()
    stepped.decode()
    assert steps == [([second.idx], [second.idx])]


def test_who_is_paused_lends_its_room_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocked after it was handed over; and when it goes on, both do not fit into one step."""
    stepped = Stepped(is_packed=True)
    first, second = (stepped.open(seed) for seed in range(2))
    steps = ridden(stepped, monkeypatch)
    stepped.say(first, LONG)
    stepped.prefill()
    stepped.engine.set_blocked(first, True)
    stepped.decode()
    stepped.say(second, LONG)
    stepped.prefill()
    stepped.engine.set_blocked(first, False)
    for _ in range(2):
        stepped.decode()
    assert steps == [([first.idx], [first.idx]), ([first.idx, second.idx], [second.idx])]
    hand_over = stepped.engine._prefill.hand_over
    assert hand_over.num_riders == stepped.engine._decode.num_ridden > 160


@pytest.mark.parametrize("num_voices", [1, 2])
def test_streams_of_one_voice_read_it_once(
    num_voices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "LEAST_SHARED", 3)
    stepped = Stepped(is_packed=True)
    model, shares = stepped.engine._model.dual_ar, []
    decode_frame = model.decode_frame

    def noted(*args: object, shares_pages: bool) -> object:
        shares.append(shares_pages)
        return decode_frame(*args, shares_pages=shares_pages)

    monkeypatch.setattr(model, "decode_frame", noted)
    slots = [ask_slot(stepped.engine, voice(i % num_voices), i) for i in range(3)]
    stepped.prefill()
    for slot in slots:
        stepped.say(slot)
    stepped.prefill()
    for _ in range(3):
        stepped.decode()
    assert shares == [False, *[num_voices == 1] * 2], "the first one has riders, which always share"


def test_decode_is_told_whether_a_turn_ends_with_its_segment() -> None:
    for num_segments, ends_turn in ((1, True), (2, False), (None, False)):
        stepped = Stepped()
        slot = stepped.open(1)
        stepped.say(slot)
        if num_segments is not None:
            stepped.engine.submit(EndTurn(slot, 0, num_segments))
        stepped.prefill()
        (join,) = stepped.engine._decode.inbox.take_all()
        assert join.ends_turn is ends_turn
        stepped.engine._decode.inbox.put(join)
        stepped.decode()
        assert stepped.pending is not None and stepped.pending.rows[0].ends_turn is ends_turn
