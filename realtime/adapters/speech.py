"""One text spoken as one HTTP response: session, encoder, stream, errors and a client that leaves."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import numpy as np
from fastapi import Request, Response
from numpy.typing import NDArray
from starlette.types import Receive, Scope, Send

from realtime.adapters.local import open_session
from realtime.adapters.media import MediaEncoder
from realtime.adapters.media_prosody import Prosody
from realtime.connection import CUT_EXTENSION
from realtime.errors import CapacityError, PlosiveError, SessionError, shorten
from realtime.hub import Hub
from realtime.pingpong.messages import VoicePrompt
from realtime.wire import (
    MAX_TURN_CHARS,
    PCM_SAMPLE_RATES_HZ,
    AudioFormat,
    AudioPacket,
    SessionStart,
    TurnDone,
    TurnText,
)

MAX_LEAD_MS = 600_000  # as far ahead of a listener as the server allows: a file is wanted soon
_MAX_BATCH = 16  # packets encoded at a time, when they come faster than they are taken
_LARGE_BODY_BYTES = 256 * 1024
_MAX_LARGE_BODIES = 4
_MAX_DISCARDED_BYTES = 64 * 1024 * 1024
_TURN_ID = 1

logger = logging.getLogger(__name__)


class SpeechEncoder:
    """Speed and loudness, then the format."""

    def __init__(self, media: MediaEncoder, prosody: Prosody) -> None:
        self._media = media
        self._prosody = prosody
        self.content_type = media.content_type

    def push(self, pcm: NDArray[np.float32]) -> bytes:
        return self._media.push(self._prosody.push(pcm))

    def finish(self) -> bytes:
        return self._media.push(self._prosody.finish()) + self._media.finish()


def session_pcm(codec_rate: int) -> AudioFormat:
    """The format to ask a session for: the codec's own rate wherever there is such a format."""
    rate = codec_rate if codec_rate in PCM_SAMPLE_RATES_HZ else max(PCM_SAMPLE_RATES_HZ)
    return AudioFormat(codec="pcm_s16le", sample_rate=rate)


async def speak(
    hub: Hub,
    start: SessionStart,
    text: str,
    encoder: SpeechEncoder,
    client: str,
    find_voice: Callable[[str], VoicePrompt] | None = None,
    num_voice_chars: int = 0,
) -> AsyncGenerator[bytes | TurnText, None]:
    """The encoded speech, piece by piece, and which text has been spoken by the end of those so far.

    Args:
        start: must ask for PCM at the encoder's input rate.
        client: who is charged for the text, the prompt and `num_voice_chars`.
        num_voice_chars: of text that came with the voice's clips.

    Raises:
        PlosiveError: before the first piece, for everything that can be known by then.
    """
    if len(text) > MAX_TURN_CHARS:
        message = f"got {len(text):,} characters, the limit is {MAX_TURN_CHARS:,}"
        raise SessionError("turn_too_long", message, param="text")
    async with open_session(hub, start, find_voice=find_voice) as session:
        # Not before: what is refused for want of a slot costs nothing.
        hub.charge_text(client, len(text) + len(start.prompt) + num_voice_chars)
        await session.append(_TURN_ID, text)
        await session.commit(_TURN_ID)
        payloads: list[bytes] = []
        async for item in session:
            is_due = not session.num_waiting or not isinstance(item, AudioPacket)
            if isinstance(item, AudioPacket):
                payloads.append(item.payload)
            if payloads and (is_due or len(payloads) == _MAX_BATCH):
                pcm = decode_pcm(payloads)
                payloads = []
                if data := await asyncio.to_thread(encoder.push, pcm):
                    yield data
            if isinstance(item, TurnText):
                yield item
            if isinstance(item, TurnDone):
                if not item.metrics.num_frames:  # a file without a sound is no answer
                    raise _nothing_to_speak(text)
                break
    if data := await asyncio.to_thread(encoder.finish):
        yield data


def check_speakable(text: str) -> None:
    """Raises SessionError `nothing_to_speak` for a text of blanks; `speak` for one of signs alone."""
    if not text.strip():
        raise _nothing_to_speak(text)


def _nothing_to_speak(text: str) -> SessionError:
    message = f"there is nothing that can be spoken in {shorten(text)}; expected words"
    return SessionError("nothing_to_speak", message, param="text")


async def audio_alone(
    pieces: AsyncGenerator[bytes | TurnText, None],
) -> AsyncGenerator[bytes, None]:
    async with aclosing(pieces):
        async for piece in pieces:
            if isinstance(piece, bytes):
                yield piece


def decode_pcm(payloads: list[bytes]) -> NDArray[np.float32]:
    """The samples of `pcm_s16le` packets."""
    return np.frombuffer(b"".join(payloads), "<i2").astype(np.float32) / 32767.0


class SpeechResponse(Response):
    """Streams `chunks`. An error before the first one is the whole response, as `explain` words it.
    After it, a stream of events ends with one more, `late_event(error)`; any other is cut, so that
    half a file is not taken for a whole one. A client that leaves, or takes nothing for `stall_s`,
    stops the speech at once."""

    def __init__(
        self,
        chunks: AsyncGenerator[bytes, None],
        content_type: str,
        explain: Callable[[PlosiveError], Response],
        *,
        stall_s: float,
        late_event: Callable[[PlosiveError], bytes] | None = None,
    ) -> None:
        super().__init__(None, media_type=content_type)
        del self.headers["content-length"]
        self._chunks = chunks
        self._explain = explain
        self._stall_s = stall_s
        self._late_event = late_event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        speaking = asyncio.create_task(self._stream(scope, receive, send))
        leaving = asyncio.create_task(_until_disconnected(receive))
        tasks = (speaking, leaving)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        if not speaking.cancelled():
            speaking.result()

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._chunks) as chunks:
            try:
                first = await anext(chunks, b"")
            except PlosiveError as error:
                await self._explain(error)(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                await self._send_all(send, first, chunks)
            except (PlosiveError, TimeoutError) as error:
                why = error if isinstance(error, PlosiveError) else "its client takes nothing"
                logger.warning("a response is cut short: %s", why)
                if cut := scope.get("extensions", {}).get(CUT_EXTENSION):
                    cut()
                return
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_all(
        self, send: Send, first: bytes, chunks: AsyncGenerator[bytes, None]
    ) -> None:
        try:
            await self._send(send, first)
            async for chunk in chunks:
                await self._send(send, chunk)
        except PlosiveError as error:
            if self._late_event is None:
                raise
            logger.warning("a stream of events ends with an error: %s", error)
            await self._send(send, self._late_event(error))

    async def _send(self, send: Send, chunk: bytes) -> None:
        async with asyncio.timeout(self._stall_s):
            await send({"type": "http.response.body", "body": chunk, "more_body": True})


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class BodyReader:
    """Reads request bodies of at most `max_bytes`, and only a few large ones at a time."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_large = 0

    async def read(self, request: Request) -> bytes:
        """Raises PlosiveError `body_too_large`, CapacityError."""
        body = bytearray()
        num_bytes, is_large = 0, False
        try:
            async for chunk in request.stream():
                num_bytes += len(chunk)
                if num_bytes > _LARGE_BODY_BYTES and not is_large:
                    is_large = self._take_large()
                if num_bytes <= self._max_bytes:
                    body += chunk
                elif num_bytes > _MAX_DISCARDED_BYTES:  # or its sender would hear no answer
                    break
        finally:
            self._num_large -= is_large
        if num_bytes > self._max_bytes:
            message = f"the limit of a request is {self._max_bytes:,} bytes"
            raise PlosiveError("body_too_large", message)
        return bytes(body)

    def _take_large(self) -> bool:
        if self._num_large >= _MAX_LARGE_BODIES:
            message = f"{_MAX_LARGE_BODIES} large requests are being read already"
            raise CapacityError(message, retry_after_s=2.0)
        self._num_large += 1
        return True
