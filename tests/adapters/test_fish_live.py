"""`/v1/tts/live`: events, several starts on one socket, formats, voices, times of words."""

import asyncio
from pathlib import Path
from typing import Any

import ormsgpack
import pytest

from realtime.adapters import fish_live
from realtime.pingpong.messages import OpenSlot
from tests.adapters.fish_support import (
    LIVE,
    SENTENCES,
    TEXT,
    assert_same,
    decode,
    live,
    pcm_of,
    said,
    spoken,
)
from tests.realtime.support import make_engine, serving
from tests.realtime.test_voices import clip

# ---------------------------------------------------------------------------- turns


async def test_turns_on_one_socket(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    async with serving(tmp_path, engine) as served:
        async with live(served) as fish:
            for turn_id in (1, 2, 3):
                await fish.start()
                for sentence in SENTENCES:
                    await fish.send("text", text=sentence)
                    await fish.send("flush")
                await fish.send("stop")
                audio = await fish.until_finish()
                assert_same(pcm_of(audio), engine.pcm(0, turn_id), 24_000, 24_000)
            assert spoken(engine) == " ".join("".join(SENTENCES) for _ in range(3))
            assert len(engine.seen(OpenSlot)) == 1, "one session, prefilled once"
        await served.until_free()


async def test_starts_that_do_not_wait_are_spoken_in_order(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    async with serving(tmp_path, engine) as served, live(served) as fish:
        for format in ("pcm", "wav", "pcm"):
            await fish.start(format=format, text=TEXT)
            await fish.send("stop")
        first, second, third = [await fish.until_finish() for _ in range(3)]
        assert first == third == second[44:] and second[:4] == b"RIFF"


@pytest.mark.parametrize("rate", [8_000, 16_000, 24_000, 44_100, None])
async def test_wav_has_one_header_for_each_start(tmp_path: Path, rate: int | None) -> None:
    engine = make_engine(tmp_path)
    async with serving(tmp_path, engine) as served, live(served) as fish:
        for turn_id in (1, 2):
            await fish.start(format="wav", sample_rate=rate)
            await fish.send("text", text=TEXT)
            await fish.send("stop")
            audio = await fish.until_finish()
            assert audio.count(b"RIFF") == 1 and audio[:4] == b"RIFF"
            assert_same(pcm_of(audio[44:]), engine.pcm(0, turn_id), 24_000, rate or 44_100)


@pytest.mark.parametrize(
    "request_", [{"format": "mp3"}, {"format": "opus", "opus_bitrate": 64_000}]
)
async def test_compressed_formats(tmp_path: Path, request_: dict[str, Any]) -> None:
    engine = make_engine(tmp_path)
    async with serving(tmp_path, engine) as served, live(served) as fish:
        await fish.start(**{"sample_rate": None} | request_, text=TEXT)
        await fish.send("stop")
        got, rate = decode(await fish.until_finish())
        excess_s = len(got) / rate - len(engine.pcm(0, 1)) / 24_000
        assert -1e-4 < excess_s < (0.1 if request_["format"] == "mp3" else 1e-4)


async def test_prefill_at_start(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    async with serving(tmp_path, engine) as served, live(served) as fish:
        await fish.start()
        await asyncio.to_thread(engine.wait_until, lambda: bool(engine.seen(OpenSlot)))


async def test_a_flush_speaks_what_is_no_sentence_yet(tmp_path: Path) -> None:
    async with serving(tmp_path, auto_flush_ms=0) as served, live(served) as fish:
        await fish.start(text="and then")
        await fish.send("flush")
        assert (await fish.until("audio"))["audio"]
        assert spoken(served.engine) == "and then"


async def test_an_empty_flush_is_not_heard(tmp_path: Path) -> None:
    """Also one that ends a reply on a socket that never stops: the next reply follows."""
    engine = make_engine(tmp_path)
    async with serving(tmp_path, engine) as served, live(served) as fish:
        await fish.start()
        await fish.send("flush")
        for reply in range(3):
            for sentence in SENTENCES:
                await fish.send("text", text=sentence.strip())
                await fish.send("flush")
            await fish.send("flush")
            await fish.send("flush")
            frames = sum(max(1, len(s.strip()) // 2) for s in SENTENCES)
            audio = await fish.until_bytes(frames * 960 * 2)
            assert_same(pcm_of(audio), engine.pcm(0, reply + 1), 24_000, 24_000)
        assert {event["event"] for event in fish.events} == {"audio"}


@pytest.mark.parametrize("has_flush", [True, False])
async def test_a_socket_that_never_stops_has_no_limit_of_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_flush: bool
) -> None:
    """A turn of the session is left for a new one long before its limit, unheard."""
    monkeypatch.setattr(fish_live, "_MAX_TURN_CHARS", 300)
    monkeypatch.setattr(fish_live, "_LONG_TURN_CHARS", 150)
    engine = make_engine(tmp_path)
    text = TEXT + " "
    async with serving(tmp_path, engine) as served, live(served) as fish:
        await fish.start()
        for _ in range(12):
            await fish.send("text", text=text)
            if has_flush:
                await fish.send("flush")
        await fish.send("stop")
        audio = await fish.until_finish()
        turn_ids = sorted(turn_id for _, turn_id in engine.emitted)
        assert len(turn_ids) == (4 if has_flush else 3)  # 3 texts to a turn, or 4
        assert_same(pcm_of(audio), said(engine, *turn_ids), 24_000, 24_000)
        assert spoken(engine).split() == (text * 12).split()


async def test_a_text_of_several_turns_is_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fish_live, "_LONG_TURN_CHARS", 20)
    engine = make_engine(tmp_path)
    async with serving(tmp_path, engine) as served, live(served) as fish:
        await fish.start(format="wav")
        for sentence in SENTENCES:
            await fish.send("text", text=sentence)
            await fish.send("flush")
        await fish.send("stop")
        audio = await fish.until_finish()
    turn_ids = sorted(turn_id for _, turn_id in engine.emitted)
    assert len(turn_ids) > 1 and audio.count(b"RIFF") == 1
    assert_same(pcm_of(audio[44:]), said(engine, *turn_ids), 24_000, 24_000)


async def test_nothing_to_say(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, live(served) as fish:
        await fish.start()
        await fish.send("stop")
        assert await fish.until_finish() == b""
        await fish.start(format="wav")
        await fish.send("stop")
        assert len(await fish.until_finish()) == 44
        await fish.start(text=TEXT)
        await fish.send("stop")
        assert await fish.until_finish()


async def test_unknown_events_are_ignored(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, live(served) as fish:
        await fish.send("dance")
        await fish.send("text", text="before any start")
        await fish.send("flush")
        await fish.send("stop")
        await fish.socket.send(ormsgpack.packb({"no": "event"}))
        await fish.start(text=TEXT)
        await fish.send("log", level="debug")
        await fish.send("stop")
        assert await fish.until_finish()
        assert [event["event"] for event in fish.events].count("finish") == 1


async def test_speed(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    async with serving(tmp_path, engine) as served, live(served) as fish:
        await fish.start(text=TEXT, prosody={"speed": 1.25, "volume": 0})
        await fish.send("stop")
        audio = await fish.until_finish()
        assert abs(len(audio) / 2 - len(engine.pcm(0, 1)) / 1.25) <= 2


# ---------------------------------------------------------------------------- timestamps


async def test_timestamps(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    async with serving(tmp_path, engine) as served, live(served, LIVE + "/with-timestamp") as fish:
        await fish.start()
        await fish.send("text", text=TEXT)
        await fish.send("flush")
        await fish.send("flush")  # the end of a chunk
        await fish.send("text", text=" One more thing.")
        await fish.send("stop")
        audio = await fish.until_finish()
    assert_same(pcm_of(audio), said(engine, 1, 2), 24_000, 24_000)
    chunks = {e["chunk_seq"]: e for e in fish.events if e.get("alignment")}
    assert list(chunks) == [0, 1]
    assert [chunk["content"] for chunk in chunks.values()] == [TEXT, " One more thing."]
    for idx, chunk in chunks.items():
        segments = chunk["alignment"]["segments"]
        assert [s["text"] for s in segments] == chunk["content"].split()
        times = [t for s in segments for t in (s["start"], s["end"])]
        duration_s = len(engine.pcm(0, idx + 1)) / 24_000
        assert times == sorted(times) and times[0] == 0.0
        assert all(s["end"] > s["start"] for s in segments)
        assert times[-1] == chunk["alignment"]["audio_duration"] == pytest.approx(duration_s)
    offset_s = len(engine.pcm(0, 1)) / 24_000
    assert chunks[1]["chunk_audio_offset_sec"] == pytest.approx(offset_s)
    assert all(isinstance(event["time"], int) for event in fish.events)


# ---------------------------------------------------------------------------- voices


async def test_voice_and_sampling_of_each_start(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    async with serving(tmp_path, engine) as served, live(served) as fish:
        references = [{"audio": clip(), "text": "what I said"}]
        for request in ({"temperature": 0.1}, {"references": references}, {"reference_id": None}):
            await fish.start(text=TEXT, **request)
            await fish.send("stop")
            await fish.until_finish()
        opened = [command for command in engine.seen(OpenSlot) if isinstance(command, OpenSlot)]
        assert [command.voices[0].text for command in opened] == ["a tone", "what I said", "a tone"]
        assert [command.sampling.temperature for command in opened] == [0.1, 0.7, 0.7]


async def test_the_last_sentence_needs_no_flush(tmp_path: Path) -> None:
    """It does not wait for the next text, as with Fish's own service (pipecat#827, #899)."""
    async with serving(tmp_path, auto_flush_ms=1) as served, live(served) as fish:
        await fish.start()
        await fish.send("text", text="Hello there.")
        assert (await fish.next())["event"] == "audio"
        await fish.send("text", text="And bye.")
        await fish.send("stop")
        await fish.until_finish()
