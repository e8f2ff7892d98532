"""Reference audio: every container decodes to the same sound, every bad clip is a ClipError."""

import io
import random
import struct

import av
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from model.audio import ClipError, read_clip
from model.embedded import embedded_path
from model.embedded.recipe.encode import load_codec

RATE = 24_000


def chirp(seconds, rate_hz, amplitude=0.5):
    """A sweep from 200 Hz to 3 kHz under a slow envelope: speech-like in band and level."""
    t = np.arange(round(seconds * rate_hz)) / rate_hz
    phase = 2 * np.pi * (200 * t + (3000 - 200) * t**2 / (2 * max(seconds, 1e-3)))
    return (amplitude * np.sin(phase) * (0.6 + 0.4 * np.sin(2 * np.pi * 3 * t))).astype(np.float32)


def babble(seconds, rate_hz):
    """Harmonics of 130 Hz under formants that glide from one of nine places a second to the next, with
    a hiss: its spectrum moves as that of speech does."""
    rng = np.random.default_rng(0)
    t = np.arange(round(seconds * rate_hz)) / rate_hz
    at = np.arange(0, seconds + 0.2, 1 / 9)
    formants = [np.interp(t, at, rng.uniform(*span, len(at))) for span in ((250, 900), (900, 2600))]
    levels = np.interp(t, at, rng.uniform(0.1, 1, len(at)))
    out = 0.01 * rng.standard_normal(len(t))
    for hz in range(130, 4000, 130):
        gain = sum(np.exp(-np.abs(formant - hz) / 150) for formant in formants)
        out += gain * np.sin(2 * np.pi * hz * t)
    return (0.1 * levels * out).astype(np.float32)


def encode(samples, rate_hz, container="wav", codec="pcm_s16le", channels=1):
    """One clip in a container; the same signal in every channel."""
    layout = {1: "mono", 2: "stereo", 6: "5.1", 8: "7.1"}[channels]
    out = io.BytesIO()
    with av.open(out, "w", format=container) as writer:
        stream = writer.add_stream(codec, rate=rate_hz, layout=layout)
        if codec in ("libmp3lame", "aac", "libopus"):
            stream.bit_rate = 96_000 * channels
        interleaved = np.repeat(samples, channels)[None]
        frame = av.AudioFrame.from_ndarray(interleaved, format="flt", layout=layout)
        frame.sample_rate = rate_hz
        resampler = av.AudioResampler(
            format=stream.codec_context.format, layout=layout, rate=rate_hz
        )
        fifo = av.AudioFifo()
        for piece in resampler.resample(frame) + resampler.resample(None):
            fifo.write(piece)
        size = stream.codec_context.frame_size or 4096
        while (piece := fifo.read(size, partial=True)) is not None:
            writer.mux(stream.encode(piece))
        writer.mux(stream.encode(None))
    return out.getvalue()


def wav_f32(samples, rate_hz=RATE):
    """A float WAV written by hand, so that it can hold anything."""
    data = np.asarray(samples, dtype="<f4").tobytes()
    header = struct.pack("<4sI4s4sIHHIIHH", b"RIFF", 36 + len(data), b"WAVE", b"fmt ", 16, 3, 1,
                         rate_hz, 4 * rate_hz, 4, 32)  # fmt: skip
    return header + struct.pack("<4sI", b"data", len(data)) + data


def best_correlation(a, b):
    """Correlation at the best lag: codecs shift by their own delay."""
    size = len(a) + len(b)
    product = np.fft.irfft(np.fft.rfft(a, size) * np.fft.rfft(b, size).conj(), size)
    return float(product.max() / (np.linalg.norm(a) * np.linalg.norm(b)))


@pytest.mark.parametrize("channels", [1, 2, 6, 8])
@pytest.mark.parametrize(
    ("container", "codec", "rates"),
    [
        ("wav", "pcm_s16le", (8_000, 44_100)),
        ("wav", "pcm_u8", (22_050,)),
        ("wav", "pcm_s24le", (96_000,)),
        ("wav", "pcm_f32le", (24_000,)),
        ("flac", "flac", (16_000, 48_000)),
        ("mp3", "libmp3lame", (44_100, 24_000)),
        ("ogg", "libopus", (48_000, 16_000)),
        ("ipod", "aac", (44_100, 22_050)),
        ("webm", "libopus", (48_000,)),
        ("caf", "pcm_s16be", (32_000,)),
        ("mpegts", "aac", (48_000,)),
    ],
)
def test_container_rate_and_channels(container, codec, rates, channels):
    if codec == "libmp3lame" and channels > 2:
        pytest.skip("MP3 holds two channels at most")
    for rate_hz in rates:
        clip = read_clip(encode(chirp(1.5, rate_hz), rate_hz, container, codec, channels), RATE)
        assert clip.dtype == np.float32 and clip.ndim == 1
        assert len(clip) / RATE == pytest.approx(1.5, abs=0.08), "encoders pad to whole frames"
        want = chirp(1.5, RATE)
        correlation = best_correlation(want, clip)
        peak = float(np.abs(clip).max())
        print(f"{container:7} {codec:11} {rate_hz:6} Hz x{channels}: {correlation:.4f} {peak:.3f}")
        lossy = codec in ("libmp3lame", "aac", "libopus")
        assert correlation > (0.93 if lossy else 0.999)
        # Lossy encoders low-pass the 5.1 layout's bass channel, a sixth of the sum.
        assert peak == pytest.approx(0.5, rel=0.35 if lossy else 0.01)


def test_wav_is_exact_at_its_own_rate(tmp_path):
    path = tmp_path / "clip.wav"
    path.write_bytes(wav_f32(chirp(1, RATE)))
    for source in (path, str(path), path.read_bytes()):
        assert np.array_equal(read_clip(source, RATE), chirp(1, RATE))
    assert len(read_clip(path, 44_100)) == 44_100


def test_channels_are_averaged():
    left, right = chirp(1, RATE), np.zeros(RATE, np.float32)
    frame = np.stack([left, right], axis=1).ravel()
    data = bytearray(wav_f32(frame))
    data[22:24], data[32:34] = struct.pack("<H", 2), struct.pack("<H", 8)
    assert np.allclose(read_clip(bytes(data), RATE), left / 2, atol=1e-7)


@pytest.mark.parametrize("num_channels", [3, 9, 64])
def test_channels_without_a_known_layout(num_channels):
    data = bytearray(wav_f32(np.repeat(chirp(0.6, RATE), num_channels)))
    data[22:24], data[32:34] = struct.pack("<H", num_channels), struct.pack("<H", 4 * num_channels)
    clip = read_clip(bytes(data), RATE)
    assert np.allclose(clip, chirp(0.6, RATE), atol=1e-6)


def test_trim_keeps_a_margin():
    quiet = 1e-4 * np.random.default_rng(0).standard_normal(RATE).astype(np.float32)
    clip = np.concatenate([quiet, chirp(1, RATE), quiet[: RATE // 2]])
    assert len(read_clip(wav_f32(clip), RATE)) == len(clip)
    trimmed = read_clip(wav_f32(clip), RATE, trim_silence=True)
    assert len(trimmed) / RATE == pytest.approx(1.1, abs=0.045)
    assert best_correlation(chirp(1, RATE), trimmed) > 0.999


def test_room_noise_is_trimmed_as_well():
    room = 0.004 * np.random.default_rng(0).standard_normal(6 * RATE).astype(np.float32)
    speech = babble(2, RATE)
    clip = np.concatenate([room, speech + room[: len(speech)], room])
    assert np.abs(room).max() > 10 ** (-40 / 20) * np.abs(speech).max()
    assert len(read_clip(wav_f32(clip), RATE, trim_silence=True)) / RATE == pytest.approx(
        2.1, abs=0.15
    )


def notes(rate_hz):
    t = np.arange(rate_hz // 4) / rate_hz
    scale = [262, 294, 330, 349, 392, 440, 494, 523]
    return np.concatenate(
        [
            sum(np.sin(2 * np.pi * hz * k * t) / k for k in range(1, 6)) * np.exp(-3 * t)
            for hz in scale
        ]
    )


def nothing_spoken(kind):
    rng, t = np.random.default_rng(0), np.arange(2 * RATE) / RATE
    noise = rng.standard_normal(len(t))
    return {
        "tone": np.sin(2 * np.pi * 220 * t),
        "hum": np.sign(np.sin(2 * np.pi * 50 * t)),
        "sweep": chirp(2, RATE),
        "siren": np.sin(2 * np.pi * 500 * t + 8 * np.sin(2 * np.pi * 5 * t)),
        "beeps": np.sin(2 * np.pi * 800 * t) * (t * 2 % 1 < 0.5),
        "notes": notes(RATE),
        "noise": noise,
        "gusts": noise * (1 + np.sin(2 * np.pi * 4 * t)),
        "rumble": np.convolve(noise, np.exp(-np.arange(200) / 40), "same") / 6,
        "clicks": noise * (np.arange(len(t)) % 6000 < 30),
    }[kind]


UNSPOKEN = (
    *("tone", "hum", "sweep", "siren", "beeps", "notes"),
    *("noise", "gusts", "rumble", "clicks"),
)


@pytest.mark.parametrize("level", [0.2, 0.01])
@pytest.mark.parametrize("kind", UNSPOKEN)
def test_what_is_no_speech_is_refused_as_such(kind, level):
    clip = wav_f32(level * nothing_spoken(kind))
    with pytest.raises(ClipError, match="no speech found in the clip"):
        read_clip(clip, RATE, trim_silence=True, must_speak=True)
    assert len(read_clip(clip, RATE)) > RATE, "sound is enough unless speech is asked for"


@pytest.mark.parametrize("gain", [20, 1, 0.02])
@pytest.mark.parametrize("seconds", [0.6, 4, 60])
def test_what_may_be_speech_is_taken(seconds, gain):
    speech = (gain * babble(seconds, RATE)).clip(-1, 1)
    read_clip(wav_f32(speech), RATE, must_speak=True)
    noise = np.random.default_rng(1).standard_normal(len(speech)).astype(np.float32)
    read_clip(wav_f32(speech + 0.3 * speech.std() * noise), RATE, must_speak=True)


def test_speech_of_a_telephone_is_taken():
    clip = encode(babble(3, 8_000), 8_000, "wav", "pcm_mulaw")
    assert len(read_clip(clip, RATE, must_speak=True)) == 3 * RATE


def high_passed(samples, hz):
    """Steeply, and written in 16 bits."""
    size = len(samples)
    gain = 1 / np.sqrt(1 + (hz / np.fft.rfftfreq(size, 1 / RATE).clip(1)) ** 40)
    filtered = np.fft.irfft(np.fft.rfft(samples) * gain, size)
    return np.rint(16_384 * filtered / np.abs(filtered).max()).astype(np.float32) / 32_768


@pytest.mark.parametrize("name", ["af_heart", "am_michael", "bf_emma"])
def test_speech_of_a_tinny_loudspeaker_is_taken(name):
    voice = load_file(embedded_path() / f"voices/{name}.safetensors")["codes"]
    codec = load_codec(embedded_path() / "codec.safetensors", torch.device("cpu"))
    speech = codec.decode(voice[None, :, :60])[0].numpy()
    for hz in (0.1, 1_000, 1_500, 2_000):
        read_clip(wav_f32(high_passed(speech, hz)), RATE, must_speak=True)


@pytest.mark.parametrize("kind", UNSPOKEN)
def test_what_is_no_speech_is_none_through_a_tinny_loudspeaker(kind):
    with pytest.raises(ClipError, match="no speech found in the clip"):
        read_clip(wav_f32(high_passed(nothing_spoken(kind), 1_000)), RATE, must_speak=True)


@pytest.mark.parametrize("hz", [400, 700])
def test_a_siren_that_sweeps_wide_is_no_speech(hz):
    t = np.arange(3 * RATE) / RATE
    siren = 0.3 * np.sin(2 * np.pi * hz * t + 100 * np.sin(2 * np.pi * 2 * t))
    with pytest.raises(ClipError, match="no speech found in the clip"):
        read_clip(wav_f32(siren), RATE, must_speak=True)


def test_a_loud_float_clip_is_scaled_down():
    clip = read_clip(wav_f32(4 * chirp(1, RATE)), RATE)
    assert float(np.abs(clip).max()) == 1.0


REFUSED = {
    "empty": (b"", "empty"),
    "text": (b"this is no sound at all, " * 40, "not audio"),
    "zeros": (bytes(5000), "not audio"),
    "png": (b"\x89PNG\r\n\x1a\n" + bytes(200), "not audio"),
    "playlist": (b"#EXTM3U\n#EXTINF:5,\nhttp://127.0.0.1:9/a.ts\n", "not audio"),
    "no samples": (wav_f32([]), "without samples|not audio"),
    "silent": (wav_f32(np.zeros(RATE)), "silent"),
    "offset": (wav_f32(np.full(RATE, 0.5)), "silent"),
    "faint": (wav_f32(chirp(1, RATE, 1e-4)), "silent"),
    "too short": (wav_f32(chirp(0.1, RATE)), r"0\.10 s .* at least 0\.5 s"),
    "too long": (wav_f32(chirp(61, 8_000), 8_000), "longer than 60 s"),
    "nan": (wav_f32(np.where(np.arange(RATE) == 9, np.nan, chirp(1, RATE))), "1 samples that"),
    "inf": (wav_f32(np.where(np.arange(RATE) > 9, np.inf, 0.1)), "not finite"),
    "integer scale": (wav_f32(20_000 * chirp(1, RATE)), "peaks at"),
    "1 Hz": (wav_f32(chirp(1, RATE), 1), "sample rate of 1 Hz"),
    "1 GHz": (wav_f32(chirp(1, RATE), 2**30 - 1), "sample rate of 1073741823 Hz"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    data, message = REFUSED[name]
    with pytest.raises(ClipError, match=message) as refused:
        read_clip(data, RATE)
    for internal in ("Errno", "<none>", "InvalidDataError"):
        assert internal not in str(refused.value)


def test_limits_are_the_callers(tmp_path):
    clip = wav_f32(chirp(2, RATE))
    assert len(read_clip(wav_f32(chirp(0.1, RATE)), RATE, min_seconds=0.05)) == 2400
    with pytest.raises(ClipError, match="longer than 1 s"):
        read_clip(clip, RATE, max_seconds=1)
    with pytest.raises(ClipError, match=r"0\.2 MiB; expected at most 0\.1 MiB"):
        read_clip(clip, RATE, max_bytes=2**17)
    assert len(read_clip(clip, RATE, max_bytes=len(clip)))
    with pytest.raises(ClipError, match="cannot be read"):
        read_clip(tmp_path / "none.wav", RATE)
    with pytest.raises(ClipError, match="cannot be read"):
        read_clip(tmp_path, RATE)
    with pytest.raises(ClipError, match="cannot be read"):
        read_clip("a\0b", RATE)


def test_speech_too_short_after_trimming():
    clip = np.concatenate(
        [np.zeros(RATE, np.float32), chirp(0.2, RATE), np.zeros(RATE, np.float32)]
    )
    with pytest.raises(ClipError, match="s of sound; expected at least"):
        read_clip(wav_f32(clip), RATE, trim_silence=True)


def test_video_without_audio():
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as writer:
        stream = writer.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        for _ in range(3):
            frame = av.VideoFrame.from_ndarray(np.zeros((64, 64, 3), np.uint8), format="rgb24")
            writer.mux(stream.encode(frame))
        writer.mux(stream.encode(None))
    with pytest.raises(ClipError, match="no audio stream .found: video."):
        read_clip(out.getvalue(), RATE)


def test_a_long_clip_is_not_decoded_whole(monkeypatch):
    """Ten minutes of MP3: the refusal comes after about the limit's worth of packets."""
    import model.audio

    decoded = []
    to_mono = model.audio._to_mono
    monkeypatch.setattr(
        model.audio, "_to_mono", lambda frame: decoded.append(frame.samples) or to_mono(frame)
    )
    data = encode(np.tile(chirp(10, 16_000), 60), 16_000, "mp3", "libmp3lame")
    with pytest.raises(ClipError, match="longer than 5 s"):
        read_clip(data, RATE, max_seconds=5)
    assert sum(decoded) < 6 * 16_000, sum(decoded)


@pytest.mark.parametrize(
    ("container", "codec"),
    [("wav", "pcm_s16le"), ("mp3", "libmp3lame"), ("ogg", "libopus"), ("flac", "flac"),
     ("ipod", "aac"), ("webm", "libopus")],
)  # fmt: skip
def test_damaged_bytes_give_a_clip_or_a_clip_error(container, codec):
    good = encode(chirp(1, 48_000), 48_000, container, codec)
    rng = random.Random(container)
    num_refused = 0
    for _ in range(40):
        data = bytearray(good[: rng.randrange(1, len(good))] if rng.random() < 0.4 else good)
        for _ in range(rng.choice([0, 1, 8, 200])):
            data[rng.randrange(min(len(data), rng.choice([64, 1 << 20])))] = rng.randrange(256)
        try:
            clip = read_clip(bytes(data), RATE, max_seconds=10)
        except ClipError:
            num_refused += 1
        else:
            assert np.isfinite(clip).all() and np.abs(clip).max() <= 1
    assert num_refused > 0
