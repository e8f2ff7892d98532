"""The server over real sockets: round trips, refusals, and what the operator sees."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
import soxr
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from realtime import wire
from realtime.errors import VoiceError
from realtime.hub import State
from tests.fakes import FakeEngine
from tests.realtime.support import Client, decode, make_engine, serving, session

TEXT = "The quick brown fox jumps over the lazy dog. Then it sleeps until noon."


@pytest.mark.parametrize(
    ("codec_rate", "frame_samples", "rate"),
    [
        (24_000, 960, 24_000),
        (24_000, 960, 48_000),
        (24_000, 960, 8_000),
        (44_100, 2048, 24_000),
        (44_100, 2048, 48_000),
        (44_100, 2048, 44_100),
    ],
)
async def test_pcm_round_trip_is_exact(
    tmp_path: Path, codec_rate: int, frame_samples: int, rate: int
) -> None:
    engine = make_engine(tmp_path, sample_rate=codec_rate, frame_samples=frame_samples)
    async with (
        serving(tmp_path, engine) as served,
        session(served, format=wire.AudioFormat(codec="pcm_s16le", sample_rate=rate)) as client,
    ):
        for turn_id in (1, 2):  # the second turn starts from a clean encoder
            client.heard.packets.clear()
            done = await client.say(TEXT, turn_id)
            sent = engine.pcm(0, turn_id)
            expected = soxr.resample(sent, codec_rate, rate) if codec_rate != rate else sent
            num_samples = (2 * len(sent) * rate + codec_rate) // (2 * codec_rate)
            fmt = wire.EffectiveFormat(codec="pcm_s16le", sample_rate=rate)
            got = decode(client.heard.packets, fmt)
            assert done.metrics.num_samples == len(got) == num_samples
            assert done.metrics.num_packets == len(client.heard.packets)
            assert np.abs(got[: len(expected)] - expected[: len(got)]).max() < 2 / 32767
            check_packets(client.heard.packets, turn_id, rate // 50)


@pytest.mark.parametrize(
    ("codec_rate", "frame_samples", "rate"),
    [(24_000, 960, 24_000), (44_100, 2048, 24_000), (44_100, 2048, 48_000)],
)
async def test_opus_round_trip(
    tmp_path: Path, codec_rate: int, frame_samples: int, rate: int
) -> None:
    engine = make_engine(tmp_path, sample_rate=codec_rate, frame_samples=frame_samples)
    async with serving(tmp_path, engine) as served, served.connect() as socket:
        client = Client(socket)
        ready = await client.start(format=wire.AudioFormat(sample_rate=rate, bitrate=64_000))
        assert ready.format.sample_rate == rate
        assert ready.format.pre_skip_samples == rate * 6.5 // 1000
        done = await client.say(TEXT)
        got = decode(client.heard.packets, ready.format)
        sent = engine.pcm(0, 1)
        expected = soxr.resample(sent, codec_rate, rate) if codec_rate != rate else sent
        assert abs(done.metrics.num_samples - len(expected)) <= 1
        assert len(got) >= done.metrics.num_samples  # the tail came through the look-ahead
        got, expected = got[: len(expected)], expected[: len(got)]
        error_db = 10 * np.log10(np.mean((got - expected) ** 2) / np.mean(expected**2))
        assert error_db < -10, error_db
        assert np.corrcoef(got[-960:], expected[-960:])[0, 1] > 0.9
        check_packets(client.heard.packets, 1, rate // 50)
        assert client.heard.of(wire.TurnText)[-1].text == TEXT


def check_packets(packets: list[wire.AudioPacket], turn_id: int, packet_samples: int) -> None:
    assert [packet.seq for packet in packets] == list(range(len(packets)))
    assert {packet.turn_id for packet in packets} == {turn_id}
    assert [packet.is_last for packet in packets] == [False] * (len(packets) - 1) + [True]
    assert [packet.pts_samples for packet in packets] == [
        i * packet_samples for i in range(len(packets))
    ]


async def test_first_packets_leave_after_the_first_frame(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, sample_rate=44_100, frame_samples=2048)
    engine.hold()
    async with serving(tmp_path, engine) as served, session(served) as client:
        await client.begin(TEXT)
        engine.let(1)
        first = await client.until(wire.AudioPacket)
        second = await client.until(wire.AudioPacket)  # 42 ms of the frame's 46 ms are final
        assert (first.seq, second.seq) == (0, 1)
        assert len(engine.emitted[0, 1]) == 1
        engine.let_all()
        await client.until(wire.TurnDone)


async def test_subprotocol_and_compression(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        async with served.connect(compression="deflate") as socket:
            assert socket.subprotocol == wire.SUBPROTOCOL
            assert "Sec-WebSocket-Extensions" not in socket.response.headers
        await served.until_free()
        async with served.connect(subprotocols=None) as socket:
            assert socket.subprotocol is None
            await Client(socket).start()


async def test_several_turns_and_cancel(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    async with serving(tmp_path, engine) as served, session(served) as client:
        engine.hold()
        await client.begin(TEXT, 1)
        engine.let(5)
        await client.until(wire.AudioPacket)
        await client.send(wire.TurnCancel(turn_id=1, played_ms=20.0))
        cancelled = await client.until(wire.TurnCancelled)
        assert cancelled.spoken_text + cancelled.remaining_text == TEXT
        client.heard.packets.clear()
        engine.let_all()
        await client.say("And now for something else entirely.", 2)
        assert {packet.turn_id for packet in client.heard.packets} == {2}
        check_packets(client.heard.packets, 2, 480)


async def test_a_cancelled_turn_tells_its_stages(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, session(served) as client:
        await client.send(wire.TextAppend(turn_id=1, text=TEXT))
        await client.until(wire.AudioPacket)
        await client.send(wire.TurnCancel(turn_id=1))
        cancelled = await client.until(wire.TurnCancelled)
        timeline_ms = cancelled.metrics.timeline_ms
        assert sorted(timeline_ms, key=timeline_ms.__getitem__) == [
            "first_text",
            "prefill_done",
            "first_step",
            "first_pcm",
            "encoded",
            "first_packet",
            "written",
        ]


async def test_a_sentence_is_spoken_when_no_text_follows_it(tmp_path: Path) -> None:
    async with serving(tmp_path, auto_flush_ms=1) as served, session(served) as client:
        await client.send(wire.TextAppend(turn_id=1, text="Hello there."))
        await client.until(wire.AudioPacket)
        await client.send(wire.TurnCommit(turn_id=1))
        await client.until(wire.TurnDone)


async def test_text_beyond_the_permitted_rate_is_refused(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, max_text_chars_per_s=100_000) as served,
        session(served) as client,
    ):
        for turn_id in range(1, 7):
            text = wire.TextAppend(turn_id=turn_id, text="no " * 6_600)
            await client.send(text, wire.TurnCancel(turn_id=turn_id))
        error = await client.until(wire.Error)
        assert (error.code, error.keeps_turn, error.fatal) == ("text_rate_exceeded", True, False)
        await asyncio.sleep(error.retry_after_ms / 1000.0)
        await client.say("Hello there.", 7)


async def test_session_close_finishes_and_closes(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        async with session(served) as client:
            await client.begin(TEXT)
            await client.send(wire.SessionClose())
            await client.until(wire.TurnDone)
            with pytest.raises(ConnectionClosed) as closed:
                await client.next()
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1000
        await served.until_free()


# ---------------------------------------------------------------------------- refusals


async def test_more_sessions_than_slots(tmp_path: Path) -> None:
    async with serving(tmp_path, make_engine(tmp_path, num_slots=1)) as served:
        async with session(served):
            with pytest.raises(InvalidStatus) as refused:
                await served.connect()
            response = refused.value.response
            assert response.status_code == 503
            assert int(response.headers["Retry-After"]) >= 1
            assert response.headers["Content-Type"] == "application/json"
            assert b'"at_capacity"' in response.body
        await served.until_free()
        async with session(served) as client:  # the slot is usable again
            await client.say("Hello again, this works.")


async def test_an_engine_that_dies_while_idle_is_seen(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, served.http() as http:
        for ask in (http.get, http.head):  # as some load balancers do
            assert [(await ask(path)).status_code for path in ("/ready", "/health")] == [200, 200]
        served.engine.failure = "decode: RuntimeError: device lost"
        for ask in (http.get, http.head):
            assert [(await ask(path)).status_code for path in ("/ready", "/health")] == [503, 503]


async def test_not_ready(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    engine.warm_up_gate.clear()
    async with serving(tmp_path, engine, until_ready=False) as served, served.http() as http:
        response = await http.get("/ready")
        assert response.status_code == 503
        assert response.json() == {"ready": False, "reason": "the model is being warmed up"}
        assert (await http.get("/health")).status_code == 200
        with pytest.raises(InvalidStatus) as refused:
            await served.connect()
        assert refused.value.response.status_code == 503
        assert b'"not_ready"' in refused.value.response.body
        engine.warm_up_gate.set()
        await served.hub.wait_until_ready()
        assert (await http.get("/ready")).json() == {"ready": True, "reason": "ready"}
        assert [voice.name for voice in engine.warmed] == ["tone"]


async def test_failed_warm_up(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    engine.warm_up_error = RuntimeError("no memory")
    async with serving(tmp_path, engine, until_ready=False) as served, served.http() as http:
        with pytest.raises(RuntimeError, match="no memory"):
            await served.hub.wait_until_ready()
        assert (await http.get("/ready")).status_code == 503
        assert (await http.get("/health")).status_code == 503


async def test_a_warm_up_that_fails_with_a_sentence_says_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(tmp_path)
    engine.warm_up_error = VoiceError("invalid_voice", "the default voice is too long")
    async with serving(tmp_path, engine, until_ready=False) as served:
        with pytest.raises(VoiceError, match="too long"):
            await served.hub.wait_until_ready()
        assert served.hub.state is State.FAILED
    assert "Traceback" not in caplog.text


async def test_a_model_without_its_default_voice_is_served(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with serving(tmp_path, engine) as served, served.connect() as socket:
        client = Client(socket)
        await client.send(wire.SessionStart())
        assert (await client.until(wire.Error)).code == "voice_not_found"
        assert engine.warmed == ()


async def test_http_errors_are_json(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, served.http() as http:
        for response, status, code in (
            (await http.get("/nothing"), 404, "not_found"),
            (await http.put("/health"), 405, "method_not_allowed"),
            (await http.delete("/v1/voices/nobody"), 404, "voice_not_found"),
        ):
            assert response.status_code == status
            assert response.json()["error"]["code"] == code
        told = (await http.get(wire.PATH)).json()["error"]["message"]
        assert told == "there is no GET /v1/realtime; sessions are a WebSocket at /v1/realtime"


# ---------------------------------------------------------------------------- bad messages


BAD_FRAMES: list[tuple[str | bytes, str]] = [
    ("{nonsense", "invalid_json"),
    ('{"type": "text.append", "turn_id": NaN}', "invalid_json"),
    ("[]", "invalid_message"),
    ('{"type": "dance"}', "unknown_type"),
    ('{"type": "session.start"}', "already_started"),
    ('{"type": "text.append", "turn_id": "x", "text": ""}', "invalid_message"),
    ('{"type": "text.append", "turn_id": 99, "text": "' + "x" * 200_000 + '"}', "text_too_long"),
    (
        '{"type": "text.append", "turn_id": 99, "text": "' + "x" * 300_000 + '"}',
        "message_too_large",
    ),
    ('{"type": "session.update", "voice": "nobody"}', "voice_not_found"),
    ('{"type": "session.update", "sampling": {"temperature": 99}}', "invalid_message"),
    (b"\x00" * 100, "binary_not_expected"),
]


@pytest.mark.parametrize("path", ["/", "/v1/realtimes", "/v1/voices", "/v1/tts", "/v1/models/x"])
async def test_a_socket_where_there_is_none_is_not_found(tmp_path: Path, path: str) -> None:
    async with serving(tmp_path) as served:
        with pytest.raises(InvalidStatus) as refused:
            async with connect(f"ws://127.0.0.1:{served.port}{path}", proxy=None):
                pass
        response = refused.value.response
        assert response.status_code == 404
        assert "/v1/realtime" in response.body.decode()
        assert served.engine.slots.num_free == served.engine.info.num_slots


async def test_bad_frames_lose_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, session(served) as client:
        for turn_id, (frame, code) in enumerate(BAD_FRAMES):
            await client.socket.send(frame)
            error = await client.until(wire.Error)
            assert (error.code, error.fatal) == (code, False)
            await client.say(TEXT, turn_id)


async def test_before_session_start(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, served.connect() as socket:
        client = Client(socket)
        await client.send(wire.TextAppend(turn_id=1, text="hello"))
        assert (await client.until(wire.Error)).code == "not_started"
        await client.send(wire.SessionStart(voice="nobody"))
        assert (await client.until(wire.Error)).code == "voice_not_found"
        await client.start()


async def test_strange_text(tmp_path: Path) -> None:
    texts = ["", "\x00\x00", "\ud800 alone", "\u202eright to left\u200f", "\N{GRINNING FACE}"]
    async with serving(tmp_path) as served, session(served) as client:
        for turn_id, text in enumerate(texts):
            append = {"type": "text.append", "turn_id": turn_id, "text": text}
            await client.socket.send(json.dumps(append))  # ASCII: the surrogate goes as an escape
            await client.send(wire.TurnCommit(turn_id=turn_id))
            await client.until(wire.TurnDone)
        await client.say(TEXT, len(texts))


async def test_a_huge_frame_closes_with_1009(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        async with session(served) as client:
            with pytest.raises(ConnectionClosed) as closed:
                await client.socket.send("x" * 2_000_000)
                await client.until(wire.TurnDone)
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1009
        await served.until_free()


# ---------------------------------------------------------------------------- operations


async def test_metrics(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, served.http() as http, session(served) as client:
        done = await client.say(TEXT)
        await client.socket.send("{")
        await client.until(wire.Error)
        text = (await http.get("/metrics")).text
        values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
        assert float(values["plosive_sessions"]) == 1
        assert float(values["plosive_slots"]) == 2
        assert float(values["plosive_slots_free"]) == 1
        assert float(values["plosive_encoders"]) == float(values["plosive_ready"]) == 1
        assert float(values["plosive_frames_total"]) == done.metrics.num_frames
        assert float(values["plosive_packets_total"]) == done.metrics.num_packets
        assert float(values["plosive_audio_bytes_total"]) == sum(
            len(packet.payload) for packet in client.heard.packets
        )
        assert float(values["plosive_ttfa_seconds_count"]) == 1
        assert float(values['plosive_turns_total{end="done"}']) == 1
        assert float(values['plosive_errors_total{code="invalid_json"}']) == 1
        assert float(values["plosive_engine_decode_rows_total"]) == done.metrics.num_frames
        assert done.metrics.server_ttfa_ms is not None


async def test_no_task_is_left(tmp_path: Path) -> None:
    before = asyncio.all_tasks()
    async with serving(tmp_path) as served:
        for turn_id in range(2):
            async with session(served) as client:
                await client.say(TEXT, turn_id)
        await served.until_free()
    assert asyncio.all_tasks() == before
