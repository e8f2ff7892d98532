"""Audio files: the suffix names the format."""

import io
from pathlib import Path

import av
import numpy as np

from clients.decode import Samples, to_int16
from realtime.errors import SessionError

# suffix -> container, encoder, sample rates that the encoder takes (None: any)
_FORMATS: dict[str, tuple[str, str, tuple[int, ...] | None]] = {
    ".wav": ("wav", "pcm_s16le", None),
    ".ogg": ("ogg", "libopus", (8_000, 12_000, 16_000, 24_000, 48_000)),
    ".opus": ("ogg", "libopus", (8_000, 12_000, 16_000, 24_000, 48_000)),
    ".mp3": (
        "mp3",
        "libmp3lame",
        (8_000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000),
    ),
}
SUFFIXES = tuple(_FORMATS)
_BIT_RATE = {"libopus": 48_000, "libmp3lame": 96_000}
_RESAMPLED_HZ = 48_000
_MIN_HZ, _MAX_HZ = 1_000, 384_000


def check_suffix(path: Path) -> None:
    """Raises ValueError, naming the valid ones, if `save` does not know the path's suffix."""
    if path.suffix.lower() not in _FORMATS:
        raise ValueError(
            f"cannot write {path.name!r}: its suffix must be one of {', '.join(SUFFIXES)}"
        )


def check_path(path: Path | str) -> None:
    """Raises ValueError, if `save` does not know the path's suffix, or there is no such folder.

    Example:
        check_path(path)  # before a word is spoken
    """
    path = Path(path)
    check_suffix(path)
    if not path.parent.is_dir():
        raise ValueError(f"cannot write {path.name!r}: there is no folder {str(path.parent)!r}")


def save(path: Path | str, samples: Samples, sample_rate_hz: int) -> None:
    """Write mono samples (f32 [num_samples], -1..1) as .wav, .ogg or .opus (Opus), or .mp3.

    The file appears when it is complete. A rate that the encoder lacks is resampled to 48 kHz.

    Example:
        save("hello.wav", samples, sample_rate_hz)

    Raises:
        SessionError: `no_audio`, no samples at all: `Turn.warnings` says why a turn had none.
        ValueError: unknown suffix, or samples or a rate that no audio has.
        OSError: the file cannot be written.
    """
    path = Path(path)
    check_suffix(path)
    samples = np.asarray(samples)
    if samples.shape == (0,):
        why = f"{path.name} would be empty: there are no samples. turn.warnings says why a turn had none"
        raise SessionError("no_audio", why)
    is_audio = samples.dtype.kind == "f" and samples.ndim == 1
    if not is_audio or not np.isfinite(samples).all():
        got = f"{samples.dtype} {list(samples.shape)}"
        raise ValueError(f"samples: got {got}, expected finite f32 [num_samples]")
    is_whole = isinstance(sample_rate_hz, int | np.integer)
    if not is_whole or not _MIN_HZ <= sample_rate_hz <= _MAX_HZ:
        expected = f"{_MIN_HZ:,} to {_MAX_HZ:,}, a whole number"
        raise ValueError(f"sample_rate_hz: got {sample_rate_hz!r}, expected {expected}")
    sample_rate_hz = int(sample_rate_hz)  # numpy's are none to the encoder
    container_format, encoder, valid_hz = _FORMATS[path.suffix.lower()]
    file_hz = sample_rate_hz if valid_hz is None or sample_rate_hz in valid_hz else _RESAMPLED_HZ
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container_format) as container:
        stream = container.add_stream(encoder, rate=file_hz, layout="mono")
        assert isinstance(stream, av.AudioStream), stream
        if encoder in _BIT_RATE:
            stream.bit_rate = _BIT_RATE[encoder]
        frame = av.AudioFrame.from_ndarray(to_int16(samples)[None], format="s16", layout="mono")
        frame.sample_rate = sample_rate_hz
        frame.pts = 0  # from which Ogg's positions count: without it the file ends 6.5 ms late
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    path.write_bytes(buffer.getvalue())
