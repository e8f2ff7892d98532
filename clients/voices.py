"""A server's voices over HTTP: list, add from a clip, delete. Blocking.

`api_key` None is the key of PLOSIVE_API_KEY, if the environment has it. `ssl_context` is for an https
server whose certificate this machine does not trust.
"""

import secrets
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pydantic import BaseModel, TypeAdapter, ValidationError

from clients.address import http_url, key_headers, opener, refusal, refused, without_password
from clients.checks import check_ssl_context
from clients.explain import no_connection
from realtime.errors import ConnectionFailed, VoiceError, shorten

PATH = "/v1/voices"


@dataclass(frozen=True)
class Voice:
    """A voice that sessions may ask for."""

    name: str
    text: str = ""  # what is said in its reference clip
    duration_s: float = 0.0
    is_builtin: bool = False
    is_default: bool = False
    warnings: tuple[str, ...] = ()  # of `add_voice`: what would make it a better one


_VOICE = TypeAdapter(Voice)


class _Voices(BaseModel):
    voices: list[Voice]
    default: str | None = None


def list_voices(
    url: str, *, api_key: str | None = None, ssl_context: ssl.SSLContext | None = None
) -> list[Voice]:
    """Built-in voices first. `url` is the server's, like http://localhost:8765.

    Raises:
        ConnectionFailed: the server cannot be reached, or refused the key.
    """
    body = _request("GET", url, PATH, api_key, ssl_context)
    with _readable(url):
        answer = _Voices.model_validate_json(body)
    return [replace(voice, is_default=voice.name == answer.default) for voice in answer.voices]


def add_voice(
    url: str,
    name: str,
    clip: Path | str,
    text: str,
    *,
    api_key: str | None = None,
    ssl_context: ssl.SSLContext | None = None,
) -> Voice:
    """Add a voice from a recording, in any common audio format, and what is said in it, word for
    word. 10 to 30 s of one person who speaks clearly are good; a short clip, or a text that hardly
    belongs to it, is answered with `warnings`.

    Raises:
        VoiceError: the name is taken or not valid, or the clip cannot be used; it says why.
        ConnectionFailed: the server cannot be reached, refused the key, or is busy (`retry_after_s`).
        OSError: the clip cannot be read.
    """
    if not isinstance(clip, Path | str):
        why = f"clip: got {shorten(clip)}, expected the path of an audio file"
        raise VoiceError("invalid_clip", why, param="file")
    boundary = secrets.token_hex(16)
    parts = [
        _part(boundary, 'name="name"', _encoded("name", name)),
        _part(boundary, 'name="text"', _encoded("text", text)),
        _part(boundary, 'name="file"; filename="clip"', Path(clip).read_bytes()),
        f"--{boundary}--\r\n".encode(),
    ]
    content_type = f"multipart/form-data; boundary={boundary}"
    body = _request("POST", url, PATH, api_key, ssl_context, b"".join(parts), content_type)
    with _readable(url):
        return _VOICE.validate_json(body)


def delete_voice(
    url: str,
    name: str,
    *,
    api_key: str | None = None,
    ssl_context: ssl.SSLContext | None = None,
) -> None:
    """Delete an added voice.

    Raises:
        VoiceError: there is none of that name, or it is built in.
        ConnectionFailed: the server cannot be reached, or refused the key.
    """
    path = f"{PATH}/{quote(_encoded('name', name), safe='')}"
    _request("DELETE", url, path, api_key, ssl_context)


def _encoded(param: str, text: str) -> bytes:
    try:
        return text.encode()
    except (AttributeError, UnicodeError):
        why = f"{param}: got {shorten(text)}, expected a string of whole characters"
        raise VoiceError("invalid_voice", why, param=param) from None


def _part(boundary: str, disposition: str, content: bytes) -> bytes:
    head = f"--{boundary}\r\nContent-Disposition: form-data; {disposition}\r\n\r\n"
    return head.encode() + content + b"\r\n"


def _request(
    method: str,
    url: str,
    path: str,
    api_key: str | None,
    ssl_context: ssl.SSLContext | None,
    body: bytes | None = None,
    content_type: str = "",
) -> bytes:
    check_ssl_context(ssl_context)
    key = key_headers(api_key)
    request = urllib.request.Request(http_url(url, path), data=body, headers=key, method=method)
    if content_type:
        request.add_header("Content-Type", content_type)
    try:
        with _response(url, request, ssl_context) as response:
            answer: bytes = response.read()
    except (OSError, HTTPException) as error:
        raise ConnectionFailed(no_connection(url, error)) from None
    if response.status >= 300:
        code, message = refusal(answer)
        if code is not None and response.status not in (401, 429, 503):
            raise VoiceError(code, message)
        retry_after = response.headers.get("Retry-After")
        raise refused("the request", response.status, answer, retry_after, is_key_shown=bool(key))
    return answer


def _response(url: str, request: urllib.request.Request, ssl_context: ssl.SSLContext | None) -> Any:
    try:
        return opener(url, ssl_context).open(request, timeout=60)
    except urllib.error.HTTPError as refusal:  # it is the response as well
        return refusal


@contextmanager
def _readable(url: str) -> Iterator[None]:
    try:
        yield
    except ValidationError:
        why = f"{without_password(url)} answers, but not as a Plosive server does: expected its voices as JSON"
        raise ConnectionFailed(why) from None
