"""Speed and loudness: exact durations, the pitch as it was, no steps, no clipping."""

import numpy as np
import pytest

from realtime.adapters.media_prosody import Prosody, ProsodyError

RATE = 24_000
SPEEDS = (0.25, 0.5, 0.8, 1.25, 2.0, 4.0)


def tone(hz: float, duration_s: float, amplitude: float = 0.5) -> np.ndarray:
    t_s = np.arange(round(duration_s * RATE)) / RATE
    return (amplitude * np.sin(2 * np.pi * hz * t_s)).astype(np.float32)


def run(pcm: np.ndarray, push_samples: int = 960, **kwargs: float) -> list[np.ndarray]:
    prosody = Prosody(RATE, **kwargs)
    starts = range(0, len(pcm), push_samples)
    return [
        *(prosody.push(pcm[start : start + push_samples]) for start in starts),
        prosody.finish(),
    ]


def spectrum(pcm: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    size = 1 << 20
    power = np.abs(np.fft.rfft(pcm * np.blackman(len(pcm)), size)) ** 2
    return power, np.fft.rfftfreq(size, 1 / RATE)


def peak_hz(pcm: np.ndarray) -> float:
    power, hz = spectrum(pcm)
    k = int(power.argmax())
    left, top, right = np.log(power[k - 1 : k + 2])
    return hz[k] + 0.5 * (left - right) / (left - 2 * top + right) * hz[1]


def off_tone_db(pcm: np.ndarray, hz_of_tone: float) -> float:
    power, hz = spectrum(pcm)
    is_tone = np.abs(hz - hz_of_tone) < 15
    return 10 * np.log10(power[~is_tone].sum() / power[is_tone].sum())


@pytest.mark.parametrize("speed", SPEEDS)
@pytest.mark.parametrize("num_samples", [1, 50, 960, 24_000, 47_993])
def test_duration_is_exact(speed: float, num_samples: int) -> None:
    out = np.concatenate(run(tone(200, 2.0)[:num_samples], speed=speed))
    assert len(out) == np.floor(num_samples / speed + 0.5)


@pytest.mark.parametrize("speed", SPEEDS)
@pytest.mark.parametrize("hz", [100.0, 200.0, 313.0, 1000.0])
def test_a_tone_stays_a_tone(speed: float, hz: float) -> None:
    sent = tone(hz, 4.0)
    inner = np.concatenate(run(sent, speed=speed))[2_000:-2_000]
    max_cents = 15.0 if hz < 150 else 2.0
    assert abs(1200 * np.log2(peak_hz(inner) / hz)) < max_cents
    step_ratio = np.abs(np.diff(inner)).max() / np.abs(np.diff(sent)).max()
    assert step_ratio < 1.03  # no discontinuity: none is larger than the tone's own
    assert off_tone_db(inner, hz) < -30.0


@pytest.mark.parametrize("speed", [0.5, 0.8, 1.25, 2.0])
def test_the_end_is_there(speed: float) -> None:
    """A word that ends with the audio keeps its last syllable, and in its place."""
    sent = np.concatenate((np.zeros(RATE, np.float32), tone(300, 0.25)))
    out = np.concatenate(run(sent, speed=speed))
    loud = np.flatnonzero(np.abs(out) > 0.1)
    assert loud[0] / RATE == pytest.approx(1.0 / speed, abs=0.06)
    assert (len(out) - loud[-1]) / RATE < 0.04
    assert np.sum(out**2) == pytest.approx(np.sum(sent**2) / speed, rel=0.25)


@pytest.mark.parametrize("speed", [0.5, 0.8, 1.25, 2.0])
def test_audio_comes_early(speed: float) -> None:
    parts = run(tone(200, 1.0), push_samples=480, speed=speed)
    assert any(len(part) for part in parts[:4])  # within 80 ms
    assert len(parts[-1]) <= 0.1 * RATE / speed


def test_neither_is_transparent() -> None:
    sent = tone(200, 0.5)
    assert np.array_equal(np.concatenate(run(sent)), sent)


def test_attenuation_is_a_product() -> None:
    sent = tone(200, 0.5)
    assert np.allclose(np.concatenate(run(sent, volume_db=-20.0)), sent / 10.0, atol=1e-7)


def test_gain_below_full_scale_is_exact() -> None:
    sent = tone(200, 1.0, amplitude=0.2)
    out = np.concatenate(run(sent, volume_db=6.0))
    assert len(out) == len(sent)
    assert np.allclose(out, sent * 10 ** (6 / 20), atol=1e-5)


@pytest.mark.parametrize("volume_db", [6.0, 12.0, 20.0])
@pytest.mark.parametrize("hz", [100.0, 1000.0])
def test_gain_never_clips(volume_db: float, hz: float) -> None:
    sent = np.concatenate((tone(hz, 1.0, 0.9), tone(hz, 0.5, 0.05), tone(hz, 1.0, 1.0)))
    out = np.concatenate(run(sent, volume_db=volume_db))
    assert len(out) == len(sent) and np.abs(out).max() <= 0.981
    assert off_tone_db(out[RATE // 4 : RATE], hz) < -60.0


def test_both_at_once() -> None:
    sent = tone(200, 2.0)
    out = np.concatenate(run(sent, speed=1.25, volume_db=20.0))
    assert len(out) == round(len(sent) / 1.25)
    assert 0.9 < np.abs(out).max() <= 0.981
    assert peak_hz(out[2_000:-2_000]) == pytest.approx(200.0, abs=0.2)


@pytest.mark.parametrize(
    ("kwargs", "param"),
    [
        ({"speed": 0.2}, "speed"),
        ({"speed": float("nan")}, "speed"),
        ({"volume_db": 21.0}, "volume"),
    ],
)
def test_out_of_range_is_refused(kwargs: dict[str, float], param: str) -> None:
    with pytest.raises(ProsodyError, match="expected") as refused:
        Prosody(RATE, **kwargs)
    assert refused.value.param == param
