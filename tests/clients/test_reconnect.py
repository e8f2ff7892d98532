"""The policy without sockets, then the session that follows it."""

import asyncio
import itertools
import math

import pytest

from clients import ConnectionFailed, ConnectionLost, EngineError, Reconnect, VoiceError, connect
from clients.reconnect import Attempts, is_retryable
from realtime.errors import CapacityError, PlosiveError, ProtocolError, SessionError
from realtime.wire import (
    SessionClose,
    SessionStart,
    SessionUpdate,
    TextAppend,
    TurnCommit,
    TurnStarted,
    TurnText,
)
from tests.clients.scripted_server import (
    PACKET,
    PCM_FORMAT,
    Peer,
    ready,
    respond,
    scripted_server,
    talker,
)

AT_ONCE = Reconnect(initial_delay_s=0.0)


@pytest.mark.parametrize("close_code", [1001, 1005, 1006, 1011, 1012, 1013, None])
def test_codes_that_pass(close_code) -> None:
    assert is_retryable(ConnectionLost("lost", close_code=close_code))


@pytest.mark.parametrize("close_code", [1000, 1002, 1003, 1008, 1009, 1015, 4000, 4001, 4999])
def test_codes_that_would_come_again(close_code) -> None:
    assert not is_retryable(ConnectionLost("lost", close_code=close_code))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ConnectionFailed("nobody listens"), True),
        (ConnectionFailed("busy", status=503, retry_after_s=2.0), True),
        (ConnectionFailed("too many", status=429), True),
        (ConnectionFailed("wrong key", status=401), False),
        (ConnectionFailed("no such path", status=404), False),
        (CapacityError("later", code="text_rate_exceeded", retry_after_s=2.0), True),
        (EngineError("engine_error", "the device is gone", fatal=True), True),
        (SessionError("idle_timeout", "idle", fatal=True), False),
        (ProtocolError("binary_not_expected", "what?", fatal=True), False),
        (VoiceError("voice_not_found", "no voice 'eve'"), False),
    ],
)
def test_which_errors_pass(error: PlosiveError, expected: bool) -> None:
    assert is_retryable(error) is expected


def test_delays_double_up_to_their_limit_and_end() -> None:
    lost = ConnectionLost("lost", close_code=1006)
    attempts = Attempts(Reconnect(max_attempts=4, initial_delay_s=1, max_delay_s=3), lambda: 0.0)
    assert [attempts.next_delay_s(lost) for _ in range(5)] == [1.0, 2.0, 3.0, 3.0, None]
    attempts.spoke()
    assert attempts.next_delay_s(lost) == 1.0


def test_jitter_takes_off_up_to_a_half() -> None:
    lost = ConnectionLost("lost", close_code=1006)
    drawn = iter([0.0, 0.5, 1.0])
    attempts = Attempts(Reconnect(initial_delay_s=8.0), lambda: next(drawn))
    assert [attempts.next_delay_s(lost) for _ in range(3)] == [8.0, 6.0, 4.0]


def test_retry_after_is_waited_for_whole() -> None:
    busy = ConnectionFailed("busy", status=503, retry_after_s=7.0)
    attempts = Attempts(Reconnect(initial_delay_s=0.5), lambda: 1.0)
    assert attempts.next_delay_s(busy) == 7.25


async def drop_first(peer: Peer) -> None:
    """Lose the connection in the middle of the first turn."""
    await peer.accept()
    await peer.expect_turn()
    await peer.audio(1, [PACKET] * 3)
    await peer.send(TurnText(turn_id=1, text="one ", audio_ms=60.0))
    await peer.socket.close(1012)


def in_order(*scripts):
    """The first connection follows the first script, and so on; the last one repeats."""
    numbers = itertools.count()

    async def script(peer: Peer) -> None:
        await scripts[min(next(numbers), len(scripts) - 1)](peer)

    return script


async def test_a_lost_turn_says_how_far_it_came_and_the_next_one_is_spoken() -> None:
    async with (
        scripted_server(in_order(drop_first, talker)) as server,
        connect(
            server.url, voice="bob", prompt="calm", format=PCM_FORMAT, reconnect=AT_ONCE
        ) as session,
    ):
        packets = []
        with pytest.raises(ConnectionLost) as raised:
            async for packet in session.say("one two"):
                packets.append(packet)
        assert "of turn 1, 3 packets (60 ms) had come, which say 'one '" in str(raised.value)
        assert (raised.value.close_code, raised.value.turn_id) == (1012, 1)
        assert len(packets) == 3
        assert len([packet async for packet in session.say("two")]) == 3
        assert session.num_reconnects == 1
    first, second = (peer.received[0] for peer in server.peers)
    assert first == second == SessionStart(voice="bob", prompt="calm", format=PCM_FORMAT)


async def test_what_was_updated_is_started_with() -> None:
    async def script(peer: Peer) -> None:
        await peer.accept()
        await peer.expect(SessionUpdate)
        await peer.send(ready(voice="bob"))
        await peer.expect(TextAppend)
        await peer.socket.close(1001)

    async with (
        scripted_server(in_order(script, talker)) as server,
        connect(server.url, voice="ann", prompt="calm", reconnect=AT_ONCE) as session,
    ):
        await session.update(voice="bob")
        with pytest.raises(ConnectionLost):
            async for _ in session.say("one"):
                pass
        assert [packet async for packet in session.say("two")]
        assert session.ready.voice == "bob"
    assert server.peers[1].received[0] == SessionStart(voice="bob", prompt="calm")


async def test_an_update_during_which_the_connection_is_lost_is_asked_for_again() -> None:
    async def script(peer: Peer) -> None:
        await peer.accept()
        await peer.expect(SessionUpdate)
        await peer.socket.close(1012)

    async with (
        scripted_server(in_order(script, talker)) as server,
        connect(server.url, voice="ann", reconnect=AT_ONCE) as session,
    ):
        ready = await session.update(voice="bob")
        assert (ready.voice, session.num_reconnects) == ("bob", 1)
        assert [packet async for packet in session.say("two")]
    start, update, *_ = server.peers[1].received
    assert (start.voice, update) == ("ann", SessionUpdate(voice="bob"))


async def test_without_the_option_an_update_fails_with_the_connection() -> None:
    async def script(peer: Peer) -> None:
        await peer.accept()
        await peer.expect(SessionUpdate)
        await peer.socket.close(1012)

    async with scripted_server(script) as server, connect(server.url) as session:
        with pytest.raises(ConnectionLost):
            await session.update(voice="bob")


async def test_without_the_option_nothing_is_opened_again() -> None:
    async with scripted_server(drop_first) as server, connect(server.url) as session:
        for _ in range(2):
            with pytest.raises(ConnectionLost):
                async for _ in session.say("one two"):
                    pass
    assert len(server.peers) == 1


async def test_a_connection_that_never_speaks_counts_on() -> None:
    async def accept_and_drop(peer: Peer) -> None:
        await peer.accept()
        await peer.socket.close(1011)

    async with (
        scripted_server(accept_and_drop) as server,
        connect(server.url, reconnect=Reconnect(max_attempts=3, initial_delay_s=0.0)) as session,
    ):
        while session.num_reconnects < 3:
            with pytest.raises(ConnectionLost, match="1011"):
                await anext(aiter(session.say("one")))
        for _ in range(2):
            with pytest.raises(ConnectionLost, match="1011"):
                await anext(aiter(session.say("one")))
    assert len(server.peers) == 4


async def test_a_connection_that_speaks_may_be_lost_any_number_of_times() -> None:
    once = Reconnect(max_attempts=1, initial_delay_s=0.0)
    async with (
        scripted_server(drop_first) as server,
        connect(server.url, reconnect=once) as session,
    ):
        for _ in range(4):
            with pytest.raises(ConnectionLost, match="1012"):
                async for _ in session.say("one two"):
                    pass
    assert len(server.peers) >= 4


async def test_a_server_that_is_gone_ends_the_session_with_the_last_reason() -> None:
    async with (
        scripted_server(drop_first) as server,
        connect(server.url, reconnect=Reconnect(max_attempts=2, initial_delay_s=0.0)) as session,
    ):
        server.refusal = respond(503, "", {"Retry-After": "0"})
        with pytest.raises(ConnectionLost):
            async for _ in session.say("one two"):
                pass
        with pytest.raises(ConnectionFailed, match="status 503"):
            async for _ in session.say("two"):
                pass
        with pytest.raises(ConnectionFailed):
            session.turn()


async def test_a_turn_that_waits_can_be_cancelled_and_never_begins() -> None:
    async with (
        scripted_server(in_order(drop_first, talker)) as server,
        connect(server.url, reconnect=Reconnect(initial_delay_s=3600.0)) as session,
    ):
        with pytest.raises(ConnectionLost):
            async for _ in session.say("one two"):
                pass
        turn = session.turn()
        waiting = asyncio.create_task(turn.append("two"))
        await asyncio.sleep(0)
        heard = await session.interrupt()
        assert (heard.spoken_text, heard.remaining_text) == ("", "two")
        assert [type(event).__name__ async for event in turn] == ["TurnCancelled"]
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    assert len(server.peers) == 1


@pytest.mark.parametrize("num_steps", range(9))
async def test_lost_at_any_step_a_turn_is_whole_or_fails_and_the_next_is_spoken(num_steps) -> None:
    async def script(peer: Peer) -> None:
        steps = [
            peer.accept(),
            peer.expect(TextAppend),
            peer.send(TurnStarted(turn_id=1)),
            peer.audio(1, [PACKET] * 2),
            peer.expect(TurnCommit),
            peer.audio(1, [PACKET], first_seq=2),
            peer.send(TurnText(turn_id=1, text="one two", audio_ms=60.0)),
            peer.done(1, 3),
        ]
        for step in steps[:num_steps]:
            await step
        for step in steps[num_steps:]:
            step.close()
        peer.socket.transport.abort()

    async with scripted_server(in_order(script, talker)) as server:
        if num_steps == 0:
            with pytest.raises(ConnectionLost):
                async with connect(server.url, format=PCM_FORMAT, reconnect=AT_ONCE):
                    pass
            return
        async with connect(server.url, format=PCM_FORMAT, reconnect=AT_ONCE) as session:
            try:
                packets = [packet async for packet in session.say("one two")]
            except ConnectionLost:
                is_loss_seen = True
            else:  # before it was lost, or after
                assert len(packets) in (3, 6)
                is_loss_seen = len(packets) == 6
            try:
                packets = [packet async for packet in session.say("one two")]
            except ConnectionLost:
                assert not is_loss_seen, "only a turn begun before the loss was seen may be lost"
                packets = [packet async for packet in session.say("one two")]
            assert len(packets) == 6


@pytest.mark.parametrize("ending", ["close", "leave"])
async def test_ending_a_session_ends_its_attempts(ending) -> None:
    async with scripted_server(drop_first) as server:
        async with connect(server.url, reconnect=Reconnect(initial_delay_s=3600.0)) as session:
            with pytest.raises(ConnectionLost):
                async for _ in session.say("one two"):
                    pass
            waiting = asyncio.create_task(session.turn().append("three"))
            await asyncio.sleep(0)
            if ending == "close":
                await session.close()
        with pytest.raises(ConnectionLost):
            await waiting
    assert len(server.peers) == 1


async def test_a_connection_that_breaks_while_it_is_closed_is_not_opened_again() -> None:
    async def script(peer: Peer) -> None:
        await peer.accept()
        await peer.expect(SessionClose)
        peer.socket.transport.abort()

    async with (
        scripted_server(in_order(script, talker)) as server,
        connect(server.url, reconnect=AT_ONCE) as session,
    ):
        await session.close()
        assert session.has_ended
        with pytest.raises(ConnectionLost):
            session.turn()
    assert len(server.peers) == 1


BUSY = respond(503, "", {"Retry-After": "0"})
FIRST_TOO = Reconnect(initial_delay_s=0.0, also_first=True)


async def test_a_server_that_is_still_loading_is_asked_again() -> None:
    async with scripted_server(talker) as server:
        server.refusals += [BUSY, respond(429)]
        async with connect(server.url, format=PCM_FORMAT, reconnect=FIRST_TOO) as session:
            assert [packet async for packet in session.say("one")]
            assert session.num_reconnects == 0
        server.refusals += [BUSY, BUSY]
        with pytest.raises(ConnectionFailed, match="503"):
            async with connect(server.url, reconnect=AT_ONCE):
                pass
        assert server.refusals == [BUSY]


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_a_first_opening_that_is_refused_for_good_is_not_tried_again(status) -> None:
    async with scripted_server(talker) as server:
        server.refusals += [respond(status)] * 2
        with pytest.raises(ConnectionFailed, match=str(status)):
            async with connect(server.url, reconnect=FIRST_TOO):
                pass
        assert len(server.refusals) == 1


@pytest.mark.parametrize(
    "option", [{"max_attempts": "3"}, {"initial_delay_s": -1}, {"max_delay_s": math.nan}]
)
def test_a_policy_that_makes_no_sense_is_refused_when_it_is_made(option) -> None:
    (name,) = option
    with pytest.raises(SessionError, match=rf"{name}: got .*, expected a number from 0 on"):
        Reconnect(**option)


def test_the_delay_of_the_thousandth_attempt_is_the_longest() -> None:
    attempts = Attempts(Reconnect(max_attempts=math.inf, max_delay_s=8.0), draw=lambda: 0.0)
    delays = [attempts.next_delay_s(ConnectionLost("gone")) for _ in range(1_100)]
    assert delays[:3] == [0.5, 1.0, 2.0] and delays[-1] == 8.0
