"""Reference audio: any common clip -> mono samples at the codec's rate, or a clear refusal.

Clips come from strangers. What is read is bounded in bytes, packets and seconds while it is being
decoded, only self-contained formats are opened (no playlists, which could name other files), and
every way in which a clip can be unusable is a `ClipError` that says what was got, what was
expected and what to do. Without torch, so that a child process can start quickly and do it.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import av
import av.error
import numpy as np
import soxr
from numpy.typing import NDArray

from model.errors import ClipError

MAX_CLIP_BYTES = 64 * 2**20  # 60 s of 48 kHz stereo f32 is 22 MiB
MAX_CLIP_SECONDS = 60.0  # a voice needs 10 to 30 s; more only fills the model's context
MIN_CLIP_SECONDS = 0.5  # less gives the model no voice to follow
MIN_RATE_HZ, MAX_RATE_HZ = 4_000, 384_000

SILENT_DBFS = -60.0  # RMS of the loudest window; a quiet recording lies near -40
TRIM_BELOW_LOUDEST_DB = (25.0, 40.0)  # from here down it is not speech, at the latest and at once
TRIM_ABOVE_FLOOR_DB = 6.0  # between them, what is so near to the quietest twentieth of the windows
TRIM_MARGIN_SECONDS = 0.05
# Of 480 clips and 1,271 half seconds of speech, the clips in noise as loud and high-passed at 1 kHz too: the
# spectrum moves by 3.4 dB and more (of 3 half seconds by less), of tones, hum and noise by 0 to 3.2; 0 to
# 0.1 of speech stands still from one window to the next, 0.5 to 1 of notes, chords and beeps; 3.1 to 16
# bands of speech sound at a time (2.3 of what is high-passed at 2 kHz), 1 to 2 of sweeps and sirens.
MIN_MOVEMENT_DB = 3.4
MAX_STILL_SHARE, STILL_DB = 0.4, 1.0
MIN_BANDS_AT_A_TIME = 2.35
WEAKEST_BAND = 1e-3  # of the strongest in power: weaker ones tell nothing, of a filtered clip
MAX_PEAK = 8.0  # a float clip above full scale is scaled down; far above, it is in other units

_WINDOW_SECONDS = 0.02
_DTYPES: dict[str, tuple[type[np.generic], float]] = {  # sample format -> dtype, full scale
    "u8": (np.uint8, 2.0**7),
    "s16": (np.int16, 2.0**15),
    "s32": (np.int32, 2.0**31),
    "s64": (np.int64, 2.0**63),
    "flt": (np.float32, 1.0),
    "dbl": (np.float64, 1.0),
}
_MAX_PLANES = 8
_MAX_PACKETS = 200_000  # 60 s in 2.5 ms packets is 24,000
_FORMATS = (
    "aac,aiff,amr,asf,au,avi,caf,flac,matroska,webm,mov,mp4,m4a,3gp,3g2,mj2,mp3,mpegts,ogg,rf64,"
    "w64,wav"
)

Samples = NDArray[np.float32]


def read_clip(
    data: bytes | str | Path,
    sample_rate: int,
    *,
    max_seconds: float = MAX_CLIP_SECONDS,
    min_seconds: float = MIN_CLIP_SECONDS,
    max_bytes: int = MAX_CLIP_BYTES,
    trim_silence: bool = False,
    must_speak: bool = False,
) -> Samples:
    """Read a clip of any common container, codec, rate and channel count.

    Args:
        data: the file's content, or its path.
        sample_rate: of the result, in Hz.
        max_seconds: decoding stops once the clip proves longer, which is an error.
        min_seconds: of what is returned, after trimming.
        max_bytes: of the file.
        trim_silence: cut leading and trailing silence and room noise down to 50 ms.
        must_speak: refuse tones, notes, hum and noise.

    Returns:
        f32 [N] — mono (mean of the channels), at most 1 in size, finite, not silent.

    Raises:
        ClipError: if the clip is not audio, is empty, silent, too short, too long, too large, holds
            samples that are not numbers, or no speech where that is asked for.
    """
    content = _read_bytes(data, max_bytes)
    samples, rate_hz = _decode(content, max_seconds)
    samples = _check_samples(samples, rate_hz)
    if rate_hz != sample_rate:
        samples = soxr.resample(samples, rate_hz, sample_rate, quality="HQ")
    if trim_silence:
        samples = _trim(samples, sample_rate)
    num_samples = len(samples)
    if num_samples < min_seconds * sample_rate:
        raise ClipError(
            f"the clip holds {num_samples / sample_rate:.2f} s of "
            f"{'sound' if trim_silence else 'audio'}; expected at least {min_seconds:g} s: "
            "record a longer one (10 to 30 s of clean speech is best)"
        )
    if must_speak and not _may_be_speech(samples, sample_rate):
        raise ClipError(
            "no speech found in the clip (a tone, notes, hum or noise?); expected one person who "
            "speaks: record 10 to 30 s of clean speech"
        )
    return np.clip(samples, -1.0, 1.0).astype(np.float32, copy=False)


def _read_bytes(data: bytes | str | Path, max_bytes: int) -> bytes:
    try:
        size = len(data) if isinstance(data, bytes) else Path(data).stat().st_size
        if size > max_bytes:
            raise ClipError(
                f"the clip is {size / 2**20:.1f} MiB; expected at most {max_bytes / 2**20:.1f} MiB: "
                "cut it, or send a compressed format"
            )
        content = data if isinstance(data, bytes) else Path(data).read_bytes()
    except (OSError, ValueError) as error:
        raise ClipError(f"the clip cannot be read: {error}") from error
    if not content:
        raise ClipError("the clip is empty (0 bytes); expected an audio file")
    return content


def _decode(content: bytes, max_seconds: float) -> tuple[Samples, int]:
    """Decode the first audio stream: mono f32 [N] at its own rate, and that rate in Hz."""
    try:
        with av.open(
            io.BytesIO(content),
            mode="r",
            metadata_errors="ignore",
            options={"format_whitelist": _FORMATS},
        ) as container:
            if not container.streams.audio:
                kinds = ", ".join(sorted({stream.type for stream in container.streams}))
                raise ClipError(
                    f"the clip has no audio stream (found: {kinds or 'nothing'}); expected a "
                    "recording of speech"
                )
            return _collect(_frames(container), max_seconds)
    except (ClipError, TypeError, AttributeError):  # a refusal, or a fault that is not the clip's
        raise
    # Damaged input raises more than FFmpeg's own errors: EOFError, ValueError, MemoryError.
    except Exception as error:
        raise ClipError(
            f"the clip is not audio that can be decoded ({len(content)} bytes: "
            f"{_first_line(error)}); expected WAV, FLAC, MP3, Ogg, M4A, WebM or the like"
        ) from error


def _frames(container: av.container.InputContainer) -> Iterator[av.AudioFrame]:
    """The frames of the first audio stream; packets that cannot be decoded are passed over."""
    stream = container.streams.audio[0]
    num_channels = stream.codec_context.channels
    if num_channels > 2:
        # NOTE: PyAV frees a layout of unusual channel order, which CAF and MOV can name, once per
        # frame, and the process dies. The order does not matter to a mean: leave it unspecified.
        stream.codec_context.layout = f"{num_channels} channels"
    num_good = num_bad = 0
    for packet in container.demux(stream):
        try:
            decoded = packet.decode()
        except av.error.InvalidDataError:
            num_bad += 1
            if num_bad > num_good + 8:
                raise
            continue
        num_good += 1
        if num_good + num_bad > _MAX_PACKETS:
            raise ClipError(
                f"the clip has more than {_MAX_PACKETS} packets; expected an ordinary recording"
            )
        for frame in decoded:
            assert isinstance(frame, av.AudioFrame), frame
            yield frame


def _collect(frames: Iterator[av.AudioFrame], max_seconds: float) -> tuple[Samples, int]:
    pieces: list[Samples] = []
    rate_hz = num_samples = 0
    for frame in frames:
        if not pieces:
            rate_hz = frame.sample_rate
            if not MIN_RATE_HZ <= rate_hz <= MAX_RATE_HZ:
                raise ClipError(
                    f"the clip has a sample rate of {rate_hz} Hz; expected {MIN_RATE_HZ} to "
                    f"{MAX_RATE_HZ} Hz"
                )
        elif frame.sample_rate != rate_hz:
            raise ClipError(
                f"the clip changes its sample rate from {rate_hz} to {frame.sample_rate} Hz; "
                "expected one rate throughout: convert it first"
            )
        pieces.append(_to_mono(frame))
        num_samples += len(pieces[-1])
        if num_samples > max_seconds * rate_hz:
            raise ClipError(
                f"the clip is longer than {max_seconds:g} s; expected at most that: "
                "cut it to 10 to 30 s of clean speech"
            )
    if not num_samples:
        raise ClipError("the clip has an audio stream without samples; expected a recording")
    return np.concatenate(pieces), rate_hz


def _to_mono(frame: av.AudioFrame) -> Samples:
    """One frame -> mean of its channels, full scale = 1."""
    # NOTE: `to_ndarray` reads beyond the planes of planar frames with 8 channels: PyAV counts them
    # up to a null pointer, and only fewer than 8 have one.
    num_channels, kind = frame.layout.nb_channels, frame.format.name.removesuffix("p")
    if kind not in _DTYPES:
        raise ClipError(f"the clip has samples of kind {kind}; expected 8 to 64-bit PCM")
    dtype, full_scale = _DTYPES[kind]
    if frame.format.is_planar:
        if num_channels > _MAX_PLANES:
            raise ClipError(
                f"the clip has {num_channels} channels; expected at most {_MAX_PLANES}: mix it down"
            )
        planes = frame.planes[:num_channels]
        channels = np.stack(
            [np.frombuffer(memoryview(plane), dtype, frame.samples) for plane in planes]
        )
    else:
        samples = np.frombuffer(memoryview(frame.planes[0]), dtype, frame.samples * num_channels)
        channels = samples.reshape(frame.samples, num_channels).T
    # Samples that are not finite are counted later, over the whole clip.
    with np.errstate(all="ignore"):
        mono = channels.mean(0, dtype=np.float64)
        if kind == "u8":
            mono = mono - 128
        scaled: Samples = (mono / full_scale).astype(np.float32)
    return scaled


def _check_samples(samples: Samples, rate_hz: int) -> Samples:
    """Refuse what is not sound; scale down what is above full scale."""
    num_bad = int(np.count_nonzero(~np.isfinite(samples)))
    if num_bad:
        raise ClipError(
            f"the clip has {num_bad} samples that are not finite numbers; expected samples in "
            "-1..1: export it again"
        )
    peak = float(np.abs(samples).max())
    if peak > MAX_PEAK:
        raise ClipError(
            f"the clip peaks at {peak:.4g}; expected float samples in -1..1: scale it first"
        )
    samples = samples / peak if peak > 1 else samples
    loudest_dbfs = float(_window_dbfs(samples, rate_hz).max())
    if loudest_dbfs < SILENT_DBFS:
        raise ClipError(
            f"the clip is silent (its loudest part is at {loudest_dbfs:.0f} dBFS); expected speech "
            f"above {SILENT_DBFS:.0f} dBFS: check the microphone"
        )
    return samples


def _window_dbfs(samples: Samples, rate_hz: int) -> Samples:
    """RMS of each 20 ms window, in dB below full scale; an offset is not sound."""
    window = min(round(_WINDOW_SECONDS * rate_hz), len(samples))
    num_windows = len(samples) // window
    windows = (samples - samples.mean())[: num_windows * window].reshape(num_windows, window)
    power = np.square(windows).mean(1)
    dbfs: Samples = (10 * np.log10(power + 1e-20)).astype(np.float32)
    return dbfs


def _may_be_speech(samples: Samples, rate_hz: int) -> bool:
    """Whether the spectrum moves as that of speech does: not hardly at all, not in steps alone, and in
    several bands at a time.

    Seen in windows of 40 ms within 30 dB of the loudest, in 16 bands from 100 Hz to 4 kHz, each beside
    its average: neither the level nor a filter (a telephone, a tinny loudspeaker) matters.
    """
    window = round(0.04 * rate_hz)
    windows = np.lib.stride_tricks.sliding_window_view(samples, window)[:: window // 2]
    power = np.square(np.abs(np.fft.rfft(windows * np.hanning(window))))
    edges = np.geomspace(100, min(4_000, rate_hz / 2), 17) * window / rate_hz
    bands = np.add.reduceat(power, edges.astype(np.int64), axis=1)[:, :-1] + 1e-20
    level = bands.sum(1)
    is_loud = level > 1e-3 * level.max()
    average = bands[is_loud].mean(0)
    bands = (bands / average)[:, average > WEAKEST_BAND * average.max()]
    share = bands / bands.sum(1, keepdims=True)
    shape = 10 * np.log10(share + 1e-5)
    steps = np.abs(np.diff(shape, axis=0)).mean(1)[is_loud[1:] & is_loud[:-1]]
    num_at_a_time = np.exp(-(share * np.log(share)).sum(1))[is_loud].mean()
    is_moving = shape[is_loud].std(0).mean() >= MIN_MOVEMENT_DB
    is_in_steps = not len(steps) or (steps < STILL_DB).mean() > MAX_STILL_SHARE
    return bool(is_moving and not is_in_steps and num_at_a_time >= MIN_BANDS_AT_A_TIME)


def _trim(samples: Samples, rate_hz: int) -> Samples:
    """Cut silence and room noise at both ends, but for a margin."""
    levels = _window_dbfs(samples, rate_hz)
    depth = levels.max() - np.percentile(levels, 5) - TRIM_ABOVE_FLOOR_DB
    sound = np.flatnonzero(levels > levels.max() - np.clip(depth, *TRIM_BELOW_LOUDEST_DB))
    window = round(_WINDOW_SECONDS * rate_hz)
    margin = round(TRIM_MARGIN_SECONDS * rate_hz)
    start = max(int(sound[0]) * window - margin, 0)
    return samples[start : (int(sound[-1]) + 1) * window + margin]


def _first_line(error: Exception) -> str:
    """FFmpeg's own words where it has some, without the number and the name of no file."""
    said: str = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return said.strip().splitlines()[0][:120]
