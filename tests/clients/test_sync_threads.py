"""The blocking client where it may not wait: on its own thread, and in a forked process."""

import gc
import os
from collections.abc import AsyncIterator, Iterator

import pytest

from clients import SessionError
from clients.sync import Session, connect
from realtime.wire import TurnCancel
from tests.clients.scripted_server import talker
from tests.clients.test_sync import served


def test_an_iterator_may_be_collected_on_the_sessions_own_thread() -> None:
    """As one is that lies in a cycle: the thread would wait for itself."""

    async def collect() -> None:
        gc.collect()

    class Holder:
        def __init__(self, speech: Iterator[object]) -> None:
            self.speech, self.holder = speech, self

    with served(talker) as server, connect(server.url) as session:
        gc.disable()
        try:
            next(Holder(iter(session.say("one two"))).speech)
            session.loop.run(collect())
        finally:
            gc.enable()
        assert list(session.say("three"))
    assert TurnCancel(turn_id=1) in server.received


async def interrupting(session: Session) -> AsyncIterator[str]:
    """An asynchronous iterator is read on the session's own thread."""
    yield "one "
    session.interrupt()


def test_what_runs_on_the_sessions_own_thread_cannot_wait_for_it() -> None:
    with served(talker) as server, connect(server.url) as session:
        with pytest.raises(SessionError, match="would wait for itself") as raised:
            list(session.say(interrupting(session)))
        assert raised.value.code == "own_thread"
        assert list(session.say("two"))


def test_a_session_is_of_the_process_that_opened_it() -> None:
    with served(talker) as server, connect(server.url) as session:
        reader, writer = os.pipe()
        if not (child := os.fork()):
            try:
                session.say("one")
            except SessionError as error:
                os.write(writer, error.code.encode())
            finally:
                os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as said:
            assert said.read() == "other_process"
        os.waitpid(child, 0)
        assert list(session.say("one"))
