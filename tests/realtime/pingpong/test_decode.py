"""The decode loop: what it launches, when it looks, and that nobody hears who else is there."""

import threading
import time

import numpy as np
import pytest
import torch

from model.speech_model import SpeechModel
from realtime.pingpong.decode import DecodeLoop
from realtime.pingpong.device import Event
from realtime.pingpong.frames import FrameRunner
from realtime.pingpong.messages import SegmentEnd, SlotRef, TurnEnd
from realtime.pingpong.steps import Returned, StepBuffer
from tests.support.engine import (
    Recorder,
    close_slot,
    open_slot,
    running,
    speak,
    start_turn,
    tiny_model,
    voice,
    wait_for_ends,
)

TEXTS = ("hello there.", "and some more of it.", "the end!")


def packed_model(**kwargs: object) -> SpeechModel:
    model = tiny_model(**kwargs)  # type: ignore[arg-type]
    model.dual_ar.use_kernels("bf16")
    return model


def said(model: SpeechModel, **config: object) -> np.ndarray:
    with running(model, **config) as (engine, recorder):
        slot = open_slot(engine, recorder, seed=5)
        return speak(engine, recorder, slot, 0, *TEXTS)


@pytest.mark.parametrize("in_order", [False, True])
def test_the_packed_model_says_what_the_eager_one_says(in_order: bool) -> None:
    expected = said(tiny_model(), num_slots=1)
    got = said(packed_model(), num_slots=1, in_order=in_order, kv_page_size=16)
    np.testing.assert_array_equal(got, expected)


def test_no_row_is_computed_for_a_stream_that_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    read, calls = FrameRunner.read_ends, []

    def everybody_ends_now_and_then(frames: FrameRunner, num_rows: int) -> list[bool]:
        calls.append(num_rows)
        return [len(calls) % 7 == 0 or end for end in read(frames, num_rows)]

    monkeypatch.setattr(FrameRunner, "read_ends", everybody_ends_now_and_then)
    with running(tiny_model(max_frames=30), num_slots=3) as (engine, recorder):
        slots = [open_slot(engine, recorder, seed=seed) for seed in (1, 2, 3)]
        for slot in slots:
            start_turn(engine, slot, 0, *TEXTS)
        for _ in slots:  # in any order
            recorder.wait(TurnEnd)
        ends = [event for event in recorder.events if isinstance(event, SegmentEnd)]
        assert len(ends) == 9 and all(end.num_frames < 30 for end in ends)
        num_end_rows = len(ends)  # the row whose frame is the end itself
        assert engine._decode.num_rows == sum(end.num_frames for end in ends) + num_end_rows


def test_ends_are_read_before_the_next_frame_is_launched_and_handed_on_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    launch, drain = DecodeLoop._launch, DecodeLoop._drain

    def launched(loop: DecodeLoop, streams: list) -> StepBuffer | None:
        calls.append("launch")
        return launch(loop, streams)

    def drained(loop: DecodeLoop, step: StepBuffer) -> None:
        drain(loop, step)
        calls.append("drain")
        assert len(step.is_end) == len(step.rows)

    monkeypatch.setattr(DecodeLoop, "_launch", launched)
    monkeypatch.setattr(DecodeLoop, "_drain", drained)
    said(tiny_model(), num_slots=1)
    assert calls == ["launch", "drain"] * (len(calls) // 2)


@pytest.mark.parametrize("max_frames", [3, 30])  # cut at the limit; ended by the model
def test_a_turns_end_does_not_overtake_its_last_frame(
    max_frames: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill, which says that a turn is over, may run as soon as decode gives the slot back."""
    with running(tiny_model(max_frames=max_frames), num_slots=1) as (engine, recorder):
        give_back = engine._decode._give_back

        def give_back_and_fall_asleep(returned: Returned) -> None:
            give_back(returned)
            time.sleep(0.05)

        monkeypatch.setattr(engine._decode, "_give_back", give_back_and_fall_asleep)
        slot = open_slot(engine, recorder, seed=5)
        start_turn(engine, slot, 0, "hello.")
        recorder.wait(TurnEnd)
        assert [type(event) for event in recorder.events[-2:]] == [SegmentEnd, TurnEnd]


def test_streams_that_join_together_are_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(tiny_model(), num_slots=4) as (engine, recorder):
        slots = [open_slot(engine, recorder, seed=seed) for seed in range(4)]
        decode, sizes = engine._decode, []
        start, take = decode.frames.start, decode.inbox.take_all
        joins: list = []
        is_patched = threading.Event()

        def take_when_all_are_there(timeout_s: float | None = 0.0) -> list:
            is_patched.set()
            joins.extend(take(timeout_s))
            ready = joins.copy() if len(joins) >= 4 or sizes else []
            del joins[: len(ready)]
            return ready

        def started(starts: list) -> None:
            sizes.append(len(starts))
            start(starts)

        monkeypatch.setattr(decode.inbox, "take_all", take_when_all_are_there)
        monkeypatch.setattr(decode.frames, "start", started)
        decode.inbox.poke()
        assert is_patched.wait(10)
        for slot in slots:
            start_turn(engine, slot, 0, "hello.")
        wait_for_ends(recorder, slots)
    assert sizes == [4]


def test_the_device_is_told_the_slots_only_when_they_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with running(tiny_model(max_frames=20), num_slots=2) as (engine, recorder):
        slots = [open_slot(engine, recorder, seed=seed) for seed in (3, 4)]
        frames, uploads = engine._decode.frames, []
        upload = frames._upload_slots
        monkeypatch.setattr(
            frames, "_upload_slots", lambda array: uploads.append(array.tolist()) or upload(array)
        )
        for slot in slots:
            start_turn(engine, slot, 0, *TEXTS)
        wait_for_ends(recorder, slots)
        num_steps = engine._decode.num_steps
    assert all(a != b for a, b in zip(uploads, uploads[1:], strict=False))
    assert len(uploads) < num_steps / 2


def speak_among_others(model: SpeechModel, num_slots: int, **config: object) -> np.ndarray:
    """One stream's audio while others open, speak, are cancelled by closing, and come again."""
    with running(model, num_slots=num_slots, **config) as (engine, recorder):
        rng = np.random.default_rng(num_slots)
        others = [open_slot(engine, recorder, seed=100 + i) for i in range(num_slots // 2)]
        slot = open_slot(engine, recorder, seed=5)
        for i, other in enumerate(others):
            start_turn(engine, other, 0, *TEXTS[: 1 + i % 3])
        start_turn(engine, slot, 0, *TEXTS)
        for other in others[::2]:
            close_slot(engine, recorder, other)
            _join_another(engine, recorder, rng)
        recorder.wait(TurnEnd, lambda event: event.slot == slot)
        return recorder.pcm(slot, 0)


def _join_another(engine: object, recorder: Recorder, rng: np.random.Generator) -> SlotRef:
    other = open_slot(engine, recorder, seed=int(rng.integers(1000)))  # type: ignore[arg-type]
    start_turn(engine, other, 0, "another one.")  # type: ignore[arg-type]
    return other


@pytest.mark.parametrize("num_slots", [4, 9])
@pytest.mark.parametrize("make", [tiny_model, packed_model])
def test_a_stream_is_the_same_beside_others_that_come_and_go(make, num_slots: int) -> None:
    """Bit for bit, in fp32 on the CPU."""
    np.testing.assert_array_equal(speak_among_others(make(), num_slots), said(make(), num_slots=1))


def test_an_engine_of_512_slots() -> None:
    expected = said(tiny_model(), num_slots=1)
    with running(tiny_model(), num_slots=512, max_positions=320) as (engine, recorder):
        slots = [open_slot(engine, recorder, seed=5) for _ in range(40)]
        assert slots[-1].idx == 39 and engine.info.num_slots == 512
        for slot in slots:
            start_turn(engine, slot, 0, *TEXTS)
        wait_for_ends(recorder, slots)
        for slot in slots:
            np.testing.assert_array_equal(recorder.pcm(slot, 0), expected)
        stats = engine.stats()
    assert stats["weight_bytes"] > 0 and stats["kv_bytes"] > 0
    assert stats["decode_host_us"] > 0 and stats["graph_bytes"] == 0


# ---------------------------------------------------------------------- on a GPU


def guard(engine: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """No part of the decode loop may wait but where it is meant to."""
    decode = engine._decode  # type: ignore[attr-defined]
    for name in ("_admit", "_launch", "_drain", "_retire_stale"):
        run = getattr(decode, name)

        def guarded(*args: object, run=run) -> object:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return run(*args)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        monkeypatch.setattr(decode, name, guarded)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_cuda_the_loop_never_waits_and_graphs_say_what_eager_frames_say(monkeypatch) -> None:
    results = {}
    for is_captured in (False, True):
        with running(tiny_model(device="cuda"), num_slots=5) as (engine, recorder):
            if is_captured:
                engine.warm_up((voice(0),))
                assert engine.stats()["graph_bytes"] > 0
                guard(engine, monkeypatch)
            slots = [open_slot(engine, recorder, seed=seed) for seed in range(5)]
            for slot in slots:
                start_turn(engine, slot, 0, *TEXTS)
            wait_for_ends(recorder, slots)
            assert all(len(recorder.pcm(slot, 0)) for slot in slots)
            # One at a time: who is in a batch depends on time, and bits on the size of the batch.
            results[is_captured] = [speak(engine, recorder, slot, 1, *TEXTS) for slot in slots]
    for eager, captured in zip(results[False], results[True], strict=True):
        assert len(eager)
        np.testing.assert_array_equal(captured, eager)


@pytest.mark.gpu
def test_cuda_ends_are_known_while_the_frame_still_runs() -> None:
    """An event recorded inside a graph is over before the graph is."""
    device, host = torch.device("cuda"), torch.empty(1, dtype=torch.int64, pin_memory=True)
    counter, known = (
        torch.zeros(1, dtype=torch.int64, device=device),
        Event(device, is_external=True),
    )

    def run() -> None:
        counter.add_(1)
        host.copy_(counter, non_blocking=True)
        known.record()
        torch.cuda._sleep(200_000_000)  # about 0.1 s

    run()
    torch.cuda.synchronize()
    graph, over = torch.cuda.CUDAGraph(), torch.cuda.Event()
    with torch.cuda.graph(graph):
        run()
    for expected in (2, 3, 4):
        graph.replay()
        over.record()
        known.wait_on_host()
        assert host.item() == expected and not over.query()
        torch.cuda.synchronize()


@pytest.mark.gpu
def test_cuda_512_slots_speak() -> None:
    with running(tiny_model(device="cuda"), num_slots=512, max_positions=320) as (engine, rec):
        engine.warm_up((voice(0),))
        slots = [open_slot(engine, rec, seed=5) for _ in range(300)]
        for slot in slots:
            start_turn(engine, slot, 0, "hello.")
        wait_for_ends(rec, slots)
        lengths = {len(rec.pcm(slot, 0)) for slot in slots}
        stats = engine.stats()
    print(f"\n| 512 slots | lengths {lengths} | graphs {stats['graph_bytes'] / 2**20:.0f} MiB")
    assert min(lengths) > 0
