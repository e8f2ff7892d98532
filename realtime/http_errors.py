"""From an error to an HTTP answer, in the shape that the clients of its path expect.

An adapter names the beginnings of its paths and its shape; every other path has the native one. What
is refused before a route is reached (no key, no such path, a failure) goes through here as well.
"""

import json
import math
from collections.abc import Callable, Mapping

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match

from realtime.connection import INTERNAL_ERROR
from realtime.errors import HTTP_STATUS, CapacityError, PlosiveError, fault
from realtime.wire import PATH

Shape = Callable[[int, PlosiveError], object]  # status, error -> JSON body

_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_HTTP_CODES = {404: "not_found", 405: "method_not_allowed"}


def native_shape(status: int, error: PlosiveError) -> object:
    return {"error": {"code": error.code, "message": error.message, "param": error.param}}


class HttpErrors:
    """`shapes` by the beginning of the path."""

    def __init__(self, shapes: Mapping[str, Shape]) -> None:
        self._shapes = shapes

    def respond(
        self,
        path: str,
        error: PlosiveError,
        *,
        status: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> JSONResponse:
        status = status or HTTP_STATUS.get(error.code, 400)
        content = self._shape(path)(status, error)
        return JSONResponse(content, status, _headers(error) | dict(headers or {}))

    def event(self, path: str, error: PlosiveError) -> bytes:
        """The same as a server-sent event, for a stream that has begun."""
        content = self._shape(path)(HTTP_STATUS.get(error.code, 400), error)
        return b"event: error\ndata: " + json.dumps(content).encode() + b"\n\n"

    def install(self, app: FastAPI) -> None:
        """Answer with this whatever a route raises."""

        @app.exception_handler(PlosiveError)
        async def plosive_error(request: Request, error: PlosiveError) -> JSONResponse:
            return self.respond(request.url.path, error)

        @app.exception_handler(RequestValidationError)
        async def invalid_request(request: Request, error: RequestValidationError) -> JSONResponse:
            first = error.errors()[0]
            param = ".".join(str(part) for part in first["loc"][1:])
            refusal = PlosiveError("invalid_request", f"{param}: {fault(first)}", param=param)
            return self.respond(request.url.path, refusal)

        @app.exception_handler(HTTPException)
        async def http_error(request: Request, error: HTTPException) -> JSONResponse:
            code, message = _HTTP_CODES.get(error.status_code, "invalid_request"), error.detail
            if error.status_code == 404:
                asked = f"{request.method} {request.url.path[:200]}"
                message = f"there is no {asked}; sessions are a WebSocket at {PATH}"
            headers = dict(error.headers or {})
            if "Allow" in headers and (allowed := _methods(request)):
                verb = "are" if len(allowed) > 1 else "is"
                message = f"{request.method} is not possible there; {' and '.join(allowed)} {verb}"
                headers["Allow"] = ", ".join(allowed)
            refusal = PlosiveError(code, message)
            return self.respond(
                request.url.path, refusal, status=error.status_code, headers=headers
            )

        @app.exception_handler(ClientDisconnect)
        async def gone(request: Request, error: ClientDisconnect) -> Response:
            return Response(status_code=400)  # nobody gets it, and it is no failure to be logged

        @app.exception_handler(Exception)
        async def internal_error(request: Request, error: Exception) -> JSONResponse:
            failure = PlosiveError("internal_error", INTERNAL_ERROR)
            return self.respond(request.url.path, failure, status=500)

    def _shape(self, path: str) -> Shape:
        for beginning, shape in self._shapes.items():
            if path.startswith(beginning):
                return shape
        return native_shape


def _methods(request: Request) -> list[str]:
    """All that the path takes: the error itself names those of its first route."""
    asked = ((method, dict(request.scope, method=method)) for method in _METHODS)
    return [
        method
        for method, scope in asked
        if any(route.matches(scope)[0] == Match.FULL for route in request.app.routes)
    ]


def _headers(error: PlosiveError) -> dict[str, str]:
    headers = {}
    if error.code in ("clip_too_large", "body_timeout"):
        headers["Connection"] = "close"  # or the rest of the body would be read to its end
    if error.code in ("missing_api_key", "invalid_api_key"):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, CapacityError):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    return headers
