"""The official Python SDK against the real server: nothing changed but the URL."""

import asyncio
import contextlib
import warnings
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest

from realtime.auth import ApiKeys
from tests.adapters.fish_support import TEXT, assert_same, decode, pcm_of, spoken
from tests.fakes import FakeEngine
from tests.realtime.support import Served, make_engine, serving
from tests.realtime.test_voices import clip

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the SDK's own
    from fishaudio import AsyncFishAudio, FishAudio
    from fishaudio.exceptions import (
        APIError,
        AuthenticationError,
        NotFoundError,
        ServerError,
        WebSocketError,
    )
    from fishaudio.types import FlushEvent, Prosody, ReferenceAudio, TTSConfig

SENTENCES = ("The quick brown fox jumps. ", "It runs over the lazy dog. ", "Then it sleeps.")
PCM = TTSConfig(format="pcm", sample_rate=24_000)


def sync_client(served: Served) -> FishAudio:
    return FishAudio(api_key="any", base_url=f"http://127.0.0.1:{served.port}")


def async_client(served: Served) -> AsyncFishAudio:
    return AsyncFishAudio(api_key="any", base_url=f"http://127.0.0.1:{served.port}")


def pieces() -> Iterator[str | FlushEvent]:
    for sentence in SENTENCES:
        yield sentence
        yield FlushEvent()


async def async_pieces() -> AsyncIterator[str | FlushEvent]:
    for piece in pieces():
        yield piece


def check_pcm(audio: bytes, engine: FakeEngine) -> None:
    """All that the engine has said since the last look."""
    sent = np.concatenate([frame for frames in engine.emitted.values() for frame in frames])
    assert_same(pcm_of(audio), sent, 24_000, 24_000)
    engine.emitted.clear()


def seconds(engine: FakeEngine) -> float:
    num_frames = sum(map(len, engine.emitted.values()))
    engine.emitted.clear()
    return num_frames * 0.04


async def test_convert_and_stream(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    async with serving(tmp_path, engine) as served, async_client(served) as client:
        check_pcm(await client.tts.convert(text=TEXT, config=PCM), engine)
        await served.until_free()
        stream = await client.tts.stream(text=TEXT, config=PCM)
        check_pcm(b"".join([chunk async for chunk in stream]), engine)
        await served.until_free()
        mp3 = await client.tts.convert(text=TEXT)
        assert len(decode(mp3)[0]) / 44_100 == pytest.approx(seconds(engine), abs=0.06)
        await served.until_free()
        config = TTSConfig(format="opus", opus_bitrate=64, prosody=Prosody(speed=2.0))
        opus = await client.tts.convert(text=TEXT, config=config)
        assert len(decode(opus)[0]) / 48_000 == pytest.approx(seconds(engine) / 2, abs=1e-3)
        assert spoken(engine) == " ".join([TEXT] * 4)


async def test_the_synchronous_twin(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    async with serving(tmp_path, engine) as served:

        def work() -> tuple[bytes, bytes, bytes]:
            with sync_client(served) as client:
                return (
                    client.tts.convert(text=TEXT, config=PCM),
                    client.tts.stream(text=TEXT, config=PCM).collect(),
                    b"".join(client.tts.stream_websocket(pieces(), config=PCM)),
                )

        converted, streamed, live = await asyncio.to_thread(work)
        check_pcm(converted + streamed + live, engine)
        assert spoken(engine) == " ".join((TEXT, TEXT, "".join(SENTENCES)))


async def test_stream_websocket(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    async with serving(tmp_path, engine) as served, async_client(served) as client:
        for _ in range(2):
            chunks = client.tts.stream_websocket(async_pieces(), config=PCM)
            check_pcm(b"".join([chunk async for chunk in chunks]), engine)
            await served.until_free()
        chunks = client.tts.stream_websocket(async_pieces(), format="mp3")
        audio, rate = decode(b"".join([chunk async for chunk in chunks]))
        assert len(audio) / rate == pytest.approx(seconds(engine), abs=0.06)
        assert spoken(engine) == " ".join(["".join(SENTENCES)] * 3)


async def test_an_iterator_that_is_left_frees_the_slot_and_nothing_stale_follows(
    tmp_path: Path,
) -> None:
    engine = make_engine(tmp_path)
    engine.hold()
    engine.let(3)
    async with serving(tmp_path, engine) as served, async_client(served) as client:
        chunks = client.tts.stream_websocket(async_pieces(), config=PCM)
        assert await anext(chunks)
        with contextlib.suppress(BaseExceptionGroup):  # its library groups the GeneratorExit
            await chunks.aclose()
        await served.until_free()
        engine.let_all()
        engine.emitted.clear()
        chunks = client.tts.stream_websocket(async_pieces(), config=PCM)
        check_pcm(b"".join([chunk async for chunk in chunks]), engine)


async def test_references(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, async_client(served) as client:
        references = [ReferenceAudio(audio=clip(), text="what I said")]
        assert await client.tts.convert(text=TEXT, references=references)
        chunks = client.tts.stream_websocket(async_pieces(), references=references)
        assert [chunk async for chunk in chunks]


async def test_voices(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, async_client(served) as client:
        voice = await client.voices.create(
            title="Anna", voices=[clip()], texts=["what I said"], tags=["calm"], description="x"
        )
        assert (voice.title, voice.tags, voice.state) == ("Anna", ["calm"], "trained")
        assert (await client.voices.get(voice.id)).id == voice.id
        assert [v.title for v in (await client.voices.list(self_only=True)).items] == ["Anna"]
        assert (await client.voices.list(page_size=1)).total == 2
        await client.voices.update(voice.id, title="Anne")
        assert (await client.voices.get(voice.id)).title == "Anne"
        assert await client.tts.convert(text=TEXT, reference_id=voice.id)
        await client.voices.delete(voice.id)
        with pytest.raises(NotFoundError, match="there is no model"):
            await client.voices.get(voice.id)


async def test_voices_and_errors_of_the_synchronous_twin(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:

        def work() -> None:
            with sync_client(served) as client:
                voice = client.voices.create(title="Anna", voices=[clip()], texts=["what I said"])
                assert client.voices.get(voice.id).title == "Anna"
                assert [v.id for v in client.voices.list(self_only=True).items] == [voice.id]
                assert client.tts.convert(text=TEXT, reference_id=voice.id)
                client.voices.delete(voice.id)
                with pytest.raises(NotFoundError, match="there is no model"):
                    client.voices.get(voice.id)
                with pytest.raises(NotFoundError, match="there is no voice"):
                    client.tts.convert(text=TEXT, reference_id=voice.id)
                with pytest.raises(APIError, match="sample_rate") as refused:
                    client.tts.convert(text=TEXT, config=TTSConfig(format="pcm", sample_rate=1))
                assert refused.value.status == 400
                with pytest.raises((WebSocketError, ExceptionGroup)) as failed:
                    list(client.tts.stream_websocket(pieces(), reference_id=voice.id))
                assert "WebSocketError" in repr(failed.value)

        await asyncio.to_thread(work)
        await served.until_free()


async def test_errors(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, num_slots=1)
    async with serving(tmp_path, engine) as served, async_client(served) as client:
        with pytest.raises(NotFoundError, match="there is no voice"):
            await client.tts.convert(text=TEXT, reference_id="nobody")
        with pytest.raises(APIError, match="sample_rate") as refused:
            await client.tts.convert(text=TEXT, config=TTSConfig(format="pcm", sample_rate=1))
        assert refused.value.status == 400
        chunks = client.tts.stream_websocket(async_pieces(), reference_id="nobody")
        with pytest.raises((WebSocketError, ExceptionGroup)) as failed:  # grouped by its library
            [chunk async for chunk in chunks]
        assert "WebSocketError" in repr(failed.value)
        await served.until_free()
        slot = served.hub.admit()
        with pytest.raises(ServerError, match="slots"):
            await client.tts.convert(text=TEXT)
        served.hub.give_back(slot)


async def test_keys(tmp_path: Path) -> None:
    async with serving(tmp_path, keys=ApiKeys(["the-key-of-a-client"])) as served:
        url = f"http://127.0.0.1:{served.port}"
        async with AsyncFishAudio(api_key="another-key-entirely", base_url=url) as client:
            with pytest.raises(AuthenticationError, match="API key"):
                await client.tts.convert(text=TEXT)
            with pytest.raises(AuthenticationError):
                await client.voices.list()
            with pytest.raises(Exception, match="401|upgrade|Upgrade"):
                [chunk async for chunk in client.tts.stream_websocket(async_pieces())]
        async with AsyncFishAudio(api_key="the-key-of-a-client", base_url=url) as client:
            assert await client.tts.convert(text=TEXT)
            assert [chunk async for chunk in client.tts.stream_websocket(async_pieces())]


async def test_the_legacy_client(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from fish_audio_sdk import HttpCodeErr, Session, TTSRequest, WebSocketSession

    engine = make_engine(tmp_path)
    async with serving(tmp_path, engine) as served:
        url = f"http://127.0.0.1:{served.port}"
        request = TTSRequest(text=TEXT, format="pcm", sample_rate=24_000)

        def work() -> tuple[bytes, bytes, HttpCodeErr, list[str]]:
            with Session("any", base_url=url) as session:
                audio = b"".join(session.tts(request))
                models = session.list_models()
                with pytest.raises(HttpCodeErr) as refused:
                    b"".join(session.tts(TTSRequest(text=TEXT, reference_id="nobody")))
            live_request = request.model_copy(update={"text": ""})
            with WebSocketSession("any", base_url=url) as session:
                live = b"".join(session.tts(live_request, iter(SENTENCES)))
            return audio, live, refused.value, [model.title for model in models.items]

        audio, live, refused, titles = await asyncio.to_thread(work)
        check_pcm(audio + live, engine)
        assert spoken(engine) == " ".join((TEXT, "".join(SENTENCES)))
        assert refused.status == 404
        assert titles == ["tone"]
