"""The asynchronous client against a scripted server: every end a turn can have."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator

import pytest

from clients import (
    AudioPacket,
    ConnectionFailed,
    ConnectionLost,
    EngineError,
    ProtocolError,
    SessionError,
    TurnCancelled,
    TurnDone,
    TurnStarted,
    TurnText,
    VoiceError,
    Warn,
    connect,
)
from clients.address import http_url, websocket_url
from realtime.errors import CapacityError
from realtime.wire import (
    MAX_TEXT_CHARS,
    AudioFormat,
    Error,
    Sampling,
    SessionClose,
    SessionClosing,
    SessionStart,
    SessionUpdate,
    TextAppend,
    TextFlush,
    TurnCancel,
    TurnCommit,
    TurnMetrics,
)
from tests.clients.scripted_server import (
    PACKETS_PER_WORD,
    Peer,
    done,
    ready,
    respond,
    scripted_server,
    talker,
)

PCM_FORMAT = AudioFormat(codec="pcm_s16le")
P = b"\0\0" * 480


async def test_say_gives_the_turns_packets_and_its_timings() -> None:
    async with scripted_server(talker) as server, connect(server.url, voice="ann") as session:
        speech = session.say("one two three")
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


async def test_start_carries_what_connect_was_given() -> None:
    async with (
        scripted_server(talker) as server,
        connect(
            server.url.replace("http", "ws"),
            voice="bob",
            prompt="calm",
            format=PCM_FORMAT,
            sampling=Sampling(seed=7),
            max_lead_ms=500,
        ),
    ):
        pass
    assert server.received == [
        SessionStart(
            voice="bob",
            prompt="calm",
            format=PCM_FORMAT,
            sampling=Sampling(seed=7),
            max_lead_ms=500,
        )
    ]


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
        await peer.audio(1, [P])
        await peer.send(TurnText(turn_id=1, text="Hi", audio_ms=20.0))
        await peer.send(Warn(code="odd_text", message="an emoji", turn_id=1))
        await peer.send(Warn(code="idle", message="soon closing"))
        await peer.expect(TurnCommit)
        await peer.done(1, 1)
        await peer.until_closed()

    async with (
        scripted_server(script) as server,
        connect(server.url, format=PCM_FORMAT) as session,
        session.turn() as turn,
    ):
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
        await peer.until_closed()

    async def collect(speech) -> list[bytes]:
        return [packet.payload async for packet in speech]

    async with (
        scripted_server(script) as server,
        connect(server.url, format=PCM_FORMAT) as session,
    ):
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


async def test_cancel_gives_the_account_and_late_audio_is_dropped() -> None:
    async def script(peer: Peer) -> None:
        await peer.accept()
        await peer.expect(TextAppend)
        await peer.expect(TurnCommit)
        await peer.audio(1, [P] * 5)
        cancel = await peer.expect(TurnCancel)
        assert cancel.played_ms == 30.0
        await peer.audio(1, [P] * 5, first_seq=5)
        await peer.send(
            TurnCancelled(turn_id=1, spoken_text="Hel", remaining_text="lo", played_ms=30.0)
        )
        await peer.audio(1, [P], first_seq=10)
        await peer.expect(TextAppend)
        await peer.expect(TurnCommit)
        await peer.audio(2, [P])
        await peer.done(2, 1)
        await peer.until_closed()

    async with (
        scripted_server(script) as server,
        connect(server.url, format=PCM_FORMAT) as session,
    ):
        speech = session.say("Hello")
        seen = 0
        async for _ in speech:
            seen += 1
            if seen == 2:
                account = await speech.turn.cancel(played_ms=30.0)
        assert seen == 2
        assert (account.spoken_text, account.remaining_text) == ("Hel", "lo")
        assert await speech.turn.cancel() == account
        assert len([packet async for packet in session.say("Again")]) == 1
        assert session.protocol.num_late_packets == 6


async def test_cancel_while_text_still_streams() -> None:
    cancel_arrived = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.accept()
        await peer.expect(TextAppend)
        await peer.audio(1, [P])
        await peer.expect(TurnCancel)
        cancel_arrived.set()
        await (await peer.socket.ping())  # meanwhile the client has tried to send "two "
        await peer.send(
            TurnCancelled(turn_id=1, spoken_text="", remaining_text="one ", played_ms=0.0)
        )
        await peer.until_closed()

    async def endless() -> AsyncIterator[str]:
        yield "one "
        await cancel_arrived.wait()
        yield "two "

    async with (
        scripted_server(script) as server,
        connect(server.url, format=PCM_FORMAT) as session,
    ):
        speech = session.say(endless())
        async for _ in speech:
            assert (await speech.turn.cancel()).remaining_text == "one "
    assert len(server.received) == 3


async def test_cancel_after_done_while_it_still_plays() -> None:
    async def script(peer: Peer) -> None:
        await peer.accept()
        await peer.expect(TextAppend)
        await peer.expect(TurnCommit)
        await peer.audio(1, [P])
        await peer.done(1, 1)
        await peer.expect(TurnCancel)
        await peer.send(
            TurnCancelled(turn_id=1, spoken_text="He", remaining_text="llo", played_ms=9.0)
        )
        await peer.until_closed()

    async with (
        scripted_server(script) as server,
        connect(server.url, format=PCM_FORMAT) as session,
    ):
        speech = session.say("Hello")
        assert len([packet async for packet in speech]) == 1
        account = await speech.turn.cancel(played_ms=9.0)
        assert account.spoken_text == "He"
        assert speech.turn.metrics is not None, "those of the end before"


async def test_a_cancelled_turn_has_the_metrics_that_the_server_tells() -> None:
    metrics = TurnMetrics(num_samples=480, num_packets=1, num_frames=1, audio_ms=20, num_segments=1)

    async def script(peer: Peer) -> None:
        await peer.accept()
        await peer.expect(TextAppend)
        await peer.audio(1, [P])
        await peer.expect(TurnCancel)
        account = TurnCancelled(turn_id=1, spoken_text="", remaining_text="Hello", played_ms=0.0)
        await peer.send(account.model_copy(update={"metrics": metrics}))
        await peer.until_closed()

    async with (
        scripted_server(script) as server,
        connect(server.url, format=PCM_FORMAT) as session,
    ):
        turn = session.turn()
        await turn.append("Hello")
        await turn.cancel()
        assert turn.metrics == metrics


async def test_text_that_came_too_fast_says_when_to_come_back() -> None:
    async def script(peer: Peer) -> None:
        await peer.accept()
        await peer.expect(TextAppend)
        refusal = Error(code="text_rate_exceeded", message="wait", turn_id=1, keeps_turn=True)
        await peer.send(refusal.model_copy(update={"retry_after_ms": 1500}))
        await peer.until_closed()

    async with (
        scripted_server(script) as server,
        connect(server.url, format=PCM_FORMAT) as session,
    ):
        with pytest.raises(CapacityError) as refused:
            async for _ in session.say("Hello"):
                pass
        assert (refused.value.code, refused.value.turn_id) == ("text_rate_exceeded", 1)
        assert refused.value.retry_after_s == 1.5


async def test_done_that_crosses_a_cancel_ends_in_the_account() -> None:
    async def script(peer: Peer) -> None:
        await peer.accept()
        await peer.expect(TextAppend)
        await peer.expect(TurnCommit)
        await peer.audio(1, [P])
        await peer.expect(TurnCancel)
        await peer.done(1, 1)
        await peer.send(
            TurnCancelled(turn_id=1, spoken_text="", remaining_text="Hello", played_ms=0.0)
        )
        await peer.until_closed()

    async with (
        scripted_server(script) as server,
        connect(server.url, format=PCM_FORMAT) as session,
    ):
        turn = session.turn()
        await turn.append("Hello")
        await turn.commit()
        assert (await turn.cancel()).remaining_text == "Hello"
        assert [type(event) for event in [e async for e in turn]] == [TurnCancelled]


async def test_cancel_of_what_the_server_has_forgotten_is_accounted_here() -> None:
    async def script(peer: Peer) -> None:
        await peer.accept()
        await peer.expect(TextAppend)
        await peer.expect(TurnCommit)
        await peer.audio(1, [P] * 2)
        await peer.send(TurnText(turn_id=1, text="One. ", audio_ms=20.0))
        await peer.send(TurnText(turn_id=1, text="One. Two.", audio_ms=40.0))
        await peer.done(1, 2)
        await peer.expect(TurnCancel)
        await peer.send(Warn(code="unknown_turn", message="not open", turn_id=1))
        await peer.until_closed()

    async with (
        scripted_server(script) as server,
        connect(server.url, format=PCM_FORMAT) as session,
    ):
        speech = session.say("One. Two.")
        assert len([packet async for packet in speech]) == 2
        account = await speech.turn.cancel(played_ms=25.0)
        assert (account.spoken_text, account.remaining_text) == ("One. ", "Two.")


async def test_cancel_of_a_turn_the_server_never_heard_of_sends_nothing() -> None:
    async with scripted_server(talker) as server, connect(server.url) as session:
        account = await session.turn().cancel()
        assert (account.spoken_text, account.remaining_text) == ("", "")
    assert not any(isinstance(message, TurnCancel) for message in server.received)


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
        await peer.expect(TextAppend)
        await peer.expect(TurnCommit)
        await peer.audio(1, [P])
        await peer.send(Error(code=code, message="no", param="text", turn_id=1))
        await peer.expect(TurnCancel)
        await peer.audio(1, [P], first_seq=1)
        await peer.send(
            TurnCancelled(turn_id=1, spoken_text="", remaining_text="Hello", played_ms=0.0)
        )
        await peer.expect(TextAppend)
        await peer.expect(TurnCommit)
        await peer.audio(2, [P])
        await peer.done(2, 1)
        await peer.until_closed()

    async with (
        scripted_server(script) as server,
        connect(server.url, format=PCM_FORMAT) as session,
    ):
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
        await peer.until_closed()

    async with scripted_server(script) as server, connect(server.url) as session:
        turn = session.turn()
        await turn.append("Hello")
        with pytest.raises(ProtocolError, match="too large"):
            await anext(turn)


async def test_a_turn_that_an_error_without_a_turn_ended_is_cancelled_and_the_next_speaks() -> None:
    async def script(peer: Peer) -> None:
        await peer.accept()
        await peer.expect(TextAppend)
        await peer.send(Error(code="text_too_long", message="turn 1: too long"))
        assert (await peer.expect(TurnCancel)).turn_id == 1
        await peer.send(Error(code="turn_too_long", message="no", turn_id=1, keeps_turn=True))
        await peer.expect(TextAppend)
        await peer.expect(TurnCommit)
        await peer.send(Error(code="turn_too_long", message="no", turn_id=1, keeps_turn=True))
        await peer.audio(2, [P])
        await peer.done(2, 1)
        await peer.send(Error(code="text_too_long", message="turn 1: too long"))
        await peer.expect(SessionClose)

    async with (
        scripted_server(script) as server,
        connect(server.url, format=PCM_FORMAT) as session,
    ):
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
        await peer.expect(TextAppend)
        await peer.expect(TurnCommit)
        await peer.audio(1, [P])
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
        await peer.until_closed()

    async with scripted_server(script) as server, connect(server.url) as session:
        with pytest.raises(ProtocolError, match="cannot be read"):
            async for _ in session.say("Hello"):
                pass


@pytest.mark.parametrize(
    "field",
    [
        {"sample_rate": 0},
        {"sample_rate": -24_000},
        {"sample_rate": 10**12},
        {"pre_skip_samples": -1},
        {"pre_skip_samples": 10**9},
        {"packet_ms": 0},
        {"channels": 0},
    ],
)
async def test_a_format_that_cannot_be_refuses_the_session(field) -> None:
    async def script(peer: Peer) -> None:
        await peer.expect(SessionStart)
        message = ready().model_dump()
        message["format"] |= field
        await peer.send_raw(json.dumps(message))
        await peer.until_closed()

    async with scripted_server(script) as server:
        with pytest.raises(ProtocolError, match="cannot be read"):
            async with connect(server.url, format=PCM_FORMAT):
                pass


async def test_messages_of_a_newer_server_are_ignored() -> None:
    async def script(peer: Peer) -> None:
        await peer.send_raw('{"type":"server.hello"}')
        await peer.accept()
        await peer.expect(TextAppend)
        await peer.expect(TurnCommit)
        await peer.send_raw('{"type":"turn.mood","turn_id":1}')
        await peer.audio(1, [P])
        await peer.done(1, 1)
        await peer.audio(77, [P])
        await peer.send(done(77, 1))
        await peer.until_closed()

    async with (
        scripted_server(script) as server,
        connect(server.url, format=PCM_FORMAT) as session,
    ):
        assert len([packet async for packet in session.say("Hello")]) == 1


@pytest.mark.parametrize(("seqs", "num_packets"), [([0, 2], 3), ([0, 1], 3)])
async def test_missing_packets_are_an_error(seqs, num_packets) -> None:
    async def script(peer: Peer) -> None:
        await peer.accept()
        await peer.expect(TextAppend)
        for seq in seqs:
            await peer.audio(1, [P], seq)
        await peer.done(1, num_packets)
        await peer.until_closed()

    async with (
        scripted_server(script) as server,
        connect(server.url, format=PCM_FORMAT) as session,
    ):
        with pytest.raises(ProtocolError, match="audio_gap"):
            async for _ in session.say("Hello"):
                pass


async def test_update_changes_the_voice_and_a_refusal_leaves_the_session_usable() -> None:
    async def script(peer: Peer) -> None:
        await peer.accept()
        await peer.expect(SessionUpdate)
        await peer.send(ready(voice="bob"))
        await peer.expect(SessionUpdate)
        await peer.send(Error(code="voice_not_found", message="no voice 'eve'", param="voice"))
        await peer.until_closed()

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


async def test_a_turn_that_nobody_reads_fails_alone(monkeypatch) -> None:
    overflowed = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.accept()
        await peer.expect(TextAppend)
        await peer.audio(1, [P] * 5)
        await peer.expect(TurnCancel)
        overflowed.set()
        await peer.expect(TextAppend)
        await peer.expect(TurnCommit)
        await peer.audio(2, [P])
        await peer.done(2, 1)
        await peer.until_closed()

    monkeypatch.setattr("clients.session.MAX_BUFFERED_EVENTS", 4)
    async with (
        scripted_server(script) as server,
        connect(server.url, format=PCM_FORMAT) as session,
    ):
        unread = session.turn()
        await unread.append("Hello")
        await overflowed.wait()
        assert len([packet async for packet in session.say("Again")]) == 1
        with pytest.raises(SessionError, match="receive_buffer_full"):
            async for _ in unread:
                pass


async def test_refused_before_the_upgrade() -> None:
    refusal = respond(
        503,
        '{"error": {"code": "at_capacity", "message": "all 4 slots are taken"}}',
        {"Retry-After": "7"},
    )
    async with scripted_server(talker, refusal=refusal) as server:
        with pytest.raises(ConnectionFailed, match="status 503: all 4 slots are taken") as raised:
            async with connect(server.url):
                pass
    assert (raised.value.status, raised.value.retry_after_s) == (503, 7.0)


async def test_refused_start() -> None:
    async def script(peer: Peer) -> None:
        await peer.expect(SessionStart)
        await peer.send(Error(code="voice_not_found", message="no voice 'eve'", param="voice"))
        await peer.until_closed()

    async with scripted_server(script) as server:
        with pytest.raises(VoiceError, match="eve"):
            async with connect(server.url, voice="eve"):
                pass


async def test_a_server_that_never_gets_ready() -> None:
    async with scripted_server(Peer.until_closed) as server:
        with pytest.raises(ConnectionFailed, match="ready within"):
            async with connect(server.url, open_timeout_s=0.05):
                pass


async def test_nobody_listens() -> None:
    async with scripted_server(talker) as server:
        url = server.url
    with pytest.raises(ConnectionFailed, match="Is the server up"):
        async with connect(url):
            pass


def test_addresses() -> None:
    assert websocket_url("https://tts.example/") == "wss://tts.example/v1/realtime"
    assert websocket_url("ws://h:1/other?x=1") == "ws://h:1/other?x=1"
    assert (
        http_url("wss://tts.example/v1/realtime", "/v1/voices") == "https://tts.example/v1/voices"
    )
    with pytest.raises(ConnectionFailed, match="no server address"):
        websocket_url("localhost:8765")


async def test_a_speech_is_said_once() -> None:
    async with scripted_server(talker) as server, connect(server.url) as session:
        speech = session.say("one")
        assert [packet async for packet in speech]
        with pytest.raises(RuntimeError, match="said already"):
            async for _ in speech:
                pass
