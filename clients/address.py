"""A server's address, as users write it, and what a server says when it refuses over HTTP."""

import json
import os
import re
import ssl
from urllib.parse import SplitResult, urlsplit, urlunsplit
from urllib.request import BaseHandler, HTTPSHandler, OpenerDirector, ProxyHandler, build_opener

from realtime.errors import CapacityError, ConnectionFailed, shorten
from realtime.wire import PATH

_SECURE = {"http": False, "ws": False, "https": True, "wss": True}
DEFAULT_URL = "http://127.0.0.1:8765"  # where `plosive serve` listens unless it is told otherwise
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_NEEDS_KEY = "it needs an API key: connect(url, api_key=KEY), or PLOSIVE_API_KEY in the environment"
_FULL = ("at_capacity", "too_many_sessions", "text_rate_exceeded")


class ServerFull(ConnectionFailed, CapacityError):
    """A refusal over HTTP because all slots are taken, or a client has as many as it may: a
    CapacityError that has the `status` of a ConnectionFailed, and the server's `code`."""

    retry_after_s: float

    def __init__(
        self, message: str, *, code: str, status: int, retry_after_s: float | None
    ) -> None:
        super().__init__(message, status=status, retry_after_s=retry_after_s or 1.0)
        self.code = code


def websocket_url(url: str) -> str:
    """The address of the server's socket; an address with a path is taken as it is.

    Example:
        >>> websocket_url("http://localhost:8765")
        'ws://localhost:8765/v1/realtime'

    Raises:
        ConnectionFailed: `url` is no server address.
    """
    parts = _split(url)
    scheme = "wss" if _SECURE[parts.scheme] else "ws"
    path = PATH if parts.path in ("", "/") else parts.path
    return urlunsplit((scheme, parts.netloc, path, parts.query, ""))


def http_url(url: str, path: str) -> str:
    """The address of another path on the same server. Raises like `websocket_url`."""
    parts = _split(url)
    scheme = "https" if _SECURE[parts.scheme] else "http"
    return urlunsplit((scheme, parts.netloc, path, "", ""))


def key_headers(api_key: str | None) -> dict[str, str]:
    """What a server that needs a key wants to see with every request; nothing without one.

    None is the key of PLOSIVE_API_KEY, "" is none.

    Raises:
        ConnectionFailed: no header can carry the key. The message does not show it.
    """
    if api_key is None:
        api_key = os.environ.get("PLOSIVE_API_KEY", "")
    if api_key == "":
        return {}
    if not isinstance(api_key, str):
        got = type(api_key).__name__
        raise ConnectionFailed(f"the API key cannot be sent: got {got}, expected a string")
    if not (api_key.isascii() and api_key.isprintable() and " " not in api_key):
        raise ConnectionFailed(
            "the API key cannot be sent: expected ASCII letters, digits and signs without spaces"
        )
    return {"Authorization": f"Bearer {api_key}"}


def without_password(url: str) -> str:
    """For a message.

    Example:
        >>> without_password("http://user:p@ss@host:8765/a@b")
        'http://host:8765/a@b'
    """
    return re.sub(r"^(\w+:)?//[^/?#]*@", r"\1//", url)


def is_loopback(url: str) -> bool:
    return urlsplit(url).hostname in _LOOPBACK


def opener(url: str, ssl_context: ssl.SSLContext | None = None) -> OpenerDirector:
    """For requests to the server: no proxy of the environment is asked for this machine."""
    handlers: list[BaseHandler] = [HTTPSHandler(context=ssl_context)]
    if is_loopback(url):
        handlers.append(ProxyHandler({}))
    return build_opener(*handlers)


def refusal(body: bytes) -> tuple[str | None, str]:
    """Code and message of a JSON refusal; of anything else, no code and its beginning."""
    text = body.decode("utf-8", "replace")
    try:
        answer = json.loads(text)
        error = answer.get("error", answer)  # some paths speak as another API's server does
        return error.get("code"), str(error["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return None, text.strip()[:300]


def refused(
    what: str, status: int, body: bytes, retry_after: str | None, *, is_key_shown: bool
) -> ConnectionFailed:
    """The error of a refusal, with what the server says, and when to come back if it says that."""
    code, said = refusal(body)
    if code == "missing_api_key" and not is_key_shown:
        said = _NEEDS_KEY
    message = f"the server refused {what} with status {status}" + (f": {said}" if said else "")
    is_seconds = (retry_after or "").isdecimal()  # else none, or a date
    retry_after_s = float(retry_after or 0) if is_seconds else None
    if code in _FULL:
        return ServerFull(message, code=code, status=status, retry_after_s=retry_after_s)
    return ConnectionFailed(message, status=status, retry_after_s=retry_after_s)


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - raises where it is none
        url.encode()
        host = parts.hostname or ""
        host.encode("idna")
        is_address = parts.scheme in _SECURE and host.isprintable() and host and " " not in host
    except (ValueError, AttributeError, TypeError):  # UnicodeError, of what no name can be, is one
        is_address = False
    if not is_address:
        shown = without_password(url) if isinstance(url, str) else url
        raise ConnectionFailed(
            f"{shorten(shown)} is no server address; expected one like http://localhost:8765"
        )
    return parts
