"""The voice of a Fish request: stored, or from reference clips that come with it.

Clips are encoded on a thread of their own, one request at a time, and kept by content.
"""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from realtime.adapters.fish_request import Reference, TtsRequest
from realtime.config import ServerConfig
from realtime.errors import CapacityError, PlosiveError, VoiceError
from realtime.pingpong.api import Engine
from realtime.pingpong.messages import VoicePrompt
from realtime.session.boundaries import SPEAKER_TAG
from realtime.voices import MAX_TEXT_CHARS, VoiceStore, clip_warnings

# Of Fish's own service; LiveKit's plugin asks for it where nobody chooses a voice.
_FISH_DEFAULT = "933563129e564b19a115bedd57b7406a"
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
        try:
            return self._kept.get(name) or self._store.get(name)
        except VoiceError:
            if name != _FISH_DEFAULT:
                raise
            return self._store.get(self._engine.info.default_voice)

    async def choose(self, request: TtsRequest) -> str:
        """The name of the request's voice: `reference_id`, or else its clips, or else the default.
        Several speakers are one voice, which its text and theirs tell apart by their tags.

        Raises:
            VoiceError: no such voice, or a clip that cannot be used.
            CapacityError: the clips of several requests wait already.
            PlosiveError: `not_supported`, several speakers of a model that has one.
        """
        ids, clips = [id for id in request.reference_id if id], request.references
        self._check_speakers("reference_id", ids)
        if ids:
            voices = [self.find(id) for id in ids]
            return voices[0].name if len(voices) == 1 else await self._keep_all(voices)
        self._check_speakers("references", clips)
        if not any(clips):
            return self.find(self._engine.info.default_voice).name
        voices = [await self._voice_of(speakers_clips) for speakers_clips in clips]
        return voices[0].name if len(voices) == 1 else await self._keep_all(voices)

    def _check_speakers(self, param: str, speakers: Sequence[object]) -> None:
        if len(speakers) > 1 and not self._engine.info.has_speakers:
            message = (
                f"{param}: got {len(speakers)} speakers, {self._engine.info.model_name} has one"
            )
            raise PlosiveError("not_supported", message, param=param)

    async def _voice_of(self, references: Sequence[Reference]) -> VoicePrompt:
        name = await asyncio.to_thread(_name, references)
        voice = self._kept.get(name) or await self.encode(name, references)
        return self._keep(voice)

    async def _keep_all(self, voices: Sequence[VoicePrompt]) -> str:
        voice = _together(voices)
        if voice.name not in self._kept:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._worker, self._engine.check_voice, voice)
        return self._keep(voice).name

    def _keep(self, voice: VoicePrompt) -> VoicePrompt:
        """The same object each time: its prefix is cached."""
        voice = self._kept.setdefault(voice.name, voice)
        self._kept.move_to_end(voice.name)
        while len(self._kept) > _MAX_KEPT:
            self._kept.popitem(last=False)
        return voice

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
            duration_s = codes.shape[1] / self._engine.info.frame_rate_hz
            clip_warnings(reference.text, duration_s, "references")  # raises what is impossible
            left_s -= duration_s
            parts.append(codes)
        text = "\n".join(reference.text.strip() for reference in references)
        voice = VoicePrompt(name, text, np.concatenate(parts, axis=1))
        self._engine.check_voice(voice)
        return voice


def _together(voices: Sequence[VoicePrompt]) -> VoicePrompt:
    """Several speakers as one voice: what the model then reads is, byte for byte, what it reads of
    several references.

    Raises:
        VoiceError: one of them has no reference, so that no speaker could be told from it.
    """
    for voice in voices:
        if not voice.codes.shape[1]:
            message = f"{voice.name!r} has no reference clip and cannot be one of several speakers"
            raise VoiceError("invalid_voice", message, param="reference_id")
    texts = [
        voice.text if SPEAKER_TAG.search(voice.text) else f"<|speaker:{i}|>{voice.text}"
        for i, voice in enumerate(voices)
    ]
    text, codes = "\n".join(texts), np.concatenate([voice.codes for voice in voices], axis=1)
    name = _content_name("speakers", [_utf8(text), codes.tobytes()])
    return VoicePrompt(name, text, codes)


def _name(references: Sequence[Reference]) -> str:
    parts = [(reference.audio, _utf8(reference.text)) for reference in references]
    return _content_name("reference", chain.from_iterable(parts))


def _content_name(kind: str, parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return f"{kind}:{digest.hexdigest()}"  # no name that the store would take


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
