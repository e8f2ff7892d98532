"""What a change of speed does to real speech, by comparison with the speech itself.

`python -m tests.adapters.speech_measures` speaks three sentences by each voice of the embedded model
and prints the table that stands in `tests_clients/README.md`.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from clients import AudioFormat, Sampling, decode_turn
from clients.local_server import LocalServer
from clients.sync import connect
from clients.voices import list_voices
from realtime.adapters.media_prosody import Prosody

RATE = 24_000
HOP = 240  # 10 ms
_TEXTS = (
    "Hello! How can I help you today?",
    "The quick brown fox jumps over the lazy dog, and then it sleeps until noon.",
    "Please leave your number after the tone; we will call you back at five past nine.",
)

Samples = NDArray[np.float32]
Array = NDArray[np.float64]


class Measures(NamedTuple):
    """Of changed speech. Each moment is compared with what was within 30 ms around its place."""

    spectral_db: float  # distance of 40 mel bands, mean over what is within 50 dB of the loudest
    pitch_cents: float  # difference of voiced frames, median
    off_pitch: (
        float  # share of voiced frames that differ by more than a semitone, or were not voiced
    )
    dip_db: float  # the deepest of 5 ms below the quietest 5 ms around its place, of what is loud
    click_db: float  # the highest of 2 ms above the brightest 2 ms around its place


def change_speed(pcm: Samples, speed: float) -> Samples:
    prosody = Prosody(RATE, speed)
    parts = [prosody.push(pcm[start : start + 480]) for start in range(0, len(pcm), 480)]
    return np.concatenate([*parts, prosody.finish()])


def measure(speech: Samples, changed: Samples, speed: float) -> Measures:
    pitch_cents, off_pitch = _pitch_difference(speech, changed, speed)
    return Measures(
        spectral_db=_spectral_distance(speech, changed, speed),
        pitch_cents=pitch_cents,
        off_pitch=off_pitch,
        dip_db=_deepest_dip(speech, changed, speed),
        click_db=_highest_click(speech, changed, speed),
    )


def say(url: str, voice: str, text: str) -> Samples:
    pcm, seed = AudioFormat(codec="pcm_s16le", sample_rate=RATE), Sampling(seed=1)
    with connect(url, voice=voice, format=pcm, sampling=seed, max_lead_ms=60_000) as session:
        speech = session.say(text)
        packets = list(speech)
        assert speech.turn.metrics is not None
        return decode_turn(packets, session.format, speech.turn.metrics.num_samples)[0]


# ---------------------------------------------------------------------------- the parts


def _spectral_distance(speech: Samples, changed: Samples, speed: float) -> float:
    old, new = _mel_db(speech), _mel_db(changed)
    peaks = new.max(axis=1)
    distances = [
        np.sqrt(((old[place] - new[i]) ** 2).mean(axis=1)).min()
        for i, place in _places(len(new), len(old), speed, num_around=3)
        if peaks[i] > peaks.max() - 50
    ]
    return float(np.mean(distances))


def _pitch_difference(speech: Samples, changed: Samples, speed: float) -> tuple[float, float]:
    (old_hz, was_voiced), (new_hz, is_voiced) = _pitch(speech), _pitch(changed)
    cents = []
    for i, place in _places(len(new_hz), len(old_hz), speed, num_around=3):
        if is_voiced[i]:
            hz = old_hz[place][was_voiced[place]]
            cents.append(np.abs(1200 * np.log2(new_hz[i] / hz)).min() if len(hz) else np.inf)
    return float(np.median(cents)), float(np.mean(np.array(cents) > 100.0))


def _deepest_dip(speech: Samples, changed: Samples, speed: float) -> float:
    old, new = _levels_db(speech, RATE // 200), _levels_db(changed, RATE // 200)
    quietest = [(i, old[p].min()) for i, p in _places(len(new), len(old), speed, num_around=6)]
    return float(max(level - new[i] for i, level in quietest if level > -40))


def _highest_click(speech: Samples, changed: Samples, speed: float) -> float:
    """By the second difference, in which a step or a kink outshines a voice."""
    old, new = (_levels_db(np.diff(pcm, 2), RATE // 500) for pcm in (speech, changed))
    places = _places(len(new), len(old), speed, num_around=15)
    return float(max(new[i] - old[place].max() for i, place in places if new[i] > -70))


def _places(
    num_new: int, num_old: int, speed: float, num_around: int
) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Of each new frame the old ones that may be in its place."""
    around = np.arange(-num_around, num_around + 1)
    for i in range(num_new):
        yield i, np.clip(round(i * speed) + around, 0, num_old - 1)


def _frames(pcm: Samples, size: int) -> Array:
    padded = np.pad(pcm.astype(np.float64), size // 2)
    return np.lib.stride_tricks.sliding_window_view(padded, size)[::HOP]


def _levels_db(pcm: Samples, size: int) -> Array:
    blocks = pcm[: len(pcm) // size * size].astype(np.float64).reshape(-1, size)
    return np.asarray(10 * np.log10((blocks**2).mean(axis=1) + 1e-9))


def _mel_db(pcm: Samples) -> Array:
    """[num_frames, 40], 80 Hz to 10 kHz."""
    size = 1_024
    power = np.abs(np.fft.rfft(_frames(pcm, size) * np.hanning(size), axis=1)) ** 2
    mels = 2595 * np.log10(1 + np.fft.rfftfreq(size, 1 / RATE) / 700)
    edges = np.linspace(*(2595 * np.log10(1 + np.array([80.0, 10_000.0]) / 700)), 42)
    rising = (mels[:, None] - edges[:-2]) / np.diff(edges)[:-1]
    falling = (edges[2:] - mels[:, None]) / np.diff(edges)[1:]
    bands = power @ np.clip(np.minimum(rising, falling), 0.0, None)
    return np.asarray(10 * np.log10(np.maximum(bands, 1e-3)))


def _pitch(pcm: Samples) -> tuple[Array, NDArray[np.bool_]]:
    """In Hz, and which frames are voiced: the shortest lag, within 60 to 400 Hz, at which 50 ms are
    nearly as like themselves as at any."""
    size, fft_size, (first, last) = 1_200, 4_096, (RATE // 400, RATE // 60)
    frames = _frames(pcm, size)
    frames = (frames - frames.mean(axis=1, keepdims=True)) * np.hanning(size)
    likeness = np.fft.irfft(np.abs(np.fft.rfft(frames, fft_size, axis=1)) ** 2, axis=1)
    of_window = np.fft.irfft(np.abs(np.fft.rfft(np.hanning(size), fft_size)) ** 2)
    likeness = likeness[:, : last + 1] / (likeness[:, :1] + 1e-9)
    likeness *= of_window[0] / of_window[: last + 1]
    inner, before, after = (likeness[:, first + d : last + d] for d in (0, -1, 1))
    is_peak = (inner >= before) & (inner >= after)
    is_peak &= inner > 0.9 * inner.max(axis=1, keepdims=True)
    lag = is_peak.argmax(axis=1)
    b, a, c = (part[np.arange(len(lag)), lag] for part in (inner, before, after))
    top = first + lag + 0.5 * (a - c) / (a - 2 * b + c - 1e-12)
    is_voiced = is_peak.any(axis=1) & (b > 0.8) & ((frames**2).mean(axis=1) > 4e-5)
    return RATE / top, is_voiced


# ---------------------------------------------------------------------------- the table


def main() -> None:
    with LocalServer(["--device", "cpu"]) as server:
        voices = [voice.name for voice in list_voices(server.url)]
        clips = [say(server.url, voice, text) for voice in voices for text in _TEXTS]
    print(f"{len(clips)} clips, {sum(map(len, clips)) / RATE:.0f} s; mean (worst)")
    for speed in (0.5, 0.8, 1.25, 2.0):
        found = [measure(clip, change_speed(clip, speed), speed) for clip in clips]
        cells = [
            f"{np.mean(values):.2f} ({np.max(values):.2f})" for values in zip(*found, strict=True)
        ]
        print(f"| {speed:g}x | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
