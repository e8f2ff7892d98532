"""Resampler and encoder: exact lengths, the same in any split, early starts, clean turns."""

import numpy as np
import pytest
import soxr
from hypothesis import given, settings
from hypothesis import strategies as st

from realtime.audio_encoder import AudioEncoder, pre_skip_samples
from realtime.resample import StreamResampler
from realtime.session.actions import EncodedPacket
from realtime.wire import AudioFormat
from tests.realtime.support import opus_decode

RATES = [
    (44_100, 48_000),
    (44_100, 24_000),
    (24_000, 48_000),
    (24_000, 44_100),
    (24_000, 22_050),
    (24_000, 16_000),
    (44_100, 8_000),
]
splits = st.lists(st.integers(1, 5_000), min_size=1, max_size=8)


def noise(num_samples: int) -> np.ndarray:
    return np.random.default_rng(num_samples).uniform(-1, 1, num_samples).astype(np.float32)


def cut(pcm: np.ndarray, sizes: list[int]) -> list[np.ndarray]:
    return np.split(pcm, np.cumsum(sizes)[:-1])


def exact_length(num_in: int, in_rate: int, out_rate: int) -> int:
    return (2 * num_in * out_rate + in_rate) // (2 * in_rate)


@given(rates=st.sampled_from(RATES), turns=st.lists(splits, min_size=1, max_size=3))
@settings(max_examples=150, deadline=None)
def test_resampler_equals_the_whole_conversion(
    rates: tuple[int, int], turns: list[list[int]]
) -> None:
    resampler = StreamResampler(*rates)
    for sizes in turns:
        pcm = noise(sum(sizes))
        got = np.concatenate(
            [*(resampler.push(part) for part in cut(pcm, sizes)), resampler.finish()]
        )
        assert len(got) == exact_length(len(pcm), *rates)
        whole = soxr.resample(pcm, *rates)
        num = min(len(got), len(whole))
        assert abs(len(whole) - len(got)) <= 1
        assert num == 0 or np.abs(got[:num] - whole[:num]).max() < 1e-5


@pytest.mark.parametrize(
    ("rates", "frame_samples", "early_ms"),
    [((44_100, 24_000), 2048, 42), ((44_100, 48_000), 2048, 44), ((24_000, 48_000), 960, 35)],
)
def test_resampler_starts_early(
    rates: tuple[int, int], frame_samples: int, early_ms: float
) -> None:
    first = StreamResampler(*rates).push(noise(frame_samples))
    assert 1000 * len(first) / rates[1] >= early_ms


def test_resampler_without_input_gives_nothing() -> None:
    assert len(StreamResampler(44_100, 24_000).finish()) == 0


FORMATS = [
    (24_000, AudioFormat()),
    (44_100, AudioFormat(sample_rate=48_000)),
    (24_000, AudioFormat(codec="pcm_s16le")),
    (44_100, AudioFormat(codec="pcm_s16le")),
    (24_000, AudioFormat(codec="pcm_s16le", sample_rate=44_100)),
]


def encode(encoder: AudioEncoder, parts: list[np.ndarray]) -> list[EncodedPacket]:
    packets = [packet for part in parts for packet in encoder.push(part)]
    return [*packets, *encoder.finish()]


@pytest.mark.parametrize(("codec_rate", "audio_format"), FORMATS)
@given(sizes=splits)
@settings(max_examples=20, deadline=None)
def test_encoder_is_exact_in_any_split(
    codec_rate: int, audio_format: AudioFormat, sizes: list[int]
) -> None:
    pcm = 0.5 * noise(sum(sizes))
    encoder = AudioEncoder(audio_format, codec_rate)
    packets = encode(encoder, cut(pcm, sizes))
    rate = audio_format.sample_rate
    num_samples = exact_length(len(pcm), codec_rate, rate)
    assert encoder.num_samples == num_samples
    assert [p.pts_samples for p in packets] == [i * rate // 50 for i in range(len(packets))]
    if audio_format.codec == "opus":
        num_decoded = len(packets) * rate // 50 - pre_skip_samples(audio_format)
        assert num_samples <= num_decoded < num_samples + rate // 50
    else:
        assert all(len(packet.payload) == 2 * rate // 50 for packet in packets[:-1])
        assert sum(len(packet.payload) for packet in packets) == 2 * num_samples


@pytest.mark.parametrize(("codec_rate", "audio_format"), FORMATS)
def test_turns_do_not_touch_one_another(codec_rate: int, audio_format: AudioFormat) -> None:
    pcm = 0.5 * noise(10_000)
    fresh = encode(AudioEncoder(audio_format, codec_rate), [pcm])
    encoder = AudioEncoder(audio_format, codec_rate)
    assert encode(encoder, [pcm]) == fresh
    assert encode(encoder, [pcm]) == fresh, "after a finished turn"
    encoder.push(pcm[:3_333])
    encoder.reset()
    assert encoder.num_samples == 0
    assert encode(encoder, [pcm]) == fresh, "after an abandoned turn"


def test_first_packets_after_the_first_frame() -> None:
    assert len(AudioEncoder(AudioFormat(), 24_000).push(noise(960))) == 2
    assert len(AudioEncoder(AudioFormat(), 44_100).push(noise(2048))) == 2
    assert len(AudioEncoder(AudioFormat(sample_rate=48_000), 44_100).push(noise(2048))) == 2


def test_audio_so_far_is_without_the_pre_skip() -> None:
    encoder = AudioEncoder(AudioFormat(), 24_000)
    encoder.push(noise(960))
    assert encoder.num_samples == 960 - pre_skip_samples(AudioFormat()) > 0


def test_the_tail_survives_the_look_ahead() -> None:
    """The very last samples of a turn, a click, are in what is decoded."""
    pcm = np.zeros(4_800, np.float32)
    pcm[-60:] = 0.8 * np.sin(np.arange(60) / 3)
    packets = encode(AudioEncoder(AudioFormat(bitrate=64_000), 24_000), [pcm])
    got = opus_decode([packet.payload for packet in packets], 24_000)[156:][: len(pcm)]
    assert np.sum(got[-60:] ** 2) > 0.5 * np.sum(pcm**2)


def test_pcm_is_clipped_not_wrapped() -> None:
    loud = np.array([2.0, -2.0, 1.0, -1.0, 0.0], np.float32)
    (packet,) = encode(AudioEncoder(AudioFormat(codec="pcm_s16le"), 24_000), [loud])
    samples = np.frombuffer(packet.payload, "<i2")
    assert samples.tolist() == [32767, -32767, 32767, -32767, 0]


def test_a_turn_that_ends_on_a_packet_border_ends_in_an_empty_packet() -> None:
    encoder = AudioEncoder(AudioFormat(codec="pcm_s16le"), 24_000)
    assert len(encoder.push(noise(960))) == 2
    assert encoder.finish() == (EncodedPacket(960, b""),)
    assert encoder.num_samples == 960


def test_packets_that_are_held_back_come_with_the_rest() -> None:
    """The same packets, the first of them sooner."""
    pcm = np.sin(np.arange(4_096) * 0.05).astype(np.float32)
    whole, parted = (AudioEncoder(AudioFormat(), 44_100) for _ in range(2))
    expected = whole.push(pcm)
    first = parted.push(pcm, max_packets=1)
    assert len(first) == 1 and first + parted.rest() == expected
    assert parted.rest() == ()
    assert parted.finish() == whole.finish()
    assert parted.num_samples == whole.num_samples
