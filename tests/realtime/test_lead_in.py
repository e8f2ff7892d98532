"""Silence before each turn's audio: part of it for every clock, of no word for the ledger."""

from pathlib import Path

import numpy as np
import pytest

from realtime import wire
from realtime.audio_encoder import AudioEncoder, pre_skip_samples
from realtime.session.ledger import Ledger, SpeakingRate
from tests.realtime.support import decode, make_engine, opus_decode, serving, session

TEXT = "The quick brown fox jumps over the lazy dog."
LEAD_IN_MS = 100
FORMATS = [
    wire.AudioFormat(codec="pcm_s16le", sample_rate=24_000, lead_in_ms=LEAD_IN_MS),
    wire.AudioFormat(codec="pcm_s16le", sample_rate=44_100, lead_in_ms=LEAD_IN_MS),
    wire.AudioFormat(codec="opus", sample_rate=48_000, lead_in_ms=LEAD_IN_MS),
]


@pytest.mark.parametrize("audio_format", FORMATS)
def test_each_turn_begins_with_it(audio_format: wire.AudioFormat) -> None:
    rate = audio_format.sample_rate
    num_silent = rate * LEAD_IN_MS // 1000
    pcm = (0.5 * np.sin(np.arange(24_000) / 5)).astype(np.float32)
    encoder = AudioEncoder(audio_format, 24_000)
    for _ in range(2):
        packets = [*encoder.push(pcm[:960]), *encoder.push(pcm[960:]), *encoder.finish()]
        assert encoder.num_samples == rate + num_silent
        payloads = [packet.payload for packet in packets]
        if audio_format.codec == "opus":
            heard = opus_decode(payloads, rate)[pre_skip_samples(audio_format) :]
        else:
            heard = np.frombuffer(b"".join(payloads), "<i2") / 32767.0
        heard = heard[: encoder.num_samples]
        assert np.abs(heard[: num_silent - rate // 100]).max() < 0.01
        assert np.abs(heard[num_silent + rate // 100 :][: rate // 10]).max() > 0.4
        encoder.push(pcm[:5_000])
        encoder.reset()  # an interruption


def test_no_word_is_spoken_in_it() -> None:
    plain, led = (Ledger(40.0, SpeakingRate.typical(40.0), ms) for ms in (0, LEAD_IN_MS))
    for ledger in (plain, led):
        ledger.add_text("aaaa bbbb cccc")
        ledger.add_segment(14)
        ledger.add_frames(0, 0, 40)
        ledger.end_segment(0, 40)
    for ms in range(0, 2_000, 10):
        assert led.num_spoken_chars(ms + LEAD_IN_MS) == plain.num_spoken_chars(ms)
        assert led.num_heard_frames(ms + LEAD_IN_MS) == plain.num_heard_frames(ms)
    assert led.num_spoken_chars(LEAD_IN_MS) == led.num_heard_frames(LEAD_IN_MS) == 0


async def test_over_the_wire(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    async with serving(tmp_path, engine) as served, session(served, format=FORMATS[0]) as client:
        ready = client.heard.of(wire.SessionReady)[0]
        assert ready.format.lead_in_ms == LEAD_IN_MS
        done = await client.say(TEXT)
        sent = engine.pcm(0, 1)
        got = decode(client.heard.packets, ready.format)
        assert done.metrics.num_samples == len(got) == len(sent) + 2_400
        assert done.metrics.audio_ms == pytest.approx(1000 * len(sent) / 24_000 + LEAD_IN_MS)
        assert not got[:2_400].any()
        assert np.abs(got[2_400:] - sent).max() < 2 / 32767


async def test_who_interrupts_in_it_has_heard_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, session(served, format=FORMATS[0]) as client:
        await client.say(TEXT)
        await client.send(wire.TurnCancel(turn_id=1, played_ms=LEAD_IN_MS))
        cancelled = await client.until(wire.TurnCancelled)
        assert (cancelled.spoken_text, cancelled.remaining_text) == ("", TEXT)
        assert cancelled.played_ms == LEAD_IN_MS


@pytest.mark.parametrize("lead_in_ms", [-20, 30, 2_020, 2**31])
def test_how_long_it_may_be(lead_in_ms: int) -> None:
    with pytest.raises(ValueError, match="lead_in_ms"):
        wire.AudioFormat(lead_in_ms=lead_in_ms)
