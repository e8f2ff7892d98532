"""OpenAI's API: its own SDK, unchanged, and what it would never send."""

import asyncio
import base64
import dataclasses
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from realtime.pingpong.messages import OpenSlot
from tests.adapters.fish_support import spoken
from tests.adapters.test_media import LONGER_BY, best_match, read
from tests.realtime.support import TIMEOUT_S, Served, make_engine, serving

TEXT = "The quick brown fox jumps over the lazy dog. Then it sleeps until noon."
SPEECH = "/v1/audio/speech"
ASKED = {"model": "tts-1", "input": TEXT, "voice": "tone"}


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with serving(tmp_path, make_engine(tmp_path, num_slots=2)) as served:
        yield served


def sdk(served: Served, *on_response: Any, **kwargs: Any) -> openai.AsyncOpenAI:
    hooks = {"response": list(on_response)}
    return openai.AsyncOpenAI(
        api_key="none",
        base_url=f"http://127.0.0.1:{served.port}/v1",
        http_client=httpx.AsyncClient(trust_env=False, verify=False, event_hooks=hooks),
        **({"max_retries": 0, "timeout": TIMEOUT_S} | kwargs),
    )


async def refusal(served: Served, content: object, **kwargs: Any) -> tuple[int, dict[str, Any]]:
    async with served.http() as http:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        headers = {"content-type": "application/json"} | kwargs.pop("headers", {})
        response = await http.post(SPEECH, content=body, headers=headers)
    answer = response.json()
    assert set(answer) == {"error"}
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    return response.status_code, answer["error"]


# ---------------------------------------------------------------------------- the SDK


@pytest.mark.parametrize("format", ["mp3", "opus", "aac", "flac", "wav", "pcm"])
async def test_create(served: Served, format: Any) -> None:
    async with sdk(served) as client:
        response = await client.audio.speech.create(
            model="gpt-4o-mini-tts", voice="alloy", input=TEXT, response_format=format
        )
    heard, sent = read(response.content, format, 24_000), served.engine.pcm(0, 1)
    assert 0 <= len(heard) - len(sent) <= LONGER_BY.get(format, 0)
    assert best_match(heard, sent)[0] > 0.98
    assert spoken(served.engine) == TEXT
    await served.until_free()


async def test_default_format_is_mp3(served: Served) -> None:
    async with sdk(served) as client:
        response = await client.audio.speech.create(model="fake", voice="tone", input=TEXT)
    assert response.response.headers["content-type"] == "audio/mpeg"
    assert len(read(response.content, "mp3", 24_000)) >= len(served.engine.pcm(0, 1))


async def test_streaming_response_begins_before_the_speech_ends(served: Served) -> None:
    served.engine.hold()
    served.engine.let(5)
    async with (
        sdk(served) as client,
        client.audio.speech.with_streaming_response.create(
            model="tts-1", voice="tone", input=TEXT, response_format="pcm"
        ) as response,
    ):
        assert response.headers["content-type"] == "audio/pcm"
        chunks = response.iter_bytes()
        first = await asyncio.wait_for(anext(chunks), TIMEOUT_S)
        served.engine.let_all()
        data = first + b"".join([chunk async for chunk in chunks])
    sent = served.engine.pcm(0, 1)
    assert 0 < len(first) < 2 * len(sent) == len(data)
    assert np.abs(read(data, "pcm", 24_000) - sent).max() < 2 / 32767
    assert spoken(served.engine) == TEXT


async def test_server_sent_events(served: Served) -> None:
    asked = ASKED | {"response_format": "pcm", "stream_format": "sse"}
    async with served.http() as http:
        response = await http.post(SPEECH, json=asked)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [json.loads(part.removeprefix("data: ")) for part in response.text.split("\n\n")[:-1]]
    *deltas, done = events
    assert {event["type"] for event in deltas} == {"speech.audio.delta"}
    data = b"".join(base64.b64decode(event["audio"]) for event in deltas)
    assert len(data) == 2 * len(served.engine.pcm(0, 1))
    assert spoken(served.engine) == TEXT
    num_frames = len(served.engine.emitted[0, 1])
    assert done == {
        "type": "speech.audio.done",
        "usage": {
            "input_tokens": len(TEXT),
            "output_tokens": num_frames,
            "total_tokens": len(TEXT) + num_frames,
        },
    }


@pytest.mark.parametrize("speed", [0.25, 0.8, 2.0, 4.0])
async def test_speed(served: Served, speed: float) -> None:
    async with sdk(served) as client:
        response = await client.audio.speech.create(
            model="tts-1", voice="nova", input=TEXT, response_format="pcm", speed=speed
        )
    num_samples = len(served.engine.pcm(0, 1))
    assert len(response.content) // 2 == np.floor(num_samples / speed + 0.5)


async def test_instructions_are_the_prompt(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    engine.info = dataclasses.replace(engine.info, has_prompt=True)
    async with serving(tmp_path, engine) as served, sdk(served) as client:
        await client.audio.speech.create(
            model="tts-1", voice="tone", input="Hi.", instructions="Whisper."
        )
    (opened,) = engine.seen(OpenSlot)
    assert opened.prompt == "Whisper."


async def test_models_and_voices(served: Served) -> None:
    async with sdk(served) as client, served.http() as http:
        models = [model.id async for model in client.models.list()]
        assert models == ["fake"]
        for name in ("tts-1-hd", "gpt-4o-mini-tts-2025-12-15"):
            assert (await client.models.retrieve(name)).id == name
        with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-9'"):
            await client.models.retrieve("gpt-9")
        voices = (await http.get("/v1/audio/voices")).json()
    assert voices["voices"] == [{"id": "tone", "name": "tone"}]
    assert voices["default"] == "tone"


async def test_the_sdk_raises_its_own_errors(served: Served) -> None:
    async with sdk(served) as client:
        with pytest.raises(openai.BadRequestError, match="there are: tone") as refused:
            await client.audio.speech.create(model="tts-1", voice="nobody", input=TEXT)
        assert refused.value.param == "voice" and refused.value.code == "invalid_voice"
        assert refused.value.type == "invalid_request_error"
        with pytest.raises(openai.NotFoundError, match="valid: fake, tts-1"):
            await client.audio.speech.create(model="whisper-1", voice="tone", input=TEXT)


# ---------------------------------------------------------------------------- capacity, leaving


async def test_at_capacity_it_is_told_when_to_come_back(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, num_slots=1)
    async with serving(tmp_path, engine) as served, served.connect(), served.http() as http:
        response = await http.post(SPEECH, json=ASKED)
        assert response.status_code == 503 and int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["type"] == "server_error"
        assert response.json()["error"]["code"] == "at_capacity"


async def test_the_sdk_waits_for_a_slot(tmp_path: Path) -> None:
    refused = asyncio.Event()

    async def note(response: httpx.Response) -> None:
        if response.status_code == 503:
            refused.set()

    async with (
        serving(tmp_path, make_engine(tmp_path, num_slots=1)) as served,
        sdk(served, note, max_retries=3) as client,
    ):
        socket = await served.connect()
        asking = asyncio.create_task(
            client.audio.speech.create(model="tts-1", voice="tone", input=TEXT)
        )
        await asyncio.wait_for(refused.wait(), TIMEOUT_S)
        await socket.close()
        assert (await asyncio.wait_for(asking, TIMEOUT_S)).content


@pytest.mark.parametrize("num_frames", [0, 3])
async def test_a_client_that_leaves_frees_its_slot(served: Served, num_frames: int) -> None:
    """Before the first audio and in the middle of it."""
    served.engine.hold()
    served.engine.let(num_frames)
    async with served.http() as http:
        asking = asyncio.create_task(_begin(http))
        await asyncio.to_thread(
            served.engine.wait_until, lambda: len(served.engine.emitted[0, 1]) >= num_frames
        )
        await asyncio.to_thread(served.engine.wait_until, lambda: served.engine.seen(OpenSlot))
        asking.cancel()
        await asyncio.wait((asking,))
    await served.until_free()


async def _begin(http: httpx.AsyncClient) -> None:
    async with http.stream("POST", SPEECH, json=ASKED) as response:
        async for _ in response.aiter_bytes():
            pass


async def test_a_failure_in_the_middle_is_no_whole_file(served: Served) -> None:
    served.engine.hold()
    served.engine.let(3)
    with pytest.raises(httpx.RemoteProtocolError):
        async with (
            served.http() as http,
            http.stream("POST", SPEECH, json=ASKED | {"response_format": "pcm"}) as response,
        ):
            assert response.status_code == 200
            async for _ in response.aiter_bytes():
                served.engine.die()


async def test_a_failure_in_the_middle_of_events_is_an_event(served: Served) -> None:
    served.engine.hold()
    served.engine.let(3)
    asked = ASKED | {"response_format": "pcm", "stream_format": "sse"}
    text = ""
    async with served.http() as http, http.stream("POST", SPEECH, json=asked) as response:
        async for chunk in response.aiter_text():
            text += chunk
            served.engine.die()
    *deltas, last = text.removesuffix("\n\n").split("\n\n")
    assert deltas and all(json.loads(part.removeprefix("data: "))["audio"] for part in deltas)
    name, data = last.split("\n")
    error = json.loads(data.removeprefix("data: "))["error"]
    assert name == "event: error" and "died" in error["message"]
    assert (error["type"], error["code"], error["param"]) == ("server_error", "engine_error", None)


async def test_the_sdk_raises_an_error_event(served: Served) -> None:
    served.engine.hold()
    served.engine.let(3)
    async with sdk(served) as client:
        events = await client.post(
            SPEECH.removeprefix("/v1"),
            body=ASKED | {"stream_format": "sse"},
            cast_to=object,
            stream=True,
            stream_cls=openai.AsyncStream[object],
        )
        with pytest.raises(openai.APIError, match="died"):
            async for _ in events:
                served.engine.die()


# ---------------------------------------------------------------------------- bad input


BAD_FIELDS: list[tuple[dict[str, object], str, str]] = [
    ({"input": None}, "input", "invalid_value"),
    ({"input": ""}, "input", "string_below_min_length"),
    ({"input": "a" * 60_001}, "input", "string_above_max_length"),
    ({"input": ["a"]}, "input", "invalid_value"),
    ({"voice": 3}, "voice", "invalid_value"),
    ({"voice": "../../etc/passwd"}, "voice", "invalid_voice"),
    ({"voice": {"name": "tone"}}, "voice", "invalid_value"),
    ({"response_format": "ogg"}, "response_format", "invalid_value"),
    ({"speed": 4.5}, "speed", "invalid_value"),
    ({"speed": "fast"}, "speed", "invalid_value"),
    ({"stream_format": "chunked"}, "stream_format", "invalid_value"),
    ({"instructions": "a" * 4_001}, "instructions", "string_above_max_length"),
]


async def test_bad_fields(served: Served) -> None:
    for change, param, code in BAD_FIELDS:
        status, error = await refusal(served, ASKED | change)
        assert (status, error["param"], error["code"]) == (400, param, code), change
        assert error["type"] == "invalid_request_error" and param in error["message"], change
        assert code == "invalid_voice" or f"(got {repr(change[param])[:70]}" in error["message"]
    assert not served.engine.seen(OpenSlot)


@pytest.mark.parametrize("stream_format", ["audio", "sse"])
@pytest.mark.parametrize("text", [" ", "..."])
async def test_a_text_of_signs_alone_is_no_empty_file(
    served: Served, text: str, stream_format: str
) -> None:
    asked = ASKED | {"input": text, "stream_format": stream_format}
    status, error = await refusal(served, asked)
    assert (status, error["param"], error["code"]) == (400, "input", "nothing_to_speak")
    assert error["message"] == f"there is nothing that can be spoken in {text!r}; expected words"


async def test_missing_fields(served: Served) -> None:
    for field in ASKED:
        asked = {name: value for name, value in ASKED.items() if name != field}
        status, error = await refusal(served, asked)
        assert (status, error["param"]) == (400, field)
        assert error["code"] == "missing_required_parameter"


async def test_what_is_no_request(served: Served) -> None:
    huge = b"[" * 100_000
    for body in (b"", b"{", b"[]", b"null", b'{"input": "\xff"}', b'{"input": NaN}', huge):
        status, error = await refusal(served, body)
        assert status == 400 and error["type"] == "invalid_request_error", body[:20]


async def test_another_content_type(served: Served) -> None:
    headers = {"content-type": "application/x-www-form-urlencoded"}
    status, error = await refusal(served, b"input=hello", headers=headers)
    assert status == 415 and "expected application/json" in error["message"]


async def test_a_body_that_is_too_large(served: Served) -> None:
    status, error = await refusal(served, ASKED | {"input": "a" * 1_100_000})
    assert status == 413 and error["code"] == "body_too_large"


async def test_other_paths_and_methods(served: Served) -> None:
    async with served.http() as http:
        for response in (
            await http.get("/v1/audio/transcriptions"),
            await http.get(SPEECH),
            await http.post("/v1/models"),
        ):
            assert response.status_code in (404, 405)
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}
            if response.status_code == 405:
                expected = response.headers["Allow"]
                assert (
                    f"is not possible there; {expected} is" in response.json()["error"]["message"]
                )
        assert set((await http.get("/v1/nothing")).json()["error"]) == {"code", "message", "param"}


async def test_a_voice_object(served: Served) -> None:
    async with served.http() as http:
        assert (await http.post(SPEECH, json=ASKED | {"voice": {"id": "tone"}})).status_code == 200


async def test_unknown_fields_are_harmless(served: Served) -> None:
    async with served.http() as http:
        response = await http.post(SPEECH, json=ASKED | {"user": "a", "language": None})
    assert response.status_code == 200
