"""`/v1/tts/live`: interruptions, errors, floods, and leaving at any stage."""

import asyncio
import gc
import json
from pathlib import Path
from typing import Any

import ormsgpack
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from realtime.adapters.fish import TIMESTAMPS_PATH
from realtime.adapters.fish_live import Speech
from realtime.hub import State
from realtime.pingpong.messages import CancelTurn, EndTurn, OpenSlot, SetText
from tests.adapters.fish_support import LIVE, TEXT, assert_same, live, pcm_of, spoken
from tests.realtime.support import make_engine, serving


async def test_a_start_without_a_stop_takes_over(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    engine.hold()
    async with serving(tmp_path, engine) as served, live(served) as fish:
        await fish.start()
        await fish.send("text", text=TEXT * 5)
        await fish.send("flush")
        engine.let(4)
        await fish.until("audio")
        await fish.start(format="wav", text="Something else entirely.")
        await fish.send("stop")
        await asyncio.to_thread(engine.wait_until, lambda: bool(engine.seen(CancelTurn)))
        engine.let_all()
        audio = await fish.until_finish()
        audio = audio[audio.index(b"RIFF") + 44 :]
        assert_same(pcm_of(audio), engine.pcm(0, 2), 24_000, 24_000)


@pytest.mark.parametrize("stage", ["connected", "started", "text", "speaking", "stopped"])
async def test_a_client_that_leaves_frees_the_slot(tmp_path: Path, stage: str) -> None:
    engine = make_engine(tmp_path, num_slots=1)
    engine.hold()
    async with serving(tmp_path, engine) as served:
        async with live(served) as fish:
            if stage != "connected":
                await fish.start()
            if stage in ("text", "speaking", "stopped"):
                await fish.send("text", text=TEXT)
            if stage == "speaking":
                engine.let(3)
                await fish.send("flush")
                await fish.until("audio")
            if stage == "stopped":
                await fish.send("stop")
        await served.until_free()
        engine.let_all()
        async with live(served) as fish:  # the slot is usable again, nothing old is heard
            await fish.start(text=TEXT)
            await fish.send("stop")
            audio = await fish.until_finish()
            assert len(audio) == len(engine.emitted[0, 1]) * 1920 or stage == "speaking"


async def test_the_lead_is_bounded_when_nobody_cancels(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    async with serving(tmp_path, engine, max_lead_ms=500) as served, live(served) as fish:
        for speed in (1.0, 2.0, 0.5):  # what is played faster needs more
            await fish.start(text=TEXT, prosody={"speed": speed})
            await fish.send("stop")
            await fish.until_finish()
        opened = [command for command in engine.seen(OpenSlot) if isinstance(command, OpenSlot)]
        assert [command.max_lead_ms for command in opened] == [500, 60_000, 500]


async def test_a_client_that_does_not_read_is_closed(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    async with serving(tmp_path, engine, write_stall_s=0.3) as served:
        url = f"ws://127.0.0.1:{served.port}{LIVE}"
        async with connect(url, proxy=None, close_timeout=0.2, max_queue=1) as socket:
            start = {"event": "start", "request": {"text": "", "format": "wav"}}
            await socket.send(ormsgpack.packb(start))
            await socket.send(ormsgpack.packb({"event": "text", "text": TEXT * 400}))
            await socket.send(ormsgpack.packb({"event": "stop"}))
            await served.until_free()
            await served.until_idle()  # the socket too, though its client still reads nothing
            with pytest.raises(ConnectionClosed) as closed:
                while True:
                    await socket.recv()
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 4001


@pytest.mark.parametrize("path", [LIVE, TIMESTAMPS_PATH])
async def test_an_idle_socket_closes_without_an_error(tmp_path: Path, path: str) -> None:
    limits = {"idle_timeout_s": 0.4, "idle_warning_s": 0.1}
    async with serving(tmp_path, **limits) as served, live(served, path) as fish:
        for _ in range(2):
            await fish.start(text=TEXT)
            await fish.send("stop")
            await fish.until_finish()
            await asyncio.sleep(0.2)
        with pytest.raises(ConnectionClosed) as closed:
            await fish.next()
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1000
        assert closed.value.rcvd.reason == "the session has ended: idle_timeout"
        await served.until_free()


async def test_a_reply_that_is_never_finished_ends_in_one_error(tmp_path: Path) -> None:
    limits = {"idle_timeout_s": 0.4, "idle_warning_s": 0.1}
    async with serving(tmp_path, **limits) as served, live(served) as fish:
        await fish.start(text="This has no end")
        finish = await fish.until("finish")
        assert (finish["reason"], finish["message"]) == ("error", "nothing happened for 0.4 s")
        with pytest.raises(ConnectionClosed) as closed:
            await fish.next()
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 4000


async def test_what_is_over_is_not_kept(tmp_path: Path) -> None:
    """However many replies a socket speaks: finished, taken over by the next, or failed."""
    async with serving(tmp_path) as served, live(served) as fish:
        for text in (TEXT, "", TEXT):
            await fish.start(text=text)
            await fish.send("stop")
            await fish.until_finish()
            await fish.start(text=TEXT)  # the next start takes its place
        await fish.start(format="nonsense")
        await fish.until_finish("error")
        gc.collect()
        assert not [thing for thing in gc.get_objects() if type(thing) is Speech]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"reference_id": "nobody"}, "there is no voice"),
        ({"reference_id": "../x"}, "there is no voice"),
        ({"format": "flac"}, "format"),
        ({"sample_rate": 12_345}, "sample_rate"),
        ({"references": [{"audio": b"no audio", "text": "x"}]}, "not audio"),
        ({"top_p": "high"}, "top_p"),
    ],
)
async def test_a_bad_start(tmp_path: Path, request_: dict[str, Any], message: str) -> None:
    async with serving(tmp_path) as served, live(served) as fish:
        await fish.start(**request_)
        await fish.send("text", text="this is not spoken")
        await fish.send("stop")
        finish = await fish.next()
        assert finish == {"event": "finish", "reason": "error", "message": finish["message"]}
        assert message in finish["message"]
        await fish.start(text=TEXT)  # the socket can be used again
        await fish.send("stop")
        await fish.until_finish()
        assert "not spoken" not in spoken(served.engine)


async def test_an_error_with_timestamps_is_an_event_of_its_own_as_well(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, live(served, TIMESTAMPS_PATH) as fish:
        await fish.start(reference_id="nobody")
        error, finish = await fish.next(), await fish.next()
        assert error == {"event": "error", "error": finish["message"]}
        assert (finish["event"], finish["reason"]) == ("finish", "error")
        assert "there is no voice" in finish["message"]


async def test_garbage(tmp_path: Path) -> None:
    frames: list[bytes | str] = [
        b"",
        b"\xc1",
        ormsgpack.packb({"event": "start"})[:-2],
        ormsgpack.packb([1, 2]),
        "a text frame",
    ]
    async with serving(tmp_path) as served, live(served) as fish:
        for frame in frames:
            await fish.socket.send(frame)
            finish = await fish.next()
            assert finish["reason"] == "error"
        assert finish["message"] == "got a text frame, expected MessagePack in a binary one"
        await fish.start()
        await fish.send("text", text=5)
        assert "text" in (await fish.next())["message"]
        await fish.start(text=TEXT)
        await fish.send("stop")
        await fish.until_finish()


async def test_a_flood_of_text_ends_in_an_error(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    engine.hold()
    async with (
        serving(tmp_path, engine, max_text_chars_per_s=0) as served,
        live(served) as fish,
    ):
        await fish.start()
        for _ in range(20):
            await fish.send("text", text="word " * 9_000)
        assert (await fish.next())["reason"] == "error"
        engine.let_all()
        await fish.start(text=TEXT)
        await fish.send("stop")
        await fish.until_finish()


async def test_more_text_a_second_than_is_permitted_ends_in_an_error(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    async with serving(tmp_path, engine) as served, live(served) as fish:
        await fish.start()
        for _ in range(10):
            await fish.send("text", text="word " * 3_000)
        while (finish := await fish.next())["event"] != "finish":
            pass
        assert finish["reason"] == "error" and "1,000 characters of text a second" in str(finish)
        await fish.start()
        await fish.send("stop")
        await fish.until_finish()


async def test_an_engine_that_dies_ends_the_socket(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    async with serving(tmp_path, engine) as served, live(served) as fish:
        await fish.start()
        await asyncio.to_thread(engine.wait_until, lambda: bool(engine.seen(OpenSlot)))
        engine.die()
        assert (await fish.next())["reason"] == "error"
        with pytest.raises(ConnectionClosed) as closed:
            await fish.next()
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1011


async def test_a_draining_server_finishes_what_is_stopped(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    engine.hold()
    async with serving(tmp_path, engine, drain_s=10.0) as served, live(served) as fish:
        await fish.start(text=TEXT)
        await fish.send("stop")
        await asyncio.to_thread(engine.wait_until, lambda: bool(engine.seen(EndTurn)))
        served.server.stop()
        engine.let_all()
        audio = await fish.until_finish()
        assert_same(pcm_of(audio), engine.pcm(0, 1), 24_000, 24_000)
        with pytest.raises(ConnectionClosed) as closed:
            await fish.next()
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1001


async def test_a_flush_while_the_server_drains_begins_nothing_new(tmp_path: Path) -> None:
    """Frameworks flush once more at the end of a reply."""
    engine = make_engine(tmp_path)
    engine.hold()
    async with serving(tmp_path, engine, drain_s=10.0) as served, live(served) as fish:
        await fish.start(text=TEXT)
        await asyncio.to_thread(engine.wait_until, lambda: bool(engine.seen(SetText)))
        served.server.stop()
        for _ in range(200):  # steps of the loop, until the socket's task knows it
            await asyncio.sleep(0)
        assert served.hub.state is State.DRAINING
        await fish.send("flush")
        await fish.send("flush")
        await fish.send("stop")
        engine.let_all()
        assert_same(pcm_of(await fish.until_finish()), engine.pcm(0, 1), 24_000, 24_000)


async def test_refused_before_the_upgrade(tmp_path: Path) -> None:
    async with serving(tmp_path, make_engine(tmp_path, num_slots=1)) as served:
        async with live(served):
            with pytest.raises(InvalidStatus) as refused:
                async with live(served):
                    pass
            response = refused.value.response
            assert response.status_code == 503
            assert int(response.headers["Retry-After"]) >= 1
            assert set(json.loads(response.body)) == {"status", "message"}
        await served.until_free()


async def test_no_compression(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, live(served) as fish:
        assert "Sec-WebSocket-Extensions" not in fish.socket.response.headers
