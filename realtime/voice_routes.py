"""`/v1/voices`: list, add from an uploaded clip, delete."""

import asyncio
from collections.abc import MutableMapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.datastructures import FormData, UploadFile

from realtime.config import ServerConfig
from realtime.errors import CapacityError, VoiceError, shorten
from realtime.pingpong.api import Engine
from realtime.pingpong.messages import VoicePrompt
from realtime.slow_bodies import discard_body
from realtime.voices import VoiceStore, clip_warnings

PATH = "/v1/voices"
_MAX_WAITING = 4  # uploads that are being read or wait for the one that is encoded
_FORM_BYTES = 64 * 1024  # of the form around the clip
_MAX_DISCARDED_BYTES = 256 * 1024 * 1024


class VoiceRoutes:
    """Clips are encoded one at a time on a thread of their own; more than a few are refused."""

    def __init__(self, engine: Engine, config: ServerConfig, voices: VoiceStore) -> None:
        self._engine = engine
        self._config = config
        self._voices = voices
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="plosive-voices")
        self._num_uploads = 0
        self.router = APIRouter()
        self.router.add_api_route(PATH, self._list, methods=["GET"])
        self.router.add_api_route(PATH, self._add, methods=["POST"], status_code=201)
        self.router.add_api_route(
            PATH + "/{name}", self._remove, methods=["DELETE"], status_code=204
        )

    def close(self) -> None:
        self._worker.shutdown(wait=True, cancel_futures=True)

    async def _list(self) -> dict[str, object]:
        return {
            "default": self._engine.info.default_voice,
            "voices": [self._describe(info.as_dict()) for info in self._voices.infos()],
        }

    async def _add(self, request: Request) -> dict[str, object]:
        if self._num_uploads >= _MAX_WAITING:
            raise CapacityError(f"{_MAX_WAITING} clips are waiting already", retry_after_s=2.0)
        self._num_uploads += 1
        try:
            limited = await self._limited(request)
            async with limited.form(max_files=1, max_fields=8) as form:
                name, text, clip = await self._read_form(form)
            return await self._encode(name, text, clip)
        finally:
            self._num_uploads -= 1

    async def _remove(self, name: str) -> Response:
        await asyncio.to_thread(self._voices.remove, name)
        return Response(status_code=204)

    async def _encode(self, name: str, text: str, clip: bytes) -> dict[str, object]:
        def work() -> dict[str, object]:
            codes = self._engine.encode_voice(clip, self._config.max_clip_s)
            warnings = clip_warnings(text, codes.shape[1] / self._engine.info.frame_rate_hz)
            self._engine.check_voice(VoicePrompt(name, text, codes))
            info = self._voices.add(name, text, codes)
            return self._describe(info.as_dict()) | {"warnings": warnings}

        return await asyncio.get_running_loop().run_in_executor(self._worker, work)

    async def _read_form(self, form: FormData) -> tuple[str, str, bytes]:
        name, text, clip = form.get("name"), form.get("text"), form.get("file")
        if not isinstance(name, str) or not isinstance(text, str):
            got = shorten(", ".join(form))
            why = f"got the form fields {got}, expected name, text and file"
            raise VoiceError("invalid_voice", why)
        if not isinstance(clip, UploadFile):
            if clip is None:
                got = f"got the form fields {shorten(', '.join(form))} without it"
            else:
                got = f"got {shorten(clip)}"
            why = f"file: {got}, expected the clip as a file"
            raise VoiceError("invalid_clip", why, param="file")
        self._voices.check_addable(name, text)
        return name, text, await clip.read()

    async def _limited(self, request: Request) -> Request:
        """The same request, whose body ends in an error when it is longer than a clip may be."""
        max_bytes = self._config.max_clip_bytes
        error = VoiceError(
            "clip_too_large", f"the limit of an upload is {max_bytes:,} bytes", param="file"
        )
        declared = request.headers.get("content-length", "0")
        if declared.isdigit() and int(declared) > max_bytes + _FORM_BYTES:
            await discard_body(request.receive, _MAX_DISCARDED_BYTES)
            raise error
        num_bytes = 0

        async def receive() -> MutableMapping[str, Any]:
            nonlocal num_bytes
            message = await request.receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > max_bytes + _FORM_BYTES:
                raise error
            return message

        return Request(request.scope, receive)

    def _describe(self, info: dict[str, object]) -> dict[str, object]:
        num_frames = info["num_frames"]
        assert isinstance(num_frames, int)
        return info | {"duration_s": round(num_frames / self._engine.info.frame_rate_hz, 3)}
