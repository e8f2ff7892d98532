"""The one definition of the protocol: what decodes, what is refused and how it is said."""

import json
import struct

import pytest

from realtime import wire
from realtime.errors import ProtocolError


def refused(frame: str) -> ProtocolError:
    with pytest.raises(ProtocolError) as error:
        wire.decode_client(frame)
    assert not error.value.fatal
    return error.value


@pytest.mark.parametrize(
    "message",
    [
        wire.SessionStart(voice="a", sampling=wire.Sampling(temperature=0.5, seed=7)),
        wire.SessionUpdate(prompt="softly"),
        wire.TextAppend(turn_id=3, text="hällo \u200f\n"),
        wire.TextFlush(turn_id=0),
        wire.TurnCommit(turn_id=2**32 - 1),
        wire.TurnCancel(turn_id=1, played_ms=12.5),
        wire.SessionClose(),
    ],
)
def test_client_messages_survive_the_round_trip(message: wire.ClientMessage) -> None:
    assert wire.decode_client(wire.encode(message)) == message


def test_server_messages_survive_the_round_trip() -> None:
    metrics = wire.TurnMetrics(
        num_samples=960, num_packets=2, num_frames=1, audio_ms=40.0, num_segments=1
    )
    for message in (
        wire.TurnDone(turn_id=1, metrics=metrics),
        wire.TurnCancelled(turn_id=1, spoken_text="a", remaining_text="b", played_ms=1.0),
        wire.Error(code="x", message="y", fatal=True),
    ):
        assert wire.decode_server(wire.encode(message)) == message


@pytest.mark.parametrize("frame", ["", "{", "nul", "[1,", '{"type": NaN}', "[" * 100_000])
def test_what_is_not_json(frame: str) -> None:
    assert refused(frame).code == "invalid_json"


@pytest.mark.parametrize("frame", ["[]", "3", '"text"', "{}", '{"type": 3}', '{"type": null}'])
def test_json_that_is_no_message(frame: str) -> None:
    assert refused(frame).code == "invalid_message"


def test_unknown_types_are_named_and_unknown_fields_ignored() -> None:
    assert "turn.dance" in refused('{"type": "turn.dance"}').message
    assert wire.decode_client('{"type": "turn.commit", "turn_id": 1, "new": 2}').turn_id == 1  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"sampling": {"temperature": 3}}, "sampling.temperature"),
        ({"sampling": {"temperature": -0.1}}, "sampling.temperature"),
        ({"sampling": {"top_p": 0}}, "sampling.top_p"),
        ({"sampling": {"top_k": 0}}, "sampling.top_k"),
        ({"sampling": {"top_k": 129}}, "sampling.top_k"),
        ({"sampling": {"seed": -1}}, "sampling.seed"),
        ({"sampling": {"seed": 2**63}}, "sampling.seed"),
        ({"max_lead_ms": 1}, "max_lead_ms"),
        ({"format": {"codec": "mp3"}}, "format.codec"),
        ({"format": {"codec": "opus", "sample_rate": 44100}}, "format"),
        ({"format": {"codec": "opus", "sample_rate": 2**31 - 1}}, "format"),
        ({"format": {"codec": "pcm_s16le", "sample_rate": 2**31 - 1}}, "format"),
        ({"voice": 7}, "voice"),
    ],
)
def test_values_out_of_range_name_their_field(fields: dict[str, object], param: str) -> None:
    error = refused(json.dumps({"type": "session.start", **fields}))
    assert (error.code, error.param) == ("invalid_message", param)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none(number: str) -> None:
    error = refused('{"type":"session.start","sampling":{"temperature":' + number + "}}")
    assert error.code in ("invalid_json", "invalid_message")


@pytest.mark.parametrize("turn_id", ["1", 1.0, True, -1, 2**32, None])
def test_turn_ids_are_u32_integers(turn_id: object) -> None:
    assert refused(json.dumps({"type": "turn.commit", "turn_id": turn_id})).param == "turn_id"


def test_lone_surrogates_become_the_replacement_character() -> None:
    frame = wire.encode(wire.TextAppend(turn_id=1, text="a\ud800b\ud83d\ude00"))
    assert json.loads(frame.encode("utf-8"))["text"] == "a\ufffdb\U0001f600"


def test_too_large_a_message() -> None:
    assert refused(" " * (wire.MAX_MESSAGE_BYTES + 1)).code == "message_too_large"


def test_audio_header_is_sixteen_bytes_little_endian() -> None:
    packet = wire.AudioPacket(wire.AudioKind.OPUS, wire.AudioFlags.LAST, 7, 9, 480, b"abc")
    frame = wire.pack_audio(packet)
    assert frame[:16] == struct.pack("<BBHIII", 1, 1, 1, 7, 9, 480)
    assert wire.unpack_audio(frame) == packet and packet.is_last


@pytest.mark.parametrize(
    "frame", [b"", b"\x01" * 15, b"\x02\x01" + bytes(14), b"\x01\x09" + bytes(14)]
)
def test_broken_audio_frames(frame: bytes) -> None:
    with pytest.raises(ProtocolError, match="invalid_audio"):
        wire.unpack_audio(frame)
