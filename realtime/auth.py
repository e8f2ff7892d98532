"""Who may use the server: API keys, browsers' origins, and sessions at a time.

One piece of middleware before every route that is not public; nothing is asked for by default. A key
comes as `Authorization: Bearer KEY`, as `xi-api-key: KEY`, or, since a browser sets no headers on a
WebSocket, as the subprotocol `plosive.key.KEY` (percent-encoded) offered beside `plosive.v1`. What is
refused is refused before the upgrade, in the shape that the clients of the path expect:
401 without a valid key, 403 for an origin that is not listed, 429 for one session too many.

Without keys a client is its address: that of the socket, or where that is one of `trusted_proxies` the
last one of `X-Forwarded-For` that is none of them. Unless it is told of proxies, the server believes
nobody.
"""

import asyncio
import contextlib
import hmac
import ipaddress
import logging
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, MutableMapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from realtime.config import ConfigError, ServerConfig, named
from realtime.errors import CapacityError, PlosiveError
from realtime.http_errors import HttpErrors
from realtime.metrics import Metrics
from realtime.page_routes import ASSETS_PATH
from realtime.slow_bodies import discard_body

KEYS_VARIABLE = "PLOSIVE_API_KEYS"
KEY_SUBPROTOCOL = "plosive.key."
MIN_KEY_CHARS = 16
_CLIENT_SCOPE = "plosive.client"  # where the gate leaves who it has let in
_PUBLIC_PATHS = ("/health", "/ready", "/")  # the page is asked for before a key can be typed
_KEY_HEADERS = ("authorization", "xi-api-key", "sec-websocket-protocol")
_MAX_DISCARDED_BYTES = 64 * 1024 * 1024
_DISCARD_S = 30.0
_LOOPBACK = ("localhost", "127.0.0.1", "::1")

logger = logging.getLogger(__name__)


class AuthError(PlosiveError):
    """No key, a wrong key, or an origin that may not."""

    default_code = "invalid_api_key"


class TooManySessions(CapacityError):
    default_code = "too_many_sessions"


# ---------------------------------------------------------------------------- keys


class ApiKeys:
    """Valid keys, kept as digests under a secret of this process; none at all lets everybody in."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._secret = secrets.token_bytes(32)
        self._digests = [self._digest(_checked(key)) for key in dict.fromkeys(keys)]

    def __len__(self) -> int:
        return len(self._digests)

    def find(self, key: str) -> str | None:
        """A name for the key's owner, or None. Takes the same time whichever key it is, if any."""
        digest = self._digest(key)
        found = [known for known in self._digests if hmac.compare_digest(known, digest)]
        return found[0].hex() if found else None

    def _digest(self, key: str) -> bytes:
        return hmac.digest(self._secret, key.encode("utf-8", "surrogatepass"), "sha256")


def load_api_keys(file: Path | None, environ: Mapping[str, str]) -> ApiKeys:
    """The keys of the file, one a line (`#` begins a comment), and of the environment, by commas.

    Raises:
        ConfigError: a file or variable that is there without a usable key in it: a server that was
            meant to be closed must not start open.
    """
    keys: list[str] = []
    if file is not None:
        keys += _from_source(f"{named('api_keys_file')}: {file}", _read(file).splitlines())
    if KEYS_VARIABLE in environ:
        keys += _from_source(KEYS_VARIABLE, environ[KEYS_VARIABLE].split(","))
    return ApiKeys(keys)


def _read(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        message = f"{named('api_keys_file')}: cannot read {file}: {why}"
        raise ConfigError(message=message, param="api_keys_file") from error


def _from_source(source: str, lines: Iterable[str]) -> list[str]:
    keys = [line.partition("#")[0].strip() for line in lines]
    keys = [key for key in keys if key]
    if not keys:
        raise ConfigError(message=f"{source} has no key in it")
    return keys


def _checked(key: str) -> str:
    is_plain = key.isascii() and key.isprintable() and " " not in key
    if len(key) < MIN_KEY_CHARS or not is_plain:
        raise ConfigError(
            message=f"an API key must have {MIN_KEY_CHARS} or more printable ASCII characters and "
            f"no space; got one of {len(key)}. Make one with "
            '`python -c "import secrets; print(secrets.token_urlsafe(24))"`.'
        )
    return key


def presented_key(headers: Headers, subprotocols: Iterable[str]) -> str | None:
    """The key that a request brings along, from the first place that has one."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    if key := headers.get("xi-api-key"):
        return key
    for name in subprotocols:
        if name.startswith(KEY_SUBPROTOCOL):
            return unquote(name.removeprefix(KEY_SUBPROTOCOL))
    return None


class _HideKeys(logging.Filter):
    """At level debug the headers of every upgrade are logged; those that may hold a key are not."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple) and len(record.args) == 2:
            name, _ = record.args
            if str(name).lower() in _KEY_HEADERS:
                record.args = (name, "(hidden)")
        return True


_HIDE_KEYS = _HideKeys()

# ---------------------------------------------------------------------------- the gate


class Rules(NamedTuple):
    """`session_paths` are those whose POST holds a slot while it is answered; sockets always do."""

    keys: ApiKeys
    origins: frozenset[str]  # none: any
    max_sessions: int  # of one key, or without keys of one address; 0: no limit
    is_metrics_public: bool
    session_paths: frozenset[str]


def make_rules(config: ServerConfig, keys: ApiKeys, session_paths: Iterable[str]) -> Rules:
    if not keys and config.host not in _LOOPBACK:
        logger.warning("no API key is asked for: whoever reaches %s may speak", config.host)
    return Rules(
        keys=keys,
        origins=config.origins(),
        max_sessions=config.max_sessions_per_client,
        is_metrics_public=config.public_metrics,
        session_paths=frozenset(session_paths),
    )


def protect(app: Starlette, rules: Rules, errors: HttpErrors, metrics: Metrics) -> None:
    """Put the gate before every route; pages of listed origins may also read what it answers."""
    logging.getLogger("uvicorn.error").addFilter(_HIDE_KEYS)
    app.add_middleware(Gate, rules=rules, errors=errors, metrics=metrics)
    if rules.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=sorted(rules.origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["Retry-After"],
        )


def client_of(scope: MutableMapping[str, Any]) -> str:
    """Whoever the gate has let in: a name for its API key, or where there are none its address."""
    client: str = scope[_CLIENT_SCOPE]
    return client


def _owner_of(host: str) -> str:
    """Of an IPv6 address its /64, within which whoever has it may choose any."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return host
    if address.ipv4_mapped is not None:  # a socket that takes both
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address), 64), strict=False))


class Gate:
    """ASGI middleware. Event loop only."""

    def __init__(self, app: ASGIApp, rules: Rules, errors: HttpErrors, metrics: Metrics) -> None:
        self._app = app
        self._rules = rules
        self._errors = errors
        self._metrics = metrics
        self._num_sessions: Counter[str] = Counter()  # by client; those that have any

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or self._is_public(scope["path"]):
            await self._app(scope, receive, send)
            return
        is_session = self._is_session(scope)
        try:
            client = self._identify(scope)
            scope[_CLIENT_SCOPE] = client
            if is_session:
                self._take(client)
        except PlosiveError as error:
            self._metrics.refused.labels(error.code).inc()
            await self._refuse(error, scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            if is_session:
                self._leave(client)

    def _is_public(self, path: str) -> bool:
        is_page = path in _PUBLIC_PATHS or path.startswith(ASSETS_PATH)
        return is_page or (path == "/metrics" and self._rules.is_metrics_public)

    def _is_session(self, scope: Scope) -> bool:
        if scope["type"] == "websocket":
            return True
        return scope["method"] == "POST" and scope["path"] in self._rules.session_paths

    def _identify(self, scope: Scope) -> str:
        """Who this is. Raises AuthError."""
        headers = Headers(scope=scope)
        self._check_origin(headers.get("origin"))
        if not self._rules.keys:
            return _owner_of(scope["client"][0]) if scope.get("client") else ""
        key = presented_key(headers, scope.get("subprotocols", ()))
        if key is None:
            raise AuthError(
                "missing_api_key",
                'this server needs an API key: send it as "Authorization: Bearer KEY"',
            )
        client = self._rules.keys.find(key)
        if client is None:
            raise AuthError("invalid_api_key", "the API key is not one of this server's")
        return client

    def _check_origin(self, origin: str | None) -> None:
        allowed = self._rules.origins
        if allowed and origin is not None and origin.lower() not in allowed:
            message = f"pages of {origin[:200]!r} may not use this server"
            raise AuthError("origin_not_allowed", message)

    def _take(self, client: str) -> None:
        limit = self._rules.max_sessions
        if limit and self._num_sessions[client] >= limit:
            raise TooManySessions(f"this client has {limit} sessions, as many as it may have")
        self._num_sessions[client] += 1

    def _leave(self, client: str) -> None:
        self._num_sessions[client] -= 1
        if not self._num_sessions[client]:
            del self._num_sessions[client]

    async def _refuse(
        self, error: PlosiveError, scope: Scope, receive: Receive, send: Send
    ) -> None:
        response = self._errors.respond(scope["path"], error)
        if scope["type"] == "websocket":
            await WebSocket(scope, receive, send).send_denial_response(response)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DISCARD_S):
                await discard_body(receive, _MAX_DISCARDED_BYTES)
        await response(scope, receive, send)
