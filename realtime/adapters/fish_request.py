"""The body of a Fish TTS request: what is read, what is refused by name, what is taken and ignored."""

import base64
import binascii
from typing import Annotated, Any, Literal

import ormsgpack
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json

from realtime.adapters import media_prosody
from realtime.adapters.media import MediaEncoder
from realtime.adapters.speech import SpeechEncoder
from realtime.errors import PlosiveError, fault
from realtime.wire import Sampling

# What Fish offers; the first rate of a format is its default.
_PCM_RATES = (44_100, 8_000, 16_000, 24_000, 32_000)
_RATES = {"mp3": (44_100, 32_000), "wav": _PCM_RATES, "pcm": _PCM_RATES, "opus": (48_000,)}
_MP3_KBPS = (64, 128, 192)
_OPUS_AUTO = -1000
_OPUS_KBPS = (24, 32, 48, 64)  # the SDK sends these, others bits per second
MAX_SPEAKERS = 5  # as many as their model takes in one prompt
_MIN_TOP_P = 0.01  # Fish allows 0


def _audio_bytes(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"not base64: {error}") from error


class _Lenient(BaseModel):
    """Unknown fields are ignored, null means not given."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: object) -> object:
        if isinstance(data, dict):
            return {key: value for key, value in data.items() if value is not None}
        return data


class Reference(_Lenient):
    """A clip of the voice to speak with, and what is said in it."""

    audio: Annotated[bytes, BeforeValidator(_audio_bytes)]
    text: str


class Prosody(_Lenient):
    speed: float = Field(default=1.0, ge=0.5, le=2.0)
    volume: float = Field(default=0.0, ge=-20.0, le=20.0)  # dB


def _per_speaker(value: object) -> object:
    """A list of clips is one speaker's."""
    is_nested = isinstance(value, list) and any(isinstance(item, list) for item in value)
    return value if is_nested or not isinstance(value, list) else [value]


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


_Id = Annotated[str, Field(max_length=256)]
_Clips = Annotated[list[Reference], Field(max_length=16)]


class TtsRequest(_Lenient):
    """Speakers, of whom one is usual: `text` names another by `<|speaker:N|>`, from 0. The last group
    has no meaning here: it steers how Fish cuts text and decodes."""

    text: str = ""
    reference_id: Annotated[list[_Id], BeforeValidator(_listed)] = Field(
        [], max_length=MAX_SPEAKERS
    )
    references: Annotated[list[_Clips], BeforeValidator(_per_speaker)] = Field(
        [], max_length=MAX_SPEAKERS
    )
    format: str = "mp3"
    sample_rate: int | None = None
    mp3_bitrate: int = 128
    opus_bitrate: int = _OPUS_AUTO
    prosody: Prosody = Prosody()
    temperature: float | None = Field(default=None, ge=0.0, le=1.0)
    top_p: float | None = Field(default=None, ge=0.0, le=1.0)
    seed: int | None = None

    latency: Literal["low", "normal", "balanced"] = "normal"
    chunk_length: int = 200
    min_chunk_length: int = 50
    normalize: bool = True
    max_new_tokens: int = 1024
    repetition_penalty: float = 1.2
    condition_on_previous_chunks: bool = True
    early_stop_threshold: float = 1.0
    features: list[str] = []

    @property
    def rate(self) -> int:
        """Raises PlosiveError for a format or rate that Fish does not have."""
        if self.format not in _RATES:
            valid = ", ".join(_RATES)
            raise _refusal("format", f"there is no format {self.format[:40]!r}; valid: {valid}")
        rates = _RATES[self.format]
        if self.sample_rate is not None and self.sample_rate not in rates:
            valid = ", ".join(map(str, sorted(rates)))
            message = f"{self.format} is not offered at {self.sample_rate} Hz; valid: {valid}"
            raise _refusal("sample_rate", message)
        return self.sample_rate or rates[0]

    @property
    def sampling(self) -> Sampling:
        return Sampling(
            temperature=self.temperature,
            top_p=None if self.top_p is None else max(self.top_p, _MIN_TOP_P),
            seed=None if self.seed is None else self.seed % 2**63,
        )

    @property
    def num_reference_chars(self) -> int:
        """Of the text of its clips, where these are its voice."""
        clips = () if any(self.reference_id) else self.references
        return sum(len(clip.text) for speaker in clips for clip in speaker)

    def make_encoder(self, input_rate: int) -> SpeechEncoder:
        media = MediaEncoder(self.format, self.rate, self._bitrate(), input_rate=input_rate)
        return SpeechEncoder(
            media, media_prosody.Prosody(input_rate, self.prosody.speed, self.prosody.volume)
        )

    def _bitrate(self) -> int | None:
        if self.format == "mp3":
            return 1000 * _checked("mp3_bitrate", self.mp3_bitrate, _MP3_KBPS)
        if self.format != "opus" or self.opus_bitrate == _OPUS_AUTO:
            return None
        is_kbps = abs(self.opus_bitrate) < 1000
        bitrate = self.opus_bitrate * (1000 if is_kbps else 1)
        return _checked("opus_bitrate", bitrate, tuple(1000 * kbps for kbps in _OPUS_KBPS))


def parse_body(content_type: str, body: bytes) -> TtsRequest:
    """Raises PlosiveError `unsupported_media_type`, `invalid_body`, or what `parse_request` does."""
    match content_type.partition(";")[0].strip().lower():
        case "application/json":
            return parse_request(read_json(body))
        case "application/msgpack" | "application/x-msgpack":
            return parse_request(unpack(body))
        case other:
            raise PlosiveError(
                "unsupported_media_type",
                f"got Content-Type {other[:80]!r}, expected application/json or application/msgpack",
            )


def read_json(data: bytes) -> dict[str, Any]:
    """A JSON object. Half a surrogate pair is no text, here as in MessagePack and in OpenAI's API.

    Raises:
        PlosiveError: `invalid_body`.
    """
    return _decode("JSON", "object", from_json, data)


def unpack(data: bytes) -> dict[str, Any]:
    """A MessagePack map. Raises PlosiveError `invalid_body`."""
    return _decode("MessagePack", "map", ormsgpack.unpackb, data)


def _decode(name: str, mapping: str, decode: Any, data: bytes) -> dict[str, Any]:
    try:
        value = decode(data)
    except ValueError as error:
        raise PlosiveError("invalid_body", f"not {name}: {error}") from error
    if not isinstance(value, dict):
        message = f"expected a {name} {mapping}, got {type(value).__name__}"
        raise PlosiveError("invalid_body", message)
    return value


def parse_request(data: dict[str, Any]) -> TtsRequest:
    """Raises PlosiveError `invalid_field` or `not_supported`, which name the field."""
    try:
        request = TtsRequest.model_validate(data)
    except ValidationError as error:
        raise invalid_field(error) from error
    request.rate, request._bitrate()  # refuse early
    return request


def invalid_field(error: ValidationError) -> PlosiveError:
    """The first that is wrong, by its path."""
    first = error.errors(include_url=False, include_context=False)[0]
    param = ".".join(map(str, first["loc"])) or "request"
    return PlosiveError("invalid_field", f"{param}: {fault(first)}", param=param)


def _checked(param: str, value: int, valid: tuple[int, ...]) -> int:
    if value not in valid:
        names = ", ".join(map(str, valid))
        raise _refusal(param, f"got {value}, valid: {names}")
    return value


def _refusal(param: str, why: str) -> PlosiveError:
    return PlosiveError("not_supported", f"{param}: {why}", param=param)
