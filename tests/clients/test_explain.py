"""Errors of the system, as a terminal shows them."""

import errno
import os
import socket
import ssl
import urllib.error

import pytest

from clients.address import key_headers
from clients.explain import cause, no_connection, sentence
from realtime.errors import ConnectionFailed

REFUSED = OSError(errno.ECONNREFUSED, "Connect call failed ('127.0.0.1', 9)")
BOTH = OSError(f"Multiple exceptions: {REFUSED}, [Errno 113] Connect call failed ('::1', 9)")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (REFUSED, "connection refused"),
        (BOTH, "connection refused, no route to host"),
        (urllib.error.URLError(REFUSED), "connection refused"),
        (socket.gaierror(-2, "Name or service not known"), "Name or service not known"),
        (ssl.SSLError(1, "bad certificate"), "bad certificate"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_cause(error: Exception, said: str) -> None:
    assert cause(error) == said


def test_a_missing_file_of_authorities_is_named(monkeypatch, tmp_path) -> None:
    error = ssl.SSLCertVerificationError(1, "certificate verify failed")
    error.verify_code, error.verify_message = 18, "self-signed certificate"
    file = tmp_path / "ca.pem"
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    missing = f"in SSL_CERT_FILE; there is no file '{file}', which it names now"
    assert no_connection("https://h", error).endswith(missing)
    file.touch()
    assert no_connection("https://h", error).endswith("in SSL_CERT_FILE")


def test_sentence() -> None:
    assert sentence(ConnectionFailed("nobody answers")) == "nobody answers"
    missing = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "/missing.wav")
    assert sentence(missing) == "/missing.wav: No such file or directory"
    assert sentence(OSError("there is no sound output")) == "there is no sound output"


@pytest.mark.parametrize("key", ["ключ-" * 4, "two words", "line\nbreak"])
def test_a_key_that_no_header_carries_is_not_shown(key: str) -> None:
    with pytest.raises(ConnectionFailed, match="expected ASCII letters") as refused:
        key_headers(key)
    assert key not in str(refused.value)
