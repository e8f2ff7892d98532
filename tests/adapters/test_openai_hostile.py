"""OpenAI's API under clients that crowd, leave, stall or send nonsense. No slot may be lost."""

import asyncio
import json
from collections import Counter
from pathlib import Path

import httpx
import numpy as np

from realtime.adapters.openai import SPEECH_PATH
from tests.realtime.support import TIMEOUT_S, Served, make_engine, serving

ASKED = {"model": "tts-1", "input": "Hello there.", "voice": "tone", "response_format": "pcm"}


def raw_request(asked: dict[str, str]) -> bytes:
    body = json.dumps(asked).encode()
    head = (
        f"POST {SPEECH_PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def is_serving(served: Served) -> bool:
    await served.until_free()
    async with served.http() as http:
        response = await http.post(SPEECH_PATH, json=ASKED)
        return response.status_code == 200 and len(response.content) > 0


async def test_300_at_once_are_served_or_refused(tmp_path: Path) -> None:
    limits = httpx.Limits(max_connections=300)
    async with (
        serving(tmp_path, make_engine(tmp_path, num_slots=4)) as served,
        httpx.AsyncClient(trust_env=False, limits=limits, timeout=TIMEOUT_S) as http,
    ):
        url = f"http://127.0.0.1:{served.port}{SPEECH_PATH}"
        responses = await asyncio.gather(*(http.post(url, json=ASKED) for _ in range(300)))
        counts = Counter(response.status_code for response in responses)
        assert set(counts) <= {200, 503} and counts[200] >= 4
        assert all("retry-after" in r.headers for r in responses if r.status_code == 503)
        sizes = {len(response.content) for response in responses if response.status_code == 200}
        assert len(sizes) == 1  # each one whole
        assert await is_serving(served)


async def test_a_client_that_leaves_at_any_byte_of_its_request(tmp_path: Path) -> None:
    request = raw_request(ASKED)
    async with serving(tmp_path, make_engine(tmp_path, num_slots=4)) as served:
        for cut in range(len(request) + 1):
            _, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(request[:cut])
            await writer.drain()
            writer.transport.abort()
        assert await is_serving(served)


async def test_a_client_that_leaves_anywhere_in_its_answer(tmp_path: Path) -> None:
    num_all = 2_000
    cuts = np.linspace(1, num_all, 25).astype(int)
    async with serving(tmp_path, make_engine(tmp_path, num_slots=4)) as served:
        for cut in cuts:
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(raw_request(ASKED | {"input": "Hello there. " * 50}))
            async with asyncio.timeout(TIMEOUT_S):
                await reader.readexactly(int(cut))
            writer.transport.abort()
            await served.until_free()
        assert await is_serving(served)


async def test_a_client_that_never_reads_loses_its_slot(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, num_slots=1)
    async with serving(tmp_path, engine, write_stall_s=0.3) as served:
        _, writer = await asyncio.open_connection("127.0.0.1", served.port, limit=1024)
        writer.transport.pause_reading()
        writer.write(raw_request(ASKED | {"input": "Hello there. " * 4_000}))
        await asyncio.to_thread(engine.wait_until, lambda: len(engine.emitted[0, 1]) > 10)
        await served.until_idle()  # the request is over as well, though nothing of it was read
        assert await is_serving(served)
        writer.transport.abort()
        num_frames = len(engine.emitted[0, 1])
        assert num_frames < 20_000  # it was paused, not rendered to its end


async def test_nonsense_is_an_error_and_not_a_failure(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    request = raw_request(ASKED)
    body_at = request.index(b"{")
    async with serving(tmp_path) as served, served.http() as http:
        for _ in range(30):
            body = bytearray(request[body_at:])
            for at in rng.integers(0, len(body), 3):
                body[at] = rng.integers(0, 256)
            headers = {"Content-Type": "application/json"}
            response = await http.post(SPEECH_PATH, content=bytes(body), headers=headers)
            assert response.status_code in (200, 400, 404), body
            if response.status_code != 200:
                assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        assert await is_serving(served)
