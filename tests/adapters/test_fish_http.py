"""`POST /v1/tts`: formats, both encodings of the body, voices, refusals, and clients that leave."""

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import ormsgpack
import pytest

from realtime.adapters import fish_voices
from realtime.pingpong.messages import OpenSlot, SetText
from tests.adapters.fish_support import TEXT, assert_same, decode, pcm_of
from tests.realtime.support import TIMEOUT_S, make_engine, serving
from tests.realtime.test_voices import clip

TTS, STREAM = "/v1/tts", "/v1/tts/stream/with-timestamp"


async def tts(http: httpx.AsyncClient, **body: Any) -> httpx.Response:
    return await http.post(TTS, json={"text": TEXT} | body, headers={"model": "s2-pro"})


def refusal(response: httpx.Response, status: int, message: str) -> None:
    content = response.json()
    assert response.status_code == status, content
    assert content == {"status": status, "message": content["message"]}
    assert message in content["message"]


# ---------------------------------------------------------------------------- audio


@pytest.mark.parametrize("codec_rate", [24_000, 44_100])
@pytest.mark.parametrize("rate", [8_000, 16_000, 24_000, 32_000, 44_100, None])
async def test_pcm_and_wav_are_exact(tmp_path: Path, codec_rate: int, rate: int | None) -> None:
    engine = make_engine(tmp_path, sample_rate=codec_rate, frame_samples=codec_rate // 25)
    async with serving(tmp_path, engine) as served, served.http() as http:
        pcm = await tts(http, format="pcm", sample_rate=rate)
        assert pcm.headers["content-type"] == "audio/pcm"
        assert pcm.headers["transfer-encoding"] == "chunked"
        sent = engine.pcm(0, 1)
        assert_same(pcm_of(pcm.content), sent, codec_rate, rate or 44_100)
        await served.until_free()
        wav = await tts(http, format="wav", sample_rate=rate)
        assert wav.headers["content-type"] == "audio/wav"
        assert wav.content[:4] == b"RIFF"
        assert_same(pcm_of(wav.content[44:]), sent, codec_rate, rate or 44_100)


@pytest.mark.parametrize(
    ("options", "rate"),
    [
        ({}, 44_100),
        ({"format": "mp3", "sample_rate": 32_000, "mp3_bitrate": 64}, 32_000),
        ({"format": "mp3", "mp3_bitrate": 192}, 44_100),
        ({"format": "opus"}, 48_000),
        ({"format": "opus", "opus_bitrate": 64_000, "sample_rate": 48_000}, 48_000),
        ({"format": "opus", "opus_bitrate": 24}, 48_000),
        ({"format": "opus", "opus_bitrate": -1000}, 48_000),
    ],
)
async def test_compressed_formats(tmp_path: Path, options: dict[str, Any], rate: int) -> None:
    engine = make_engine(tmp_path)
    async with serving(tmp_path, engine) as served, served.http() as http:
        response = await tts(http, **options)
        got, got_rate = decode(response.content)
        is_mp3 = response.headers["content-type"] == "audio/mpeg"
        assert got_rate == rate
        sent_s = len(engine.pcm(0, 1)) / 24_000
        excess_s = len(got) / rate - sent_s  # MP3 has whole frames
        assert -1e-4 < excess_s < (1152 / rate if is_mp3 else 1e-4)
        assert np.sqrt(np.mean(got[rate // 10 : -rate // 10] ** 2)) > 0.05


@pytest.mark.parametrize(
    ("format", "bitrates"),
    [("mp3", (64, 128, 192)), ("opus", (24, 32, 48, 64)), ("opus", (24_000, 64_000))],
)
async def test_the_bitrate_is_what_was_asked_for(
    tmp_path: Path, format: str, bitrates: tuple[int, ...]
) -> None:
    async with serving(tmp_path) as served, served.http() as http:
        sizes = []
        for bitrate in bitrates:
            body = {"text": TEXT * 4, "format": format, f"{format}_bitrate": bitrate}
            response = await http.post("/v1/tts", json=body)
            assert response.status_code == 200
            sizes.append(len(response.content))
            await served.until_free()
    ratio = sizes[-1] / sizes[0]
    assert sizes == sorted(set(sizes))
    assert ratio == pytest.approx(bitrates[-1] / bitrates[0], rel=0.3), sizes


async def test_speed_and_volume(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, served.http() as http:
        same = pcm_of((await tts(http, format="pcm", prosody={"speed": 1.0})).content)
        await served.until_free()
        fast = pcm_of((await tts(http, format="pcm", prosody={"speed": 2.0})).content)
        await served.until_free()
        soft = pcm_of((await tts(http, format="pcm", prosody={"volume": -20.0})).content)
        assert abs(len(fast) - len(same) / 2) <= 2
        assert len(soft) == len(same)
        assert np.abs(soft - same / 10).max() < 2 / 32767


@pytest.mark.parametrize("speed", [1.0, 2.0])
async def test_events_with_timestamps(tmp_path: Path, speed: float) -> None:
    engine = make_engine(tmp_path)
    async with serving(tmp_path, engine) as served, served.http() as http:
        body = {"text": TEXT, "format": "pcm", "sample_rate": 24_000, "prosody": {"speed": speed}}
        response = await http.post(STREAM, json=body)
        assert response.headers["content-type"].startswith("text/event-stream")
        blocks = response.text.strip().split("\n\n")
        events = [json.loads(block.removeprefix("event: message\ndata: ")) for block in blocks]
        audio = b"".join(base64.b64decode(event["audio_base64"]) for event in events)
        duration_s = len(engine.pcm(0, 1)) / 24_000 / speed
        assert len(audio) / 48_000 == pytest.approx(duration_s, abs=1e-3)
        *_, last = [event for event in events if event["alignment"]]
        assert last["content"] == TEXT and last["chunk_seq"] == 0
        segments = last["alignment"]["segments"]
        assert [segment["text"] for segment in segments] == TEXT.split()
        assert segments[-1]["end"] == pytest.approx(duration_s, abs=1e-3)
        refusal(await http.post(STREAM, json={"text": TEXT, "format": "x"}), 400, "format")


async def test_msgpack_with_nulls_and_what_has_no_meaning_here(tmp_path: Path) -> None:
    body = {
        "text": TEXT,
        "format": "pcm",
        "sample_rate": None,
        "reference_id": None,
        "references": [],
        "prosody": None,
        "latency": "balanced",
        "chunk_length": 300,
        "normalize": False,
        "features": ["quality-guard"],
        "temperature": 0.5,
        "top_p": 0,
        "seed": 7,
        "something_new": {"x": 1},
    }
    engine = make_engine(tmp_path)
    async with serving(tmp_path, engine) as served, served.http() as http:
        headers = {"Content-Type": "application/msgpack"}
        response = await http.post(TTS, content=ormsgpack.packb(body), headers=headers)
        assert response.status_code == 200
        assert_same(pcm_of(response.content), engine.pcm(0, 1), 24_000, 44_100)
        opened = engine.seen(OpenSlot)[-1]
        assert isinstance(opened, OpenSlot)
        assert (opened.sampling.temperature, opened.sampling.seed) == (0.5, 7)
        assert opened.max_lead_ms == 60_000, "the server's cap"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"temperature": 0.0, "top_p": 0.0, "seed": 0}, (0.0, 0.01, 0)),  # less is no choice
        ({"temperature": 1.0, "top_p": 0.3, "seed": -1}, (1.0, 0.3, 2**63 - 1)),
        ({"temperature": None, "seed": 2**63 + 5}, (0.7, 0.9, 5)),  # the model's defaults
    ],
)
async def test_sampling(
    tmp_path: Path, fields: dict[str, Any], expected: tuple[float, float, int]
) -> None:
    engine = make_engine(tmp_path)
    async with serving(tmp_path, engine) as served, served.http() as http:
        assert (await tts(http, format="pcm", **fields)).status_code == 200
    opened = engine.seen(OpenSlot)[-1]
    assert isinstance(opened, OpenSlot)
    sampling = opened.sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed) == expected


@pytest.mark.parametrize("normalize", [True, False])
async def test_the_model_reads_the_text_as_it_was_sent(tmp_path: Path, normalize: bool) -> None:
    """What a model's own front end makes of digits it makes in either case: its phonemes are of words."""
    engine = make_engine(tmp_path)
    async with serving(tmp_path, engine) as served, served.http() as http:
        body = {"text": "It costs 10.000.000, Dr. Lee.", "normalize": normalize}
        assert (await http.post(TTS, json=body)).status_code == 200
    texts = [c.text for c in engine.seen(SetText) if isinstance(c, SetText) and c.is_closed]
    assert texts == ["It costs 10.000.000, Dr. Lee."]


# ---------------------------------------------------------------------------- voices


async def test_inline_references_are_encoded_once(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    two = [{"audio": clip(), "text": "one"}, {"audio": clip(2.0), "text": "two"}]
    as_text = [{**item, "audio": base64.b64encode(item["audio"]).decode()} for item in two]
    async with serving(tmp_path, engine) as served, served.http() as http:
        for _ in range(2):
            assert (await tts(http, references=as_text)).status_code == 200
        body = ormsgpack.packb({"text": TEXT, "references": two})
        headers = {"Content-Type": "application/msgpack"}
        assert (await http.post(TTS, content=body, headers=headers)).status_code == 200
        voices = [command.voices[0] for command in engine.seen(OpenSlot)]
        assert voices[0] is voices[1] is voices[2]
        assert voices[0].text == "one\ntwo" and voices[0].codes.shape[1] == 75
        listed = (await http.get("/v1/voices")).json()["voices"]
        assert [voice["name"] for voice in listed] == ["tone"], "nothing is stored"


async def test_only_so_many_references_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that were not used for longest are encoded again."""
    monkeypatch.setattr(fish_voices, "_MAX_KEPT", 2)
    engine = make_engine(tmp_path)
    audio = base64.b64encode(clip()).decode()
    async with serving(tmp_path, engine) as served, served.http() as http:
        for text in ("a", "b", "a", "c", "a", "b"):
            references = [{"audio": audio, "text": text}]
            assert (await tts(http, references=references)).status_code == 200
    a, b, also_a, _, still_a, again_b = [command.voices[0] for command in engine.seen(OpenSlot)]
    assert a is also_a is still_a
    assert again_b is not b and again_b.text == b.text == "b"


async def test_fishs_own_default_voice_is_the_servers(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    async with serving(tmp_path, engine) as served, served.http() as http:
        reference_id = "933563129e564b19a115bedd57b7406a"
        assert (await tts(http, reference_id=reference_id)).status_code == 200
        (opening,) = engine.seen(OpenSlot)
        assert opening.voices[0].name == "tone"


async def test_unknown_voice_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, served.http() as http:
        refusal(await tts(http, reference_id="933563129e56"), 404, "there is no voice")
        refusal(await tts(http, reference_id="../../etc/passwd"), 404, "there is no voice")
        assert served.engine.slots.num_free == 2


# ---------------------------------------------------------------------------- bad input


LONG_REFERENCE = {"audio": base64.b64encode(clip()).decode(), "text": "x" * 200}


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"text": " "}, 400, "nothing that can be spoken in ' '; expected words"),
        ({"text": "..."}, 400, "nothing that can be spoken in '...'; expected words"),
        ({"text": 5}, 422, "text: Input should be a valid string (got 5)"),
        ({"text": "x" * 60_001}, 400, "60,001"),
        ({"format": "aiff"}, 400, "format"),
        ({"format": "pcm", "sample_rate": 22_050}, 400, "sample_rate"),
        ({"format": "opus", "sample_rate": 24_000}, 400, "sample_rate"),
        ({"format": "mp3", "mp3_bitrate": 100}, 400, "mp3_bitrate"),
        ({"format": "opus", "opus_bitrate": 31}, 400, "opus_bitrate"),
        ({"temperature": 1.5}, 422, "(got 1.5)"),
        ({"latency": "never"}, 422, "latency"),
        ({"prosody": {"speed": 9}}, 422, "(got 9)"),
        ({"prosody": "fast"}, 422, "prosody"),
        ({"reference_id": ["a", "b"]}, 400, "reference_id"),
        ({"references": [[{"audio": "", "text": "x"}]] * 2}, 400, "references"),
        ({"references": [{"audio": "*", "text": "x"}]}, 422, "base64"),
        ({"references": [{"audio": "AAAA", "text": "x"}]}, 422, "not audio"),
        ({"references": [{"audio": "AAAA", "text": " "}]}, 400, "text"),
        (
            {"references": [LONG_REFERENCE]},
            400,
            "got 200 characters for 1.0 s of speech, more than",
        ),
    ],
)
async def test_fields(tmp_path: Path, body: dict[str, Any], status: int, message: str) -> None:
    async with serving(tmp_path) as served, served.http() as http:
        refusal(await tts(http, **body), status, message)
        await served.until_free()


async def test_bodies(tmp_path: Path) -> None:
    packed = ormsgpack.packb({"text": TEXT})
    json_type, msgpack_type = "application/json", "application/msgpack"
    async with serving(tmp_path, max_clip_bytes=1_000_000) as served, served.http() as http:
        for content, kind, status, message in (
            (packed, "text/plain", 415, "text/plain"),
            (b"", "", 415, "Content-Type"),
            (packed[:-3], msgpack_type, 400, "MessagePack"),
            (b"", msgpack_type, 400, "MessagePack"),
            (b"\x91" * 10_000, msgpack_type, 400, "MessagePack"),
            (ormsgpack.packb([1]), msgpack_type, 400, "list"),
            (b'{"text": "hel', json_type, 400, "JSON"),
            (b"[" * 100_000, json_type, 400, "JSON"),
            (b"\xff\xfe", json_type, 400, "JSON"),
            (b'{"text": "\\ud800 is no text"}', json_type, 400, "JSON"),
            (b" " * 3_000_000, json_type, 413, "bytes"),
        ):
            headers = {"Content-Type": kind} if kind else {}
            response = await http.post(TTS, content=content, headers=headers)
            refusal(response, status, message)
        refusal(await http.get(TTS), 405, "")
        form = {"files": {"audio": b"x"}, "data": {"text": "x"}}
        refusal(await http.post(TTS, **form), 415, "multipart/form-data")


# ---------------------------------------------------------------------------- many, and leaving


async def test_300_at_once_are_served_or_refused(tmp_path: Path) -> None:
    limits = httpx.Limits(max_connections=300)
    async with (
        serving(tmp_path, make_engine(tmp_path, num_slots=4)) as served,
        httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{served.port}",
            trust_env=False,
            limits=limits,
            timeout=TIMEOUT_S,
        ) as http,
    ):
        responses = await asyncio.gather(*(tts(http, format="pcm") for _ in range(300)))
        by_status = {response.status_code for response in responses}
        assert by_status <= {200, 503} and 200 in by_status
        sizes = {len(r.content) for r in responses if r.status_code == 200}
        assert len(sizes) == 1
        for response in responses:
            if response.status_code == 503:
                refusal(response, 503, "slots")
                assert int(response.headers["Retry-After"]) >= 1
        await served.until_free()


@pytest.mark.parametrize("num_frames", [0, 5])
async def test_a_client_that_leaves_frees_the_slot(tmp_path: Path, num_frames: int) -> None:
    engine = make_engine(tmp_path)
    engine.hold()
    engine.let(num_frames)
    async with serving(tmp_path, engine) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        body = json.dumps({"text": TEXT, "format": "pcm"}).encode()
        head = f"POST {TTS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        if num_frames:
            await reader.readuntil(b"\r\n\r\n")
            await reader.read(10)
        else:
            await asyncio.to_thread(engine.wait_until, lambda: bool(engine.seen(OpenSlot)))
        writer.transport.abort()
        await served.until_free()


async def test_a_client_that_does_not_read_loses_the_slot(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path, write_stall_s=0.3) as served, served.http() as http:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port, limit=1024)
        body = json.dumps({"text": TEXT * 600, "format": "pcm"}).encode()
        head = f"POST {TTS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        await reader.readuntil(b"\r\n\r\n")
        await served.until_free()
        await served.until_idle()
        assert "a response is cut short: its client takes nothing" in caplog.text
        assert (await tts(http)).status_code == 200
        writer.transport.abort()


async def test_an_engine_that_dies_cuts_the_response(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    engine.hold()
    engine.let(3)
    async with serving(tmp_path, engine) as served, served.http() as http:
        async with http.stream("POST", TTS, json={"text": TEXT, "format": "pcm"}) as response:
            assert response.status_code == 200
            engine.die()
            with pytest.raises(httpx.RemoteProtocolError):
                await response.aread()
        refusal(await tts(http), 503, "")


async def test_an_engine_that_dies_ends_the_events(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    engine.hold()
    engine.let(3)
    async with serving(tmp_path, engine) as served, served.http() as http:
        async with http.stream("POST", STREAM, json={"text": TEXT, "format": "pcm"}) as response:
            engine.die()
            *_, last = (await response.aread()).decode().strip().split("\n\n")
        error = json.loads(last.removeprefix("event: error\ndata: "))
        assert error["status"] == 500 and "died" in error["message"] and len(error) == 2
