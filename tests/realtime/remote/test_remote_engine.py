"""An engine in another process answers as one in this process does, and its death is known."""

import os
import signal
import time

import numpy as np
import pytest

from realtime.errors import EngineError, PlosiveError, VoiceError
from realtime.pingpong.messages import (
    CloseSlot,
    Event,
    FramePcm,
    SetText,
    SlotClosed,
    SlotFailed,
    TurnEnd,
    VoicePrompt,
)
from realtime.pingpong.slots import Slots
from realtime.remote.engine import MAX_WAITING_COMMANDS, RemoteEngine
from realtime.remote.process import Call
from tests.support.recorder import Recorder
from tests.support.tones import (
    check_stale_is_dropped,
    fall_over,
    load_forever,
    make_slow_tone,
    make_tone,
    opened,
    refuse,
    say,
    tell_patience,
)

VOICE = VoicePrompt("any", "a voice", np.zeros((1, 3), np.int32))


@pytest.fixture
def remote():
    engine = RemoteEngine(make_tone, num_slots=3).load()
    yield engine
    engine.stop()


def pcm(recorder: Recorder, turn_id: int) -> np.ndarray:
    frames = [each for each in recorder.events if isinstance(each, FramePcm)]
    return np.concatenate([each.pcm for each in frames if each.turn_id == turn_id])


def test_it_speaks_as_it_would_here(remote: RemoteEngine) -> None:
    here, there, local = Recorder(), Recorder(), make_tone(Slots(3))
    assert remote.info == local.info
    local.start(here)
    remote.start(there)
    for engine, recorder in ((local, here), (remote, there)):
        slot = opened(engine, recorder)
        say(engine, slot, 1, "The same text.", "Twice.")
        recorder.wait(TurnEnd)
    kinds = [[type(event) for event in recorder.events] for recorder in (here, there)]
    assert kinds[0] == kinds[1]
    assert np.array_equal(pcm(here, 1), pcm(there, 1))
    local.stop()


def test_its_threads_share_the_interpreter_as_those_of_the_server_do() -> None:
    with pytest.raises(PlosiveError, match=": 0.0005$"):
        RemoteEngine(tell_patience, num_slots=1).load()


def test_what_is_stale_is_dropped_over_there_too(remote: RemoteEngine) -> None:
    check_stale_is_dropped(remote)


def test_calls_return_and_raise(remote: RemoteEngine) -> None:
    remote.warm_up((VOICE,))
    remote.check_voice(VOICE)
    with pytest.raises(VoiceError, match="learn no voice") as raised:
        remote.encode_voice(b"RIFF", 30.0)
    assert raised.value.code == "invalid_clip"


def test_a_slot_takes_a_bounded_number_of_commands() -> None:
    """As `CommandQueue` expects; a close is never refused, and the others are told to come again."""
    remote = RemoteEngine(make_slow_tone, num_slots=1).load()
    recorder = Recorder()
    remote.start(recorder)
    os.kill(remote.pid or 0, signal.SIGSTOP)  # it takes nothing
    slot = remote.slots.acquire()
    assert slot is not None
    for number in range(MAX_WAITING_COMMANDS):
        remote.submit(SetText(slot, 1, 0, f"word {number}", is_closed=False))
    with pytest.raises(EngineError, match="64 commands") as raised:
        remote.submit(SetText(slot, 1, 0, "one more", is_closed=False))
    assert raised.value.code == "engine_overloaded"
    slot = remote.slots.bump(slot)
    remote.submit(CloseSlot(slot))
    os.kill(remote.pid or 0, signal.SIGCONT)
    recorder.wait(SlotClosed)
    remote.stop()


def test_its_death_fails_what_it_had(remote: RemoteEngine) -> None:
    recorder = Recorder()
    remote.start(recorder)
    slot = opened(remote, recorder, max_lead_ms=200)
    say(remote, slot, 1, "word " * 200)
    recorder.wait(FramePcm)
    os.kill(remote.pid or 0, signal.SIGKILL)
    failed = recorder.wait(SlotFailed)
    assert failed.slot == slot and "exit code -9" in failed.message
    assert remote.failure == failed.message
    with pytest.raises(EngineError) as raised:
        remote.submit(CloseSlot(slot))
    assert raised.value.code == "engine_stopped"
    with pytest.raises(EngineError):
        remote.check_voice(VOICE)


def test_what_keeps_it_from_being_made_is_told() -> None:
    with pytest.raises(PlosiveError, match="no engine with 5 slots") as raised:
        RemoteEngine(refuse, num_slots=5).load()
    assert raised.value.code == "model_unusable"
    with pytest.raises(PlosiveError, match="MemoryError: no room for the weights"):
        RemoteEngine(fall_over, num_slots=5).load()


def test_stop_ends_the_process_whatever_it_does() -> None:
    remote = RemoteEngine(make_slow_tone, num_slots=1).load()
    recorder = Recorder()
    remote.start(recorder)
    slot = opened(remote, recorder)
    say(remote, slot, 1, "A long step.")
    started_s = time.monotonic()
    remote.stop()
    remote.stop()
    assert time.monotonic() - started_s < 5.0
    with pytest.raises(ProcessLookupError):
        os.kill(remote.pid or 0, 0)
    with pytest.raises(EngineError, match="stopped"):
        remote.submit(CloseSlot(slot))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_it_imports_is_the_servers(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    remote = RemoteEngine(make_tone, num_slots=1)
    end_s = time.monotonic() + 0.3  # of at least that much importing
    while time.monotonic() < end_s:
        os.kill(remote.pid or 0, number)
        time.sleep(0.01)
    assert remote.load().info.num_slots == 1
    remote.stop()
    assert capfd.readouterr().err == ""
    assert number not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_stop_does_not_wait_for_an_engine_that_loads() -> None:
    remote = RemoteEngine(load_forever, num_slots=1)
    started_s = time.monotonic()
    remote.stop()
    assert time.monotonic() - started_s < 5.0
    with pytest.raises(ProcessLookupError):
        os.kill(remote.pid or 0, 0)


def test_an_answer_that_nobody_waits_for_any_more_harms_nobody(remote: RemoteEngine) -> None:
    recorder = Recorder()
    remote.start(recorder)
    slot = opened(remote, recorder)
    remote._send(Call(10**6, "check_voice", (VOICE,)))  # as one that was given up
    say(remote, slot, 1, "Still here.")
    assert recorder.wait(TurnEnd).turn_id == 1


def test_events_that_cannot_be_taken_are_the_end_of_the_engine(remote: RemoteEngine) -> None:
    recorder = Recorder()

    def fail_once(event: Event) -> None:
        if isinstance(event, FramePcm):
            raise RuntimeError("the receiver is broken")
        recorder(event)

    remote.start(fail_once)
    slot = opened(remote, recorder)
    say(remote, slot, 1, "Nobody hears it.")
    assert recorder.wait(SlotFailed).slot == slot and remote.failure is not None
