"""OpenAI's speech API: `/v1/audio/speech`, `/v1/audio/voices`, `/v1/models`.

What differs from OpenAI's own:
- `model` is the served model's name, or one of OpenAI's (`tts-1`, `tts-1-hd`, `gpt-4o-mini-tts` and
  its dated versions), which stand for it.
- `voice` is one of the server's. OpenAI's names (`alloy`, ...) are its default voice, unless a voice
  of that name was added. A voice object gives its name as `id`.
- `instructions` are the prompt of a model that takes one, and are ignored by one that does not.
- `input` may have 60,000 characters instead of 4,096. One in which nothing can be spoken is refused.
- `pcm` and `wav` are 24 kHz, 16 bits, mono; the others have the model's own rate where they can.
- `usage` counts characters as input tokens and the codec's frames as output tokens.
- A stream of events that fails ends with `event: error` and an error body, which OpenAI's clients raise.
"""

import base64
import json
import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Annotated, Literal

import numpy as np
from fastapi import APIRouter, Request, Response
from numpy.typing import NDArray
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from realtime.adapters.media import MediaEncoder, default_rate
from realtime.adapters.media_prosody import SPEEDS, Prosody
from realtime.adapters.speech import (
    MAX_LEAD_MS,
    BodyReader,
    SpeechEncoder,
    SpeechResponse,
    audio_alone,
    check_speakable,
    speak,
)
from realtime.auth import client_of
from realtime.config import ServerConfig
from realtime.errors import PlosiveError, VoiceError, fault
from realtime.http_errors import HttpErrors
from realtime.hub import Hub
from realtime.pingpong.api import EngineInfo
from realtime.voices import VoiceStore
from realtime.wire import (
    MAX_PROMPT_CHARS,
    MAX_TURN_CHARS,
    PCM_SAMPLE_RATES_HZ,
    AudioFormat,
    SessionStart,
)

SPEECH_PATH = "/v1/audio/speech"
PATHS = ("/v1/audio/", "/v1/models")
OPENAI_MODELS = ("tts-1", "tts-1-hd", "gpt-4o-mini-tts")
OPENAI_VOICES = (
    *("alloy", "ash", "ballad", "cedar", "coral", "echo", "fable"),
    *("marin", "nova", "onyx", "sage", "shimmer", "verse"),
)
_PCM_RATE = 24_000
_MAX_BODY_BYTES = 1024 * 1024


# ---------------------------------------------------------------------------- errors

_PARAMS = {"text": "input", "prompt": "instructions", "format": "response_format"}


def error_shape(status: int, error: PlosiveError) -> object:
    """`{"error": {"message", "type", "param", "code"}}`, in OpenAI's words for fields and types."""
    if status == 429:
        kind = "rate_limit_error"
    else:
        kind = "server_error" if status >= 500 else "invalid_request_error"
    param = _PARAMS.get(error.param, error.param) if error.param else None
    content = {"message": error.message, "type": kind, "param": param, "code": error.code}
    return {"error": content}


class RequestError(PlosiveError):
    default_code = "invalid_value"


_CODES = {
    "missing": "missing_required_parameter",
    "string_too_long": "string_above_max_length",
    "string_too_short": "string_below_min_length",
    "json_invalid": "invalid_json",
}


def _request_error(error: ValidationError) -> RequestError:
    first = error.errors(include_url=False, include_context=False)[0]
    param = str(first["loc"][0]) if first["loc"] else None
    code = _CODES.get(first["type"])
    return RequestError(code, f"{param or 'body'}: {fault(first)}", param=param)


# ---------------------------------------------------------------------------- the request


def _voice_name(voice: object) -> object:
    return voice["id"] if isinstance(voice, dict) and "id" in voice else voice


class SpeechRequest(BaseModel):
    """Unknown fields are ignored."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    model: str
    input: str = Field(min_length=1, max_length=MAX_TURN_CHARS)
    voice: Annotated[str, BeforeValidator(_voice_name)]
    instructions: str | None = Field(default=None, max_length=MAX_PROMPT_CHARS)
    response_format: Literal["mp3", "opus", "aac", "flac", "wav", "pcm"] | None = None
    speed: Annotated[float, Field(ge=SPEEDS[0], le=SPEEDS[1])] | None = None
    stream_format: Literal["audio", "sse"] | None = None


class _CountingEncoder(SpeechEncoder):
    """Counts what the model spoke."""

    num_samples = 0

    def push(self, pcm: NDArray[np.float32]) -> bytes:
        self.num_samples += len(pcm)
        return super().push(pcm)


# ---------------------------------------------------------------------------- the routes


class OpenAiRoutes:
    def __init__(
        self,
        hub: Hub,
        info: EngineInfo,
        config: ServerConfig,
        voices: VoiceStore,
        errors: HttpErrors,
    ) -> None:
        self._hub = hub
        self._info = info
        self._config = config
        self._voices = voices
        self._errors = errors
        self._body = BodyReader(_MAX_BODY_BYTES)
        self.router = APIRouter()
        self.router.add_api_route(SPEECH_PATH, self._speech, methods=["POST"])
        self.router.add_api_route("/v1/audio/voices", self._list_voices, methods=["GET"])
        self.router.add_api_route("/v1/models", self._list_models, methods=["GET"])
        self.router.add_api_route("/v1/models/{name:path}", self._model, methods=["GET"])

    async def _speech(self, request: Request) -> Response:
        _check_is_json(request)
        asked = _parse(await self._body.read(request))
        check_speakable(asked.input)
        self._check_model(asked.model)
        format = asked.response_format or "mp3"
        rate = self._rate(format)
        start = SessionStart(
            voice=self._voice(asked.voice),
            prompt=(asked.instructions or "") if self._info.has_prompt else "",
            format=AudioFormat(codec="pcm_s16le", sample_rate=rate),
            max_lead_ms=MAX_LEAD_MS,
        )
        encoder = _CountingEncoder(MediaEncoder(format, rate), Prosody(rate, asked.speed or 1.0))
        pieces = speak(self._hub, start, asked.input, encoder, client_of(request.scope))
        chunks = audio_alone(pieces)
        content_type, late_event = encoder.content_type, None
        if asked.stream_format == "sse":
            chunks = self._events(chunks, encoder, rate, len(asked.input))
            content_type = "text/event-stream"
            late_event = partial(self._errors.event, SPEECH_PATH)
        return SpeechResponse(
            chunks,
            content_type,
            partial(self._errors.respond, SPEECH_PATH),
            stall_s=self._config.write_stall_s,
            late_event=late_event,
        )

    async def _events(
        self,
        chunks: AsyncGenerator[bytes, None],
        encoder: _CountingEncoder,
        rate: int,
        num_chars: int,
    ) -> AsyncGenerator[bytes, None]:
        async with aclosing(chunks):
            async for chunk in chunks:
                audio = base64.b64encode(chunk).decode()
                yield _event({"type": "speech.audio.delta", "audio": audio})
        num_frames = math.ceil(encoder.num_samples / rate * self._info.frame_rate_hz - 1e-6)
        usage = {
            "input_tokens": num_chars,
            "output_tokens": num_frames,
            "total_tokens": num_chars + num_frames,
        }
        yield _event({"type": "speech.audio.done", "usage": usage})

    async def _list_voices(self) -> dict[str, object]:
        voices = [{"id": info.name, "name": info.name} for info in self._voices.infos()]
        return {"object": "list", "voices": voices, "default": self._info.default_voice}

    async def _list_models(self) -> dict[str, object]:
        return {"object": "list", "data": [self._describe(self._info.model_name)]}

    async def _model(self, name: str) -> dict[str, object]:
        self._check_model(name)
        return self._describe(name)

    def _describe(self, name: str) -> dict[str, object]:
        return {"id": name, "object": "model", "created": 0, "owned_by": "plosive"}

    def _check_model(self, name: str) -> None:
        served = self._info.model_name
        is_known = name in (served, *OPENAI_MODELS) or name.startswith("gpt-4o-mini-tts-")
        if not is_known:
            valid = ", ".join((served, *OPENAI_MODELS))
            message = f"there is no model {name[:80]!r}; valid: {valid}"
            raise RequestError("model_not_found", message, param="model")

    def _voice(self, name: str) -> str | None:
        """None is the default voice."""
        try:
            return self._voices.get(name).name
        except VoiceError as error:
            if name in OPENAI_VOICES:
                return None
            raise RequestError("invalid_voice", error.message, param="voice") from error

    def _rate(self, format: str) -> int:
        if format in ("pcm", "wav"):
            return _PCM_RATE
        rate = default_rate(format, self._info.sample_rate)
        return rate if rate in PCM_SAMPLE_RATES_HZ else 48_000


def _check_is_json(request: Request) -> None:
    content_type = request.headers.get("content-type", "application/json")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        message = f"got a body of type {content_type[:80]!r}, expected application/json"
        raise RequestError("unsupported_media_type", message)


def _parse(body: bytes) -> SpeechRequest:
    try:
        return SpeechRequest.model_validate_json(body)
    except ValidationError as error:
        raise _request_error(error) from error


def _event(content: dict[str, object]) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"
