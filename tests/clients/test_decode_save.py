"""Sample exactness: what is decoded and what is saved has every sample, and none more."""

from pathlib import Path

import av
import numpy as np
import pytest

from clients import Decoder, ProtocolError, SessionError, Warn, decode_turn, save, to_int16
from realtime.wire import EffectiveFormat
from tests.clients.scripted_server import (
    OPUS,
    PACKET_SAMPLES,
    PCM,
    SAMPLE_RATE_HZ,
    Peer,
    opus_payloads,
    packet,
    pcm_payloads,
    session_with,
    tone,
)

NUM_SAMPLES = 10 * PACKET_SAMPLES + 123


def opus_packets(samples):
    return [packet(1, seq, payload, OPUS) for seq, payload in enumerate(opus_payloads(samples))]


def test_pcm_is_bit_exact() -> None:
    samples = np.arange(-500, 500, dtype=np.int16)
    packets = [packet(1, seq, payload) for seq, payload in enumerate(pcm_payloads(samples))]
    decoded, sample_rate_hz = decode_turn(packets, PCM, len(samples))
    assert sample_rate_hz == SAMPLE_RATE_HZ
    np.testing.assert_array_equal(to_int16(decoded), samples)


def test_opus_drops_the_pre_skip_and_keeps_num_samples() -> None:
    samples = tone(NUM_SAMPLES, num_silent=PACKET_SAMPLES)
    decoded, sample_rate_hz = decode_turn(opus_packets(samples), OPUS, NUM_SAMPLES)
    scale = sample_rate_hz // SAMPLE_RATE_HZ
    assert (sample_rate_hz, len(decoded)) == (48_000, scale * NUM_SAMPLES)
    sent = samples / 32768
    lags = range(-40, 41)
    core = slice(2 * PACKET_SAMPLES, 8 * PACKET_SAMPLES)
    error = {lag: np.abs(np.roll(decoded, lag)[::scale][core] - sent[core]).max() for lag in lags}
    best = min(error, key=error.__getitem__)
    assert abs(best) <= 1, f"off by {best} samples at 48 kHz"
    assert error[best] < 0.02


def test_opus_streams_packet_by_packet() -> None:
    packets = opus_packets(tone(NUM_SAMPLES))
    decoder = Decoder(OPUS)
    parts = [decoder.decode(each) for each in packets]
    assert len(parts[0]) == 960 - 2 * OPUS.pre_skip_samples
    assert all(len(part) == 960 for part in parts[1:])
    whole, _ = decode_turn(packets, OPUS)
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_pre_skip_longer_than_a_packet() -> None:
    format = EffectiveFormat(codec="pcm_s16le", sample_rate=24_000, pre_skip_samples=500)
    packets = [packet(1, seq, b"\1\0" * 480) for seq in range(2)]
    decoder = Decoder(format)
    assert [len(decoder.decode(each)) for each in packets] == [0, 460]


def test_a_turn_without_audio() -> None:
    decoded, _ = decode_turn([], OPUS, 0)
    assert len(decoded) == 0


@pytest.mark.parametrize(
    ("bad", "format", "match"),
    [
        (packet(1, 4, b"\0"), PCM, "packet 4 of turn 1 has 1 bytes"),
        (packet(1, 0, b"\0\0"), OPUS, "is PCM_S16LE, expected OPUS"),
        (packet(1, 0, b"", OPUS), OPUS, "is empty"),
        (packet(1, 0, b"\xff" * 40, OPUS), OPUS, "is not Opus"),
    ],
)
def test_payloads_that_are_not_what_the_format_says(bad, format, match) -> None:
    with pytest.raises(ProtocolError, match=match):
        Decoder(format).decode(bad)


def test_any_bytes_are_decoded_or_refused() -> None:
    rng = np.random.default_rng(7)
    decoder = Decoder(OPUS)
    for seq in range(2_000):
        payload = rng.bytes(int(rng.integers(1, 60)))
        try:
            samples = decoder.decode(packet(1, seq, payload, OPUS))
        except ProtocolError:
            continue
        assert np.isfinite(samples).all() and len(samples) <= 48_000 // 1000 * 120


def test_fewer_samples_than_announced() -> None:
    with pytest.raises(ProtocolError, match="audio_gap"):
        decode_turn([packet(1, 0, b"\0\0" * 480)], PCM, 481)


def test_to_int16_clips() -> None:
    assert to_int16(np.array([-2, -1, 0, 1, 2], np.float32)).tolist() == [
        -32768,
        -32768,
        0,
        32767,
        32767,
    ]


def read(path: Path) -> tuple[np.ndarray, int]:
    with av.open(str(path)) as container:
        frames = list(container.decode(audio=0))
    return np.concatenate([frame.to_ndarray().reshape(-1) for frame in frames]), frames[0].rate


@pytest.mark.parametrize("suffix", [".wav", ".ogg", ".opus", ".mp3"])
@pytest.mark.parametrize("sample_rate_hz", [24_000, 44_100, 48_000])
def test_saved_files_have_every_sample(tmp_path, suffix, sample_rate_hz) -> None:
    samples = tone(NUM_SAMPLES).astype(np.float32) / 32768
    path = tmp_path / f"out{suffix}"
    save(path, samples, sample_rate_hz)
    written, written_hz = read(path)
    assert abs(len(written) / written_hz - NUM_SAMPLES / sample_rate_hz) < 1 / written_hz
    if suffix == ".wav":
        np.testing.assert_array_equal(written, to_int16(samples))


@pytest.mark.parametrize("rate_hz", [2**31 - 1, 2**31, 384_001, 999, 0, -24_000])
@pytest.mark.parametrize("suffix", [".wav", ".ogg"])
def test_a_rate_that_no_audio_has_is_refused(tmp_path, suffix, rate_hz) -> None:
    with pytest.raises(ValueError, match=f"sample_rate_hz: got {rate_hz}, expected 1,000 to"):
        save(tmp_path / f"out{suffix}", np.zeros(10, np.float32), rate_hz)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("samples", "got"),
    [
        (np.zeros((2, 0), np.float32), r"float32 \[2, 0\]"),
        (np.zeros((2, 960), np.float32), r"float32 \[2, 960\]"),
        (np.zeros(960, np.int16), r"int16 \[960\]"),
        (np.full(960, np.nan, np.float32), r"float32 \[960\]"),
        (None, r"object \[\]"),
    ],
)
def test_samples_that_are_no_audio_are_refused(tmp_path, samples, got) -> None:
    with pytest.raises(ValueError, match=f"samples: got {got}, expected finite f32"):
        save(tmp_path / "a.ogg", samples, 24_000)
    assert not list(tmp_path.iterdir())


async def test_a_turn_without_audio_is_not_saved_and_says_where_the_reason_is(tmp_path) -> None:
    async def script(peer: Peer) -> None:
        await peer.accept()
        await peer.expect_turn()
        await peer.send(Warn(code="nothing_to_speak", message="no words", turn_id=1))
        await peer.done(1, 0)

    async with session_with(script) as session:
        speech = session.say("\N{SLIGHTLY SMILING FACE}")
        packets = [packet async for packet in speech]
        samples, sample_rate_hz = decode_turn(packets, session.format, 0)
        why = "no_audio: a.wav would be empty: there are no samples. turn.warnings says why"
        with pytest.raises(SessionError, match=why):
            save(tmp_path / "a.wav", samples, sample_rate_hz)
        assert [warning.code for warning in speech.turn.warnings] == ["nothing_to_speak"]
    assert not list(tmp_path.iterdir())


def test_a_rate_that_is_no_whole_number_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="got 24000.0, expected 1,000 to 384,000, a whole number"):
        save(tmp_path / "a.wav", np.zeros(960, np.float32), 24_000.0)


@pytest.mark.parametrize("suffix", [".wav", ".ogg"])
def test_a_rate_may_be_a_whole_number_of_numpy(tmp_path, suffix) -> None:
    save(tmp_path / f"a{suffix}", np.zeros(960, np.float32), np.int64(24_000))
    assert read(tmp_path / f"a{suffix}")[1] in (24_000, 48_000)


def test_what_is_no_opus_is_said_without_a_number() -> None:
    with pytest.raises(ProtocolError, match="is not Opus: Invalid data found when"):
        Decoder(OPUS).decode(packet(1, 0, b"\xff", OPUS))


def test_unknown_suffix_names_the_valid_ones(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"\.wav, \.ogg, \.opus, \.mp3"):
        save(tmp_path / "out.flac", np.zeros(10, np.float32), 24_000)
