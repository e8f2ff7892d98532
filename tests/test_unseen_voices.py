"""Clips that nobody chose with care, as voices of a real server: speech of a voice, or a refusal; never noise, never a crash."""

import io
import wave
from pathlib import Path

import httpx
import numpy as np
import pytest
import soxr
import torch
from safetensors.torch import load_file

from clients import AudioFormat, Sampling, connect, decode_turn
from model.embedded import embedded_path
from model.embedded.recipe.encode import load_codec

RATE_HZ = 24_000
CLIP_TEXT = "The library on the corner opens at nine and closes a little after six."
TEXT = "Your table is booked for seven, and I have asked for one by the window."
PCM = AudioFormat(codec="pcm_s16le", sample_rate=RATE_HZ)


@pytest.fixture(scope="module")
def stranger() -> np.ndarray:
    """A voice of the package with a vocal tract that none of them has."""
    codec = load_codec(embedded_path() / "codec.safetensors", torch.device("cpu"))
    codes = load_file(embedded_path() / "voices/am_michael.safetensors")["codes"]
    speech = codec.decode(codes[None])[0].numpy()
    return soxr.resample(speech, 1.0, 1.15)


def wav(samples: np.ndarray) -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setparams((1, 2, RATE_HZ, 0, "NONE", ""))
        file.writeframes((samples.clip(-1, 1) * 32_767).astype("<i2").tobytes())
    return out.getvalue()


def add(url: str, name: str, samples: np.ndarray, text: str = CLIP_TEXT) -> httpx.Response:
    form = {"name": name, "text": text}
    files = {"file": wav(samples)}
    http_url = url.replace("ws://", "http://")
    return httpx.post(f"{http_url}/v1/voices", data=form, files=files, trust_env=False, timeout=30)


async def say(url: str, voice: str) -> np.ndarray:
    sampling = Sampling(seed=1)
    async with connect(
        url, voice=voice, format=PCM, sampling=sampling, max_lead_ms=60_000
    ) as session:
        speech = session.say(TEXT)
        packets = [packet async for packet in speech]
        samples, _ = decode_turn(packets, session.format, speech.turn.metrics.num_samples)
        return samples


def voiced_share(samples: np.ndarray) -> float:
    """Of the windows of 40 ms within 30 dB of the loudest, those that repeat themselves after 2.5 to
    16 ms: about half of speech, nothing of noise."""
    windows = samples[: len(samples) // 960 * 960].reshape(-1, 960)
    power = np.square(windows).mean(1)
    windows = windows[power > power.max() * 1e-3]
    spectrum = np.fft.rfft(windows - windows.mean(1, keepdims=True), 1920)
    correlation = np.fft.irfft(np.abs(spectrum) ** 2)[:, :960]
    overlap = 1 - np.arange(960) / 960
    peaks = (correlation / overlap / correlation[:, :1])[:, 60:384].max(1)
    return float((peaks > 0.6).mean())


CLIPS = {
    "speech": lambda speech, noise: speech,
    "quiet speech": lambda speech, noise: 0.02 * speech,
    "overdriven speech": lambda speech, noise: 20 * speech,
    "a word": lambda speech, noise: speech[12_000:26_400],
    "speech in noise": lambda speech, noise: speech + 0.05 * noise,
    "after a noisy pause": lambda speech, noise: (
        0.002 * np.append(noise, noise) + np.append(0 * speech, speech)
    ),
    "two people": lambda speech, noise: np.append(speech, soxr.resample(speech, 1.2, 1.0)),
    "a telephone": lambda speech, noise: soxr.resample(
        soxr.resample(speech, RATE_HZ, 8_000), 8_000, RATE_HZ
    ),
    "28 seconds": lambda speech, noise: np.resize(speech, 28 * RATE_HZ),
}


@pytest.mark.parametrize("kind", CLIPS)
async def test_whatever_the_clip_speech_comes_out(
    url: str, stranger: np.ndarray, kind: str
) -> None:
    noise = np.random.default_rng(0).standard_normal(len(stranger)).astype(np.float32)
    name = kind.replace(" ", "-")
    text = "on the corner" if kind == "a word" else CLIP_TEXT
    response = add(url, name, CLIPS[kind](stranger, noise), text)
    assert response.status_code == 201, response.text
    samples = await say(url, name)
    assert 2.0 < len(samples) / RATE_HZ < 9.0
    assert float(np.sqrt(np.square(samples).mean())) > 0.005
    assert voiced_share(samples) > 0.3


TIME_S = np.arange(4 * RATE_HZ) / RATE_HZ
NO_SPEECH = {
    "a tone": 0.3 * np.sin(2 * np.pi * 220 * TIME_S),
    "noise": 0.1 * np.random.default_rng(0).standard_normal(4 * RATE_HZ),
    "notes": 0.3 * np.sin(2 * np.pi * 220 * 2 ** (np.floor(4 * TIME_S) % 12 / 12) * TIME_S),
}


@pytest.mark.parametrize("kind", NO_SPEECH)
def test_no_voice_of_what_is_no_speech(url: str, kind: str) -> None:
    response = add(url, "nothing", NO_SPEECH[kind])
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (422, "invalid_clip", "file")
    assert "no speech found in the clip" in error["message"]


def test_a_clip_after_a_pause_is_the_same_voice(
    url: str, voices_dir: Path, stranger: np.ndarray
) -> None:
    """The room before the speech is no part of the reference, though it is not silent."""
    room = 0.002 * np.random.default_rng(0).standard_normal(12 * RATE_HZ)
    assert add(url, "late", np.append(room, stranger)).status_code == 201
    codes = load_file(voices_dir / "late.safetensors")["codes"]
    assert abs(codes.shape[1] / 25 - len(stranger) / RATE_HZ) < 0.5


def test_a_clip_that_is_too_long_is_refused_with_the_limit(url: str, stranger: np.ndarray) -> None:
    response = add(url, "long", np.resize(stranger, 60 * RATE_HZ))
    assert (response.status_code, response.json()["error"]["code"]) == (422, "invalid_clip")
    assert "longer than 30 s" in response.json()["error"]["message"]


def test_a_quiet_clip_is_the_same_voice(url: str, voices_dir: Path, stranger: np.ndarray) -> None:
    for name, gain in (("loud", 1.0), ("quiet", 0.2)):
        assert add(url, name, gain * stranger).status_code == 201
    loud, quiet = (
        load_file(voices_dir / f"{name}.safetensors")["codes"] for name in ("loud", "quiet")
    )
    assert float((loud[0] == quiet[0]).float().mean()) > 0.7  # without a level of its own: 0.1


def test_noise_is_told_from_speech(stranger: np.ndarray) -> None:
    noise = np.random.default_rng(0).standard_normal(len(stranger))
    assert voiced_share(noise) < 0.02 and voiced_share(stranger) > 0.4


@pytest.mark.parametrize(("seconds", "level"), [(0.1, 0.3), (4.0, 0.0), (4.0, 1e-4)])
async def test_no_voice_of_silence_or_of_next_to_nothing(
    url: str, seconds: float, level: float
) -> None:
    hum = level * np.sin(np.arange(round(seconds * RATE_HZ)) / 20)
    response = add(url, "nothing", hum)
    assert (response.status_code, response.json()["error"]["code"]) == (422, "invalid_clip")
    assert len(await say(url, "af_heart")) > RATE_HZ, "the server speaks on"
