"""LiveKit's own Fish Audio plugin against the Plosive server: nothing changed but the URL."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("livekit.plugins.fishaudio")

import aiohttp
from livekit.agents import APIConnectOptions, APIError
from livekit.agents.metrics import TTSMetrics
from livekit.plugins import fishaudio

from realtime.pingpong.messages import OpenSlot, SetText
from tests.fakes import FakeEngine
from tests.realtime.support import TIMEOUT_S, Served, make_engine, serving

NO_RETRY = APIConnectOptions(max_retry=0)
SENTENCES = (
    "The quick brown fox jumps over the lazy dog. ",
    "Then it sleeps until the sun is high. ",
    "Nobody wakes it before noon, not even the dog.",
)
NUM_FRAMES = len(SENTENCES[0].strip()) // 2


@asynccontextmanager
async def plugin(served: Served, **options) -> AsyncIterator[fishaudio.TTS]:
    options = {"voice_id": "tone"} | options
    async with aiohttp.ClientSession() as http:
        url = f"http://127.0.0.1:{served.port}"
        speech = fishaudio.TTS(api_key="any", base_url=url, http_session=http, **options)
        try:
            yield speech
        finally:
            await speech.aclose()


async def say(speech: fishaudio.TTS, *pieces: str) -> bytes:
    audio = b""
    async with asyncio.timeout(TIMEOUT_S), speech.stream(conn_options=NO_RETRY) as stream:
        for piece in pieces:
            stream.push_text(piece)
        stream.end_input()
        async for event in stream:
            audio += bytes(event.frame.data.cast("b"))
    return audio


def emitted(engine: FakeEngine) -> bytes:
    """All that the engine has said since the last look, as PCM."""
    pcm = np.concatenate([frame for frames in engine.emitted.values() for frame in frames])
    engine.emitted.clear()
    return np.rint(pcm * 32767.0).astype("<i2").tobytes()


def spoken(engine: FakeEngine) -> str:
    texts = [c.text for c in engine.seen(SetText) if isinstance(c, SetText) and c.is_closed]
    return " ".join(text.strip() for text in texts)


async def test_turns_on_one_socket(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    collected: list[TTSMetrics] = []
    async with serving(tmp_path, engine) as served:
        async with plugin(served) as speech:
            speech.on("metrics_collected", collected.append)
            for _ in range(3):
                assert await say(speech, *SENTENCES) == emitted(engine), "exact to the sample"
            assert len(engine.seen(OpenSlot)) == 1
        await served.until_free()
    text = " ".join("".join(SENTENCES).split())
    assert spoken(engine) == " ".join([text] * 3)
    seconds = sum(len(sentence) // 2 for sentence in SENTENCES) * 0.04
    assert len(collected) == 3
    for metrics in collected:
        assert 0 < metrics.ttfb < metrics.duration
        assert not metrics.cancelled
        assert metrics.audio_duration == pytest.approx(seconds, abs=0.2)
    print("TTFB by the plugin's own metric, ms:", [round(1000 * m.ttfb) for m in collected])


@pytest.mark.parametrize(
    "options",
    [
        {"output_format": "pcm"},
        {"output_format": "mp3"},
        {"output_format": "opus"},
        {"output_format": "wav", "sample_rate": 16_000, "speed": 1.25, "volume": -3.0},
    ],
)
async def test_formats(tmp_path: Path, options: dict) -> None:
    engine = make_engine(tmp_path)
    async with serving(tmp_path, engine) as served, plugin(served, **options) as speech:
        audio = await say(speech, *SENTENCES)
        seconds = len(emitted(engine)) / 2 / 24_000 / options.get("speed", 1.0)
        assert len(audio) / 2 / speech.sample_rate == pytest.approx(seconds, abs=0.06)


@pytest.mark.parametrize("output_format", ["wav", "mp3"])
async def test_synthesize(tmp_path: Path, output_format: str) -> None:
    engine = make_engine(tmp_path)
    async with serving(tmp_path, engine) as served:
        async with plugin(served, output_format=output_format) as speech:
            frame = await speech.synthesize(SENTENCES[0], conn_options=NO_RETRY).collect()
            seconds = len(emitted(engine)) / 2 / 24_000
            assert frame.duration == pytest.approx(seconds, abs=0.06)
        await served.until_free()


async def test_an_interruption(tmp_path: Path) -> None:
    """The plugin tells nobody; it closes the old socket when it opens the next one."""
    engine = make_engine(tmp_path)
    engine.hold()
    engine.let(20)
    async with serving(tmp_path, engine) as served, plugin(served) as speech:
        async with speech.stream(conn_options=NO_RETRY) as stream:
            stream.push_text("".join(SENTENCES) * 3)
            stream.end_input()
            await anext(stream)
        engine.let_all()
        engine.emitted.clear()
        audio = await say(speech, SENTENCES[0])
        (turn,) = [frames for frames in engine.emitted.values() if len(frames) == NUM_FRAMES]
        expected = np.rint(np.concatenate(turn) * 32767.0).astype("<i2").tobytes()
        assert audio == expected, "nothing of the turn before"
    await served.until_free()


async def test_nothing_but_the_url_is_changed(tmp_path: Path) -> None:
    """Not even a voice is chosen."""
    engine = make_engine(tmp_path)
    async with serving(tmp_path, engine) as served, aiohttp.ClientSession() as http:
        url = f"http://127.0.0.1:{served.port}"
        speech = fishaudio.TTS(api_key="any", base_url=url, http_session=http)
        assert await say(speech, *SENTENCES) == emitted(engine)
        await speech.aclose()


async def test_a_refusal_is_an_error_of_the_framework(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, plugin(served, voice_id="nobody") as speech:
        with pytest.raises(APIError):
            await say(speech, *SENTENCES)
        with pytest.raises(APIError) as refused:
            await speech.synthesize("Hello there.", conn_options=NO_RETRY).collect()
        assert refused.value.status_code == 404
