"""Voices over HTTP, by a server that is none, or by a caller who has got it wrong."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from clients import ConnectionFailed, VoiceError
from clients.voices import Voice, add_voice, delete_voice, list_voices
from tests.clients.command_line import MISSING_KEY


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """The address of a server that answers one request with these bytes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def work() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65_536)
                connection.sendall(answer)

        thread = threading.Thread(target=work)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


def ok(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


def test_this_machine_is_asked_without_a_proxy(monkeypatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with answering(ok(b'{"voices": []}')) as url:
        assert list_voices(url) == []


def test_a_voice_that_was_added_can_be_a_key() -> None:
    with answering(ok(b'{"name": "a", "warnings": ["it is short"]}')) as url:
        voice = add_voice(url, "a", __file__, "text")
    assert {voice: 1} == {Voice("a", warnings=("it is short",)): 1}


def test_the_default_voice_is_marked_and_unknown_fields_are_ignored() -> None:
    body = b'{"default": "b", "new": 1, "voices": [{"name": "a", "new": 1}, {"name": "b"}]}'
    with answering(ok(body)) as url:
        assert list_voices(url) == [Voice("a"), Voice("b", is_default=True)]


@pytest.mark.parametrize(
    "body",
    [b"", b"<html>", b"\xff", b"null", b"[]", b"{}", b'{"voices": [7]}', b'{"voices": [{}]}'],
)
def test_an_answer_that_is_no_list_of_voices(body) -> None:
    with (
        answering(ok(body)) as url,
        pytest.raises(ConnectionFailed, match=f"{url} answers, but not as a Plosive server does"),
    ):
        list_voices(url)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"garbage\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\ncut",
        b"HTTP/1.1 500 No\r\nContent-Length: 9\r\n\r\ncut",
        b"HTTP/1.1 200 OK\r\n" + 200 * b"X: y\r\n" + b"\r\n",
    ],
)
def test_an_answer_that_is_no_http(answer) -> None:
    with (
        answering(answer) as url,
        pytest.raises(ConnectionFailed, match="Is it a Plosive server") as raised,
    ):
        list_voices(url)
    assert "\n" not in raised.value.message


def test_a_refusal_without_words_ends_with_its_number() -> None:
    with (
        answering(b"HTTP/1.1 503 No\r\nRetry-After: 3\r\n\r\n") as url,
        pytest.raises(ConnectionFailed, match="refused the request with status 503$") as raised,
    ):
        list_voices(url)
    assert (raised.value.status, raised.value.retry_after_s) == (503, 3.0)


@pytest.mark.parametrize(
    ("name", "clip", "text", "said"),
    [
        (7, __file__, "text", "name: got 7, expected a string"),
        ("\udcff", __file__, "text", "name: got '.udcff'"),
        ("eve", __file__, None, "text: got None"),
        ("eve", __file__, "\udcff", "text: got '.udcff'"),
        ("eve", b"RIFF", "text", "clip: got b'RIFF', expected the path of an audio file"),
    ],
)
def test_what_is_no_voice_is_refused_before_it_is_sent(name, clip, text, said) -> None:
    with pytest.raises(VoiceError, match=said):
        add_voice("http://127.0.0.1:9", name, clip, text)


def test_a_name_that_is_none_cannot_be_deleted() -> None:
    with pytest.raises(VoiceError, match="name: got 7"):
        delete_voice("http://127.0.0.1:9", 7)


def test_without_a_key_the_error_says_how_to_give_one(monkeypatch) -> None:
    monkeypatch.delenv("PLOSIVE_API_KEY", raising=False)
    refusal = b"HTTP/1.1 401 No\r\nContent-Length: %d\r\n\r\n" % len(MISSING_KEY)
    with (
        answering(refusal + MISSING_KEY.encode()) as url,
        pytest.raises(ConnectionFailed, match="it needs an API key: .* PLOSIVE_API_KEY"),
    ):
        list_voices(url)
