"""Every end that a turn or a session can have but the wanted one."""

import asyncio

import pytest

from clients import ConnectionLost, EngineError, ProtocolError, SessionError, TurnCancelled, connect
from realtime.errors import CapacityError
from realtime.wire import Error, SessionClose, SessionClosing, SessionUpdate, TextAppend, TurnCancel
from tests.clients.scripted_server import (
    PACKET,
    PACKETS_PER_WORD,
    PCM_FORMAT,
    Peer,
    scripted_server,
    session_with,
    talker,
)


async def test_text_that_came_too_fast_says_when_to_come_back() -> None:
    async def script(peer: Peer) -> None:
        await peer.accept()
        await peer.expect(TextAppend)
        refusal = Error(code="text_rate_exceeded", message="wait", turn_id=1, keeps_turn=True)
        await peer.send(refusal.model_copy(update={"retry_after_ms": 1500}))

    async with session_with(script) as session:
        with pytest.raises(CapacityError) as refused:
            async for _ in session.say("Hello"):
                pass
        assert (refused.value.code, refused.value.turn_id) == ("text_rate_exceeded", 1)
        assert refused.value.retry_after_s == 1.5


@pytest.mark.parametrize("text", [7, None, [5], b"one", ["one ", None]])
async def test_a_text_that_is_none_fails_its_turn_alone_in_words(text) -> None:
    async with session_with(talker) as session:
        with pytest.raises(SessionError, match="got .*, expected a string") as raised:
            async for _ in session.say(text):
                pass
        assert raised.value.code == "invalid_text"
        assert [packet async for packet in session.say("one")]


async def test_an_update_that_makes_no_sense_leaves_the_session_as_it_is() -> None:
    async with session_with(talker) as session:
        with pytest.raises(SessionError, match=r"voice: .*\(got 7\)"):
            await session.update(voice=7)
        assert [packet async for packet in session.say("one")]


async def test_a_prompt_that_came_too_soon_says_when_to_come_back() -> None:
    refusal = Error(code="text_rate_exceeded", message="wait", param="prompt", retry_after_ms=1500)

    async def script(peer: Peer) -> None:
        await peer.accept()
        await peer.expect(SessionUpdate)
        await peer.send(refusal)

    async with session_with(script) as session:
        with pytest.raises(CapacityError) as refused:
            await session.update(prompt="Whisper.")
        assert (refused.value.param, refused.value.retry_after_s) == ("prompt", 1.5)
        assert not session.has_ended


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("text_too_long", SessionError),
        ("invalid_message", ProtocolError),
        ("engine_error", EngineError),
        ("engine_overloaded", EngineError),
    ],
)
async def test_an_error_of_a_turn_is_raised_there_and_the_session_goes_on(code, kind) -> None:
    async def script(peer: Peer) -> None:
        await peer.accept()
        await peer.expect_turn()
        await peer.audio(1, [PACKET])
        await peer.send(Error(code=code, message="no", param="text", turn_id=1))
        await peer.expect(TurnCancel)
        await peer.audio(1, [PACKET], first_seq=1)
        await peer.send(
            TurnCancelled(turn_id=1, spoken_text="", remaining_text="Hello", played_ms=0.0)
        )
        await peer.expect_turn()
        await peer.audio(2, [PACKET])
        await peer.done(2, 1)

    async with session_with(script) as session:
        speech = session.say("Hello")
        with pytest.raises(kind) as raised:
            async for _ in speech:
                pass
        assert (raised.value.code, raised.value.param, raised.value.turn_id) == (code, "text", 1)
        with pytest.raises(kind):
            await speech.turn.append("more")
        assert len([packet async for packet in session.say("Again")]) == 1


async def test_an_error_without_a_turn_fails_what_is_open() -> None:
    async def script(peer: Peer) -> None:
        await peer.accept()
        await peer.expect(TextAppend)
        await peer.send(Error(code="message_too_large", message="too large"))

    async with scripted_server(script) as server, connect(server.url) as session:
        turn = session.turn()
        await turn.append("Hello")
        for fails in (anext(turn), turn.cancel()):  # whatever is asked of it afterwards
            with pytest.raises(ProtocolError, match="too large"):
                await fails


async def test_a_turn_that_an_error_without_a_turn_ended_is_cancelled_and_the_next_speaks() -> None:
    async def script(peer: Peer) -> None:
        await peer.accept()
        await peer.expect(TextAppend)
        await peer.send(Error(code="session_closing", message="turn 1: too long"))
        assert (await peer.expect(TurnCancel)).turn_id == 1
        await peer.send(Error(code="turn_too_long", message="no", turn_id=1, keeps_turn=True))
        await peer.expect_turn()
        await peer.send(Error(code="turn_too_long", message="no", turn_id=1, keeps_turn=True))
        await peer.audio(2, [PACKET])
        await peer.done(2, 1)
        await peer.send(Error(code="text_too_long", message="turn 1: too long"))
        await peer.expect(SessionClose)
        await peer.socket.close()

    async with session_with(script) as session:
        turn = session.turn()
        await turn.append("Hello")
        with pytest.raises(SessionError, match="too long"):
            await anext(turn)
        assert len([packet async for packet in session.say("Again")]) == 1
        await session.close()
        assert [warning.code for warning in session.warnings] == ["text_too_long"]


async def test_a_text_too_long_for_a_turn_is_not_sent_and_the_turn_takes_a_shorter_one() -> None:
    async with (
        scripted_server(talker) as server,
        connect(server.url, format=PCM_FORMAT) as session,
    ):
        turn = session.turn()
        await turn.append("one ")
        with pytest.raises(SessionError, match=r"got 200,000 characters behind 4.*60,000") as long:
            await turn.append("word " * 40_000)
        assert (long.value.code, long.value.turn_id) == ("turn_too_long", 1)
        await turn.append("two")
        await turn.commit()
        assert len([packet async for packet in turn.audio()]) == 2 * PACKETS_PER_WORD
    appends = [message for message in server.received if isinstance(message, TextAppend)]
    assert [message.text for message in appends] == ["one ", "two"]


async def test_a_fatal_error_ends_the_session() -> None:
    async def script(peer: Peer) -> None:
        await peer.accept()
        await peer.expect(TextAppend)
        await peer.send(Error(code="engine_error", message="the device is gone", fatal=True))
        await peer.socket.close(1011)

    async with scripted_server(script) as server, connect(server.url) as session:
        turn = session.turn()
        await turn.append("Hello")
        with pytest.raises(EngineError, match="device is gone"):
            await anext(turn)
        with pytest.raises(EngineError, match="device is gone"):
            session.turn()


@pytest.mark.parametrize("close_code", [1000, 1001, 1011])
async def test_closed_before_done_is_connection_lost(close_code) -> None:
    async def script(peer: Peer) -> None:
        await peer.accept()
        await peer.expect_turn()
        await peer.audio(1, [PACKET])
        await peer.send(SessionClosing(reason="shutting_down"))
        await peer.socket.close(close_code)

    async with scripted_server(script) as server, connect(server.url) as session:
        packets = []
        with pytest.raises(ConnectionLost, match="shutting_down") as raised:
            async for packet in session.say("Hello"):
                packets.append(packet)
        assert raised.value.close_code == close_code
        assert len(packets) == 1
        with pytest.raises(ConnectionLost):
            await session.say("more").turn.append("x")


async def test_a_socket_that_breaks_is_connection_lost() -> None:
    async def script(peer: Peer) -> None:
        await peer.accept()
        await peer.expect(TextAppend)
        peer.socket.transport.abort()

    async with scripted_server(script) as server, connect(server.url) as session:
        with pytest.raises(ConnectionLost, match="1006|no close frame"):
            async for _ in session.say("Hello"):
                pass


async def test_a_waiting_cancel_learns_that_the_connection_is_lost() -> None:
    async def script(peer: Peer) -> None:
        await peer.accept()
        await peer.expect(TextAppend)
        await peer.expect(TurnCancel)
        await peer.socket.close()

    async with scripted_server(script) as server, connect(server.url) as session:
        turn = session.turn()
        await turn.append("Hello")
        with pytest.raises(ConnectionLost):
            await turn.cancel()


@pytest.mark.parametrize(
    "frame",
    ["{", "[]", '{"type":"turn.done","turn_id":1}', b"\1\1", b"\7" * 20],
    ids=["json", "no object", "missing field", "short", "version"],
)
async def test_frames_that_cannot_be_read_end_the_session(frame) -> None:
    async def script(peer: Peer) -> None:
        await peer.accept()
        await peer.expect(TextAppend)
        await peer.send_raw(frame)

    async with scripted_server(script) as server, connect(server.url) as session:
        with pytest.raises(ProtocolError, match="cannot be read"):
            async for _ in session.say("Hello"):
                pass


@pytest.mark.parametrize(("seqs", "num_packets"), [([0, 2], 3), ([0, 1], 3)])
async def test_missing_packets_are_an_error(seqs, num_packets) -> None:
    async def script(peer: Peer) -> None:
        await peer.accept()
        await peer.expect(TextAppend)
        for seq in seqs:
            await peer.audio(1, [PACKET], seq)
        await peer.done(1, num_packets)

    async with session_with(script) as session:
        with pytest.raises(ProtocolError, match="audio_gap"):
            async for _ in session.say("Hello"):
                pass


async def test_a_session_is_of_the_event_loop_that_opened_it() -> None:
    async with session_with(talker) as session:
        turn = session.turn()
        await turn.append("one ")
        for use in (lambda: session.turn().append("x"), turn.cancel, session.update):
            with pytest.raises(SessionError, match="clients.sync has one") as raised:
                await asyncio.to_thread(asyncio.run, use())
            assert raised.value.code == "other_loop"
        await turn.commit()
        assert [packet async for packet in turn.audio()]


async def test_a_turn_that_nobody_reads_fails_alone(monkeypatch) -> None:
    overflowed = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.accept()
        await peer.expect(TextAppend)
        await peer.audio(1, [PACKET] * 5)
        await peer.expect(TurnCancel)
        overflowed.set()
        await peer.expect_turn()
        await peer.audio(2, [PACKET])
        await peer.done(2, 1)

    monkeypatch.setattr("clients.turn.MAX_BUFFERED_EVENTS", 4)
    async with session_with(script) as session:
        unread = session.turn()
        await unread.append("Hello")
        await overflowed.wait()
        assert len([packet async for packet in session.say("Again")]) == 1
        with pytest.raises(SessionError, match="receive_buffer_full"):
            async for _ in unread:
                pass
