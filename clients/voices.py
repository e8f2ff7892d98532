"""A server's voices over HTTP: list, add from a clip, delete. Blocking, standard library only.

`ssl_context` is for an https server whose certificate this machine does not trust.
"""

import json
import secrets
import ssl
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from clients.address import http_url, key_headers, refusal, retry_after_s
from clients.explain import no_connection
from realtime.errors import ConnectionFailed, PlosiveError, VoiceError

PATH = "/v1/voices"


@dataclass(frozen=True)
class Voice:
    """A voice that sessions may ask for."""

    name: str
    text: str = ""  # what is said in its reference clip
    duration_s: float = 0.0
    is_builtin: bool = False
    is_default: bool = False


def list_voices(
    url: str, *, api_key: str | None = None, ssl_context: ssl.SSLContext | None = None
) -> list[Voice]:
    """Built-in voices first. `url` is the server's, like http://localhost:8765.

    Raises:
        ConnectionFailed: the server cannot be reached, or refused the key.
    """
    answer = _request("GET", url, PATH, api_key, ssl_context)
    return [
        _voice({**fields, "is_default": fields["name"] == answer.get("default")})
        for fields in answer["voices"]
    ]


def add_voice(
    url: str,
    name: str,
    clip: Path,
    text: str,
    *,
    api_key: str | None = None,
    ssl_context: ssl.SSLContext | None = None,
) -> Voice:
    """Add a voice from a recording, in any common audio format, and what is said in it.

    Raises:
        VoiceError: the name is taken or not valid, or the clip cannot be used; it says why.
        ConnectionFailed: the server cannot be reached, refused the key, or is busy (`retry_after_s`).
        OSError: the clip cannot be read.
    """
    boundary = secrets.token_hex(16)
    parts = [
        _part(boundary, 'name="name"', name.encode()),
        _part(boundary, 'name="text"', text.encode()),
        _part(boundary, 'name="file"; filename="clip"', clip.read_bytes()),
        f"--{boundary}--\r\n".encode(),
    ]
    content_type = f"multipart/form-data; boundary={boundary}"
    body = b"".join(parts)
    return _voice(_request("POST", url, PATH, api_key, ssl_context, body, content_type))


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
    _request("DELETE", url, f"{PATH}/{quote(name, safe='')}", api_key, ssl_context)


def _voice(fields: dict[str, Any]) -> Voice:
    known = {name: fields[name] for name in Voice.__dataclass_fields__ if name in fields}
    return Voice(**known)


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
) -> dict[str, Any]:
    request = urllib.request.Request(
        http_url(url, path), data=body, headers=key_headers(api_key), method=method
    )
    if content_type:
        request.add_header("Content-Type", content_type)
    try:
        with urllib.request.urlopen(request, timeout=60, context=ssl_context) as response:
            text = response.read()
    except urllib.error.HTTPError as error:
        with error:
            raise _refused(error) from None
    except OSError as error:
        raise ConnectionFailed(no_connection(url, error)) from None
    answer: dict[str, Any] = json.loads(text) if text else {}
    return answer


def _refused(error: urllib.error.HTTPError) -> PlosiveError:
    code, message = refusal(error.read())
    if code is not None and error.code not in (401, 429, 503):
        return VoiceError(code, message)
    return ConnectionFailed(
        f"the server refused with status {error.code}: {message}",
        status=error.code,
        retry_after_s=retry_after_s(error.headers.get("Retry-After")),
    )
