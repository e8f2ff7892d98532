"""The last column of README.md: what each client itself measures to its first audio.

Through the real server with the embedded model, p50 of the sentences below, after one more that is
not counted. Where a client has no metric, from the call to its first bytes.

    .venv/clients/bin/python -m tests_clients.ttfb
"""

import asyncio
import os
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace

import httpx
import openai
from fishaudio import FishAudio
from fishaudio.types import TTSConfig
from livekit.agents import tts
from livekit.agents.metrics import TTSMetrics
from pipecat.frames.frames import MetricsFrame, TTSStoppedFrame
from pipecat.metrics.metrics import TTFBMetricsData

from clients import connect
from clients.local_server import LocalServer
from tests_clients import test_fish_livekit, test_fish_pipecat, test_livekit, test_pipecat
from tests_clients.pipecat_pipeline import Talk

SENTENCES = (
    "Good morning, and welcome aboard.",
    "The ferry to the island leaves at ten.",
    "Your table by the window is ready now.",
    "It has been raining since early this morning.",
    "Please take the second street on the left.",
    "Nobody has asked for the blue umbrella yet.",
    "The library closes a little earlier on Fridays.",
    "We have found a room with a view of the lake.",
    "Thank you for waiting, here is your order.",
)

Say = Callable[[str], Awaitable[float]]  # a sentence -> seconds


@asynccontextmanager
async def fish_sdk(url: str) -> AsyncIterator[Say]:
    client = FishAudio(api_key="any", base_url=url)

    def say(text: str) -> float:
        started_s = time.perf_counter()
        chunks = client.tts.stream_websocket(iter([text]), config=TTSConfig(format="pcm"))
        next(chunks)
        first_s = time.perf_counter() - started_s
        for _ in chunks:
            pass
        return first_s

    yield lambda text: asyncio.to_thread(say, text)


@asynccontextmanager
async def openai_sdk(url: str) -> AsyncIterator[Say]:
    async with httpx.AsyncClient(trust_env=False) as http:
        client = openai.AsyncOpenAI(api_key="any", base_url=url + "/v1", http_client=http)
        create = client.audio.speech.with_streaming_response.create

        async def say(text: str) -> float:
            started_s = time.perf_counter()
            asked = {"model": "tts-1", "voice": "alloy", "response_format": "pcm"}
            async with create(input=text, **asked) as response:
                chunks = response.iter_bytes()
                await anext(chunks)
                first_s = time.perf_counter() - started_s
                async for _ in chunks:
                    pass
            return first_s

        yield say


@asynccontextmanager
async def our_sdk(url: str) -> AsyncIterator[Say]:
    async with connect(url) as session:

        async def say(text: str) -> float:
            speech = session.say(text)
            async for _ in speech:
                pass
            return speech.turn.timings.ttfa_ms / 1000.0

        yield say


def of_livekit(speech: tts.TTS) -> Say:
    collected: list[TTSMetrics] = []
    speech.on("metrics_collected", collected.append)

    async def say(text: str) -> float:
        await test_fish_livekit.say(speech, text)
        return collected[-1].ttfb

    return say


@asynccontextmanager
async def livekit_fish(url: str) -> AsyncIterator[Say]:
    served = SimpleNamespace(port=int(url.rpartition(":")[2]))
    async with test_fish_livekit.plugin(served, voice_id="af_heart") as speech:
        yield of_livekit(speech)


@asynccontextmanager
async def our_livekit(url: str) -> AsyncIterator[Say]:
    async with test_livekit.plugin(url) as speech:
        yield of_livekit(speech)


def of_pipecat(talk: Talk) -> Say:
    def found() -> list[float]:
        data = [data for frame in talk.downstream.of(MetricsFrame) for data in frame.data]
        return [d.value for d in data if isinstance(d, TTFBMetricsData) and d.value]

    async def say(text: str) -> float:
        num_before = len(found())
        num_stopped = len(talk.downstream.of(TTSStoppedFrame))
        await talk.reply(text)
        await talk.until_stopped(num_stopped + 1)
        return found()[num_before]

    return say


@asynccontextmanager
async def pipecat_fish(url: str) -> AsyncIterator[Say]:
    served = SimpleNamespace(port=int(url.rpartition(":")[2]))
    async with test_fish_pipecat.talking(served) as talk:
        yield of_pipecat(talk)


@asynccontextmanager
async def our_pipecat(url: str) -> AsyncIterator[Say]:
    async with test_pipecat.talking(url) as talk:
        yield of_pipecat(talk)


CLIENTS = {
    "fish-audio-sdk, socket": fish_sdk,
    "livekit-plugins-fishaudio": livekit_fish,
    "Pipecat, FishAudioTTSService": pipecat_fish,
    "openai, one HTTP request": openai_sdk,
    "our SDK": our_sdk,
    "our Pipecat service": our_pipecat,
    "our LiveKit plugin": our_livekit,
}


async def main() -> None:
    with LocalServer(["--device", "cpu"]) as server:
        for name, client in CLIENTS.items():
            async with client(server.url) as say:
                _, *seconds = [await say(text) for text in SENTENCES]
            p50_ms = 1000 * statistics.median(seconds)
            print(f"{name:32} {p50_ms:5.0f} ms   (load average {os.getloadavg()[0]:.1f})")


if __name__ == "__main__":
    asyncio.run(main())
