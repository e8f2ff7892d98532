"""What one client or the engine does wrong, and that nobody else notices."""

import asyncio
import random
from pathlib import Path

import pytest
from websockets.exceptions import ConnectionClosed

from realtime import wire
from realtime.encoders import LoopEvent
from realtime.outbox import Outbox
from realtime.pingpong.messages import (
    CloseSlot,
    Command,
    EndTurn,
    OpenSlot,
    SetText,
    SlotFailed,
)
from realtime.session.actions import Action, EncodedAudio
from realtime.session.core import Session
from tests.fakes import CHARS_PER_FRAME
from tests.realtime.support import TIMEOUT_S, Client, make_engine, serving, session

TEXT = "The quick brown fox jumps over the lazy dog. Then it sleeps until noon."
LONG_TEXT = TEXT * 40  # two minutes of tone
PCM_48K = wire.AudioFormat(codec="pcm_s16le", sample_rate=48_000)


async def test_slow_reader_is_paused_then_closed(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    async with serving(tmp_path, engine, write_stall_s=1.0) as served:
        async with (
            served.connect(max_queue=1, ping_interval=None) as socket,
            session(served) as other,
        ):
            slow = Client(socket)
            await slow.start(format=PCM_48K)
            await slow.begin(LONG_TEXT)  # and reads nothing from here on
            await asyncio.to_thread(engine.wait_until, lambda: any(b for _, b in engine.blocked))
            slot = next(slot for slot, is_blocked in engine.blocked if is_blocked)
            for turn_id in range(3):
                await other.say(TEXT, turn_id)

            def is_closed() -> bool:
                return any(command.slot.idx == slot.idx for command in engine.seen(CloseSlot))

            assert not is_closed(), "the other client was served while this one stalled"
            await asyncio.to_thread(engine.wait_until, is_closed)
            assert [b for s, b in engine.blocked if s == slot][-1], "it was paused to the end"
            assert len(engine.emitted[slot.idx, 1]) < 0.6 * len(LONG_TEXT) / CHARS_PER_FRAME
            await other.say(TEXT, 3)
            with pytest.raises(ConnectionClosed) as closing:  # behind what it has not read
                while True:
                    await slow.next()
            assert closing.value.rcvd is not None and closing.value.rcvd.code == 4001
        await served.until_free()


async def test_a_flood_of_messages_is_held_back(tmp_path: Path) -> None:
    num_messages = 5_000
    async with serving(tmp_path) as served, session(served) as flooder, session(served) as other:

        async def flood() -> None:
            for _ in range(num_messages):
                await flooder.socket.send("{" + "x" * 200)

        flooding = asyncio.create_task(flood())  # its errors are not read yet
        await other.say(TEXT)
        async with asyncio.timeout(TIMEOUT_S):
            while len(flooder.heard.of(wire.Error)) < num_messages:
                await flooder.next()
        await flooding
        await flooder.say(TEXT)


async def test_a_paused_stream_resumes(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    async with serving(tmp_path, engine) as served, served.connect(max_queue=1) as socket:
        client = Client(socket)
        await client.start(format=PCM_48K)
        await client.begin(LONG_TEXT)
        await asyncio.to_thread(engine.wait_until, lambda: any(b for _, b in engine.blocked))
        done = await client.until(wire.TurnDone)
        assert done.metrics.num_packets == len(client.heard.packets)
        assert [p.seq for p in client.heard.packets] == list(range(len(client.heard.packets)))
        assert [is_blocked for _, is_blocked in engine.blocked][:3] == [False, True, False]


async def test_cancel_empties_the_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(tmp_path)
    dropped_ms: list[float] = []
    drop = Outbox.drop

    def watched(outbox: Outbox, turn_id: int) -> None:
        before_ms = outbox.audio_ms
        drop(outbox, turn_id)
        dropped_ms.append(before_ms - outbox.audio_ms)

    monkeypatch.setattr(Outbox, "drop", watched)
    async with serving(tmp_path, engine) as served, served.connect(max_queue=1) as socket:
        client = Client(socket)
        await client.start(format=PCM_48K)
        await client.begin(LONG_TEXT)
        await asyncio.to_thread(engine.wait_until, lambda: any(b for _, b in engine.blocked))
        await client.send(wire.TurnCancel(turn_id=1, played_ms=40.0))
        await client.until(wire.TurnCancelled)
        num_frames = len(engine.emitted[0, 1])
        assert len(client.heard.packets) < 2 * num_frames, "queued packets were dropped"
        assert dropped_ms and dropped_ms[0] > 0, dropped_ms  # those that waited for the socket
        client.heard.packets.clear()
        await client.say(TEXT, 2)
        assert {packet.turn_id for packet in client.heard.packets} == {2}
        assert not engine.blocked[-1][1]


@pytest.mark.parametrize("seed", range(3))
async def test_disconnects_at_random_moments(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    engine = make_engine(tmp_path, num_slots=3, frame_s=0.0005)
    before = asyncio.all_tasks()
    async with serving(tmp_path, engine) as served:

        async def vanish() -> None:
            socket = await served.connect()
            client = Client(socket)
            steps = rng.randrange(6)
            if steps > 0:
                await client.send(wire.SessionStart())
            if steps > 1:
                await client.begin(TEXT * 5)
            if steps > 2:
                await client.until(wire.SessionReady)
            for _ in range(rng.randrange(30) if steps > 3 else 0):
                await client.next()
            if steps > 4:
                await client.send(wire.TurnCancel(turn_id=1))
            if rng.random() < 0.5:
                socket.transport.abort()
            else:
                await socket.close()

        for _ in range(8):
            async with asyncio.timeout(TIMEOUT_S):
                await asyncio.gather(*(vanish() for _ in range(3)))
                await served.until_free()
        async with session(served) as client:
            await client.say(TEXT)
        await served.until_free()
        assert not served.hub.num_sessions
    assert asyncio.all_tasks() == before


async def test_a_failed_slot_ends_its_session_only(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    engine.hold()
    async with serving(tmp_path, engine) as served:
        async with session(served) as failing, session(served) as other:
            await failing.begin(TEXT)
            await asyncio.to_thread(engine.wait_until, lambda: bool(engine.seen(EndTurn)))
            slot = engine.seen(OpenSlot)[0].slot
            engine.emit(SlotFailed(slot, "the model said no"))
            error = await failing.until(wire.Error)
            assert (error.code, error.turn_id) == ("engine_error", 1)
            error = await failing.until(wire.Error)
            assert error.fatal and "the model said no" in error.message
            with pytest.raises(ConnectionClosed) as closed:
                await failing.next()
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1011
            engine.let_all()
            await other.say(TEXT)
        await served.until_free()


async def test_a_session_that_raises_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Session.engine_event

    def engine_event(self: Session, event: LoopEvent, now_ns: int) -> list[Action]:
        if event.slot.idx == 0 and isinstance(event, EncodedAudio):
            raise ZeroDivisionError
        return original(self, event, now_ns)

    monkeypatch.setattr(Session, "engine_event", engine_event)
    engine = make_engine(tmp_path)
    engine.hold()
    async with serving(tmp_path, engine) as served:
        async with session(served) as failing, session(served) as other:
            await failing.begin(TEXT)
            await other.begin(TEXT)
            engine.let_all()
            await other.until(wire.TurnDone)
            with pytest.raises(ConnectionClosed) as closed:
                while True:
                    await failing.next()
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1011
            assert failing.heard.of(wire.Error)[-1].code == "internal_error"
        await served.until_free()


async def test_a_dead_engine_is_told_and_seen(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    engine.hold()
    async with serving(tmp_path, engine) as served, served.http() as http:
        async with session(served) as client:
            await client.begin(TEXT)
            await asyncio.to_thread(engine.wait_until, lambda: bool(engine.seen(EndTurn)))
            engine.die()
            with pytest.raises(ConnectionClosed) as closed:
                while True:
                    await client.next()
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1011
            assert client.heard.of(wire.Error)[-1].fatal
        assert (await http.get("/health")).status_code == 503
        assert (await http.get("/ready")).json()["reason"] == "the engine has failed"


async def test_commands_that_the_engine_does_not_take_yet_wait_in_order(tmp_path: Path) -> None:
    """Any command may have to wait, at any time: nothing is lost, nothing fails."""
    rng = random.Random(4)
    engine = make_engine(tmp_path)

    def refuse(command: object) -> str | None:
        is_refused = not isinstance(command, CloseSlot) and rng.random() < 0.7
        return "engine_overloaded" if is_refused else None

    engine.refuse = refuse
    async with serving(tmp_path, engine) as served:
        async with session(served) as client:
            for turn_id in range(3):
                await client.say(TEXT * 3, turn_id)
            await client.begin(TEXT, 3)
            await client.send(wire.TurnCancel(turn_id=3))
            await client.until(wire.TurnCancelled)
            await client.say(TEXT, 4)
        await served.until_free()
    segments = [c.segment for c in engine.seen(SetText) if c.turn_id == 0 and c.is_closed]
    assert segments == list(range(len(segments))) and len(segments) > 1


async def test_a_client_is_not_read_from_while_its_commands_wait(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    async with serving(tmp_path, engine) as served:
        async with session(served) as flooder, session(served) as other:
            slot = engine.seen(OpenSlot)[0].slot
            refused = []

            def refuse(command: Command) -> str | None:
                is_refused = command.slot.idx == slot.idx and not isinstance(command, CloseSlot)
                refused.extend([command] * is_refused)
                return "engine_overloaded" if is_refused else None

            engine.refuse = refuse
            for turn_id in range(50):
                await flooder.begin(TEXT, turn_id)
            await other.say(TEXT)
            assert len(set(map(id, refused))) == 1, "nothing overtakes, nothing else is read"
        await served.until_free()  # although commands waited


async def test_a_command_refused_for_good_fails_the_session(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    answers = ["engine_overloaded", "engine_overloaded", "engine_stopped"]
    async with serving(tmp_path, engine) as served, session(served) as client:
        engine.refuse = lambda command: answers.pop(0) if len(answers) > 1 else answers[0]
        await client.begin(TEXT)
        with pytest.raises(ConnectionClosed) as closed:
            while True:
                await client.next()
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1011
        assert client.heard.of(wire.Error)[-1].code == "engine_stopped"


async def test_who_never_starts_gives_the_slot_back(tmp_path: Path) -> None:
    async with serving(tmp_path, start_timeout_s=0.2) as served:
        async with session(served) as other, served.connect() as socket:
            silent = Client(socket)
            await silent.send(wire.TextFlush(turn_id=1))  # an error, not a start
            assert (await silent.until(wire.Error)).code == "not_started"
            error = await silent.until(wire.Error)
            assert error.fatal and error.code == "idle_timeout"
            with pytest.raises(ConnectionClosed) as closed:
                await silent.next()
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 4000
            await other.say(TEXT)
        await served.until_free()


async def test_idle_session_is_warned_and_closed(tmp_path: Path) -> None:
    options = {"idle_timeout_s": 0.3, "idle_warning_s": 0.1}
    async with serving(tmp_path, **options) as served:
        async with session(served) as client:
            assert (await client.until(wire.Warn)).code == "idle"
            await client.say(TEXT)  # activity: the clock starts anew
            assert (await client.until(wire.Warn)).code == "idle"
            assert (await client.until(wire.Error)).code == "idle_timeout"
            with pytest.raises(ConnectionClosed) as closed:
                await client.next()
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 4000
        await served.until_free()


async def test_a_client_that_answers_no_ping_is_dropped(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, ping_interval_s=0.05, ping_timeout_s=0.1) as served,
        session(served) as client,
    ):
        client.socket.transport.pause_reading()
        await served.until_free()


async def test_a_client_that_neither_reads_nor_answers_pings(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, ping_interval_s=0.05, ping_timeout_s=0.2) as served,
        served.connect(max_queue=1, ping_interval=None) as socket,
    ):
        client = Client(socket)
        await client.start(format=PCM_48K)
        await client.begin(LONG_TEXT)
        await served.until_free()
        with pytest.raises(ConnectionClosed) as closed:
            while True:
                await client.next()
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 4001


async def test_shutdown_finishes_current_turns(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    engine.hold()
    async with (
        serving(tmp_path, engine, drain_s=TIMEOUT_S) as served,
        served.http() as http,
        session(served) as busy,
        session(served) as idle,
    ):
        await busy.begin(TEXT)
        engine.let(3)
        await busy.until(wire.AudioPacket)
        served.server.handle_exit(15, None)
        closing = await idle.until(wire.SessionClosing)
        assert (closing.reason, closing.deadline_ms) == ("shutting_down", TIMEOUT_S * 1000)
        with pytest.raises(ConnectionClosed) as closed:
            await idle.next()
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1001
        assert (await http.get("/ready")).json()["reason"] == "the server is shutting down"
        assert (await http.get("/health")).status_code == 200
        await busy.until(wire.SessionClosing)
        engine.let_all()
        done = await busy.until(wire.TurnDone)
        assert done.metrics.num_packets == len(busy.heard.packets)
        with pytest.raises(ConnectionClosed) as closed:
            await busy.next()
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1001
        await served.running


async def test_shutdown_deadline(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    engine.hold()
    async with serving(tmp_path, engine, drain_s=0.2) as served, session(served) as client:
        await client.begin(TEXT)
        await asyncio.to_thread(engine.wait_until, lambda: bool(engine.seen(EndTurn)))
        served.server.handle_exit(15, None)
        assert (await client.until(wire.SessionClosing)).deadline_ms == 200
        assert (await client.until(wire.Error)).turn_id == 1
        assert (await client.until(wire.Error)).code == "shutting_down"
        with pytest.raises(ConnectionClosed) as closed:
            await client.next()
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1001
        await served.running
