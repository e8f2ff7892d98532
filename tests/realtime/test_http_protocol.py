"""Connections that ask for nothing, or never finish asking, are closed; those in use are not."""

import asyncio
import time
from pathlib import Path

import httpx
import pytest

from realtime import http_protocol
from tests.realtime.support import TIMEOUT_S, Served, make_engine, serving, session

LIMIT_S = 0.3


@pytest.fixture(autouse=True)
def short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "REQUEST_S", LIMIT_S)


async def until_closed(served: Served, first: bytes, then: bytes) -> bytes:
    """Send `first`, then `then` again and again; what came until the server closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(first)
    got = asyncio.create_task(reader.read())
    async with asyncio.timeout(TIMEOUT_S):
        while not got.done():
            writer.write(then)
            await asyncio.wait([got], timeout=0.05)
    writer.close()
    return b"" if got.exception() else got.result()


@pytest.mark.parametrize(
    ("first", "then", "answer"),
    [
        (b"", b"", b""),
        (b"GET / HTTP/1.1\r\n", b"a: b\r\n", b""),
        (b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\nGET / HTTP", b"", b"HTTP/1.1 200"),
        (
            b"POST /v1/tts HTTP/1.1\r\nHost: x\r\nContent-Length: 99999\r\n\r\n",
            b"-",
            b"HTTP/1.1 415",
        ),
    ],
)
async def test_who_never_finishes_a_request_is_closed(
    tmp_path: Path, first: bytes, then: bytes, answer: bytes
) -> None:
    async with serving(tmp_path, body_timeout_s=0.2 if b"tts" in first else 20.0) as served:
        got = await until_closed(served, first, then)
        assert got.startswith(answer) or b"408" in got


async def test_what_is_in_use_stays_open(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    engine.hold()
    async with serving(tmp_path, engine) as served, session(served) as client:
        async with served.http() as http:
            asking = asyncio.create_task(
                http.post("/v1/tts", json={"text": "Hello there.", "format": "pcm"})
            )
            started_s = time.monotonic()
            while time.monotonic() - started_s < 4 * LIMIT_S:
                assert (await http.get("/ready")).status_code == 200
                await asyncio.sleep(LIMIT_S / 4)
            engine.let_all()
            assert (await asking).status_code == 200
        await client.say("Hello there.")


async def test_https_to_an_http_port_is_told_as_such(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with serving(tmp_path) as served:
        async with httpx.AsyncClient(trust_env=False) as https:
            with pytest.raises(httpx.ConnectError):
                await https.get(f"https://127.0.0.1:{served.port}/ready")
        async with served.http() as http:  # in a body these bytes are nothing special
            response = await http.post("/v1/tts", content=b"\x16\x03" * 9)
            assert response.status_code == 415
    logged = capfd.readouterr().err
    told = "A TLS handshake came: this server speaks http; start it with --ssl-certfile, or use"
    assert logged.count(told) == 1 and "Invalid HTTP" not in logged


FORM, JSON = "multipart/form-data; boundary=x", "application/json"
UPLOADS = {"/v1/tts": JSON, "/v1/audio/speech": JSON, "/v1/voices": FORM, "/model": FORM}


async def test_a_client_that_leaves_while_it_sends_is_no_failure(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with serving(tmp_path) as served:
        for path, content_type in UPLOADS.items():
            _, writer = await asyncio.open_connection("127.0.0.1", served.port)
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {content_type}\r\n"
            writer.write(f"{head}Content-Length: 999\r\n\r\n--x\r\n".encode())
            await writer.drain()
            await asyncio.sleep(0.1)
            writer.transport.abort()
        async with served.http() as http:
            assert (await http.get("/ready")).status_code == 200
    assert "Traceback" not in capfd.readouterr().err
