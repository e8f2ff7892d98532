"""The asynchronous client against a scripted server: turns, their text, their events."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing

import pytest

from clients import (
    AudioPacket,
    ConnectionLost,
    SessionError,
    TurnDone,
    TurnStarted,
    TurnText,
    VoiceError,
    Warn,
    connect,
)
from realtime.wire import (
    MAX_TEXT_CHARS,
    Error,
    SessionClose,
    SessionUpdate,
    TextAppend,
    TextFlush,
    TurnCancel,
    TurnCommit,
)
from tests.clients.scripted_server import (
    PACKET,
    PACKETS_PER_WORD,
    PCM_FORMAT,
    Peer,
    done,
    ready,
    scripted_server,
    session_with,
    talker,
)


async def test_say_gives_the_turns_packets_and_its_timings() -> None:
    async with scripted_server(talker) as server, connect(server.url, voice="ann") as session:
        speech = session.say("one two three")
        async with asyncio.timeout(10.0):  # `turn.done` ends it: the connection stays open
            packets = [packet async for packet in speech]
        assert [packet.seq for packet in packets] == list(range(len(packets)))
        assert session.ready.voice == "ann"
        assert session.format.codec == "opus"
        assert session.ready_ms > 0
        timings = speech.turn.timings
        assert timings.ttfa_ms is not None and timings.total_ms is not None
        assert 0 < timings.ttfa_ms <= timings.total_ms
        assert timings.ttfa_from_first_text_ms is not None
        assert timings.ttfa_from_first_text_ms >= timings.ttfa_ms
        assert len(timings.packets_s) == len(packets)
        assert speech.turn.metrics is not None
        assert speech.turn.metrics.num_packets == len(packets)


async def words() -> AsyncIterator[str]:
    for word in ("one ", "", "two"):
        yield word


def sync_words() -> Iterator[str]:
    yield from ("one ", "two")


@pytest.mark.parametrize("make_text", [words, sync_words, lambda: ["one ", "two"]])
async def test_say_streams_pieces_verbatim(make_text) -> None:
    async with scripted_server(talker) as server, connect(server.url) as session:
        packets = [packet async for packet in session.say(make_text())]
    assert len(packets) >= 2 * PACKETS_PER_WORD
    assert server.received[1:] == [
        TextAppend(turn_id=1, text="one "),
        TextAppend(turn_id=1, text="two"),
        TurnCommit(turn_id=1),
    ]


async def test_long_text_is_cut_to_messages() -> None:
    text = "a" * (MAX_TEXT_CHARS + 1)
    async with (
        scripted_server(talker) as server,
        connect(server.url, format=PCM_FORMAT) as session,
    ):
        assert [packet async for packet in session.say(text)]
    appends = [message for message in server.received if isinstance(message, TextAppend)]
    assert [len(message.text) for message in appends] == [MAX_TEXT_CHARS, 1]


async def test_a_text_source_that_fails_fails_the_loop_and_cancels_the_turn() -> None:
    async def broken() -> AsyncIterator[str]:
        yield "one "
        raise LookupError("the model is out of words")

    async with scripted_server(talker) as server, connect(server.url) as session:
        with pytest.raises(LookupError, match="out of words"):
            async for _ in session.say(broken()):
                pass
        assert [packet async for packet in session.say("still here")]
    assert TurnCancel(turn_id=1) in server.received


async def test_leaving_the_loop_does_not_wait_for_text_that_never_ends() -> None:
    async def script(peer: Peer) -> None:
        await peer.accept()
        await peer.expect(TextAppend)
        await peer.audio(1, [PACKET])
        await peer.expect(TurnCancel)

    async def endless() -> AsyncIterator[str]:
        yield "one "
        await asyncio.Event().wait()

    async with (
        asyncio.timeout(10.0),
        session_with(script) as session,
        aclosing(aiter(session.say(endless()))) as packets,
    ):
        assert await anext(packets)


async def test_leaving_the_loop_cancels_the_turn() -> None:
    async with scripted_server(talker) as server, connect(server.url) as session:
        async for _ in session.say("one two three"):
            break
        assert [packet async for packet in session.say("next")]
    assert TurnCancel(turn_id=1) in server.received


async def test_typed_events_of_a_turn() -> None:
    async def script(peer: Peer) -> None:
        await peer.accept()
        await peer.expect(TextAppend)
        await peer.expect(TextFlush)
        await peer.send(TurnStarted(turn_id=1))
        await peer.audio(1, [PACKET])
        await peer.send(TurnText(turn_id=1, text="Hi", audio_ms=20.0))
        await peer.send(Warn(code="odd_text", message="an emoji", turn_id=1))
        await peer.send(Warn(code="idle", message="soon closing"))
        await peer.expect(TurnCommit)
        await peer.done(1, 1)

    async with session_with(script) as session, session.turn() as turn:
        await turn.append("Hi")
        await turn.flush()
        kinds = []
        async for event in turn:
            kinds.append(type(event))
            if isinstance(event, Warn):
                await turn.commit()
        assert kinds == [TurnStarted, AudioPacket, TurnText, Warn, TurnDone]
        assert turn.timings.ttfa_ms is not None and turn.timings.ttfa_ms < 0
        assert [warning.code for warning in session.warnings] == ["idle"]
        with pytest.raises(SessionError, match="turn_closed"):
            await turn.append("more")


async def test_interleaved_turns_each_get_their_own() -> None:
    async def script(peer: Peer) -> None:
        await peer.accept()
        for _ in range(4):
            await peer.next()
        for seq in range(3):
            await peer.audio(2, [b"bb"], seq)
            await peer.audio(1, [b"aa"], seq)
        await peer.done(2, 3)
        await peer.done(1, 3)

    async def collect(speech) -> list[bytes]:
        return [packet.payload async for packet in speech]

    async with session_with(script) as session:
        first, second = await asyncio.gather(
            collect(session.say("first")), collect(session.say("second"))
        )
    assert (first, second) == ([b"aa"] * 3, [b"bb"] * 3)


async def test_turns_are_numbered_by_their_first_text() -> None:
    async with scripted_server(talker) as server, connect(server.url) as session:
        first, second = session.turn(), session.turn()
        await second.append("second")
        await first.append("first")
        assert (second.turn_id, first.turn_id) == (1, 2)
        await first.cancel()
        await second.commit()
        assert [type(event) async for event in second][-1] is TurnDone
    assert server.received[1] == TextAppend(turn_id=1, text="second")


async def test_messages_of_a_newer_server_are_ignored() -> None:
    async def script(peer: Peer) -> None:
        await peer.send_raw('{"type":"server.hello"}')
        await peer.accept()
        await peer.expect_turn()
        await peer.send_raw('{"type":"turn.mood","turn_id":1}')
        await peer.audio(1, [PACKET])
        await peer.done(1, 1)
        await peer.audio(77, [PACKET])
        await peer.send(done(77, 1))

    async with (
        scripted_server(script) as server,
        connect(server.url, format=PCM_FORMAT) as session,
    ):
        assert len([packet async for packet in session.say("Hello")]) == 1


async def test_update_changes_the_voice_and_a_refusal_leaves_the_session_usable() -> None:
    async def script(peer: Peer) -> None:
        await peer.accept()
        await peer.expect(SessionUpdate)
        await peer.send(ready(voice="bob"))
        await peer.expect(SessionUpdate)
        await peer.send(Error(code="voice_not_found", message="no voice 'eve'", param="voice"))

    async with scripted_server(script) as server, connect(server.url) as session:
        assert (await session.update(voice="bob")).voice == "bob"
        with pytest.raises(VoiceError, match="eve"):
            await session.update(voice="eve")
        assert session.ready.voice == "bob"


async def test_close_lets_committed_turns_end() -> None:
    async with scripted_server(talker) as server, connect(server.url) as session:
        turn = session.turn()
        await turn.append("Hello there")
        await turn.commit()
        await session.close()
        kinds = [type(event) async for event in turn]
        assert kinds[-1] is TurnDone
        with pytest.raises(ConnectionLost):
            session.turn()
    assert isinstance(server.received[-1], SessionClose)


async def test_an_update_whose_caller_has_left_answers_no_other() -> None:
    may_answer = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.accept()
        for voice in ("first", "second"):
            assert (await peer.expect(SessionUpdate)).voice == voice
            asked.set()
            await may_answer.wait()
            await peer.send(ready(peer.format, voice))
        await peer.until_closed()

    asked = asyncio.Event()
    async with session_with(script) as session:
        left = asyncio.create_task(session.update(voice="first"))
        await asked.wait()
        left.cancel()
        second = asyncio.create_task(session.update(voice="second"))
        may_answer.set()
        assert (await second).voice == session.ready.voice == "second"
        assert left.cancelled()


async def test_a_speech_is_said_once() -> None:
    async with scripted_server(talker) as server, connect(server.url) as session:
        speech = session.say("one")
        assert [packet async for packet in speech]
        with pytest.raises(SessionError, match="said already"):
            async for _ in speech:
                pass


async def test_who_reads_only_packets_finds_the_warnings_on_the_turn() -> None:
    async with scripted_server(talker) as server, connect(server.url) as session:
        speech = session.say("What?!")
        assert [packet async for packet in speech]
        assert [warning.code for warning in speech.turn.warnings] == ["odd_text"]
        other = session.say("Well.")
        assert [packet async for packet in other]
        assert not other.turn.warnings and not session.warnings
