"""Addresses, the start of a session, and the ways in which there is none."""

import json

import pytest

from clients import ConnectionFailed, ProtocolError, VoiceError, connect
from clients.address import http_url, websocket_url
from realtime.wire import Error, Sampling, SessionStart
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
            sampling=Sampling(seed=7),
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
        await peer.until_closed()

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


async def test_refused_start() -> None:
    async def script(peer: Peer) -> None:
        await peer.expect(SessionStart)
        await peer.send(Error(code="voice_not_found", message="no voice 'eve'", param="voice"))
        await peer.until_closed()

    async with scripted_server(script) as server:
        with pytest.raises(VoiceError, match="eve"):
            async with connect(server.url, voice="eve"):
                pass


async def test_a_server_that_never_gets_ready() -> None:
    async with scripted_server(Peer.until_closed) as server:
        with pytest.raises(ConnectionFailed, match="ready within"):
            async with connect(server.url, open_timeout_s=0.05):
                pass


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
    with pytest.raises(ConnectionFailed, match="no server address"):
        websocket_url("localhost:8765")
