"""The Fish Audio API: `POST /v1/tts`, `/v1/tts/live` and `/model`, for clients that have its URL changed.

Every error body is exactly `{"status", "message"}`: a client of theirs refuses anything else.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from functools import partial

from fastapi import APIRouter, Request, Response, WebSocket

from realtime.adapters.fish_alignment import with_alignment
from realtime.adapters.fish_live import LiveSocket
from realtime.adapters.fish_models import Models
from realtime.adapters.fish_request import TtsRequest, parse_body
from realtime.adapters.fish_voices import Voices
from realtime.adapters.local import open_session
from realtime.adapters.speech import (
    MAX_LEAD_MS,
    BodyReader,
    SpeechEncoder,
    SpeechResponse,
    audio_alone,
    check_speakable,
    session_pcm,
    speak,
)
from realtime.auth import client_of
from realtime.config import ServerConfig
from realtime.connection import MAX_SIZE_EXTENSION
from realtime.errors import CapacityError, PlosiveError
from realtime.http_errors import HttpErrors
from realtime.hub import Hub
from realtime.pingpong.api import Engine
from realtime.pingpong.messages import SlotRef
from realtime.voices import VoiceStore
from realtime.wire import SessionStart, TurnText

TTS_PATH = "/v1/tts"
STREAM_PATH = "/v1/tts/stream/with-timestamp"
LIVE_PATH = "/v1/tts/live"
TIMESTAMPS_PATH = "/v1/tts/live/with-timestamp"
MODEL_PATH = "/model"
_BODY_BYTES = 1024 * 1024  # of a request around its clips, which base64 makes a third longer
PATHS = (TTS_PATH, MODEL_PATH)


def error_shape(status: int, error: PlosiveError) -> object:
    return {"status": status, "message": error.message}


class Fish:
    """Mount `router`; `close` when the server stops."""

    def __init__(
        self,
        hub: Hub,
        engine: Engine,
        config: ServerConfig,
        store: VoiceStore,
        errors: HttpErrors,
    ) -> None:
        self._hub = hub
        self._config = config
        self._errors = errors
        self._pcm = session_pcm(engine.info.sample_rate)
        self._voices = Voices(engine, config, store)
        self._body = BodyReader(_BODY_BYTES + config.max_clip_bytes * 4 // 3)
        models = Models(store, self._voices, config.resolved_voices_dir() / "fish", self._body)
        self.router = APIRouter()
        for path, endpoint, methods, status in (
            (TTS_PATH, self._speak, ["POST"], 200),
            (STREAM_PATH, self._speak_with_timestamps, ["POST"], 200),
            (MODEL_PATH, models.search, ["GET"], 200),
            (MODEL_PATH, models.create, ["POST"], 201),
            (MODEL_PATH + "/{model_id:path}", models.get, ["GET"], 200),
            (MODEL_PATH + "/{model_id:path}", models.update, ["PATCH"], 200),
            (MODEL_PATH + "/{model_id:path}", models.delete, ["DELETE"], 204),
        ):
            self.router.add_api_route(
                path, endpoint, methods=methods, status_code=status, response_model=None
            )
        self.router.add_api_websocket_route(LIVE_PATH, self._live)
        self.router.add_api_websocket_route(TIMESTAMPS_PATH, self._live_with_timestamps)

    def close(self) -> None:
        self._voices.close()

    # ------------------------------------------------------------------ POST

    async def _speak(self, request: Request) -> Response:
        _, encoder, pieces = await self._begin(request)
        return self._response(audio_alone(pieces), encoder.content_type)

    async def _speak_with_timestamps(self, request: Request) -> Response:
        tts, _, pieces = await self._begin(request)
        events = with_alignment(pieces, tts.prosody.speed)
        late_event = partial(self._errors.event, STREAM_PATH)
        return self._response(events, "text/event-stream", late_event)

    async def _begin(
        self, request: Request
    ) -> tuple[TtsRequest, SpeechEncoder, AsyncGenerator[bytes | TurnText, None]]:
        content_type = request.headers.get("content-type", "")
        body = await self._body.read(request)
        tts = await asyncio.to_thread(parse_body, content_type, body)  # clips make it long
        check_speakable(tts.text)
        start = SessionStart(
            voice=await self._voices.choose(tts),
            format=self._pcm,
            sampling=tts.sampling,
            max_lead_ms=MAX_LEAD_MS,
        )
        encoder = tts.make_encoder(self._pcm.sample_rate)
        client = client_of(request.scope)
        pieces = speak(
            self._hub,
            start,
            tts.text,
            encoder,
            client,
            find_voice=self._voices.find,
            num_voice_chars=tts.num_reference_chars,
        )
        return tts, encoder, pieces

    def _response(
        self,
        chunks: AsyncGenerator[bytes, None],
        content_type: str,
        late_event: Callable[[PlosiveError], bytes] | None = None,
    ) -> SpeechResponse:
        explain = partial(self._errors.respond, TTS_PATH)
        stall_s = self._config.write_stall_s
        return SpeechResponse(chunks, content_type, explain, stall_s=stall_s, late_event=late_event)

    # ------------------------------------------------------------------ /v1/tts/live

    async def _live(self, websocket: WebSocket) -> None:
        await self._serve_live(websocket, with_timestamps=False)

    async def _live_with_timestamps(self, websocket: WebSocket) -> None:
        await self._serve_live(websocket, with_timestamps=True)

    async def _serve_live(self, websocket: WebSocket, *, with_timestamps: bool) -> None:
        slot = await self._admit(websocket)
        if slot is None:
            return
        client = client_of(websocket.scope)
        async with open_session(
            self._hub, slot=slot, client=client, find_voice=self._voices.find
        ) as session:
            self._allow_clips(websocket)
            await websocket.accept()
            live = LiveSocket(
                websocket,
                session,
                self._voices,
                charge=partial(self._hub.charge_text, client),
                pcm=self._pcm,
                lead_ms=self._config.max_lead_ms,
                stall_s=self._config.write_stall_s,
                with_timestamps=with_timestamps,
            )
            await live.run()

    def _allow_clips(self, websocket: WebSocket) -> None:
        """References come in one message with `start`."""
        set_max_size = websocket.scope["extensions"].get(MAX_SIZE_EXTENSION)
        if set_max_size is not None:
            set_max_size(_BODY_BYTES + self._config.max_clip_bytes)

    async def _admit(self, websocket: WebSocket) -> SlotRef | None:
        """Refused before the upgrade: a client that is let in and dropped would come back at once."""
        try:
            return self._hub.admit()
        except CapacityError as error:
            await websocket.send_denial_response(self._errors.respond(LIVE_PATH, error))
            return None
