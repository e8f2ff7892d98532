"""Voices by name: the model's own, and those that users add. Files and numpy only, no tensor.

A voice is NAME.safetensors (`codes`: int32 [K, T]) beside NAME.json (`text`: what is said in it).
"""

import json
import logging
import os
import re
import tempfile
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from realtime.config import named
from realtime.errors import PlosiveError, VoiceError
from realtime.pingpong.messages import VoicePrompt

MAX_NAME_CHARS = 64
MAX_TEXT_CHARS = 2_000
NO_REFERENCE = "default"
SHORT_CLIP_S = 3.0  # a voice is heard from less, but hardly followed
# Nobody speaks 60 letters a second; hurried speech has 20 to 25, slow Chinese 3.
MAX_CHARS_PER_S = 100
USUAL_CHARS_PER_S = (2, 30)
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class VoiceInfo:
    """What `/v1/voices` tells about a voice."""

    name: str
    text: str
    num_frames: int
    is_builtin: bool

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


class VoiceStore:
    """All voices, held in memory and mirrored on disk. Thread-safe.

    Built-in voices cannot be replaced or deleted; a model that has none speaks without a reference,
    as the voice `default`. Added voices are bound to the codec that made their codes; voices of
    another codec in the same directory are left alone and not listed.
    """

    def __init__(
        self,
        builtin_dir: Path | None,
        user_dir: Path,
        *,
        codec_id: str,
        num_codebooks: int,
        max_voices: int = 256,
    ) -> None:
        self._user_dir = user_dir
        self._codec_id = codec_id
        self._num_codebooks = num_codebooks
        self._max_voices = max_voices
        self._lock = threading.Lock()
        self._builtin = self._read_all(builtin_dir, any_codec=True) if builtin_dir else {}
        if builtin_dir is None:
            no_codes = np.zeros((num_codebooks, 0), np.int32)
            self._builtin[NO_REFERENCE] = VoicePrompt(NO_REFERENCE, "", no_codes)
        self._added = self._read_all(user_dir, any_codec=False)

    def infos(self) -> list[VoiceInfo]:
        """Built-in voices first, each group by name."""
        with self._lock:
            groups = ((self._builtin, True), (self._added, False))
            return [
                VoiceInfo(name, voices[name].text, voices[name].codes.shape[1], is_builtin)
                for voices, is_builtin in groups
                for name in sorted(voices)
            ]

    def get(self, name: str) -> VoicePrompt:
        """Raises VoiceError `voice_not_found`."""
        with self._lock:
            voice = self._builtin.get(name) or self._added.get(name)
            if voice is not None:
                return voice
            known = sorted(self._builtin) + sorted(self._added)
        raise VoiceError(
            "voice_not_found",
            f"there is no voice {name[:MAX_NAME_CHARS]!r}; there are: {_shorten(known)}",
            param="voice",
        )

    def check_addable(self, name: str, text: str) -> None:
        """Refuse early what `add` would refuse after the clip has been encoded.

        Raises:
            VoiceError: `invalid_voice`, `voice_exists`, `voice_protected` or `too_many_voices`.
        """
        _check_name(name)
        if not text.strip() or len(text) > MAX_TEXT_CHARS:
            raise VoiceError(
                "invalid_voice",
                f"text: got {len(text):,} characters, expected 1 to {MAX_TEXT_CHARS:,}: "
                "what is said in the clip, word for word",
                param="text",
            )
        with self._lock:
            self._check_free(name)

    def add(self, name: str, text: str, codes: NDArray[np.int32]) -> VoiceInfo:
        """Write the voice to disk, atomically, and make it usable at once.

        Raises:
            VoiceError: as `check_addable`, and `invalid_voice` for codes of another shape.
        """
        self.check_addable(name, text)
        voice = VoicePrompt(name, text, self._checked(codes))
        with self._lock:
            self._check_free(name)
            self._write(voice)
            self._added[name] = voice
        return VoiceInfo(name, text, codes.shape[1], is_builtin=False)

    def remove(self, name: str) -> None:
        """Raises VoiceError `voice_protected` or `voice_not_found`. Running sessions keep it."""
        _check_name(name)
        with self._lock:
            if name in self._builtin:
                raise _protected(name)
            if name not in self._added:
                added = _shorten(sorted(self._added)) or "none"
                why = f"there is no voice {name!r}; those that were added: {added}"
                raise VoiceError("voice_not_found", why, param="name")
            for suffix in (".safetensors", ".json"):  # without codes the text is no voice
                (self._user_dir / name).with_suffix(suffix).unlink(missing_ok=True)
            del self._added[name]

    def _check_free(self, name: str) -> None:
        if name in self._builtin:
            raise _protected(name)
        if name in self._added:
            raise VoiceError(
                "voice_exists", f"there is a voice {name!r} already; delete it first", param="name"
            )
        if len(self._added) >= self._max_voices:
            raise VoiceError(
                "too_many_voices", f"{self._max_voices} voices are stored already; delete one first"
            )

    # ------------------------------------------------------------------------ files

    def _write(self, voice: VoicePrompt) -> None:
        self._user_dir.mkdir(parents=True, exist_ok=True)
        description = {"name": voice.name, "text": voice.text, "codec": self._codec_id}
        path = self._user_dir / voice.name
        write_atomically(path.with_suffix(".json"), json.dumps(description).encode())
        blob = safetensors.numpy.save({"codes": np.ascontiguousarray(voice.codes)})
        write_atomically(path.with_suffix(".safetensors"), blob)  # last: now the voice exists

    def _read_all(self, folder: Path, *, any_codec: bool) -> dict[str, VoicePrompt]:
        voices = {}
        for path in sorted(folder.glob("*.safetensors")):
            try:
                voice = self._read(path, any_codec=any_codec)
            except (OSError, ValueError, KeyError, SafetensorError, VoiceError) as error:
                _log.warning("voice file %s is not usable: %s", path, error)
                continue
            if voice is not None:
                voices[voice.name] = voice
        return voices

    def _read(self, path: Path, *, any_codec: bool) -> VoicePrompt | None:
        _check_name(path.stem)
        description = json.loads(path.with_suffix(".json").read_text("utf-8"))
        if not isinstance(description, dict):
            raise ValueError("its description is not a JSON object")
        if not any_codec and description["codec"] != self._codec_id:
            return None
        codes = safetensors.numpy.load(path.read_bytes())["codes"]
        return VoicePrompt(path.stem, str(description["text"]), self._checked(codes))

    def _checked(self, codes: NDArray[np.int32]) -> NDArray[np.int32]:
        if codes.dtype != np.int32 or codes.ndim != 2 or len(codes) != self._num_codebooks:
            raise VoiceError(
                "invalid_voice",
                f"got codes {codes.dtype} {list(codes.shape)}, "
                f"expected int32 [{self._num_codebooks}, T]",
            )
        return codes


def clip_warnings(text: str, duration_s: float, param: str = "text") -> list[str]:
    """What is wrong with a clip and its transcript that can be used all the same, a sentence each.

    Raises:
        VoiceError: `invalid_voice`, where the clip cannot hold so much text.
    """
    num_chars = len(text.strip())
    got = f"{param}: got {num_chars:,} characters for {duration_s:.1f} s of speech"
    expected = "expected what is said in the clip, word for word"
    if num_chars > MAX_CHARS_PER_S * duration_s:
        raise VoiceError("invalid_voice", f"{got}, more than can be said; {expected}", param=param)
    warnings = []
    if duration_s < SHORT_CLIP_S:
        warnings.append(
            f"the clip holds {duration_s:.1f} s of speech; 10 to 30 s of one person who speaks "
            "clearly make a better voice"
        )
    fewest, most = USUAL_CHARS_PER_S
    if not fewest * duration_s <= num_chars <= most * duration_s:
        much = "little" if num_chars < fewest * duration_s else "much"
        warnings.append(f"{got}, which is {much}; {expected}, or the voice says wrong words")
    return warnings


def check_voices_dir(folder: Path) -> None:
    """Refuse at the start a directory in which no voice could be stored; it need not exist yet.

    Raises:
        PlosiveError: `invalid_config`.
    """
    nearest = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    try:
        with tempfile.TemporaryFile(dir=nearest):  # root may write by the mode, and yet cannot
            pass
    except OSError as error:
        why = f"{named('voices_dir')}: no voice can be stored in {folder}: {error.strerror}"
        if nearest != folder:
            why += f" ({nearest})"
        raise PlosiveError("invalid_config", why) from error


def _protected(name: str) -> VoiceError:
    why = f"{name!r} is a built-in voice and cannot be deleted or replaced"
    return VoiceError("voice_protected", why, param="name")


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise VoiceError(
            "invalid_voice",
            f"name: got {name[:MAX_NAME_CHARS]!r}, expected 1 to {MAX_NAME_CHARS} of A-Z a-z 0-9 _ -",
            param="name",
        )


def write_atomically(path: Path, data: bytes) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(data)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _shorten(names: list[str], max_names: int = 20) -> str:
    text = ", ".join(names[:max_names])
    return text + ", ..." if len(names) > max_names else text
