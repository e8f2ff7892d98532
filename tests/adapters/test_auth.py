"""Who is let in: the matrix of keys, origins and limits, for every kind of client."""

import asyncio
import contextlib
import hmac
import logging
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import openai
import pytest
from starlette.datastructures import Headers

from clients import ConnectionFailed, connect
from clients.voices import add_voice, list_voices
from realtime import auth
from realtime.__main__ import main
from realtime.auth import ApiKeys, load_api_keys, make_rules, presented_key
from realtime.config import ConfigError, ServerConfig
from realtime.wire import SUBPROTOCOL
from tests.realtime.support import TIMEOUT_S, Served, make_engine, serving, socket_status

KEY, OTHER = "key-of-the-first-client", "key-of-the-second/client+"
WRONG = "key-of-nobody-at-all"
SPEECH = {"model": "tts-1", "input": "Hello there.", "voice": "tone", "response_format": "pcm"}


@pytest.fixture
async def closed(tmp_path: Path) -> AsyncIterator[Served]:
    """A server that asks for a key."""
    async with serving(tmp_path, keys=ApiKeys([KEY, OTHER])) as served:
        yield served


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def url(served: Served) -> str:
    return f"http://127.0.0.1:{served.port}"


# ---------------------------------------------------------------------------- keys


async def test_without_keys_everybody_is_let_in(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, served.http() as http:
        for headers in ({}, bearer(WRONG)):
            assert (await http.get("/v1/voices", headers=headers)).status_code == 200
            assert (await socket_status(served, additional_headers=headers))[0] == 101


CASES: list[tuple[dict[str, str], int, str | None]] = [
    ({}, 401, "missing_api_key"),
    ({"Authorization": "Bearer"}, 401, "missing_api_key"),
    ({"Authorization": f"Basic {KEY}"}, 401, "missing_api_key"),
    (bearer(WRONG), 401, "invalid_api_key"),
    (bearer(KEY[:-1]), 401, "invalid_api_key"),
    (bearer(KEY + "x"), 401, "invalid_api_key"),
    ({"xi-api-key": WRONG}, 401, "invalid_api_key"),
    (bearer(KEY), 200, None),
    ({"authorization": f"bearer  {KEY}"}, 200, None),
    ({"xi-api-key": OTHER}, 200, None),
]


async def test_keys_over_http_and_sockets(closed: Served) -> None:
    for headers, status, code in CASES:
        async with closed.http() as http:
            response = await http.get("/v1/voices", headers=headers)
        assert response.status_code == status, headers
        if code is not None:
            upgraded, answer = await socket_status(closed, additional_headers=headers)
            assert upgraded == 401, headers
            assert response.json()["error"]["code"] == code, headers
            assert response.headers["www-authenticate"] == "Bearer"
            assert answer["www-authenticate"] == "Bearer"
            assert not closed.engine.commands  # no slot was touched
            assert closed.engine.slots.num_free == closed.engine.info.num_slots
        else:
            assert (await socket_status(closed, additional_headers=headers))[0] == 101
            await closed.until_free()


async def test_a_body_without_end_is_answered_all_the_same(
    closed: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "_MAX_DISCARDED_BYTES", 200_000)

    reader, writer = await asyncio.open_connection("127.0.0.1", closed.port)
    writer.write(b"POST /v1/tts HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")

    async def send() -> None:
        while True:
            writer.write(b"2710\r\n" + bytes(10_000) + b"\r\n")
            await writer.drain()

    sending = asyncio.create_task(send())
    async with asyncio.timeout(TIMEOUT_S):
        assert (await reader.readline()).startswith(b"HTTP/1.1 401")
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    writer.transport.abort()


async def test_key_as_a_subprotocol(closed: Served) -> None:
    """As browsers send it; the answer never names the key."""
    for name, status in (
        ("plosive.key." + KEY, 101),
        ("plosive.key.key-of-the-second%2Fclient%2B", 101),
        ("plosive.key." + WRONG, 401),
        ("plosive.key.", 401),
        ("plosive.other." + KEY, 401),
    ):
        await closed.until_free()
        assert (await socket_status(closed, subprotocols=[SUBPROTOCOL, name]))[0] == status, name


async def test_each_route_but_the_public_ones(closed: Served) -> None:
    async with closed.http() as http:
        for path in ("/health", "/ready", "/"):
            assert (await http.get(path)).status_code == 200, path
        for path in ("/metrics", "/v1/models", "/v1/audio/voices", "/v1/nothing", "/model"):
            assert (await http.get(path)).status_code == 401, path
        assert (await http.get("/metrics", headers=bearer(KEY))).status_code == 200
        assert (await http.delete("/v1/voices/tone")).status_code == 401


async def test_metrics_can_be_public(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, keys=ApiKeys([KEY]), public_metrics=True) as served,
        served.http() as http,
    ):
        await http.get("/v1/voices")
        scraped = await http.get("/metrics")
    assert 'plosive_sessions_refused_total{reason="missing_api_key"} 1.0' in scraped.text


async def test_refusals_have_the_shape_of_their_path(closed: Served) -> None:
    async with closed.http() as http:
        native = (await http.get("/v1/voices")).json()
        theirs = (await http.post("/v1/audio/speech", json=SPEECH)).json()
        fish = (await http.post("/v1/tts", json={"text": "Hello."})).json()
    assert set(native["error"]) == {"code", "message", "param"}
    assert theirs["error"]["type"] == "invalid_request_error"
    assert theirs["error"]["code"] == "missing_api_key"
    assert set(fish) == {"status", "message"} and fish["status"] == 401


async def test_the_openai_sdk(closed: Served) -> None:
    async with httpx.AsyncClient(trust_env=False) as http:
        for key in (WRONG, KEY):
            client = openai.AsyncOpenAI(
                api_key=key, base_url=url(closed) + "/v1", http_client=http, max_retries=0
            )
            if key == WRONG:
                with pytest.raises(openai.AuthenticationError):
                    await client.audio.speech.create(**SPEECH)
            else:
                assert (await client.audio.speech.create(**SPEECH)).content


async def test_our_client(closed: Served, tmp_path: Path) -> None:
    async with connect(url(closed), api_key=KEY) as session:
        assert [packet async for packet in session.say("Hello.")]
    with pytest.raises(ConnectionFailed, match="needs an API key") as refused:
        async with connect(url(closed)):
            pass
    assert refused.value.status == 401
    (voice,) = await asyncio.to_thread(list_voices, url(closed), api_key=OTHER)
    assert voice.name == "tone"
    clip = tmp_path / "large.wav"
    clip.write_bytes(bytes(15_000_000))  # it hears the answer although it is still sending
    with pytest.raises(ConnectionFailed, match="not one of this server's"):
        await asyncio.to_thread(add_voice, url(closed), "a", clip, "A.", api_key=WRONG)


def test_comparison_takes_the_same_time_for_every_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests of one length, through `hmac.compare_digest`, all of them whichever matches."""
    keys = ApiKeys([KEY, OTHER, "a-third-key-of-nobody"])
    compared: list[tuple[bytes, bytes]] = []
    compare = hmac.compare_digest

    def counting(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return compare(a, b)

    monkeypatch.setattr(hmac, "compare_digest", counting)
    for key in (KEY, OTHER, WRONG, "", "\ud800", "x" * 100_000):
        compared.clear()
        keys.find(key)
        assert len(compared) == 3
        assert {len(side) for pair in compared for side in pair} == {32}


def test_keys_are_not_kept() -> None:
    keys = ApiKeys([KEY])
    assert keys.find(KEY) is not None and keys.find(OTHER) is None
    assert keys.find(KEY) != ApiKeys([KEY]).find(KEY)  # a digest under each process's own secret
    assert KEY.encode() not in b"".join(keys._digests) and KEY not in repr(vars(keys))


async def test_keys_are_in_no_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At level debug the headers of upgrades are logged."""
    async with serving(tmp_path, keys=ApiKeys([KEY]), log_level="debug") as served:
        logger = logging.getLogger("uvicorn.error")
        logger.addHandler(caplog.handler)
        names = [SUBPROTOCOL, "plosive.key." + KEY]
        assert (await socket_status(served, subprotocols=names))[0] == 101
        assert (await socket_status(served, additional_headers=bearer(KEY)))[0] == 101
        logger.removeHandler(caplog.handler)
    theirs = [r.getMessage() for r in caplog.records if r.name == "uvicorn.error"]
    assert any("sec-websocket-key" in message for message in theirs)
    assert not any(KEY in message for message in theirs)


def test_the_first_place_that_has_a_key_counts() -> None:
    both = Headers({"authorization": "Bearer a", "xi-api-key": "b"})
    assert presented_key(both, ["plosive.key.c"]) == "a"
    assert presented_key(Headers({"xi-api-key": "b"}), ["plosive.key.c"]) == "b"
    assert presented_key(Headers(), ["plosive.v1", "plosive.key.c%20d"]) == "c d"
    assert presented_key(Headers({"authorization": "Basic x"}), []) is None


def test_keys_come_from_a_file_and_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# clients\n\n{KEY}  # the first\n{KEY}\n")
    keys = load_api_keys(file, {"PLOSIVE_API_KEYS": f" {OTHER}, another-key-for-you ,"})
    assert len(keys) == 3
    assert keys.find(KEY) and keys.find(OTHER) and keys.find("another-key-for-you")
    assert len(load_api_keys(None, {})) == 0


@pytest.mark.parametrize(
    "content", [None, "", "# none\n", "short", "with a space in it", "ключ" * 5]
)
def test_keys_that_cannot_be_used_stop_the_start(tmp_path: Path, content: str | None) -> None:
    """A server that was meant to be closed never starts open."""
    file = tmp_path / "keys"
    if content is not None:
        file.write_text(content)
        with pytest.raises(ConfigError):
            load_api_keys(None, {"PLOSIVE_API_KEYS": content.partition("#")[0]})
    with pytest.raises(ConfigError):
        load_api_keys(file, {})


def test_an_open_server_that_others_reach_says_so(caplog: pytest.LogCaptureFixture) -> None:
    make_rules(ServerConfig(), ApiKeys(), ())
    make_rules(ServerConfig(host="0.0.0.0"), ApiKeys([KEY]), ())
    assert not caplog.records
    make_rules(ServerConfig(host="0.0.0.0"), ApiKeys(), ())
    assert "no API key is asked for" in caplog.text


# ---------------------------------------------------------------------------- origins


async def test_origins(tmp_path: Path) -> None:
    allowed = "https://app.example.org/, http://localhost:3000"
    async with serving(tmp_path, allowed_origins=allowed) as served, served.http() as http:
        for origin, status in (
            (None, 200),  # no browser
            ("https://app.example.org", 200),
            ("https://APP.example.org", 200),
            ("http://localhost:3000", 200),
            ("http://app.example.org", 403),
            ("https://app.example.org.evil.net", 403),
            ("https://app.example.org:8443", 403),
            ("null", 403),
        ):
            await served.until_free()
            headers = {} if origin is None else {"Origin": origin}
            upgraded, _ = await socket_status(served, additional_headers=headers)
            response = await http.get("/v1/voices", headers=headers)
            assert response.status_code == status, origin
            assert upgraded == (101 if status == 200 else 403), origin
            if status == 403:
                assert response.json()["error"]["code"] == "origin_not_allowed"


async def test_pages_of_a_listed_origin_may_ask_and_read(tmp_path: Path) -> None:
    """A browser's preflight brings no key, and its page may read a refusal too."""
    origin = {"Origin": "https://app.example.org"}
    asked = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    options = {"keys": ApiKeys([KEY]), "allowed_origins": origin["Origin"]}
    async with serving(tmp_path, **options) as served, served.http() as http:
        preflight = await http.options("/v1/audio/speech", headers=origin | asked)
        refused = await http.post("/v1/audio/speech", json=SPEECH, headers=origin)
        spoken = await http.post("/v1/audio/speech", json=SPEECH, headers=origin | bearer(KEY))
        other = await http.options("/v1/audio/speech", headers={"Origin": "http://evil"} | asked)
    assert [r.status_code for r in (preflight, refused, spoken, other)] == [200, 401, 200, 400]
    for response in (preflight, refused, spoken):
        assert response.headers["access-control-allow-origin"] == origin["Origin"]
    assert "access-control-allow-origin" not in other.headers


def test_origins_must_be_origins() -> None:
    with pytest.raises(ConfigError, match="allowed_origins"):
        ServerConfig(allowed_origins="example.org")


# ---------------------------------------------------------------------------- sessions at a time


async def test_sessions_of_one_key(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, num_slots=4)
    limits = {"keys": ApiKeys([KEY, OTHER]), "max_sessions_per_client": 2}
    async with serving(tmp_path, engine, **limits) as served, served.http() as http:
        engine.hold()
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(2):
                await stack.enter_async_context(served.connect(additional_headers=bearer(KEY)))
            status, headers = await socket_status(served, additional_headers=bearer(KEY))
            assert status == 429 and int(headers["retry-after"]) >= 1
            speech = await http.post("/v1/audio/speech", json=SPEECH, headers=bearer(KEY))
            assert speech.status_code == 429 and int(speech.headers["retry-after"]) >= 1
            assert speech.json()["error"]["type"] == "rate_limit_error"
            # what holds no slot is not counted, and another key has sessions of its own
            assert (await http.get("/v1/voices", headers=bearer(KEY))).status_code == 200
            assert (await socket_status(served, additional_headers=bearer(OTHER)))[0] == 101
        await served.until_free()
        engine.let_all()
        speech = await http.post("/v1/audio/speech", json=SPEECH, headers=bearer(KEY))
        assert speech.status_code == 200 and speech.content


# ---------------------------------------------------------------------------- the command line


async def test_plosive_voices_shows_its_key(
    closed: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    voices = ["voices", "--url", url(closed)]
    assert await asyncio.to_thread(main, voices) == 1
    assert "needs an API key" in capsys.readouterr().err
    assert await asyncio.to_thread(main, [*voices, "--api-key", KEY]) == 0
    monkeypatch.setenv("PLOSIVE_API_KEY", OTHER)
    assert await asyncio.to_thread(main, voices) == 0
    assert "tone" in capsys.readouterr().out


async def test_plosive_say_shows_its_key(closed: Served, tmp_path: Path) -> None:
    out = tmp_path / "said.wav"
    say = ("-m", "realtime", "say", "Hello.", "--url", url(closed), "--out", str(out))
    environ = dict(os.environ) | {"PLOSIVE_API_KEY": KEY}
    process = await asyncio.create_subprocess_exec(sys.executable, *say, env=environ)
    assert await process.wait() == 0 and out.exists()


def test_serve_does_not_start_with_keys_that_cannot_be_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    none = tmp_path / "none"
    assert main(["serve", "--api-keys-file", str(none)]) == 2
    why = f"--api-keys-file (PLOSIVE_API_KEYS_FILE): cannot read {none}: No such file or directory"
    assert capsys.readouterr().err == f"plosive serve: {why}\n"
