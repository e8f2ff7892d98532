"""Addresses, the start of a session, and the ways in which there is none."""

import json
import math

import pytest

import clients.sync
from clients import (
    AudioFormat,
    CapacityError,
    ConnectionFailed,
    ConnectionLost,
    ProtocolError,
    Sampling,
    SessionError,
    VoiceError,
    connect,
)
from clients.address import http_url, websocket_url
from clients.reconnect import is_retryable
from clients.voices import list_voices
from realtime import wire
from realtime.wire import Error, SessionStart
from tests.clients.command_line import MISSING_KEY
from tests.clients.scripted_server import PCM_FORMAT, Peer, ready, respond, scripted_server, talker


async def test_start_carries_what_connect_was_given() -> None:
    async with (
        scripted_server(talker) as server,
        connect(
            server.url.replace("http", "ws"),
            voice="bob",
            prompt="calm",
            format=PCM_FORMAT,
            sampling=Sampling(seed=7),
            max_lead_ms=500,
        ),
    ):
        pass
    assert server.received == [
        SessionStart(
            voice="bob",
            prompt="calm",
            format=PCM_FORMAT,
            sampling=wire.Sampling(seed=7),
            max_lead_ms=500,
        )
    ]


@pytest.mark.parametrize(
    "field",
    [
        {"sample_rate": 0},
        {"sample_rate": -24_000},
        {"sample_rate": 10**12},
        {"pre_skip_samples": -1},
        {"pre_skip_samples": 10**9},
        {"packet_ms": 0},
        {"channels": 0},
    ],
)
async def test_a_format_that_cannot_be_refuses_the_session(field) -> None:
    async def script(peer: Peer) -> None:
        await peer.expect(SessionStart)
        message = ready().model_dump()
        message["format"] |= field
        await peer.send_raw(json.dumps(message))

    async with scripted_server(script) as server:
        with pytest.raises(ProtocolError, match="cannot be read"):
            async with connect(server.url, format=PCM_FORMAT):
                pass


async def test_refused_before_the_upgrade() -> None:
    refusal = respond(
        503,
        '{"error": {"code": "at_capacity", "message": "all 4 slots are taken"}}',
        {"Retry-After": "7"},
    )
    async with scripted_server(talker, refusal=refusal) as server:
        with pytest.raises(ConnectionFailed, match="status 503: all 4 slots are taken") as raised:
            async with connect(server.url):
                pass
    assert (raised.value.status, raised.value.retry_after_s) == (503, 7.0)


@pytest.mark.parametrize(("code", "status"), [("at_capacity", 503), ("too_many_sessions", 429)])
async def test_a_full_server_is_a_capacity_error(code, status) -> None:
    body = json.dumps({"error": {"code": code, "message": "no more"}})
    refusal = respond(status, body, {"Retry-After": "7"})
    async with scripted_server(talker, refusal=refusal) as server:
        with pytest.raises(CapacityError, match=f"{code}: .* status {status}: no more") as raised:
            await connect(server.url)
    error = raised.value
    assert isinstance(error, ConnectionFailed) and error.status == status
    assert (error.code, error.retry_after_s, is_retryable(error)) == (code, 7.0, True)


async def test_a_server_that_is_still_loading_is_no_capacity_error() -> None:
    refusal = respond(503, '{"error": {"code": "not_ready", "message": "loading"}}')
    async with scripted_server(talker, refusal=refusal) as server:
        with pytest.raises(ConnectionFailed, match="status 503: loading") as raised:
            await connect(server.url)
    assert not isinstance(raised.value, CapacityError)


async def test_a_refusal_in_the_shape_of_another_api_is_read_as_well() -> None:
    refusal = respond(404, '{"status": 404, "message": "there is no WebSocket at /v1/tts"}')
    async with scripted_server(talker, refusal=refusal) as server:
        with pytest.raises(ConnectionFailed, match="status 404: there is no WebSocket at /v1/tts$"):
            await connect(server.url + "/v1/tts")


async def test_refused_start() -> None:
    async def script(peer: Peer) -> None:
        await peer.expect(SessionStart)
        await peer.send(Error(code="voice_not_found", message="no voice 'eve'", param="voice"))

    async with scripted_server(script) as server:
        with pytest.raises(VoiceError, match="eve"):
            async with connect(server.url, voice="eve"):
                pass


async def test_a_server_that_never_gets_ready() -> None:
    async with scripted_server(Peer.until_closed) as server:
        with pytest.raises(ConnectionFailed, match="ready within"):
            async with connect(server.url, open_timeout_s=0.05):
                pass


@pytest.mark.parametrize(
    ("option", "got"),
    [
        ({"voice": 7}, "voice: Input should be a valid string (got 7)"),
        ({"format": "opus"}, "format: "),
        ({"max_lead_ms": -1}, "max_lead_ms: "),
        ({"voice": "\ud800"}, "voice: "),
        ({"reconnect": True}, "reconnect: got True, expected a Reconnect"),
        ({"open_timeout_s": "x"}, "open_timeout_s: got 'x', expected seconds"),
        ({"open_timeout_s": math.nan}, "open_timeout_s: got nan"),
        ({"ssl_context": "ca.pem"}, "ssl_context: got 'ca.pem', expected an ssl.SSLContext"),
    ],
)
async def test_an_option_that_makes_no_sense_is_named_before_anything_is_sent(option, got) -> None:
    with pytest.raises(SessionError) as raised:
        connect("http://127.0.0.1:9", **option)
    assert raised.value.code == "invalid_option" and raised.value.param in option
    assert raised.value.message.startswith(got)


@pytest.mark.parametrize(
    ("make", "fields", "why"),
    [
        (
            AudioFormat,
            {"codec": "pcm"},
            r"codec: Input should be 'opus' or 'pcm_s16le' \(got 'pcm'",
        ),
        (AudioFormat, {"sample_rate": 7}, "sample_rate 7 does not exist for opus; use one of"),
        (Sampling, {"temperature": -1}, "temperature: .* 0 .got -1"),
    ],
)
def test_a_field_of_an_option_that_makes_no_sense_is_named(make, fields, why) -> None:
    with pytest.raises(SessionError, match=f"^invalid_option: {why}"):
        make(**fields)


@pytest.mark.parametrize(
    "url",
    [
        *("localhost:8765", "http://localhost:port", "http://[::1", "http://:80", "http://a b"),
        *("http://\ud800", "http://h/\ud800", "http://a..b", "http://" + 70 * "a", "http://h\0"),
        *(8765, None, [], b"http://h"),
    ],
)
def test_what_is_no_address_is_refused_before_anything_is_opened(url) -> None:
    for open_session in (connect, clients.sync.connect, list_voices):
        with pytest.raises(ConnectionFailed, match="is no server address; expected one like http"):
            open_session(url)


@pytest.mark.parametrize("key", [7, b"key"])
def test_a_key_that_is_no_string_is_refused_without_being_shown(key) -> None:
    for open_session in (connect, clients.sync.connect, list_voices):
        with pytest.raises(ConnectionFailed, match=f"got {type(key).__name__}, expected a string"):
            open_session("http://127.0.0.1:9", api_key=key)


async def test_without_a_key_the_error_says_how_to_give_one(monkeypatch) -> None:
    monkeypatch.delenv("PLOSIVE_API_KEY", raising=False)
    async with scripted_server(talker, refusal=respond(401, MISSING_KEY)) as server:
        how = (
            r"401: it needs an API key: connect\(url, api_key=KEY\), or PLOSIVE_API_KEY in the env"
        )
        with pytest.raises(ConnectionFailed, match=how):
            await connect(server.url)
        with pytest.raises(ConnectionFailed, match="401: send a header"):
            await connect(server.url, api_key="key")


@pytest.mark.parametrize(
    ("given", "shown"), [(None, "Bearer theirs"), ("mine", "Bearer mine"), ("", None)]
)
async def test_the_key_may_be_of_the_environment(given, shown, monkeypatch) -> None:
    monkeypatch.setenv("PLOSIVE_API_KEY", "theirs")
    async with scripted_server(talker) as server, connect(server.url, api_key=given):
        request = server.peers[0].socket.request
        assert request is not None and request.headers.get("Authorization") == shown


async def test_what_connect_gave_opens_one_session() -> None:
    async with scripted_server(talker) as server:
        opening = connect(server.url)
        session = await opening
        with pytest.raises(SessionError, match=r"call connect\(\) again"):
            await opening
        await session.close()
    assert len(server.peers) == 1


async def test_a_session_can_be_awaited_and_closed() -> None:
    async with scripted_server(talker) as server:
        session = await connect(server.url, format=AudioFormat(codec="pcm_s16le"))
        assert [packet async for packet in session.say("one")]
        await session.close()
        assert session.has_ended
        with pytest.raises(ConnectionLost, match="the session was closed here"):
            session.say("two")


async def test_a_session_that_was_awaited_may_have_a_block_of_its_own() -> None:
    async with scripted_server(talker) as server:
        async with await connect(server.url) as session:
            assert [packet async for packet in session.say("one")]
        assert session.has_ended


async def test_a_session_that_was_not_entered_says_how_it_is() -> None:
    session = connect("http://127.0.0.1:9")
    with pytest.raises(AttributeError, match="has 'say', only inside of async with connect"):
        session.say("one")


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:9", "http://127.0.0.1:99999", "ftp://x"])
async def test_a_proxy_that_cannot_be_used(monkeypatch, proxy) -> None:
    monkeypatch.setenv("http_proxy", proxy)
    monkeypatch.setenv("all_proxy", proxy)
    with pytest.raises(ConnectionFailed, match="cannot connect to ws://192.0.2.1/v1/realtime: "):
        await connect("http://user:password@192.0.2.1")


async def test_nobody_listens() -> None:
    async with scripted_server(talker) as server:
        url = server.url
    with pytest.raises(ConnectionFailed, match="Is the server up"):
        async with connect(url):
            pass


def test_addresses() -> None:
    assert websocket_url("https://tts.example/") == "wss://tts.example/v1/realtime"
    assert websocket_url("ws://h:1/other?x=1") == "ws://h:1/other?x=1"
    assert (
        http_url("wss://tts.example/v1/realtime", "/v1/voices") == "https://tts.example/v1/voices"
    )
