"""What one API key, or without keys one address, may have: over all its connections, by every API."""

import base64
import dataclasses
import re
from pathlib import Path
from typing import Any

import httpx
import openai
import ormsgpack
import pytest
from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as ws_connect
from websockets.exceptions import InvalidStatus

from realtime import hub, wire
from realtime.adapters.fish_request import parse_request
from realtime.auth import ApiKeys
from realtime.config import ConfigError, ServerConfig
from realtime.errors import HTTP_STATUS
from tests.adapters.fish_support import FishSocket
from tests.fakes import FakeEngine
from tests.realtime.support import TIMEOUT_S, Client, Served, make_engine, serving
from tests.realtime.test_voices import clip

KEY, OTHER = "key-of-the-first-client", "key-of-the-second-client"
TEXT = "No more than one of these may come at once, and no other."  # 57 of 100 characters
SOCKETS = ("/v1/realtime", "/v1/tts/live", "/v1/tts/live/with-timestamp")
POSTS: dict[str, dict[str, Any]] = {
    "/v1/audio/speech": {"model": "tts-1", "input": TEXT, "voice": "alloy"},
    "/v1/tts": {"text": TEXT},
    "/v1/tts/stream/with-timestamp": {"text": TEXT},
}
PATHS = (*SOCKETS, *POSTS)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def connect(served: Served, path: str, key: str) -> ws_connect:
    url = f"ws://127.0.0.1:{served.port}{path}"
    return ws_connect(url, additional_headers=bearer(key), proxy=None, close_timeout=0.2)


async def post(served: Served, path: str, key: str) -> httpx.Response:
    async with served.http() as http:
        return await http.post(path, json=POSTS[path], headers=bearer(key), timeout=TIMEOUT_S)


# ---------------------------------------------------------------------------- text a second


async def speak_natively(socket: ClientConnection) -> wire.Error | None:
    """None if it was spoken."""
    client = Client(socket)
    await client.start()
    await client.send(
        wire.TextAppend(turn_id=1, text=TEXT),
        wire.TurnCommit(turn_id=1),
    )
    await client.until(wire.TurnDone)
    errors = client.heard.of(wire.Error)
    assert len(errors) == (not client.heard.packets)
    return errors[0] if errors else None


async def speak_live(socket: ClientConnection) -> dict[str, Any] | None:
    fish = FishSocket(socket)
    await fish.start(text=TEXT)
    await fish.send("stop")
    finish = await fish.until("finish")
    return None if finish["reason"] == "stop" else finish


async def is_spoken(served: Served, path: str, key: str) -> bool:
    """Or refused, in the way of the path, with a time to wait for."""
    if path in POSTS:
        response = await post(served, path, key)
        if response.status_code == 200:
            return True
        assert response.status_code == HTTP_STATUS["text_rate_exceeded"] == 429
        assert 10 <= int(response.headers["retry-after"]) <= 14  # 14 characters, one a second
        if path == "/v1/audio/speech":
            error = response.json()["error"]
            assert (error["type"], error["param"]) == ("rate_limit_error", "input")
            assert error["code"] == "text_rate_exceeded"
        else:
            assert set(response.json()) == {"status", "message"}
        assert "an API key" in response.text
        return False
    async with connect(served, path, key) as socket:
        if path == wire.PATH:
            error = await speak_natively(socket)
            assert error is None or (error.code, error.keeps_turn) == ("text_rate_exceeded", True)
            assert error is None or 10_000 < error.retry_after_ms <= 14_000
            return error is None
        finish = await speak_live(socket)
        assert finish is None or "send it again in" in finish["message"], finish
        return finish is None


@pytest.mark.parametrize("path", PATHS)
async def test_text_through_one_api_counts_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(hub, "burst_chars", lambda chars_per_s: 100)
    options = {"keys": ApiKeys([KEY, OTHER]), "max_client_text_chars_per_s": 1}
    async with serving(tmp_path, **options) as served:
        assert await is_spoken(served, path, KEY)
        await served.until_free()
        for other in PATHS:
            assert not await is_spoken(served, other, KEY), other
            await served.until_free()  # a refusal leaves nothing behind
        assert await is_spoken(served, path, OTHER)


async def test_without_keys_an_address_is_a_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "burst_chars", lambda chars_per_s: 100)
    async with serving(tmp_path, max_client_text_chars_per_s=1) as served:
        assert await is_spoken(served, "/v1/tts", KEY)
        assert not await is_spoken(served, "/v1/audio/speech", OTHER)


async def test_what_finds_no_slot_is_not_charged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "burst_chars", lambda chars_per_s: 100)
    engine = make_engine(tmp_path, num_slots=1)
    async with serving(tmp_path, engine, max_client_text_chars_per_s=1) as served:
        async with served.connect():
            assert (await post(served, "/v1/tts", KEY)).status_code == 503
        await served.until_free()
        assert await is_spoken(served, "/v1/tts", KEY)


SHORT, LONG = "Hello there.", "How it is said, in sixty characters that count like spoken ones."


def prompted(path: str) -> dict[str, Any]:
    """A short text that comes with a long one that is only read."""
    if path == "/v1/audio/speech":
        return POSTS[path] | {"input": SHORT, "instructions": LONG}
    audio = base64.b64encode(clip()).decode()
    return {"text": SHORT, "references": [{"audio": audio, "text": LONG}]}


def make_prompted(folder: Path) -> FakeEngine:
    engine = make_engine(folder)
    engine.info = dataclasses.replace(engine.info, has_prompt=True)
    return engine


@pytest.mark.parametrize("path", POSTS)
async def test_prompts_and_references_of_a_request_are_text_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(hub, "burst_chars", lambda chars_per_s: 100)
    limits = {"max_client_text_chars_per_s": 1}
    async with (
        serving(tmp_path, make_prompted(tmp_path), **limits) as served,
        served.http() as http,
    ):
        response = await http.post(path, json=prompted(path), timeout=TIMEOUT_S)
        assert response.status_code == 200
        await served.until_free()
        response = await http.post(path, json=prompted(path), timeout=TIMEOUT_S)
        assert response.status_code == 429
        assert 40 <= int(response.headers["retry-after"]) <= 2 * len(SHORT + LONG) - 100
        assert set(response.json()) in ({"error"}, {"status", "message"})
        assert "characters of text a second" in response.text
        await served.until_free()


@pytest.mark.parametrize("path", SOCKETS)
async def test_prompts_and_references_on_a_socket_are_text_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(hub, "burst_chars", lambda chars_per_s: 100)
    limits = {"max_client_text_chars_per_s": 1}
    engine = make_prompted(tmp_path)
    async with serving(tmp_path, engine, **limits) as served, connect(served, path, KEY) as socket:
        if path == wire.PATH:
            client = Client(socket)
            await client.start(prompt=LONG)
            await client.send(wire.SessionUpdate(prompt=LONG))
            error = await client.until(wire.Error)
            assert (error.code, error.param, error.fatal) == (
                "text_rate_exceeded",
                "prompt",
                False,
            )
            assert 20_000 < error.retry_after_ms <= 28_000
            await client.say(SHORT)
        else:
            fish, references = FishSocket(socket), [{"audio": clip(), "text": LONG}]
            await fish.start(references=references)
            await fish.start(references=references)
            finish = await fish.until("finish")
            assert finish["reason"] == "error" and "send it again in 2" in finish["message"]
            await fish.start(text=SHORT)
            await fish.send("stop")
            assert await fish.until_finish()


def test_clips_that_are_not_spoken_with_cost_nothing() -> None:
    one, two = {"audio": b"-", "text": "four"}, {"audio": b"-", "text": "sixsix"}
    for fields, num_chars in (
        ({}, 0),
        ({"references": [one, two]}, 10),
        ({"references": [[one, two], [one]]}, 14),
        ({"references": [one], "reference_id": "anna"}, 0),
        ({"references": [one], "reference_id": ""}, 4),
    ):
        assert parse_request(fields).num_reference_chars == num_chars, fields


async def test_a_prompt_that_is_ignored_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "burst_chars", lambda chars_per_s: 100)
    async with serving(tmp_path, max_client_text_chars_per_s=1) as served, served.http() as http:
        for _ in range(3):
            response = await http.post(
                "/v1/audio/speech", json=prompted("/v1/audio/speech"), timeout=TIMEOUT_S
            )
            assert response.status_code == 200


async def test_what_could_never_be_taken_at_once_is_not_told_to_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "burst_chars", lambda chars_per_s: 50)
    for rate, status in ((1, 400), (0, 200)):
        limits = {"max_client_text_chars_per_s": rate}
        async with serving(tmp_path, **limits) as served, served.http() as http:
            response = await http.post("/v1/tts", json=prompted("/v1/tts"), timeout=TIMEOUT_S)
        assert response.status_code == status
        assert "retry-after" not in response.headers
        assert status == 200 or "at most 50 are taken at once" in response.json()["message"]


async def test_the_openai_sdk_waits_as_long_as_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "burst_chars", lambda chars_per_s: 100)
    options = {"keys": ApiKeys([KEY]), "max_client_text_chars_per_s": 50}
    async with serving(tmp_path, **options) as served, served.http() as http:
        url = f"http://127.0.0.1:{served.port}/v1"
        for max_retries, is_taken in ((0, True), (0, False), (1, True)):
            client = openai.AsyncOpenAI(
                api_key=KEY, base_url=url, http_client=http, max_retries=max_retries
            )
            speech = client.audio.speech.create(**POSTS["/v1/audio/speech"])
            if is_taken:
                assert (await speech).content
            else:
                with pytest.raises(openai.RateLimitError, match="characters of text a second"):
                    await speech


@pytest.mark.parametrize(
    ("options", "chars_per_s"),
    [
        ({}, 4_000),
        ({"max_sessions_per_client": 2}, 2_000),
        ({"max_text_chars_per_s": 0}, 0),
        ({"max_client_text_chars_per_s": 7}, 7),
        ({"max_client_text_chars_per_s": 0}, 0),
    ],
)
def test_unless_told_a_client_has_the_text_of_its_sessions(
    options: dict[str, int], chars_per_s: int
) -> None:
    assert ServerConfig(**options).client_text_chars_per_s(num_slots=4) == chars_per_s


@pytest.mark.parametrize("name", ["max_client_text_chars_per_s", "auto_flush_ms"])
def test_limits_are_not_negative(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: got -1, expected 0 or more"):
        ServerConfig(**{name: -1})


# ---------------------------------------------------------------------------- sessions at a time


@pytest.mark.parametrize("taken_by", SOCKETS)
async def test_a_session_of_one_api_counts_for_all(tmp_path: Path, taken_by: str) -> None:
    options = {"keys": ApiKeys([KEY, OTHER]), "max_sessions_per_client": 1}
    async with serving(tmp_path, **options) as served:
        async with connect(served, taken_by, KEY):
            for path in SOCKETS:
                with pytest.raises(InvalidStatus) as refused:
                    async with connect(served, path, KEY):
                        pass
                assert refused.value.response.status_code == 429, path
                assert int(refused.value.response.headers["retry-after"]) >= 1
            for path in POSTS:
                response = await post(served, path, KEY)
                assert response.status_code == 429, path
                assert int(response.headers["retry-after"]) >= 1
            assert (await post(served, "/v1/tts", OTHER)).status_code == 200
        await served.until_free()
        assert (await post(served, "/v1/tts", KEY)).status_code == 200


@pytest.mark.parametrize("path", POSTS)
async def test_a_request_that_is_spoken_is_a_session(tmp_path: Path, path: str) -> None:
    engine = make_engine(tmp_path)
    options = {"keys": ApiKeys([KEY]), "max_sessions_per_client": 1}
    async with serving(tmp_path, engine, **options) as served, served.http() as http:
        engine.hold()
        engine.let(5)
        wav = POSTS[path] | {"format": "wav", "response_format": "wav"}
        async with http.stream("POST", path, json=wav, headers=bearer(KEY)) as response:
            assert await anext(response.aiter_raw())
            with pytest.raises(InvalidStatus) as refused:
                async with connect(served, wire.PATH, KEY):
                    pass
        assert refused.value.response.status_code == 429
        engine.let_all()
        await served.until_free()
        assert (await post(served, path, KEY)).status_code == 200


# ---------------------------------------------------------------------------- clips

MAX_CLIP_S, MAX_CLIP_BYTES = 3.0, 400_000
TOO_LONG, TOO_LARGE = clip(duration_s=3.5), b"\0" * (MAX_CLIP_BYTES + 1)
HALF = clip(duration_s=1.7)  # two are too long together
CLIPS = {
    "long": ([TOO_LONG], 422),
    "large": ([TOO_LARGE], 413),
    "together": ([HALF, HALF], 422),
    "short": ([clip(duration_s=0.1)], 422),
    "silent": ([clip(level=0)], 422),
    "not audio": ([b"no audio"], 422),
}
WHY = re.compile("s, expected|400,000 bytes|silent|not audio")


@pytest.mark.parametrize("path", ["/v1/tts", "/v1/tts/stream/with-timestamp", "/model"])
@pytest.mark.parametrize(("clips", "status"), CLIPS.values(), ids=CLIPS)
async def test_clips_are_limited_over_http(
    tmp_path: Path, path: str, clips: list[bytes], status: int
) -> None:
    limits = {"max_clip_s": MAX_CLIP_S, "max_clip_bytes": MAX_CLIP_BYTES}
    async with serving(tmp_path, **limits) as served, served.http() as http:
        if path == "/model":
            form = {"title": "anna", "texts": ["words"] * len(clips)}
            response = await http.post(path, data=form, files=[("voices", c) for c in clips])
        else:
            references = [{"audio": c, "text": "words"} for c in clips]
            body = ormsgpack.packb({"text": TEXT, "references": references})
            kind = {"Content-Type": "application/msgpack"}
            response = await http.post(path, content=body, headers=kind)
        assert response.status_code == status, response.text
        assert response.json() == {"status": status, "message": response.json()["message"]}
        assert WHY.search(response.json()["message"])
        assert served.engine.slots.num_free == served.engine.info.num_slots
        assert (await post(served, "/v1/tts", KEY)).status_code == 200


@pytest.mark.parametrize("path", SOCKETS[1:])
@pytest.mark.parametrize("clips", [clips for clips, _ in CLIPS.values()], ids=CLIPS)
async def test_clips_are_limited_on_sockets(tmp_path: Path, path: str, clips: list[bytes]) -> None:
    limits = {"max_clip_s": MAX_CLIP_S, "max_clip_bytes": MAX_CLIP_BYTES}
    async with serving(tmp_path, **limits) as served, connect(served, path, KEY) as socket:
        fish = FishSocket(socket)
        await fish.start(references=[{"audio": c, "text": "words"} for c in clips])
        finish = await fish.until("finish")
        assert finish["reason"] == "error" and WHY.search(finish["message"])
        assert await speak_live(socket) is None  # the socket can still be used
