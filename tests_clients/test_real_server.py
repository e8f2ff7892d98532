"""Both adapters against the real server with the embedded model: a turn, a barge-in, a turn."""

import asyncio
from collections.abc import Iterator

import pytest

pytest.importorskip("torch")
pytest.importorskip("pipecat")
pytest.importorskip("livekit.agents")

from pipecat.frames.frames import ErrorFrame, InterruptionFrame, TTSAudioRawFrame, TTSTextFrame

from clients.adapters.livekit import TTS
from clients.local_server import LocalServer
from tests_clients.test_livekit import NO_RETRY, plugin, spoken
from tests_clients.test_pipecat import talking

TEXT = ("Good ", "morning. ", "The ", "ferry ", "leaves ", "at ", "ten.")
RATE_HZ = 24_000


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with LocalServer(["--device", "cpu"]) as server:
        yield server.url


def seconds(audio: bytes) -> float:
    return len(audio) / 2 / RATE_HZ


async def test_pipecat(url) -> None:
    async with talking(url) as talk:
        await talk.reply(*TEXT)
        await talk.until_stopped(1)
        whole_s = seconds(talk.downstream.audio)
        words = [frame.text for frame in talk.downstream.of(TTSTextFrame)]
        assert words == [token.strip() for token in TEXT]
        assert 1.0 < whole_s < 10.0

        before = len(talk.downstream.of(TTSAudioRawFrame))
        await talk.reply(*TEXT)
        await talk.downstream.until(lambda: len(talk.downstream.of(TTSAudioRawFrame)) > before + 10)
        await talk.send(InterruptionFrame())
        await talk.reply("Sorry, ", "go ", "ahead.")
        await talk.until_stopped(2)
        last = talk.downstream.of(TTSAudioRawFrame)[-1].context_id
        audio = [frame.audio for frame in talk.downstream.of(TTSAudioRawFrame)]
        assert 0.5 < seconds(b"".join(audio[before:])) < 2 * whole_s + 3.0
        assert last is not None
        accounts = [account for account in talk.cancelled if account.turn_id == 2]
        assert accounts[0].spoken_text + accounts[0].remaining_text == "".join(TEXT)
        assert not talk.upstream.of(ErrorFrame)


async def test_livekit(url) -> None:
    async with plugin(url) as speech:
        audio, words = await spoken(speech, *TEXT)
        assert 1.0 < seconds(audio) < 10.0
        assert "".join(words) == "".join(TEXT).strip()
        ends = [word.end_time for word in words]
        assert ends == sorted(ends)
        assert ends[-1] <= seconds(audio) + 0.1

        async with speech.stream(conn_options=NO_RETRY) as stream:
            stream.push_text("".join(TEXT))
            stream.end_input()
            await anext(stream)
        audio, words = await spoken(speech, "Sorry, ", "go ", "ahead.")
        assert 0.4 < seconds(audio) < 5.0
        assert "".join(words) == "Sorry, go ahead."


async def test_a_lead_in_of_silence(url) -> None:
    """For a receiver that swallows what comes first."""
    num_silent = 2 * RATE_HZ // 10
    async with plugin(url, lead_in_ms=100) as speech:
        audio, words = await spoken(speech, *TEXT)
        assert words[0].start_time == 0.1
    async with talking(url, lead_in_ms=100) as talk:
        await talk.reply(*TEXT)
        await talk.until_stopped(1)
    for heard in (audio, talk.downstream.audio):
        assert not any(heard[:num_silent]) and any(heard[num_silent:][:num_silent])


async def test_many_quick_barge_ins(url) -> None:
    """Each cancels at once; none is counted against the connection."""
    speech = TTS(url=url)
    try:
        for _ in range(20):  # more than may wait in a queue
            async with speech.stream(conn_options=NO_RETRY) as stream:
                stream.push_text("".join(TEXT))
                await anext(stream)
        async with asyncio.timeout(20):
            audio, _ = await spoken(speech, "Still here.")
        assert 0.3 < seconds(audio) < 5.0
    finally:
        await speech.aclose()
