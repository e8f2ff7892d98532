"""The media encoder, heard through an independent decoder: FFmpeg's demuxers and decoders."""

import io
import struct
from typing import NamedTuple

import av
import numpy as np
import pytest

from realtime.adapters.media import FORMATS, MediaEncoder, MediaError, default_rate

EXACT = ("wav", "pcm", "opus", "flac")
LONGER_BY = {"mp3": 576, "aac": 1023}  # at most: the rest of the last frame


class Written(NamedTuple):
    parts: list[bytes]  # of every push, then of finish
    encoder: MediaEncoder

    @property
    def data(self) -> bytes:
        return b"".join(self.parts)


def speech_like(num_samples: int, rate: int) -> np.ndarray:
    """Three partials of a gliding voice, with the envelope of syllables; no period repeats."""
    t_s = np.arange(num_samples) / rate
    phase = 2 * np.pi * (150 * t_s + 20 * np.sin(2 * np.pi * 0.9 * t_s))
    voice = sum(np.sin(k * phase) / k for k in (1, 2, 5))
    return (0.25 * voice * (0.6 + 0.4 * np.sin(2 * np.pi * 3.7 * t_s))).astype(np.float32)


def write(pcm: np.ndarray, format: str, rate: int, push_samples: int, **kwargs: int) -> Written:
    encoder = MediaEncoder(format, rate, **kwargs)
    starts = range(0, len(pcm), push_samples)
    parts = [encoder.push(pcm[start : start + push_samples]) for start in starts]
    return Written([*parts, encoder.finish()], encoder)


def read(data: bytes, format: str, rate: int) -> np.ndarray:
    """At `rate`, whatever the decoder's: Opus is always decoded at 48 kHz."""
    if format == "pcm":
        return np.frombuffer(data, "<i2") / 32767.0
    demuxer = {"opus": "ogg"}.get(format, format)
    with av.open(io.BytesIO(data), format=demuxer) as container:
        frames = [frame.to_ndarray().reshape(-1) for frame in container.decode(audio=0)]
        decoder_rate = container.streams.audio[0].codec_context.sample_rate
    samples = np.concatenate(frames)
    if samples.dtype == np.int16:
        samples = samples / 32768.0
    assert decoder_rate % rate == 0
    return samples[:: decoder_rate // rate]


def best_match(heard: np.ndarray, sent: np.ndarray) -> tuple[float, int]:
    """The highest correlation over all shifts, and the shift."""
    size = len(heard) + len(sent)
    spectrum = np.fft.rfft(heard, size) * np.conj(np.fft.rfft(sent, size))
    products = np.fft.irfft(spectrum, size)[: len(heard)]
    shift = int(np.argmax(products))
    overlap = heard[shift : shift + len(sent)]
    norm = np.linalg.norm(overlap) * np.linalg.norm(sent[: len(overlap)])
    return float(products[shift] / norm), shift


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("num_samples", [48_000, 48_001, 47_520, 24_000 + 313])
def test_duration_and_signal(format: str, num_samples: int) -> None:
    sent = speech_like(num_samples, 24_000)
    written = write(sent, format, 24_000, push_samples=960)
    heard = read(written.data, format, 24_000)
    if format in EXACT:
        assert len(heard) == num_samples
    else:
        assert 0 <= len(heard) - num_samples <= LONGER_BY[format]
    correlation, shift = best_match(heard, sent)
    assert correlation > (0.9999 if format in ("wav", "pcm", "flac") else 0.98)
    assert shift <= 1


@pytest.mark.parametrize("format", FORMATS)
def test_another_rate_is_resampled(format: str) -> None:
    sent = speech_like(44_100 + 1_234, 44_100)
    written = write(sent, format, 48_000, push_samples=2_048, input_rate=44_100)
    heard = read(written.data, format, 48_000)
    num_expected = round(len(sent) * 48_000 / 44_100)
    if format in EXACT:
        assert len(heard) == num_expected
    correlation, _ = best_match(heard, speech_like(num_expected, 48_000))
    assert correlation > 0.98


@pytest.mark.parametrize(
    ("format", "num_pushes"),
    [("wav", 1), ("pcm", 1), ("opus", 1), ("flac", 2), ("mp3", 6), ("aac", 7)],
)
def test_first_bytes_carry_audio_at_once(format: str, num_pushes: int) -> None:
    """After so many pushes of 20 ms a decoder has audio; the rest is the codec's own look-ahead."""
    sent = speech_like(24_000, 24_000)
    written = write(sent, format, 24_000, push_samples=480)
    heard = read(b"".join(written.parts[:num_pushes]), format, 24_000)
    assert len(heard) >= 120


@pytest.mark.parametrize("format", FORMATS)
def test_nothing_is_kept_back(format: str) -> None:
    """Bytes leave steadily, not in blocks: no silence of more than two codec frames."""
    written = write(speech_like(48_000, 24_000), format, 24_000, push_samples=480)
    is_empty = [not part for part in written.parts[5:-1]]
    longest = max(len(run) for run in "".join("-" if e else " " for e in is_empty).split(" "))
    assert longest <= (3 if format == "aac" else 2)


def test_an_ogg_page_holds_one_packet() -> None:
    written = write(speech_like(24_000, 24_000), "opus", 24_000, push_samples=960)
    pages, at = [], 0
    while at < len(written.data):
        assert written.data[at : at + 4] == b"OggS"
        granule, num_segments = (
            struct.unpack_from("<q", written.data, at + 6)[0],
            written.data[at + 26],
        )
        lacing = written.data[at + 27 : at + 27 + num_segments]
        pages.append((granule, sum(size < 255 for size in lacing)))
        at += 27 + num_segments + sum(lacing)
    assert [num for _, num in pages] == [1] * len(pages)
    granules = [granule for granule, _ in pages[2:]]  # behind OpusHead and OpusTags
    assert set(np.diff(granules[:-1])) == {960}


def test_pcm_never_has_a_header() -> None:
    sent = speech_like(4_800, 24_000)
    data = write(sent, "pcm", 24_000, push_samples=960).data
    assert data == np.rint(sent * 32767.0).astype("<i2").tobytes()


def test_wav_header_comes_once_with_the_sizes_of_a_stream() -> None:
    data = write(speech_like(4_800, 24_000), "wav", 24_000, push_samples=960).data
    riff, riff_size, wave, fmt = struct.unpack_from("<4sI4s4s", data)
    assert (riff, riff_size, wave, fmt) == (b"RIFF", 4_294_967_076, b"WAVE", b"fmt ")
    assert struct.unpack_from("<HHIIHH", data, 20) == (1, 1, 24_000, 48_000, 2, 16)
    assert struct.unpack_from("<4sI", data, 36) == (b"data", 4_294_967_040)
    assert len(data) == 44 + 2 * 4_800 and data.count(b"RIFF") == 1


@pytest.mark.parametrize("format", FORMATS)
def test_a_stream_without_audio_ends_in_order(format: str) -> None:
    data = MediaEncoder(format).finish()
    if format in ("wav", "opus", "flac"):
        with av.open(io.BytesIO(data)) as container:
            assert list(container.decode(audio=0)) == []
    else:
        assert data == b""


@pytest.mark.parametrize("format", FORMATS)
def test_every_rate_can_be_written(format: str) -> None:
    for rate in (8_000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000):
        if format == "opus" and rate not in (24_000, 48_000):
            continue
        heard = read(write(speech_like(rate, rate), format, rate, rate // 25).data, format, rate)
        assert rate <= len(heard) <= rate + (1_023 if format == "aac" else 1_152)
        assert best_match(heard, speech_like(rate, rate))[1] <= 1


@pytest.mark.parametrize("bitrate", [32_000, 64_000, 128_000, 192_000])
def test_mp3_bitrate_is_kept(bitrate: int) -> None:
    data = write(speech_like(88_200, 44_100), "mp3", 44_100, 2_048, bitrate=bitrate).data
    assert len(data) == pytest.approx(bitrate / 8 * 2, rel=0.05)


@pytest.mark.parametrize(
    ("arguments", "param", "named"),
    [
        (("ogg", None, None), "format", "wav, pcm, mp3, opus, aac, flac"),
        (("opus", 44_100, None), "sample_rate", "24000, 48000"),
        (("mp3", 96_000, None), "sample_rate", "44100, 48000"),
        (("mp3", 24_000, 65_000), "bitrate", "56000, 64000, 80000"),
        (("mp3", 24_000, 192_000), "bitrate", "160000"),
        (("opus", 48_000, 500), "bitrate", "6000 to 256000"),
        (("aac", 24_000, 200_000), "bitrate", "8000 to 144000"),
        (("wav", 24_000, 128_000), "bitrate", "no bitrate"),
    ],
)
def test_what_there_is_not_is_refused_with_what_there_is(
    arguments: tuple[str, int | None, int | None], param: str, named: str
) -> None:
    with pytest.raises(MediaError) as refused:
        MediaEncoder(*arguments)
    assert refused.value.param == param and named in refused.value.message


def test_default_rate_is_the_sources_where_it_exists() -> None:
    assert default_rate("mp3", 44_100) == 44_100
    assert default_rate("opus", 44_100) == 48_000
    assert default_rate("opus", 24_000) == 24_000
