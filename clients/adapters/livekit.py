"""Plosive in a LiveKit agent: `pip install -e ".[livekit]"` in a clone.

from clients.adapters.livekit import TTS

session = AgentSession(stt=..., llm=..., tts=TTS(url="http://localhost:8765", voice="af_heart"))
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager, suppress
from typing import Any

from livekit.agents import (
    APIConnectionError,
    APIConnectOptions,
    APIError,
    APIStatusError,
    APITimeoutError,
    tts,
    utils,
)
from livekit.agents.types import DEFAULT_API_CONNECT_OPTIONS
from livekit.agents.voice.io import TimedString

from clients.adapters.shared_session import SharedSession
from clients.adapters.words import WordTimes
from clients.opening import ConnectOptions
from clients.reconnect import is_retryable
from clients.session import Session
from clients.speech import TextSource
from realtime.errors import ConnectionFailed, ConnectionLost, PlosiveError
from realtime.wire import AudioFormat, AudioPacket, TurnText


class TTS(tts.TTS):
    """LiveKit's TTS over one Plosive session.

    Every stream is a turn. Text is passed on as it is pushed, without a sentence tokenizer, because
    the server speaks the first clause while the rest is being written. A stream that is closed or
    cancelled early cancels its turn at once, on the open connection. The audio comes with the times
    of its words (`use_tts_aligned_transcript`).

    Args:
        url: the server, like "http://localhost:8765".
        voice: None is the server's default voice.
        sample_rate: of the audio, in Hz.
        lead_in_ms: silence before each stream's audio, where a receiver swallows the first word.
        options: of `clients.connect`: prompt, sampling, api_key, reconnect, ...

    Example:
        speech = TTS(url="http://localhost:8765", voice="af_heart")
        speech.prewarm()
        session = AgentSession(tts=speech, use_tts_aligned_transcript=True)
    """

    def __init__(
        self,
        *,
        url: str = "http://localhost:8765",
        voice: str | None = None,
        sample_rate: int = 24_000,
        lead_in_ms: int = 0,
        options: ConnectOptions | None = None,
    ) -> None:
        super().__init__(
            capabilities=tts.TTSCapabilities(streaming=True, aligned_transcript=True),
            sample_rate=sample_rate,
            num_channels=1,
        )
        format = AudioFormat(codec="pcm_s16le", sample_rate=sample_rate, lead_in_ms=lead_in_ms)
        all_options: ConnectOptions = {**(options or {}), "voice": voice, "format": format}
        self._shared = SharedSession(url, **all_options)
        self._new_voice: str | None = None
        self._model = "unknown"
        self._warming: asyncio.Task[None] | None = None

    @property
    def model(self) -> str:
        """The server's, once it is known."""
        return self._model

    @property
    def provider(self) -> str:
        return "Plosive"

    def prewarm(self) -> None:
        """Connect and have the voice prefilled, in the background."""
        if self._warming is None:
            self._warming = asyncio.create_task(self._warm())

    def update_options(self, *, voice: str) -> None:
        """Another voice, from the next stream on."""
        self._new_voice = voice

    def stream(
        self, *, conn_options: APIConnectOptions = DEFAULT_API_CONNECT_OPTIONS
    ) -> "SynthesizeStream":
        return SynthesizeStream(tts=self, conn_options=conn_options)

    def synthesize(
        self, text: str, *, conn_options: APIConnectOptions = DEFAULT_API_CONNECT_OPTIONS
    ) -> "ChunkedStream":
        return ChunkedStream(tts=self, input_text=text, conn_options=conn_options)

    async def aclose(self) -> None:
        """Close the session, and with it every stream."""
        if self._warming is not None:
            await utils.aio.cancel_and_wait(self._warming)
        await self._shared.close()

    async def session(self) -> Session:
        """The open session. Raises PlosiveError if there can be none."""
        if self._new_voice is not None:
            voice, self._new_voice = self._new_voice, None
            await self._shared.set_voice(voice)
        session = await self._shared.get()
        self._model = session.ready.model
        return session

    @property
    def is_open(self) -> bool:
        return self._shared.is_open

    async def _warm(self) -> None:
        with suppress(PlosiveError):  # the first stream meets it again, and reports it
            await self.session()


class SynthesizeStream(tts.SynthesizeStream):
    """One turn, of text that is still being written. Made by `TTS.stream`."""

    def __init__(self, *, tts: TTS, conn_options: APIConnectOptions) -> None:
        super().__init__(tts=tts, conn_options=conn_options)
        self._plosive = tts

    async def _run(self, output_emitter: tts.AudioEmitter) -> None:
        request_id = utils.shortuuid()
        _initialize(output_emitter, request_id, self._plosive.sample_rate, is_stream=True)
        with _livekit_errors():
            session = await _acquire(self, self._plosive)
            texts = self._texts()
            first = await anext(texts, None)
            if first is not None:
                output_emitter.start_segment(segment_id=request_id)
                await _speak(session, _chain(first, texts), output_emitter)
                output_emitter.end_segment()

    async def _texts(self) -> AsyncIterator[str]:
        async for text in self._input_ch:
            if isinstance(text, str):  # else a flush, which only ever precedes the end
                self._mark_started()
                yield text


class ChunkedStream(tts.ChunkedStream):
    """One turn, of a complete text. Made by `TTS.synthesize`."""

    def __init__(self, *, tts: TTS, input_text: str, conn_options: APIConnectOptions) -> None:
        super().__init__(tts=tts, input_text=input_text, conn_options=conn_options)
        self._plosive = tts

    async def _run(self, output_emitter: tts.AudioEmitter) -> None:
        rate = self._plosive.sample_rate
        _initialize(output_emitter, utils.shortuuid(), rate, is_stream=False)
        with _livekit_errors():
            session = await _acquire(self, self._plosive)
            await _speak(session, self._input_text, output_emitter)


def _initialize(
    output_emitter: tts.AudioEmitter, request_id: str, sample_rate: int, *, is_stream: bool
) -> None:
    output_emitter.initialize(
        request_id=request_id,
        sample_rate=sample_rate,
        num_channels=1,
        mime_type="audio/pcm",
        stream=is_stream,
    )


async def _acquire(stream: tts.SynthesizeStream | tts.ChunkedStream, speech: TTS) -> Session:
    started_s = time.perf_counter()
    stream._connection_reused = speech.is_open
    try:
        async with asyncio.timeout(stream._conn_options.timeout):
            session = await speech.session()
    except TimeoutError:
        raise APITimeoutError from None
    stream._acquire_time = time.perf_counter() - started_s
    return session


async def _speak(session: Session, text: TextSource, output_emitter: tts.AudioEmitter) -> None:
    words = WordTimes(session.format.lead_in_ms)
    async with aclosing(session.say(text).events()) as events:
        async for event in events:
            match event:
                case AudioPacket(payload=payload) if payload:
                    output_emitter.push(payload)
                case TurnText():
                    timed = [TimedString(*word) for word in words.words(event)]
                    output_emitter.push_timed_transcript(timed)


async def _chain(first: str, rest: AsyncIterator[str]) -> AsyncIterator[str]:
    yield first
    async for text in rest:
        yield text


@contextmanager
def _livekit_errors() -> Iterator[None]:
    try:
        yield
    except PlosiveError as error:
        raise _api_error(error) from error


def _api_error(error: PlosiveError) -> Any:
    """As LiveKit knows errors; it tries the retryable ones again, if nothing was heard yet."""
    message = str(error)
    match error:
        case ConnectionFailed(status=int(status)):
            return APIStatusError(message, status_code=status, retryable=is_retryable(error))
        case ConnectionFailed() | ConnectionLost():
            return APIConnectionError(message, retryable=is_retryable(error))
    return APIError(message, retryable=False)
