"""Every error a user of the wire can meet, and what each becomes on the way out.

    PlosiveError
    ├── ProtocolError        a message that cannot be understood or comes at the wrong time
    ├── SessionError         understood, but cannot be done (unknown voice, text too long, ...)
    ├── CapacityError        more than is taken now (no free slot, ...), with a time to retry after
    ├── VoiceError           a voice that cannot be added, found or deleted
    ├── ConnectionFailed     client side: the server cannot be reached, or refused the upgrade
    ├── ConnectionLost       client side: the socket closed before the turn was complete
    └── EngineError          the model side failed; the session cannot go on

Each carries `code` (stable, for programs) and a message that says what was got, what was expected
and what to do. `HTTP_STATUS` and `CLOSE_CODE` are the one table from error to wire.
"""

from collections.abc import Mapping
from typing import Any


class PlosiveError(Exception):
    """Base of all. `code` is stable; `param` names the offending field, if there is one."""

    default_code = "internal_error"

    def __init__(
        self,
        code: str | None = None,
        message: str = "",
        *,
        param: str | None = None,
        turn_id: int | None = None,
        fatal: bool = False,
    ) -> None:
        super().__init__(message)
        self.code = code or self.default_code
        self.message = message
        self.param = param
        self.turn_id = turn_id
        self.fatal = fatal

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


class ProtocolError(PlosiveError):
    """A message that cannot be understood, or that comes at the wrong time."""

    default_code = "invalid_message"


class SessionError(PlosiveError):
    """A message that was understood but cannot be done."""

    default_code = "invalid_request"


class CapacityError(PlosiveError):
    """All slots are taken, or a client asks for more than it may at a time."""

    default_code = "at_capacity"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        turn_id: int | None = None,
        retry_after_s: float = 1.0,
    ) -> None:
        super().__init__(code, message, param=param, turn_id=turn_id)
        self.retry_after_s = retry_after_s


class VoiceError(PlosiveError):
    """A voice that cannot be added, found or deleted."""

    default_code = "voice_not_found"


class ConnectionFailed(PlosiveError):
    """The server cannot be reached, or it refused the upgrade (`status`)."""

    default_code = "connection_failed"

    def __init__(
        self, message: str, *, status: int | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message=message)
        self.status = status
        self.retry_after_s = retry_after_s


class ConnectionLost(PlosiveError):
    """The socket closed before what was asked for was complete (`close_code`).

    `reason` is why, without how far a turn had come.
    """

    default_code = "connection_lost"

    def __init__(self, message: str, *, close_code: int | None = None) -> None:
        super().__init__(message=message)
        self.reason = message
        self.close_code = close_code


class EngineError(PlosiveError):
    """The model side failed; the session cannot go on."""

    default_code = "engine_error"


HTTP_STATUS: dict[str, int] = {
    "missing_api_key": 401,
    "invalid_api_key": 401,
    "origin_not_allowed": 403,
    "too_many_sessions": 429,
    "text_rate_exceeded": 429,
    "at_capacity": 503,
    "not_ready": 503,
    "voice_not_found": 404,
    "model_not_found": 404,
    "voice_exists": 409,
    "voice_protected": 403,
    "invalid_voice": 400,
    "invalid_clip": 422,
    "clip_too_large": 413,
    "body_too_large": 413,
    "body_timeout": 408,
    "unsupported_media_type": 415,
    "invalid_field": 422,
    "engine_error": 500,
    "internal_error": 500,
    "engine_stopped": 503,
    "shutting_down": 503,
}

CLOSE_CODE: dict[str, int] = {
    "session_closed": 1000,
    "shutting_down": 1001,
    "engine_error": 1011,
    "internal_error": 1011,
    "idle_timeout": 4000,
    "client_too_slow": 4001,
}


def shorten(value: object) -> str:
    """For a message: its repr, of at most 80 characters."""
    text = repr(value[:80] if isinstance(value, str | bytes) else value)
    return text if len(text) <= 80 else text[:77] + "..."


def fault(detail: Mapping[str, Any]) -> str:
    """What pydantic finds wrong with a field, and what was got."""
    got = "" if detail["type"] == "missing" else f" (got {shorten(detail.get('input'))})"
    return f"{detail['msg']}{got}"
