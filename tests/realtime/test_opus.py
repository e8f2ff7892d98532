"""libopus is found without a system copy, and the encoder is sample-exact and repeatable."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from realtime.opus import OpusEncoder, opus_pre_skip_samples
from tests.realtime.support import opus_decode

# Run in a fresh interpreter: `ctypes.util.find_library` finds nothing on the system.
NO_SYSTEM_OPUS = """
import ctypes.util, importlib.util, sys, threading
system_find_library = ctypes.util.find_library
def find_library(name):
    return None if name == "opus" else system_find_library(name)
ctypes.util.find_library = find_library
"""


def run_fresh(code: str) -> str:
    command = [sys.executable, "-W", "error", "-c", NO_SYSTEM_OPUS + code]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_pyav_libopus_is_found_by_many_threads_and_nothing_stays_patched() -> None:
    out = run_fresh("""
from concurrent.futures import ThreadPoolExecutor
from realtime.opus import OpusEncoder
with ThreadPoolExecutor(8) as pool:
    encoders = [future.result() for future in [pool.submit(OpusEncoder, 24_000, 32_000)] * 8]
assert ctypes.util.find_library is find_library
assert "av" not in sys.modules, "located, not imported"
print(encoders[0].pre_skip_samples)
""")
    assert out == "156"


def test_without_any_libopus_the_error_says_what_to_do() -> None:
    out = run_fresh("""
import realtime.opus
realtime.opus._find_in_pyav = lambda: None
try:
    realtime.opus.OpusEncoder(24_000, 32_000)
except realtime.opus.OpusUnavailable as error:
    assert ctypes.util.find_library is find_library
    print(error.code, error.message)
""")
    assert out.startswith("opus_unavailable found no libopus")
    assert "pip install av" in out


@pytest.mark.parametrize("sample_rate", [24_000, 48_000])
def test_decoded_signal_is_delayed_by_exactly_the_pre_skip(sample_rate: int) -> None:
    encoder = OpusEncoder(sample_rate, bitrate=96_000)
    size = encoder.packet_samples
    t_s = np.arange(50 * size) / sample_rate
    chirp = (0.3 * np.sin(2 * np.pi * (200 + 400 * t_s) * t_s)).astype(np.float32)
    got = opus_decode(
        [encoder.encode(chirp[i : i + size]) for i in range(0, len(chirp), size)], sample_rate
    )
    assert encoder.pre_skip_samples == opus_pre_skip_samples(sample_rate)
    part = slice(10 * size, 40 * size)
    errors = {
        shift: np.mean((np.roll(got, -shift)[part] - chirp[part]) ** 2)
        for shift in range(encoder.pre_skip_samples - 8, encoder.pre_skip_samples + 9)
    }
    assert min(errors, key=errors.__getitem__) == encoder.pre_skip_samples


def test_reset_makes_the_next_packet_the_first() -> None:
    rng = np.random.default_rng(0)
    pcm = rng.uniform(-0.3, 0.3, (20, 480)).astype(np.float32)
    encoder = OpusEncoder(24_000, 32_000)
    first = [encoder.encode(part) for part in pcm]
    encoder.reset()
    assert [encoder.encode(part) for part in pcm] == first
    assert [OpusEncoder(24_000, 32_000).encode(pcm[0])] == first[:1]


def test_bitrate_is_kept() -> None:
    rng = np.random.default_rng(0)
    for bitrate in (16_000, 64_000):
        encoder = OpusEncoder(48_000, bitrate)
        sizes = [
            len(encoder.encode(rng.uniform(-0.2, 0.2, 960).astype(np.float32))) for _ in range(100)
        ]
        assert sum(sizes) * 8 / 2.0 == pytest.approx(bitrate, rel=0.25)


@pytest.mark.parametrize("bitrate", [24_000, 32_000, 64_000])
def test_a_voice_gets_more_than_the_bitrate_within_bounds(bitrate: int) -> None:
    """VBR pays for harmonics; `realtime/opus.py` says how much."""
    encoder, speech = OpusEncoder(24_000, bitrate), voiced(48_000)
    sizes = [len(encoder.encode(speech[i : i + 480])) for i in range(0, 48_000, 480)]
    assert 1.1 * bitrate < sum(sizes) * 8 / 2.0 < 1.8 * bitrate
    assert max(sizes) * 8 * 50 < 2.1 * bitrate


def voiced(num_samples: int) -> np.ndarray:
    """A gliding tone with harmonics, f32 at 24 kHz, as loud as speech."""
    t_s = np.arange(num_samples) / 24_000
    phase = 2 * np.pi * (120 + 20 * t_s) * t_s
    return (0.1 * sum(np.sin(k * phase) / k for k in range(1, 20))).astype(np.float32)


@pytest.mark.parametrize("bitrate", [32_000, 64_000])
def test_the_waveform_is_kept(bitrate: int) -> None:
    """The MDCT mode, which codes the waveform: the speech modes reach 10 dB here."""
    encoder, speech = OpusEncoder(24_000, bitrate), voiced(48_000)
    packets = [encoder.encode(part) for part in speech.reshape(-1, encoder.packet_samples)]
    assert {packet[0] >> 3 for packet in packets} == {27}  # RFC 6716: CELT, 12 kHz wide, 20 ms
    got, skip = opus_decode(packets, 24_000), encoder.pre_skip_samples
    error = got[skip + 4800 :] - speech[4800 : len(got) - skip]
    assert 10 * np.log10(np.mean(speech**2) / np.mean(error**2)) > 18


def test_encoders_run_in_parallel_threads() -> None:
    rng = np.random.default_rng(0)
    pcm = rng.uniform(-0.3, 0.3, (50, 480)).astype(np.float32)

    def encode(_: int) -> list[bytes]:
        encoder = OpusEncoder(24_000, 32_000)
        return [encoder.encode(part) for part in pcm]

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(encode, range(4)))
    assert all(result == results[0] for result in results)


def test_rates_that_opus_lacks_are_refused() -> None:
    with pytest.raises(ValueError, match="44100"):
        OpusEncoder(44_100, 32_000)
