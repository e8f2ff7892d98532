"""`Session.interrupt`: everything that is or would be said, in one call."""

import asyncio
from contextlib import aclosing

import pytest

from clients import ConnectionLost, SessionError, TurnCancelled, TurnDone, connect
from realtime.wire import Error, TextAppend, TurnCancel, TurnText
from tests.clients.scripted_server import (
    PACKET,
    PCM_FORMAT,
    Peer,
    scripted_server,
    session_with,
    talker,
)


async def two_turns(peer: Peer) -> None:
    """Speaks of the first of two turns only, and accounts for both when they are cancelled."""
    await peer.accept()
    for _ in range(2):
        await peer.expect_turn()
    await peer.audio(1, [PACKET] * 5)
    second = await peer.expect(TurnCancel)
    first = await peer.expect(TurnCancel)
    assert (first.turn_id, second.turn_id) == (1, 2)
    await peer.send(
        TurnCancelled(turn_id=2, spoken_text="", remaining_text="Three.", played_ms=0.0),
        TurnCancelled(turn_id=1, spoken_text="One. ", remaining_text="Two.", played_ms=80.0),
    )


async def test_all_queued_turns_are_cancelled_the_last_one_first() -> None:
    async with (
        scripted_server(two_turns) as server,
        connect(server.url, format=PCM_FORMAT) as session,
    ):
        first, second = session.turn(), session.turn()
        for turn, text in ((first, "One. Two."), (second, "Three.")):
            await turn.append(text)
            await turn.commit()
        await anext(first)
        async with asyncio.timeout(5.0):  # of one that is not cancelled no account comes
            heard = await session.interrupt(played_ms=80.0)
        assert heard.spoken_text == "One. "
        assert heard.remaining_text == "Two. Three."
        assert [account.turn_id for account in heard.turns] == [1, 2]
        assert [type(event) async for event in second] == [TurnCancelled]
    cancels = [message for message in server.received if isinstance(message, TurnCancel)]
    assert [cancel.played_ms for cancel in cancels] == [0.0, 80.0]


async def test_nothing_to_interrupt() -> None:
    async with scripted_server(talker) as server, connect(server.url) as session:
        heard = await session.interrupt()
        assert (heard.turns, heard.spoken_text, heard.remaining_text) == ((), "", "")


async def test_a_turn_without_text_is_cancelled_and_not_accounted() -> None:
    async with scripted_server(talker) as server, connect(server.url) as session:
        never_read = session.say("never read")
        heard = await session.interrupt(played_ms=20.0)
        assert (heard.turns, heard.spoken_text, heard.remaining_text) == ((), "", "")
        assert not [packet async for packet in never_read]
        said = session.say("one two")
        assert [packet async for packet in said]
        waiting = session.turn()
        heard = await session.interrupt(played_ms=20.0)  # of what may still play
        assert [(turn.turn_id, turn.played_ms) for turn in heard.turns] == [(1, 20.0)]
        assert heard.remaining_text == "one two" and waiting.is_over


async def test_a_turn_that_is_done_may_still_play() -> None:
    async with scripted_server(talker) as server, connect(server.url) as session:
        speeches = [session.say(text) for text in ("one two", "three")]
        for speech in speeches:
            assert [packet async for packet in speech]
        heard = await session.interrupt(played_ms=20.0)
        assert [account.turn_id for account in heard.turns] == [2]
        assert heard.remaining_text == "three"


async def heard_of_the_first(peer: Peer) -> None:
    """Says one turn, accounts for it when it is cancelled, and speaks of a second."""
    await peer.accept()
    await peer.expect_turn()
    await peer.audio(1, [PACKET] * 3)
    await peer.expect(TurnCancel)
    await peer.send(
        TurnCancelled(turn_id=1, spoken_text="One. ", remaining_text="Two.", played_ms=40.0)
    )


async def test_a_turn_that_was_refused_takes_no_account_from_the_others() -> None:
    async def script(peer: Peer) -> None:
        await peer.accept()
        for _ in range(2):
            await peer.expect(TextAppend)
        await peer.send(Error(code="too_many_turns", message="one at a time", turn_id=2))
        cancelled = {(await peer.expect(TurnCancel)).turn_id for _ in range(2)}
        assert cancelled == {1, 2}
        await peer.send(
            TurnCancelled(turn_id=1, spoken_text="One. ", remaining_text="", played_ms=40.0)
        )

    async with session_with(script) as session:
        turns = [session.turn() for _ in range(2)]
        for turn in turns:
            await turn.append("One. ")
        heard = await session.interrupt()
        assert heard.spoken_text == "One. "
        with pytest.raises(SessionError, match="one at a time"):
            await anext(turns[1])


async def test_a_connection_that_is_lost_before_all_accounts_came_is_no_account() -> None:
    """What was heard of the first turn would be missing from it."""

    async def script(peer: Peer) -> None:
        await peer.accept()
        for _ in range(2):
            await peer.expect(TextAppend)
        for _ in range(2):
            await peer.expect(TurnCancel)
        await peer.send(
            TurnCancelled(turn_id=2, spoken_text="", remaining_text="Two. ", played_ms=0.0)
        )
        await peer.socket.close(1011)

    async with session_with(script) as session:
        turns = [session.turn() for _ in range(2)]
        for turn in turns:
            await turn.append("One. ")
        with pytest.raises(ConnectionLost, match="of turn 1"):
            await session.interrupt(played_ms=40.0)


async def test_a_loop_that_was_left_leaves_the_account_to_interrupt() -> None:
    async with session_with(heard_of_the_first) as session:
        async with aclosing(aiter(session.say("One. Two."))) as packets:
            async for _ in packets:
                break
        assert (await session.interrupt(played_ms=20.0)).spoken_text == "One. "
        assert not (await session.interrupt()).turns  # it is told once


async def test_a_block_that_was_left_leaves_the_account_to_the_turn() -> None:
    async with session_with(heard_of_the_first) as session:
        async with session.turn() as turn:
            await turn.append("One. Two.")
            await turn.commit()
            await anext(turn)
        account = await turn.cancel()
        assert (account.spoken_text, account.played_ms) == ("One. ", 40.0)


async def test_what_was_left_is_none_of_the_turns_that_are_interrupted() -> None:
    async with scripted_server(talker) as server, connect(server.url) as session:
        async with session.turn() as left:
            await left.append("one")
        turn = session.turn()
        await turn.append("two")
        heard = await session.interrupt(played_ms=20.0)
        assert [account.turn_id for account in heard.turns] == [2]
        await left.cancel()
    cancels = [message for message in server.received if isinstance(message, TurnCancel)]
    assert [cancel.played_ms for cancel in cancels] == [None, 20.0]


async def test_queued_turns_are_spoken_one_after_another() -> None:
    async with scripted_server(talker) as server, connect(server.url) as session:
        turns = [session.turn() for _ in range(3)]
        for turn in turns:
            await turn.append("one two")
            await turn.commit()
        for turn in turns:
            assert [type(event) async for event in turn][-1] is TurnDone


async def test_what_still_plays_after_the_connection_is_lost_is_accounted_here() -> None:
    async def script(peer: Peer) -> None:
        await peer.accept()
        await peer.expect_turn()
        await peer.audio(1, [PACKET] * 2)
        await peer.send(TurnText(turn_id=1, text="One. ", audio_ms=20.0))
        await peer.done(1, 2)
        await peer.expect(TextAppend)
        await peer.socket.close(1011)

    async with session_with(script) as session:
        said = session.say("One. Two.")
        assert len([packet async for packet in said]) == 2
        lost = session.turn()
        await lost.append("Three.")
        try:
            await anext(lost)
        except ConnectionLost:
            account = await said.turn.cancel(played_ms=30.0)
        assert (account.spoken_text, account.remaining_text) == ("One. ", "Two.")
