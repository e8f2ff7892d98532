"""Pipecat's own Fish Audio service against the Plosive server: nothing changed but the URL."""

import asyncio
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pipecat")

from pipecat.frames.frames import (
    ErrorFrame,
    InterruptionFrame,
    MetricsFrame,
    TTSAudioRawFrame,
)
from pipecat.metrics.metrics import TTFBMetricsData
from pipecat.services.fish.tts import FishAudioTTSService

from realtime.pingpong.messages import OpenSlot, SetText
from tests.fakes import FakeEngine
from tests.realtime.support import Served, make_engine, serving
from tests_clients.pipecat_pipeline import Talk, piped

SENTENCES = (" The quick brown fox jumps over it.", " Then it sleeps.", " Nobody wakes it.")


class Service(FishAudioTTSService):
    """The URL has no argument."""

    def __init__(self, url: str, **options) -> None:
        super().__init__(api_key="any", **options)
        self._base_url = url


def talking(served: Served, **options) -> AbstractAsyncContextManager[Talk]:
    url = f"ws://127.0.0.1:{served.port}/v1/tts/live"
    return piped(Service(url, sample_rate=24_000, **options))


def emitted(engine: FakeEngine) -> bytes:
    pcm = np.concatenate([frame for frames in engine.emitted.values() for frame in frames])
    return np.rint(pcm * 32767.0).astype("<i2").tobytes()


async def until_heard(talk: Talk, num_frames: int) -> None:
    await talk.downstream.until(lambda: len(talk.downstream.audio) >= num_frames * 1920)


def num_frames(*sentences: str) -> int:
    return sum(len(sentence.strip()) // 2 for sentence in sentences)


async def test_turns_on_one_socket(tmp_path: Path) -> None:
    """It starts once, never stops, and flushes once more than there is text."""
    engine = make_engine(tmp_path)
    async with serving(tmp_path, engine) as served:
        async with talking(served) as talk:
            await asyncio.to_thread(engine.wait_until, lambda: bool(engine.seen(OpenSlot)))
            for turn in (1, 2, 3):
                await talk.reply(*SENTENCES)
                await until_heard(talk, turn * num_frames(*SENTENCES))
            assert talk.downstream.audio == emitted(engine), "exact to the sample"
            assert not talk.upstream.of(ErrorFrame)
            ttfb_ms = [
                round(1000 * data.value)
                for frame in talk.downstream.of(MetricsFrame)
                for data in frame.data
                if isinstance(data, TTFBMetricsData) and data.value
            ]
            assert len(ttfb_ms) >= 3
            print("TTFB by the framework's own metric, ms:", ttfb_ms)
        await served.until_free()
    texts = [c.text for c in engine.seen(SetText) if isinstance(c, SetText) and c.is_closed]
    assert " ".join(texts).split() == "".join(SENTENCES * 3).split()
    assert len(engine.seen(OpenSlot)) == 1


async def test_barge_in_by_reconnecting(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    engine.hold()
    async with serving(tmp_path, engine) as served, talking(served) as talk:
        await talk.reply(*SENTENCES)
        engine.let(4)
        await until_heard(talk, 3)
        await talk.send(InterruptionFrame())
        await asyncio.to_thread(engine.wait_until, lambda: len(engine.seen(OpenSlot)) == 2)
        talk.downstream.frames.clear()
        engine.emitted.clear()
        engine.let_all()
        await talk.reply("Something else entirely.")
        await until_heard(talk, num_frames("Something else entirely."))
        assert talk.downstream.audio == emitted(engine), "nothing stale"
        assert len({frame.context_id for frame in talk.downstream.of(TTSAudioRawFrame)}) == 1


async def test_an_unknown_voice_is_an_error_frame(tmp_path: Path) -> None:
    settings = Service.Settings(voice="nobody")
    async with serving(tmp_path) as served, talking(served, settings=settings) as talk:
        await talk.reply(*SENTENCES)
        await talk.upstream.until(lambda: bool(talk.upstream.of(ErrorFrame)))
