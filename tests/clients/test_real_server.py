"""The client against the real server with the embedded model."""

import asyncio

import pytest

import clients.sync
from clients import NullDevice, Player, Sampling, TurnDone, TurnText, connect, decode_turn
from clients.silence import leading_silence_ms
from clients.voices import list_voices
from realtime.wire import OPUS_SAMPLE_RATES_HZ, AudioFormat

TEXT = "Good morning. The ferry leaves at ten."


async def test_a_turn_is_whole_and_audible(url) -> None:
    async with connect(url) as session:
        speech = session.say(TEXT)
        packets = [packet async for packet in speech]
    metrics = speech.turn.metrics
    assert metrics is not None
    assert [packet.is_last for packet in packets] == [False] * (len(packets) - 1) + [True]
    step = session.format.sample_rate * session.format.packet_ms // 1000
    assert [packet.pts_samples for packet in packets] == [n * step for n in range(len(packets))]
    samples, sample_rate_hz = decode_turn(packets, session.format, metrics.num_samples)
    assert len(samples) / sample_rate_hz == pytest.approx(metrics.audio_ms / 1000)
    silence_ms = leading_silence_ms(samples, sample_rate_hz)
    assert silence_ms is not None and silence_ms < 1000


@pytest.mark.parametrize("sample_rate", [8_000, 44_100])
async def test_pcm_at_rates_that_opus_lacks(url, sample_rate) -> None:
    assert sample_rate not in OPUS_SAMPLE_RATES_HZ
    format = AudioFormat(codec="pcm_s16le", sample_rate=sample_rate)
    async with connect(url, format=format) as session:
        speech = session.say("Good morning.")
        packets = [packet async for packet in speech]
    assert speech.turn.metrics is not None
    num_samples = speech.turn.metrics.num_samples
    assert sum(len(packet.payload) // 2 for packet in packets) >= num_samples
    _, sample_rate_hz = decode_turn(packets, session.format, num_samples)
    assert sample_rate_hz == sample_rate


async def test_barge_in_accounts_for_the_whole_text_and_the_session_goes_on(url) -> None:
    async with connect(url) as session:
        speech = session.say(TEXT)
        async for packet in speech:
            if packet.seq == 40:
                account = await speech.turn.cancel(played_ms=500)
        assert account.spoken_text + account.remaining_text == TEXT
        assert account.remaining_text
        assert [packet async for packet in session.say("Sorry, go ahead.")]


async def test_text_that_streams_is_spoken_up_to_its_end(url) -> None:
    async with connect(url) as session, session.turn() as turn:
        for word in TEXT.split(" "):
            await turn.append(word + " ")
        await turn.commit()
        events = [event async for event in turn]
    assert isinstance(events[-1], TurnDone)
    assert [event for event in events if isinstance(event, TurnText)][-1].text.strip() == TEXT


async def test_the_same_seed_gives_the_same_audio(url) -> None:
    async def say(seed: int) -> list[bytes]:
        async with connect(url, sampling=Sampling(seed=seed)) as session:
            return [packet.payload async for packet in session.say("Good morning.")]

    first = await say(7)
    assert first == await say(7)
    assert first != await say(8)


def test_the_default_voice_is_listed(url) -> None:
    assert [voice.is_builtin for voice in list_voices(url) if voice.is_default] == [True]


async def test_a_player_hears_the_turn_whole_and_an_interruption_of_two_is_accounted_for(
    url,
) -> None:
    device = NullDevice()
    async with connect(url) as session, Player(session, device) as player:
        playing = player.play("Good morning.")
        while not playing.over.done():
            device.advance(20)
            await asyncio.sleep(0)
        metrics = playing.turn.metrics
        assert metrics is not None
        assert playing.played_ms == pytest.approx(metrics.audio_ms, abs=0.1)

        first, second = player.play(TEXT), player.play("And a second one.")
        while first.played_ms < 500:
            device.advance(20)
            await asyncio.sleep(0)
        heard = await player.interrupt()
        assert [account.played_ms for account in heard.turns] == [first.played_ms, 0.0]
        assert heard.turns[0].spoken_text + heard.turns[0].remaining_text == TEXT
        assert heard.turns[0].spoken_text
        assert heard.turns[1].remaining_text == "And a second one."
        assert second.was_interrupted
        assert [packet async for packet in session.say("Sorry, go ahead.")]


def test_the_blocking_twin(url) -> None:
    with clients.sync.connect(url) as session:
        speech = session.say(word + " " for word in TEXT.split())
        for packet in speech:
            if packet.seq == 30:
                heard = session.interrupt(played_ms=400)
        assert heard.remaining_text
        assert list(session.say("Sorry, go ahead."))
