"""The blocking client where it may not wait: on its own thread, and in a forked process."""

import gc
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextvars import ContextVar

import pytest

from clients import SessionError
from clients.sync import Session, connect
from realtime.wire import TextAppend, TurnCancel
from tests.clients.scripted_server import PACKET, Peer, talker
from tests.clients.test_sync import TIMEOUT_S, served


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


def test_a_text_that_never_ends_keeps_no_program_from_ending() -> None:
    code = (
        "import queue, sys\n"
        "from clients import AudioFormat\n"
        "from clients.sync import connect\n"
        "words = queue.Queue()\n"
        "words.put('one ')\n"
        "with connect(sys.argv[1], format=AudioFormat(codec='pcm_s16le')) as session:\n"
        "    speech = iter(session.say(iter(words.get, None)))\n"
        "    next(speech)\n"
        "    print('left')"
    )

    async def speaks_at_once(peer: Peer) -> None:
        await peer.accept()
        await peer.expect(TextAppend)
        await peer.audio(1, [PACKET])
        await peer.until_closed()

    with served(speaks_at_once) as server:
        result = subprocess.run(
            [sys.executable, "-c", code, server.url],
            check=True,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    assert (result.stdout, result.stderr) == ("left\n", "")


def test_an_iterator_is_read_in_the_context_of_its_reader() -> None:
    """As a web framework's request is, or the span of a trace."""
    request = ContextVar("request", default="none")

    def words() -> Iterator[str]:
        for word in ("one", "two"):
            yield f"{word} of {request.get()} "

    with served(talker) as server, connect(server.url) as session:
        request.set("seven")
        assert list(session.say(words()))
    said = [message.text for message in server.received if isinstance(message, TextAppend)]
    assert said == ["one of seven ", "two of seven "]


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


def test_a_forked_process_may_leave_the_blocks_of_its_parent() -> None:
    with served(talker) as server, connect(server.url) as session:
        if not (child := os.fork()):
            try:
                with session:
                    sys.exit(7)
            except SystemExit as left:
                os._exit(int(str(left)))
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert list(session.say("one"))
