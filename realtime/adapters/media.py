"""PCM to the bytes of a media file, as a stream: wav, pcm, mp3, opus (Ogg), aac (ADTS), flac.

Every byte that can be written is given out by the push that made it: headers once, then packet by
packet, with no seek back. What the stream says of its length is therefore what can be said in
advance: Ogg, FLAC, WAV and raw PCM are exact to the sample. MP3 and AAC are longer by the rest of their
last frame (of 576 and 1024 samples), and begin where the audio does: MP3 tells its delay; AAC (ADTS)
can tell nothing, and goes without the frame of silence that its encoder puts in front. A decoder
overlaps each frame with the one before, so that it hears the first 1024 samples faded in from nothing,
mixed with their mirror image; speech by the embedded model is below -49 dBFS in the first half of them.
"""

import struct
from collections.abc import Callable
from typing import NamedTuple, Protocol

import av
import numpy as np
from numpy.typing import NDArray

from realtime.adapters.media_mp3 import info_frame
from realtime.adapters.media_ogg import OggOpusWriter
from realtime.audio_encoder import to_s16le
from realtime.errors import PlosiveError
from realtime.resample import StreamResampler

_PCM_RATES = (8_000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000)
_MPEG1_KBPS = (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)
_MPEG2_KBPS = (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)
_STREAMING_DATA_BYTES = 0xFFFF_FF00  # of a WAV whose length is not known, as Fish writes it


class MediaError(PlosiveError):
    """A format, sample rate or bitrate that there is not; the message names the valid ones."""

    default_code = "unsupported_audio"


class MediaEncoder:
    """One stream of mono audio. Not thread-safe; a push costs 0.1 to 0.2 ms per 20 ms of audio.

    `sample_rate` is the stream's (None: `default_rate`), `input_rate` that of the PCM where it
    differs. `bitrate` is in bits per second (None: one that suits speech); formats without one
    refuse it. `push` takes f32 [num_samples] within [-1, 1].

    Raises:
        MediaError: with `param` "format", "sample_rate" or "bitrate".

    Example:
        encoder = MediaEncoder("opus", 48_000, input_rate=24_000)
        data = b"".join([*map(encoder.push, chunks), encoder.finish()])
    """

    def __init__(
        self,
        format: str,
        sample_rate: int | None = None,
        bitrate: int | None = None,
        *,
        input_rate: int | None = None,
    ) -> None:
        kind = _kind(format)
        rate = _checked_rate(format, kind, sample_rate)
        self.format = format
        self.content_type = kind.content_type
        self.sample_rate = rate
        self.bitrate = _checked_bitrate(format, kind, rate, bitrate)
        in_rate = rate if input_rate is None else input_rate
        self._resampler = StreamResampler(in_rate, rate) if in_rate != rate else None
        self._writer = _writer(format, kind, rate, self.bitrate)

    def push(self, pcm: NDArray[np.float32]) -> bytes:
        """What can be written after this audio; may be nothing."""
        return self._writer.write(self._resampler.push(pcm) if self._resampler else pcm)

    def finish(self) -> bytes:
        """The end of the stream. To be called once, after the last push."""
        tail = self._writer.write(self._resampler.finish()) if self._resampler else b""
        return tail + self._writer.finish()


def default_rate(format: str, source_rate: int) -> int:
    """The stream's rate where nobody asks for one: the source's own if the format has it."""
    kind = _kind(format)
    return source_rate if source_rate in kind.rates else kind.rates[-1]


# ---------------------------------------------------------------------------- what there is


class _Container(NamedTuple):
    muxer: str
    codec: str
    muxer_options: dict[str, str] = {}
    codec_options: dict[str, str] = {}
    num_priming_packets: int = 0  # in front, of nothing but the encoder's delay


class _Kind(NamedTuple):
    """`bitrates` gives the default of a rate and the valid ones, a list or a range."""

    content_type: str
    rates: tuple[int, ...]
    bitrates: Callable[[int], tuple[int, tuple[int, ...] | range]] | None = None
    container: _Container | None = None


def _mp3_bitrates(rate: int) -> tuple[int, tuple[int, ...]]:
    if rate >= 32_000:
        return 128_000, tuple(1000 * kbps for kbps in _MPEG1_KBPS)
    top_kbps = 160 if rate >= 16_000 else 64
    valid = tuple(1000 * kbps for kbps in _MPEG2_KBPS if kbps <= top_kbps)
    return 64_000 if rate >= 16_000 else 32_000, valid


def _opus_bitrates(rate: int) -> tuple[int, range]:
    return 32_000, range(6_000, 256_001)


def _aac_bitrates(rate: int) -> tuple[int, range]:
    return 2 * rate, range(8_000, 6 * rate + 1)  # the encoder's own limit is 6144 bits per 1024


_KINDS: dict[str, _Kind] = {
    "wav": _Kind("audio/wav", _PCM_RATES),
    "pcm": _Kind("audio/pcm", _PCM_RATES),
    "mp3": _Kind(
        "audio/mpeg",
        _PCM_RATES,
        _mp3_bitrates,
        # FFmpeg's headers would have to be patched at the end.
        _Container("mp3", "libmp3lame", {"id3v2_version": "0", "write_xing": "0"}),
    ),
    "opus": _Kind("audio/ogg", (24_000, 48_000), _opus_bitrates),
    "aac": _Kind(
        "audio/aac",
        _PCM_RATES,
        _aac_bitrates,
        _Container("adts", "aac", num_priming_packets=1),
    ),
    "flac": _Kind(
        "audio/flac",
        _PCM_RATES,
        None,
        # Level 2 makes frames of 27 ms; from level 3 on they are of 105 ms.
        _Container("flac", "flac", {"metadata_header_padding": "0"}, {"compression_level": "2"}),
    ),
}
FORMATS = tuple(_KINDS)


def _kind(format: str) -> _Kind:
    if format not in _KINDS:
        valid = ", ".join(FORMATS)
        raise MediaError(message=f"there is no format {format!r}; valid: {valid}", param="format")
    return _KINDS[format]


def _checked_rate(format: str, kind: _Kind, rate: int | None) -> int:
    if rate is None:
        return kind.rates[-1]
    if rate not in kind.rates:
        valid = ", ".join(map(str, kind.rates))
        raise MediaError(
            message=f"{format} is not offered at {rate} Hz; valid: {valid}", param="sample_rate"
        )
    return rate


def _checked_bitrate(format: str, kind: _Kind, rate: int, bitrate: int | None) -> int | None:
    if kind.bitrates is None:
        if bitrate is not None:
            raise MediaError(message=f"{format} has no bitrate to choose", param="bitrate")
        return None
    default, valid = kind.bitrates(rate)
    if bitrate is None:
        return default
    if bitrate not in valid:
        is_range = isinstance(valid, range)
        names = f"{valid[0]} to {valid[-1]}" if is_range else ", ".join(map(str, valid))
        raise MediaError(
            message=f"{format} at {rate} Hz is not offered at {bitrate} bit/s; valid: {names}",
            param="bitrate",
        )
    return bitrate


# ---------------------------------------------------------------------------- writers


class _Writer(Protocol):
    def write(self, pcm: NDArray[np.float32]) -> bytes: ...

    def finish(self) -> bytes: ...


def _writer(format: str, kind: _Kind, rate: int, bitrate: int | None) -> _Writer:
    if kind.container is not None:
        header = info_frame(rate) if format == "mp3" else b""
        return _AvWriter(kind.container, rate, bitrate, header)
    if format == "opus":
        assert bitrate is not None
        return OggOpusWriter(rate, bitrate)
    return _PcmWriter(_wav_header(rate) if format == "wav" else b"")


class _PcmWriter:
    def __init__(self, header: bytes) -> None:
        self._header = header  # until it is written

    def write(self, pcm: NDArray[np.float32]) -> bytes:
        header, self._header = self._header, b""
        return header + to_s16le(pcm)

    def finish(self) -> bytes:
        return self._header


def _wav_header(rate: int) -> bytes:
    fmt = struct.pack("<IHHIIHH", 16, 1, 1, rate, 2 * rate, 2, 16)
    size = struct.pack("<I", _STREAMING_DATA_BYTES)
    riff_size = struct.pack("<I", _STREAMING_DATA_BYTES + 36)
    return b"RIFF" + riff_size + b"WAVEfmt " + fmt + b"data" + size


class _Sink:
    """Takes what a muxer writes; without `seek`, so that none goes back."""

    def __init__(self) -> None:
        self._written = bytearray()

    def write(self, data: bytes) -> int:
        self._written += data
        return len(data)

    def take(self) -> bytes:
        data = bytes(self._written)
        self._written.clear()
        return data


class _AvWriter:
    """`header` comes before, and with, the first that the muxer writes."""

    def __init__(
        self, container: _Container, rate: int, bitrate: int | None, header: bytes
    ) -> None:
        self._sink = _Sink()
        self._header = header
        options = {"flush_packets": "1", **container.muxer_options}
        self._muxer = av.open(self._sink, "w", format=container.muxer, options=options)
        stream = self._muxer.add_stream(
            container.codec, rate=rate, layout="mono", options=container.codec_options
        )
        assert isinstance(stream, av.AudioStream), stream
        if bitrate is not None:
            stream.bit_rate = bitrate
        self._stream = stream
        self._rate = rate
        self._num_samples = 0
        self._num_priming = container.num_priming_packets  # still to come

    def write(self, pcm: NDArray[np.float32]) -> bytes:
        if len(pcm):
            samples = np.ascontiguousarray(pcm, np.float32)[None]
            frame = av.AudioFrame.from_ndarray(samples, format="flt", layout="mono")
            frame.sample_rate = self._rate
            frame.pts = self._num_samples
            self._num_samples += len(pcm)
            self._mux(self._stream.encode(frame))
        return self._take()

    def finish(self) -> bytes:
        self._muxer.start_encoding()  # the headers of a stream without audio
        self._mux(self._stream.encode(None))
        self._muxer.close()
        return self._take()

    def _mux(self, packets: "list[av.Packet[av.AudioStream]]") -> None:
        num_dropped = min(self._num_priming, len(packets))
        self._num_priming -= num_dropped
        self._muxer.mux(packets[num_dropped:])

    def _take(self) -> bytes:
        data = self._sink.take()
        if data and self._header:
            data, self._header = self._header + data, b""
        return data
