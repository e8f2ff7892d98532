"""What went wrong, in words for whoever reads a terminal: no error numbers, no Python types."""

import os
import re
import ssl
from urllib.error import URLError

from realtime.errors import ConnectionFailed, ConnectionLost, PlosiveError

_NUMBER = re.compile(r"\[Errno (\d+)\]")


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
    return getattr(reason, "strerror", None) or str(reason) or type(reason).__name__


def _unwrapped(error: Exception) -> BaseException | str:
    return error.reason if isinstance(error, URLError) else error


def no_connection(url: str, error: Exception) -> str:
    """That there is none, why, and what to do.

    Example:
        >>> no_connection("http://localhost:8765", ConnectionRefusedError(111, ""))
        'cannot connect to http://localhost:8765: connection refused. Is the server up?'
    """
    reason = _unwrapped(error)
    if isinstance(reason, ssl.SSLCertVerificationError):
        return (
            f"cannot connect to {url}: its certificate is not trusted ({reason.verify_message}). Name "
            "the file of the authority that signed it in SSL_CERT_FILE"
        )
    return f"cannot connect to {url}: {cause(error)}. Is the server up?"


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
    if error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)
