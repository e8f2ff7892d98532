"""The voice of a Fish request: stored, or from reference clips that come with it.

Clips are encoded on a thread of their own, one request at a time, and kept by content.
"""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from realtime.adapters.fish_request import Reference, TtsRequest
from realtime.config import ServerConfig
from realtime.errors import CapacityError, VoiceError
from realtime.pingpong.api import Engine
from realtime.pingpong.messages import VoicePrompt
from realtime.voices import MAX_TEXT_CHARS, VoiceStore

_MAX_KEPT = 64  # voices; their codes are a few kilobytes each
_MAX_WAITING = 4  # requests whose clips are encoded or wait for that


class Voices:
    """One per server. `find` is for sessions; it also knows what `choose` has returned lately."""

    def __init__(self, engine: Engine, config: ServerConfig, store: VoiceStore) -> None:
        self._engine = engine
        self._config = config
        self._store = store
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="plosive-references")
        self._kept: OrderedDict[str, VoicePrompt] = OrderedDict()
        self._num_waiting = 0

    def close(self) -> None:
        self._worker.shutdown(wait=True, cancel_futures=True)

    def find(self, name: str) -> VoicePrompt:
        """Raises VoiceError `voice_not_found`."""
        return self._kept.get(name) or self._store.get(name)

    async def choose(self, request: TtsRequest) -> str:
        """The name of the request's voice: `reference_id`, or else its clips, or else the default.

        Raises:
            VoiceError: no such voice, or a clip that cannot be used.
            CapacityError: the clips of several requests wait already.
        """
        if request.reference_id or not request.references:
            return self.find(request.reference_id or self._engine.info.default_voice).name
        name = await asyncio.to_thread(_name, request.references)
        if name not in self._kept:
            voice = await self.encode(name, request.references)
            self._kept.setdefault(name, voice)  # the same object each time: its prefix is cached
        self._kept.move_to_end(name)
        while len(self._kept) > _MAX_KEPT:
            self._kept.popitem(last=False)
        return name

    async def encode(self, name: str, references: Sequence[Reference]) -> VoicePrompt:
        """All clips as one voice. Raises what `choose` does."""
        for reference in references:
            self._check(reference)
        if self._num_waiting >= _MAX_WAITING:
            raise CapacityError(f"{_MAX_WAITING} clips are waiting already", retry_after_s=2.0)
        self._num_waiting += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._worker, self._encode, name, references)
        finally:
            self._num_waiting -= 1

    def _check(self, reference: Reference) -> None:
        if not reference.text.strip() or len(reference.text) > MAX_TEXT_CHARS:
            raise VoiceError(
                "invalid_voice",
                f"references: text: got {len(reference.text):,} characters, expected 1 to "
                f"{MAX_TEXT_CHARS:,}: what is said in the clip, word for word",
                param="references",
            )
        max_bytes = self._config.max_clip_bytes
        if len(reference.audio) > max_bytes:
            raise VoiceError(
                "clip_too_large", f"the limit of a clip is {max_bytes:,} bytes", param="references"
            )

    def _encode(self, name: str, references: Sequence[Reference]) -> VoicePrompt:
        left_s = self._config.max_clip_s
        parts: list[NDArray[np.int32]] = []
        for reference in references:
            codes = self._engine.encode_voice(reference.audio, left_s)
            left_s -= codes.shape[1] / self._engine.info.frame_rate_hz
            parts.append(codes)
        text = "\n".join(reference.text.strip() for reference in references)
        voice = VoicePrompt(name, text, np.concatenate(parts, axis=1))
        self._engine.check_voice(voice)
        return voice


def _name(references: Sequence[Reference]) -> str:
    digest = hashlib.sha256()
    for reference in references:
        for part in (reference.audio, reference.text.encode("utf-8", "surrogatepass")):
            digest.update(len(part).to_bytes(8, "little") + part)
    return f"reference:{digest.hexdigest()}"  # no name that the store would take
