"""Fish clients by the hundred, clients cut off at any byte, and messages of any size."""

import asyncio
import json
import os
from pathlib import Path

import ormsgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from realtime.adapters.fish_request import parse_body
from realtime.errors import PlosiveError
from tests.adapters.fish_support import LIVE, TEXT, live
from tests.realtime.support import (
    TIMEOUT_S,
    Served,
    break_off,
    check_crowd,
    make_engine,
    serving,
    upgrade,
)
from tests.realtime.test_voices import clip


async def speak(served: Served) -> int:
    """Bytes heard, or 0 for a refusal."""
    try:
        async with live(served) as fish:
            await fish.start(text=TEXT)
            await fish.send("stop")
            return len(await fish.until_finish())
    except InvalidStatus as refused:
        assert refused.response.status_code == 503
        return 0


async def test_300_connections_and_4_slots(tmp_path: Path) -> None:
    await check_crowd(tmp_path, speak)


def masked(event: dict[str, object]) -> bytes:
    data = ormsgpack.packb(event)
    assert len(data) < 126
    return bytes([0x82, 0x80 | len(data), 0, 0, 0, 0]) + data


EVENTS = b"".join(
    masked(event)
    for event in (
        {"event": "start", "request": {"text": "", "format": "wav"}},
        {"event": "text", "text": "Some words to say."},
        {"event": "flush"},
        {"event": "stop"},
    )
)
BODY = json.dumps({"text": "Some words to say.", "format": "opus"}).encode()
POST = (
    b"POST /v1/tts HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n" % len(BODY)
) + BODY


@pytest.mark.parametrize(
    ("head", "rest"), [(upgrade(LIVE), EVENTS), (b"", POST)], ids=["live", "http"]
)
async def test_cut_off_at_any_byte(tmp_path: Path, head: bytes, rest: bytes) -> None:
    async with serving(tmp_path, make_engine(tmp_path, num_slots=4)) as served:
        await break_off(served, rest, head)
        await served.until_free()
        assert await speak(served)


async def test_a_flood_of_short_speeches_and_a_client_that_leaves(tmp_path: Path) -> None:
    """More than can be told: the session waits for the client, the client's events for the session."""
    async with serving(tmp_path) as served:
        url = f"ws://127.0.0.1:{served.port}{LIVE}"
        async with connect(url, proxy=None, close_timeout=TIMEOUT_S / 2) as socket:

            async def read() -> None:
                async for _ in socket:
                    pass

            reading = asyncio.create_task(read())
            start = ormsgpack.packb({"event": "start", "request": {"text": "", "format": "mp3"}})
            for _ in range(500):
                await socket.send(start)
                await socket.send(ormsgpack.packb({"event": "stop"}))
            await asyncio.sleep(0.5)
        await reading  # raises where the server has not closed as well
        await served.until_free()


async def test_a_long_clip_comes_in_one_message(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    async with serving(tmp_path, engine, max_clip_s=600.0) as served:
        async with live(served) as fish:
            long_clip = clip(duration_s=300.0)
            assert len(long_clip) > 4_000_000
            await fish.start(text=TEXT, references=[{"audio": long_clip, "text": "words"}])
            await fish.send("stop")
            assert await fish.until_finish()
        await served.until_free()


async def test_a_message_that_is_too_long_closes_with_1009(tmp_path: Path) -> None:
    async with serving(tmp_path, max_clip_bytes=1_000_000) as served:
        async with live(served) as fish:
            with pytest.raises(ConnectionClosed) as closed:
                await fish.start(text=TEXT, references=[{"audio": bytes(3_000_000), "text": "x"}])
                await fish.next()
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1009
        await served.until_free()


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
FIELDS = (
    "text", "reference_id", "references", "format", "sample_rate", "mp3_bitrate", "opus_bitrate",
    "prosody", "temperature", "top_p", "seed", "latency", "chunk_length", "normalize", "features",
)  # fmt: skip


@settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=300)
@given(st.dictionaries(st.sampled_from(FIELDS), VALUES))
def test_any_value_of_any_field_is_read_or_refused(body: dict[str, object]) -> None:
    try:
        request = parse_body("application/msgpack", ormsgpack.packb(body))
    except PlosiveError as error:
        assert error.message and error.code in ("invalid_field", "not_supported", "invalid_body")
    else:
        request.make_encoder(24_000)


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    for kind in ("application/msgpack", "application/json"):
        try:
            parse_body(kind, data)
        except PlosiveError as error:
            assert error.message


async def test_random_frames(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, live(served) as fish:
        for num_bytes in range(1, 60):
            await fish.socket.send(os.urandom(num_bytes))
        await fish.start(text=TEXT)
        await fish.send("stop")
        while (await fish.until("finish"))["reason"] == "error":
            pass
