"""What went wrong, in words for whoever reads a terminal: no error numbers, no Python types."""

import os
import re
import ssl
from http.client import HTTPException
from pathlib import Path
from urllib.error import URLError

from websockets.exceptions import InvalidMessage

from clients.address import without_password
from realtime.errors import ConnectionFailed, ConnectionLost, PlosiveError

_NUMBER = re.compile(r"\[Errno (\d+)\]")
_OTHER_NAMES = (62, 64)  # X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH
_PLAIN_ANSWERS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST")  # what OpenSSL says of plain text
_NO_HTTP = (HTTPException, InvalidMessage)  # the other end closed, or said something else


def cause(error: Exception) -> str:
    """Why a connection could not be made.

    Example:
        >>> cause(OSError("Multiple exceptions: [Errno 111] Connect call failed ('::1', 1), ..."))
        'connection refused'
    """
    reason = _unwrapped(error)
    if isinstance(reason, ssl.SSLError) and (name := getattr(reason, "reason", None)):
        return str(name).replace("_", " ").lower()
    numbers = dict.fromkeys(_NUMBER.findall(str(reason)))
    if numbers:
        return ", ".join(os.strerror(int(number)).lower() for number in numbers)
    said = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
    return " ".join(said.split())[:200]


def _unwrapped(error: Exception) -> BaseException | str:
    return error.reason if isinstance(error, URLError) else error


def no_connection(url: str, error: Exception) -> str:
    """That there is none, why, and what to do.

    Example:
        >>> no_connection("http://localhost:8765", ConnectionRefusedError(111, ""))
        'cannot connect to http://localhost:8765: connection refused. Is the server up?'
    """
    return f"cannot connect to {without_password(url)}: {_why(url, _unwrapped(error))}"


def _why(url: str, reason: BaseException | str) -> str:
    if isinstance(reason, ssl.SSLCertVerificationError):
        if reason.verify_code in _OTHER_NAMES:
            return (
                f"its certificate is another server's: {reason.verify_message} "
                "Connect by a name that it is made for"
            )
        named = os.environ.get("SSL_CERT_FILE")
        is_missing = named is not None and not Path(named).is_file()
        missing = f"; there is no file {named!r}, which it names now" if is_missing else ""
        return (
            f"its certificate is not trusted ({reason.verify_message}). Name the file of the "
            f"authority that signed it in SSL_CERT_FILE{missing}"
        )
    if isinstance(reason, ssl.SSLError) and reason.reason in _PLAIN_ANSWERS:
        return "what answers there does not speak TLS: its address begins with http or ws"
    known = cause(reason) if isinstance(reason, Exception) else reason
    if isinstance(reason, _NO_HTTP) and url.startswith(("http:", "ws:")):
        return f"{known}. Is it a Plosive server? One with a certificate is reached by https or wss"
    return f"{known}. Is the server up?"


def sentence(error: PlosiveError | OSError, *, is_key_given: bool = True) -> str:
    """The message of an error, without its code; of a file that cannot be used, its name and why.

    Of a lost connection the reason alone: the message quotes what was spoken, however long it is.
    `is_key_given`: whether the command was given an API key; one that lacks it is told how.
    """
    if not is_key_given and isinstance(error, ConnectionFailed) and error.status == 401:
        return "this server needs an API key: give it with --api-key KEY, or in PLOSIVE_API_KEY"
    if isinstance(error, ConnectionLost):
        return error.reason
    if isinstance(error, PlosiveError):
        return error.message
    name = "" if error.filename is None else f"{error.filename}: "
    return name + (error.strerror or str(error))
