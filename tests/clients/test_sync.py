"""The blocking client, against servers on a thread of their own."""

import asyncio
import gc
import signal
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import pytest

from clients import (
    AudioPacket,
    ConnectionFailed,
    ConnectionLost,
    NullDevice,
    Reconnect,
    SessionError,
    TurnCancelled,
    TurnDone,
    TurnStarted,
    VoiceError,
    decode_turn,
)
from clients.loop_thread import LoopThread
from clients.sync import Player, connect
from realtime.wire import Error, SessionUpdate, TextAppend, TurnCancel
from tests.clients.scripted_server import (
    PACKET,
    PACKETS_PER_WORD,
    PCM_FORMAT,
    Peer,
    Script,
    ScriptedServer,
    scripted_server,
    talker,
)

TIMEOUT_S = 10.0
WORD_MS = 20 * PACKETS_PER_WORD


@contextmanager
def served(script: Script) -> Iterator[ScriptedServer]:
    with LoopThread() as loop:
        serving = scripted_server(script)
        yield loop.run(serving.__aenter__())
        loop.run(serving.__aexit__(None, None, None))


def test_say() -> None:
    with served(talker) as server, connect(server.url, voice="bob") as session:
        speech = session.say("one two three")
        packets = list(speech)
        assert session.ready.voice == "bob" and session.ready_ms > 0
        metrics = speech.turn.metrics
        assert metrics is not None and metrics.num_packets == len(packets)
        assert speech.turn.timings.ttfa_ms is not None and speech.turn.is_over
        samples, sample_rate_hz = decode_turn(packets, session.format, metrics.num_samples)
        assert len(samples) == sample_rate_hz * 60 * 3 // 1000
        assert not session.warnings and not speech.turn.warnings
        odd = session.say("What?!")
        assert list(odd) and [warning.code for warning in odd.turn.warnings] == ["odd_text"]


def test_say_reads_an_iterator_that_blocks_without_holding_up_the_session() -> None:
    may_go_on = threading.Event()

    def words() -> Iterator[str]:
        yield "one "
        assert may_go_on.wait(TIMEOUT_S)
        yield "two"

    with served(talker) as server, connect(server.url) as session:
        speech = iter(session.say(words()))
        threading.Thread(target=lambda: (session.update(voice="bob"), may_go_on.set())).start()
        assert len(list(speech)) >= 2 * PACKETS_PER_WORD
        assert session.ready.voice == "bob"
    texts = [message.text for message in server.received if isinstance(message, TextAppend)]
    assert texts == ["one ", "two"]


async def slow_words() -> AsyncIterator[str]:
    yield "one "
    yield "two"


@pytest.mark.parametrize("text", [7, [5]])
def test_without_a_block_and_with_a_text_that_is_none(text) -> None:
    with served(talker) as server:
        session = connect(server.url)
        with pytest.raises(SessionError, match="expected a string"):
            list(session.say(text))
        assert len(list(session.say(slow_words()))) >= 2 * PACKETS_PER_WORD
        session.close()
        with pytest.raises(ConnectionLost):
            session.say("one")


def test_a_text_source_that_fails_fails_the_loop() -> None:
    def broken() -> Iterator[str]:
        yield "one "
        raise LookupError("the model is out of words")

    with served(talker) as server, connect(server.url) as session:
        with pytest.raises(LookupError, match="out of words"):
            list(session.say(broken()))
        assert list(session.say("still here"))
    assert TurnCancel(turn_id=1) in server.received


def test_what_was_heard_is_known_after_the_loop_was_left_and_after_its_end() -> None:
    with served(talker) as server, connect(server.url) as session:
        for _ in session.say("one two"):
            break
        assert session.interrupt(played_ms=20.0).remaining_text == "one two"
        assert list(session.say("three"))
        assert session.interrupt(played_ms=20.0).remaining_text == "three"


def test_typed_events_and_queued_turns() -> None:
    with served(talker) as server, connect(server.url, format=PCM_FORMAT) as session:
        turns = [session.turn() for _ in range(2)]
        for turn in turns:
            turn.append("one ")
            turn.append("two")
            turn.commit()
        for turn_id, turn in enumerate(turns, 1):
            kinds = [type(event) for event in turn]
            assert kinds == [TurnStarted, *[AudioPacket] * 2 * PACKETS_PER_WORD, TurnDone]
            assert turn.turn_id == turn_id
        with session.turn() as turn:
            turn.append("one")
            turn.flush()
            turn.commit()
            assert len(list(turn.audio())) == PACKETS_PER_WORD


def test_leaving_a_loop_or_a_block_cancels_the_turn() -> None:
    with served(talker) as server, connect(server.url) as session:
        for _ in session.say("one two three"):
            break
        with session.turn() as turn:
            turn.append("unsaid")
        assert list(session.say("next"))
    cancelled = [m.turn_id for m in server.received if isinstance(m, TurnCancel)]
    assert cancelled == [1, 2]


async def speak_until_cancelled(peer: Peer) -> None:
    await peer.accept()
    await peer.expect_turn()
    await peer.audio(1, [PACKET] * 2)
    cancel = await peer.expect(TurnCancel)
    await peer.audio(1, [PACKET] * 3, first_seq=2)
    await peer.send(
        TurnCancelled(
            turn_id=1, spoken_text="one ", remaining_text="two", played_ms=cancel.played_ms or 0
        )
    )


def test_another_thread_interrupts_the_one_that_reads() -> None:
    began = threading.Event()
    heard = []

    with (
        served(speak_until_cancelled) as server,
        connect(server.url, format=PCM_FORMAT) as session,
    ):

        def interrupt() -> None:
            assert began.wait(TIMEOUT_S)
            heard.append(session.interrupt(played_ms=30.0))

        interrupter = threading.Thread(target=interrupt)
        interrupter.start()
        num_packets = 0
        for _ in session.say("one two"):  # waits for a third packet, which never comes out
            num_packets += 1
            if num_packets == 2:
                began.set()
        interrupter.join()
    assert num_packets == 2
    assert (heard[0].spoken_text, heard[0].remaining_text) == ("one ", "two")
    assert heard[0].turns[0].played_ms == 30.0


def test_cancel_gives_the_account() -> None:
    with (
        served(speak_until_cancelled) as server,
        connect(server.url, format=PCM_FORMAT) as session,
    ):
        speech = session.say("one two")
        for packet in speech:
            if packet.seq == 1:
                assert speech.turn.cancel(played_ms=40.0).spoken_text == "one "


def test_errors_come_through() -> None:
    async def script(peer: Peer) -> None:
        await peer.accept()
        await peer.expect(SessionUpdate)
        await peer.send(Error(code="voice_not_found", message="no voice 'eve'", param="voice"))
        await peer.expect_turn()
        await peer.socket.close(1011)

    with served(script) as server, connect(server.url) as session:
        with pytest.raises(VoiceError, match="eve"):
            session.update(voice="eve")
        with pytest.raises(ConnectionLost, match="1011"):
            list(session.say("one"))


def test_reconnects() -> None:
    dropped = threading.Event()

    async def script(peer: Peer) -> None:
        if dropped.is_set():
            return await talker(peer)
        dropped.set()
        await peer.accept()
        await peer.expect(TextAppend)
        await peer.socket.close(1012)
        return None

    options = Reconnect(initial_delay_s=0.0)
    with served(script) as server, connect(server.url, reconnect=options) as session:
        with pytest.raises(ConnectionLost):
            list(session.say("one"))
        assert list(session.say("two"))


def test_close_and_what_is_used_after_the_block() -> None:
    with served(talker) as server:
        with connect(server.url) as session:
            turn = session.turn()
            turn.append("one")
            turn.commit()
            session.close()
            assert [type(event) for event in turn][-1] is TurnDone
        with pytest.raises(ConnectionLost, match="closed here"):
            session.turn()


def test_nobody_listens() -> None:
    with served(talker) as server:
        url = server.url
    with pytest.raises(ConnectionFailed, match="Is the server up"), connect(url):
        pass


def test_leaving_the_block_wakes_who_reads() -> None:
    async def mute(peer: Peer) -> None:
        await peer.accept()

    failures = []
    with served(mute) as server:
        with connect(server.url) as session:
            turn = session.turn()
            turn.append("one")

            def read() -> None:
                try:
                    list(turn)
                except ConnectionLost as error:
                    failures.append(error)

            reader = threading.Thread(target=read)
            reader.start()
        reader.join(TIMEOUT_S)
    assert len(failures) == 1


def test_ctrl_c_ends_the_wait_and_cancels_the_turn() -> None:
    async def script(peer: Peer) -> None:
        await peer.accept()
        await peer.expect_turn()
        signal.pthread_kill(main, signal.SIGINT)
        await peer.expect(TurnCancel)

    main = threading.get_ident()
    with served(script) as server, connect(server.url) as session:
        speech = session.say("one")
        with pytest.raises(KeyboardInterrupt):
            list(speech)
        assert not speech.turn.is_over  # its account is not waited for


def test_ctrl_c_cancels_what_it_finds_just_started(monkeypatch) -> None:
    started, ends = threading.Event(), []

    async def endless() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    with LoopThread() as loop:
        schedule = loop._loop.call_soon_threadsafe

        def interrupted(callback) -> None:
            monkeypatch.undo()
            schedule(callback)
            assert started.wait(TIMEOUT_S)
            raise KeyboardInterrupt

        monkeypatch.setattr(loop._loop, "call_soon_threadsafe", interrupted)
        with pytest.raises(KeyboardInterrupt):
            loop.run(endless())
        assert ends == ["cancelled"]


def test_what_waits_when_the_block_is_left_is_told() -> None:
    started, raised = threading.Event(), []

    async def endless() -> None:
        started.set()
        await asyncio.Event().wait()

    def wait() -> None:
        with pytest.raises(ConnectionLost, match="closed here") as error:
            loop.run(endless())
        raised.append(error.value)

    with LoopThread() as loop:
        waiting = threading.Thread(target=wait)
        waiting.start()
        assert started.wait(TIMEOUT_S)
    waiting.join(TIMEOUT_S)
    assert len(raised) == 1


def test_the_player() -> None:
    device = NullDevice()
    with (
        served(talker) as server,
        connect(server.url, format=PCM_FORMAT) as session,
        Player(session, device) as player,
    ):
        first, second = player.play("one two"), player.play(iter(["three"]))
        while first.played_ms < 2 * WORD_MS:
            device.advance(10)
        first.wait()
        heard = player.interrupt()
        assert second.was_interrupted and not first.was_interrupted
        assert len(heard.turns) == 1
        player.wait()
        second.wait()
        assert second.turn.is_over


def test_a_piece_that_is_no_text_is_refused_and_not_taken_for_the_end() -> None:
    with served(talker) as server, connect(server.url) as session:
        with pytest.raises(SessionError, match="text: got None"):
            list(session.say(["one ", None, "two"]))  # type: ignore[list-item]
        assert list(session.say(["one ", "", "two"]))


def test_an_iterator_may_outlive_its_session(caplog: pytest.LogCaptureFixture) -> None:
    errors: list[object] = []
    with pytest.MonkeyPatch.context() as patch, served(talker) as server:
        patch.setattr(sys, "unraisablehook", errors.append)
        with connect(server.url) as session:
            packets = iter(session.say("one two three"))
            next(packets)
        del packets
        gc.collect()
    assert not errors and not caplog.records
