"""Cancelled turns: what was heard, and what is dropped, whenever the cancel comes."""

import asyncio
import math
from collections.abc import AsyncIterator

import pytest

from clients import SessionError, TurnCancelled, TurnText, Warn, connect
from realtime.wire import TextAppend, TurnCancel, TurnMetrics
from tests.clients.scripted_server import (
    PACKET,
    PCM_FORMAT,
    Peer,
    scripted_server,
    session_with,
    talker,
)


async def test_cancel_gives_the_account_and_late_audio_is_dropped() -> None:
    async def script(peer: Peer) -> None:
        await peer.accept()
        await peer.expect_turn()
        await peer.audio(1, [PACKET] * 5)
        cancel = await peer.expect(TurnCancel)
        assert cancel.played_ms == 30.0
        await peer.audio(1, [PACKET] * 5, first_seq=5)
        await peer.send(
            TurnCancelled(turn_id=1, spoken_text="Hel", remaining_text="lo", played_ms=30.0)
        )
        await peer.audio(1, [PACKET], first_seq=10)
        await peer.expect_turn()
        await peer.audio(2, [PACKET])
        await peer.done(2, 1)

    async with session_with(script) as session:
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
        await peer.audio(1, [PACKET])
        await peer.expect(TurnCancel)
        cancel_arrived.set()
        await (await peer.socket.ping())  # meanwhile the client has tried to send "two "
        await peer.send(
            TurnCancelled(turn_id=1, spoken_text="", remaining_text="one ", played_ms=0.0)
        )

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
        await peer.expect_turn()
        await peer.audio(1, [PACKET])
        await peer.done(1, 1)
        await peer.expect(TurnCancel)
        await peer.send(
            TurnCancelled(turn_id=1, spoken_text="He", remaining_text="llo", played_ms=9.0)
        )

    async with session_with(script) as session:
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
        await peer.audio(1, [PACKET])
        await peer.expect(TurnCancel)
        account = TurnCancelled(turn_id=1, spoken_text="", remaining_text="Hello", played_ms=0.0)
        await peer.send(account.model_copy(update={"metrics": metrics}))

    async with session_with(script) as session:
        turn = session.turn()
        await turn.append("Hello")
        await turn.cancel()
        assert turn.metrics == metrics


async def test_done_that_crosses_a_cancel_ends_in_the_account() -> None:
    async def script(peer: Peer) -> None:
        await peer.accept()
        await peer.expect_turn()
        await peer.audio(1, [PACKET])
        await peer.expect(TurnCancel)
        await peer.done(1, 1)
        await peer.send(
            TurnCancelled(turn_id=1, spoken_text="", remaining_text="Hello", played_ms=0.0)
        )

    async with session_with(script) as session:
        turn = session.turn()
        await turn.append("Hello")
        await turn.commit()
        assert (await turn.cancel()).remaining_text == "Hello"
        assert [type(event) for event in [e async for e in turn]] == [TurnCancelled]


async def test_cancel_of_what_the_server_has_forgotten_is_accounted_here() -> None:
    async def script(peer: Peer) -> None:
        await peer.accept()
        await peer.expect_turn()
        await peer.audio(1, [PACKET] * 2)
        await peer.send(TurnText(turn_id=1, text="One. ", audio_ms=20.0))
        await peer.send(TurnText(turn_id=1, text="One. Two.", audio_ms=40.0))
        await peer.done(1, 2)
        await peer.expect(TurnCancel)
        await peer.send(Warn(code="unknown_turn", message="not open", turn_id=1))

    async with session_with(script) as session:
        speech = session.say("One. Two.")
        assert len([packet async for packet in speech]) == 2
        account = await speech.turn.cancel(played_ms=25.0)
        assert (account.spoken_text, account.remaining_text) == ("One. ", "Two.")


async def test_cancel_of_a_turn_the_server_never_heard_of_sends_nothing() -> None:
    async with scripted_server(talker) as server, connect(server.url) as session:
        account = await session.turn().cancel()
        assert (account.spoken_text, account.remaining_text) == ("", "")
    assert not any(isinstance(message, TurnCancel) for message in server.received)


@pytest.mark.parametrize("played_ms", [-1, math.nan, math.inf, "x"])
async def test_a_cancel_with_no_position_is_refused_and_the_next_one_works(played_ms) -> None:
    async with scripted_server(talker) as server, connect(server.url) as session:
        for cancel in (session.interrupt, session.turn().cancel):  # of a turn without text as well
            with pytest.raises(SessionError, match="played_ms: got") as refused:
                await cancel(played_ms)
            assert (refused.value.code, refused.value.param) == ("invalid_option", "played_ms")
        turn = session.turn()
        await turn.append("one ")
        with pytest.raises(SessionError, match="played_ms: got"):
            await turn.cancel(played_ms)
        async with asyncio.timeout(10):
            assert (await turn.cancel()).remaining_text is not None
            assert [packet async for packet in session.say("two")]
