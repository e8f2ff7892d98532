"""Clients that trickle: a body has its time, on every route, and nobody else waits for it."""

import asyncio
from pathlib import Path

import pytest

from tests.realtime.support import TIMEOUT_S, Served, make_engine, serving

HEAD = "POST {} HTTP/1.1\r\nHost: x\r\nContent-Type: {}\r\nContent-Length: 1000\r\n\r\n"
FORM = "multipart/form-data; boundary=x"
JSON = "application/json"


async def read_to_the_end(reader: asyncio.StreamReader) -> bytes:
    """What comes until the connection ends. A byte sent to a closed socket is answered by a reset,
    which `StreamReader.read()` raises in place of what it has read before."""
    answer = b""
    try:
        while block := await reader.read(65_536):
            answer += block
    except ConnectionResetError:
        pass
    return answer


async def trickle(served: Served, path: str, content_type: str) -> bytes:
    """Some bytes now and then, until there is an answer and the end of the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(HEAD.format(path, content_type).encode())
    writer.write(b'--x\r\nContent-Disposition: form-data; name="name"\r\n\r\n')
    reading = asyncio.create_task(read_to_the_end(reader))
    async with asyncio.timeout(TIMEOUT_S):
        while not reading.done():
            writer.write(b"-")
            await asyncio.wait([reading], timeout=0.05)
    writer.close()
    return reading.result()


@pytest.mark.parametrize(
    ("path", "content_type", "beginning"),
    [
        ("/v1/voices", FORM, b'{"error":{"code":"body_timeout"'),
        ("/model", FORM, b'{"status":408,"message":'),
        ("/v1/tts", JSON, b'{"status":408,"message":'),
        ("/v1/audio/speech", JSON, b'{"error":{"message":'),
    ],
)
async def test_a_body_that_trickles_is_refused(
    tmp_path: Path, path: str, content_type: str, beginning: bytes
) -> None:
    async with serving(tmp_path, body_timeout_s=0.4) as served:
        answers = await asyncio.gather(*(trickle(served, path, content_type) for _ in range(4)))
        for answer in answers:
            head, _, body = answer.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 408 ") and body.startswith(beginning), answer
            assert b"connection: close" in head.lower()
        async with served.http() as http:  # nobody's place is held
            assert (await http.post(path, content=b"{}")).status_code < 500


async def test_a_large_body_has_the_time_it_needs(tmp_path: Path) -> None:
    async with serving(tmp_path, make_engine(tmp_path), body_timeout_s=0.4) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        head = HEAD.format("/v1/audio/speech", JSON).replace("1000", "100000")
        writer.write(head.encode())
        for _ in range(10):  # 10,000 bytes have 0.3 s more
            writer.write(b" " * 10_000)
            await asyncio.sleep(0.1)
        answer = await asyncio.wait_for(reader.read(20), TIMEOUT_S)
        assert answer.startswith(b"HTTP/1.1 4") and b"408" not in answer
        writer.close()
