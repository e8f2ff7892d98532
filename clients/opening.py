"""How a session is opened, and all that it can be told."""

import asyncio
import ssl
import time
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, TypedDict

from clients.address import key_headers, websocket_url, without_password
from clients.checks import check_ssl_context, expect, is_from, valid_message
from clients.link import Link, open_link
from clients.reconnect import Reconnect
from clients.session import OnEvent, Session
from realtime.errors import ConnectionFailed, SessionError
from realtime.wire import AudioFormat, Sampling, SessionReady, SessionStart

_OPUS_24_KHZ = AudioFormat()
_MODEL_SAMPLING = Sampling()
NEVER = Reconnect(max_attempts=0)


class ConnectOptions(TypedDict, total=False):
    """Of `connect`, for what passes them on."""

    api_key: str | None
    voice: str | None
    prompt: str
    format: AudioFormat
    sampling: Sampling
    max_lead_ms: int | None
    open_timeout_s: float
    reconnect: Reconnect
    ssl_context: ssl.SSLContext | None


class Opening:
    """What `connect` gives, to be entered or awaited."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._started_s = time.perf_counter()
        self._is_used = False

    def __await__(self) -> Generator[Any, None, Session]:
        return self.__aenter__().__await__()

    async def __aenter__(self) -> Session:
        if self._is_used:
            why = "what connect() gave opens one session; call connect() again for another"
            raise SessionError("opened_already", why)
        self._is_used = True
        await self._session.open(self._started_s)
        return self._session

    async def __aexit__(self, *_: object) -> None:
        await self._session.drop()

    if not TYPE_CHECKING:  # a type checker sees by itself that it is no session

        def __getattr__(self, name: str) -> None:
            how = "async with connect(url) as session: ..., or session = await connect(url)"
            raise AttributeError(f"a session is open, and has {name!r}, only inside of {how}")


def connect(  # noqa: PLR0913 - what a session can be told
    url: str,
    *,
    api_key: str | None = None,
    voice: str | None = None,
    prompt: str = "",
    format: AudioFormat = _OPUS_24_KHZ,
    sampling: Sampling = _MODEL_SAMPLING,
    max_lead_ms: int | None = None,
    open_timeout_s: float = 30.0,
    reconnect: Reconnect = NEVER,
    ssl_context: ssl.SSLContext | None = None,
) -> Opening:
    """Open a session; the block begins when voice and prompt are prefilled.

    `url` is the server ("http://host:8765", "ws://host:8765") or the full address of its endpoint.
    `api_key` is for servers that need one; None is that of PLOSIVE_API_KEY in the environment, if it
    is there, and "" is none. `ssl_context` is for an https server whose certificate this machine does
    not trust (or name the authority's file in SSL_CERT_FILE). `voice` None is the server's default
    voice. Leaving the block closes the socket; a session that was awaited instead,
    `session = await connect(url)`, is closed by `close`, or by a block of its own.

    With `reconnect`, a connection that is lost is opened again in the background, with the voice
    and the prompt in force; the turns that were under way fail with ConnectionLost, which says how
    far they had come, and later ones wait until it is open. What the model remembers of the
    dialogue goes with the connection. The first opening is tried again with `also_first` only, and
    where the server answers that it is busy, as one does that is still loading its model.

    Example:
        async with connect("http://localhost:8765", voice="af_heart") as session:
            async for packet in session.say("Hello there."):
                player.feed(packet)

    Raises:
        ConnectionFailed: `url` is no address, `api_key` cannot be sent, nobody answers, or the upgrade
            was refused: `status`, `retry_after_s`.
        CapacityError: it was because all slots are taken (`at_capacity`), or because this client has
            as many as it may (`too_many_sessions`). It is a ConnectionFailed as well.
        VoiceError: no such voice.
        SessionError: `invalid_option`, before anything is opened; `opened_already`.
        PlosiveError: the server refused the session otherwise.
    """
    address, headers = websocket_url(url), key_headers(api_key)
    expect(is_from(0, open_timeout_s), "open_timeout_s", open_timeout_s, "seconds from 0 on")
    how = "connect(url, reconnect=Reconnect())"
    expect(isinstance(reconnect, Reconnect), "reconnect", reconnect, f"a Reconnect: {how}")
    check_ssl_context(ssl_context)
    with valid_message():
        start = SessionStart(
            voice=voice, prompt=prompt, format=format, sampling=sampling, max_lead_ms=max_lead_ms
        )

    async def open_in_time(start: SessionStart, on_event: OnEvent) -> tuple[Link, SessionReady]:
        try:
            async with asyncio.timeout(open_timeout_s):
                return await open_link(address, headers, start, on_event, ssl_context)
        except TimeoutError:
            raise ConnectionFailed(
                f"{without_password(url)} did not get a session ready within {open_timeout_s:g} s"
            ) from None

    return Opening(Session(open_in_time, start, reconnect))
