"""The player against scripted servers, on a device whose time a test makes pass."""

import asyncio
import sys
import types

import numpy as np
import pytest

from clients import ConnectionLost, ProtocolError, Reconnect, SessionError, connect
from clients.devices import NullDevice, SoundCard
from clients.player import Playback, Player
from realtime.wire import (
    AudioFormat,
    TurnCancel,
    TurnCancelled,
)
from tests.clients.scripted_server import (
    PACKET_SAMPLES,
    PACKETS_PER_WORD,
    PCM_FORMAT,
    SAMPLE_RATE_HZ,
    Peer,
    scripted_server,
    session_with,
    talker,
)

WORD_MS = 20 * PACKETS_PER_WORD
TIMEOUT_S = 10.0


def level(value: int, num_packets: int) -> list[bytes]:
    return [np.full(PACKET_SAMPLES, value, "<i2").tobytes()] * num_packets


async def play_out(device: NullDevice, playing: Playback) -> None:
    """Let time pass until it was heard."""
    while not playing.over.done():
        device.advance(10)
        await asyncio.sleep(0)
    await playing


async def is_received(playing: Playback) -> None:
    await asyncio.wait([playing._reader])


@pytest.mark.parametrize("number", [np.int64(60), np.float32(60), np.uint8(60)])
async def test_numbers_may_be_of_numpy(number) -> None:
    policy = Reconnect(max_attempts=number, initial_delay_s=number)
    async with (
        scripted_server(talker) as server,
        connect(server.url, open_timeout_s=number, reconnect=policy) as session,
        Player(session, device := NullDevice(), buffer_ms=number) as player,
    ):
        await play_out(device, player.play("one"))
        await session.interrupt(played_ms=number)
    assert server.received[-1] == TurnCancel(turn_id=1, played_ms=60.0)


@pytest.mark.parametrize(
    "option",
    [
        {"device": 7},
        {"buffer_ms": "60"},
        {"buffer_ms": -1},
        {"buffer_ms": float("nan")},
        {"buffer_ms": float("inf")},
    ],
)
async def test_what_no_player_can_be_made_of_is_refused_in_words(option) -> None:
    (name,) = option
    async with session_with(talker) as session:
        with pytest.raises(SessionError, match=f"{name}: got .*, expected"):
            Player(session, **option)


async def test_the_output_runs_before_the_first_word() -> None:
    """A device that opens with the first packet swallows the beginning."""
    device = NullDevice()
    async with (
        scripted_server(talker) as server,
        connect(server.url, format=PCM_FORMAT) as session,
        Player(session, device) as player,
    ):
        device.advance(50)
        assert len(device.heard) == SAMPLE_RATE_HZ // 20 and not server.peers[0].received[1:]
        playing = player.play("Hello.")
        await play_out(device, playing)
        assert playing.played_ms == WORD_MS  # all of it, after what was silent
        assert not device.heard[: SAMPLE_RATE_HZ // 20].any() and device.heard.any()


@pytest.mark.parametrize("format", [AudioFormat(), PCM_FORMAT])
async def test_what_is_heard_is_what_was_said_and_no_sample_more(format) -> None:
    device = NullDevice()
    async with (
        scripted_server(talker) as server,
        connect(server.url, format=format) as session,
        Player(session, device) as player,
    ):
        playing = player.play("one two three")
        await play_out(device, playing)
        assert playing.played_ms == 3 * WORD_MS
        assert (playing.num_underruns, player.num_underruns) == (0, 0)
        assert not playing.was_interrupted
        assert device.sample_rate_hz == player.sample_rate_hz
    audible = np.flatnonzero(device.heard)
    assert 0 < audible[-1] - audible[0] < device.sample_rate_hz * 3 * WORD_MS // 1000


async def test_the_padding_of_the_last_packet_is_not_played() -> None:
    async def script(peer: Peer) -> None:
        await peer.accept()
        await peer.expect_turn()
        await peer.audio(1, level(100, 1))
        await peer.audio(1, level(200, 1), first_seq=1, is_last=True)
        await peer.done(1, 2, num_samples=PACKET_SAMPLES + 100)

    device = NullDevice()
    async with session_with(script) as session, Player(session, device, buffer_ms=0) as player:
        await play_out(device, player.play("one"))
    assert np.count_nonzero(device.heard) == PACKET_SAMPLES + 100


async def test_turns_are_played_in_order_and_wait_waits_for_all() -> None:
    device = NullDevice()
    async with session_with(talker) as session, Player(session, device) as player:
        first, second = player.play("one two"), player.play(word for word in ["three ", "four"])
        waiting = asyncio.create_task(player.wait())
        await play_out(device, first)
        assert not waiting.done()
        assert second.played_ms <= 10
        await play_out(device, second)
        await waiting


async def barge_in(peer: Peer) -> None:
    """Speaks of two turns at once, goes on a little after the cancel, then speaks a third."""
    await peer.accept()
    for _ in range(2):
        await peer.expect_turn()
    await peer.audio(1, level(1000, 10))
    await peer.done(1, 10)
    await peer.audio(2, level(2000, 5))
    cancels = [await peer.expect(TurnCancel) for _ in range(2)]
    await peer.audio(2, level(2000, 5), first_seq=5)
    for cancel, texts in zip(cancels, [("", "Two."), ("O", "ne.")], strict=True):
        await peer.send(
            TurnCancelled(
                turn_id=cancel.turn_id,
                spoken_text=texts[0],
                remaining_text=texts[1],
                played_ms=cancel.played_ms or 0.0,
            )
        )
    await peer.audio(2, level(2000, 5), first_seq=10)
    await peer.expect_turn()
    await peer.audio(3, level(3000, 4))
    await peer.done(3, 4)


async def test_interrupt_fades_out_in_5_ms_and_says_what_was_heard() -> None:
    device = NullDevice()
    async with (
        scripted_server(barge_in) as server,
        connect(server.url, format=PCM_FORMAT) as session,
        Player(session, device) as player,
    ):
        first, second = player.play("One."), player.play("Two.")
        await is_received(first)
        device.advance(70)
        assert (first.played_ms, second.played_ms) == (70.0, 0.0)

        interrupting = asyncio.create_task(player.interrupt())
        await asyncio.sleep(0)  # it has begun; the server has not answered
        num_before = len(device.heard)
        device.advance(200)
        after = device.heard[num_before:]
        num_fading = np.count_nonzero(after)
        assert 1000 * num_fading / player.sample_rate_hz == 5
        fading = np.concatenate(([np.float32(1000 / 32768)], after[: num_fading + 1]))
        assert (np.diff(fading) < 0).all() and fading[-1] == 0
        heard = await interrupting
        assert (heard.spoken_text, heard.remaining_text) == ("O", "ne. Two.")
        await first  # being interrupted is no error
        await second
        assert first.was_interrupted and second.was_interrupted
        assert first.played_ms == 75.0

        num_before = len(device.heard)
        await play_out(device, player.play("Three."))
        later = device.heard[num_before:]
        assert set(np.unique(later)) == {np.float32(0), np.float32(3000 / 32768)}
        assert np.count_nonzero(later) == 4 * PACKET_SAMPLES
    cancels = [message for message in server.received if isinstance(message, TurnCancel)]
    assert [(cancel.turn_id, cancel.played_ms) for cancel in cancels] == [(2, 0.0), (1, 75.0)]


async def test_an_interruption_when_nothing_plays_sends_nothing() -> None:
    device = NullDevice()
    async with (
        scripted_server(talker) as server,
        connect(server.url, format=PCM_FORMAT) as session,
        Player(session, device) as player,
    ):
        await play_out(device, player.play("one"))
        assert (await player.interrupt()).turns == ()
    assert not any(isinstance(message, TurnCancel) for message in server.received)


async def test_underruns_are_counted() -> None:
    may_go_on = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.accept()
        await peer.expect_turn()
        await peer.audio(1, level(1000, 3))
        await may_go_on.wait()
        await peer.audio(1, level(1000, 3), first_seq=3)
        await peer.done(1, 6)

    device = NullDevice()
    async with session_with(script) as session, Player(session, device) as player:
        playing = player.play("one")
        while playing.num_underruns == 0:
            device.advance(10)
            await asyncio.sleep(0)
        assert playing.played_ms == 60.0
        assert player.num_underruns == 1, "told while it plays"
        may_go_on.set()
        await play_out(device, playing)
        assert playing.played_ms == 120.0
        assert player.num_underruns == 1
    assert np.count_nonzero(device.heard) == SAMPLE_RATE_HZ * 120 // 1000


async def test_a_turn_that_is_lost_is_played_as_far_as_it_came_and_then_raises() -> None:
    async def script(peer: Peer) -> None:
        await peer.accept()
        await peer.expect_turn()
        await peer.audio(1, level(1000, 5))
        await peer.socket.close(1011)

    device = NullDevice()
    async with session_with(script) as session, Player(session, device) as player:
        playing = player.play("one")
        with pytest.raises(ConnectionLost, match="5 packets"):
            await play_out(device, playing)
        assert playing.played_ms == 100.0
        with pytest.raises(ConnectionLost):
            player.play("two")


async def test_audio_that_cannot_be_decoded_cancels_its_turn() -> None:
    cancelled = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.accept()
        await peer.expect_turn()
        await peer.audio(1, [b"\0\0\0"])
        await peer.expect(TurnCancel)
        cancelled.set()

    device = NullDevice()
    async with session_with(script) as session, Player(session, device) as player:
        with pytest.raises(ProtocolError, match="not whole samples"):
            await play_out(device, player.play("one"))
        await cancelled.wait()


async def test_leaving_the_block_stops_what_plays() -> None:
    device = NullDevice()
    async with scripted_server(talker) as server, connect(server.url) as session:
        async with Player(session, device) as player:
            playing = player.play("one two three")
            await is_received(playing)
        await playing
        device.advance(100)
        assert not device.blocks
        async with Player(session, device) as player:
            unread = player.play("four five")
        await unread


async def test_leaving_the_block_does_not_wait_for_a_turn_that_goes_on() -> None:
    async def script(peer: Peer) -> None:
        await peer.accept()
        await peer.expect_turn()
        await peer.audio(1, level(1000, 3))
        await peer.expect(TurnCancel)

    device = NullDevice()
    async with session_with(script) as session, asyncio.timeout(TIMEOUT_S):
        async with Player(session, device) as player:
            playing = player.play("one")
            while not playing.played_ms:
                device.advance(10)
                await asyncio.sleep(0)
        await playing  # interrupted, which is no error


async def test_no_sounddevice_is_one_sentence(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "sounddevice", None)
    async with scripted_server(talker) as server, connect(server.url) as session:
        with pytest.raises(OSError, match=r'pip install -e "\.\[audio\]"'):
            async with Player(session):
                pass


class FakeStream:
    """What sounddevice's OutputStream is to `SoundCard`."""

    opened: "list[FakeStream]" = []

    def __init__(self, **options) -> None:
        self.options, self.is_open = options, False
        self.opened.append(self)

    def start(self) -> None:
        self.is_open = True

    def stop(self) -> None:
        assert self.is_open

    def close(self) -> None:
        self.is_open = False


class FakePortAudioError(Exception):
    pass


def test_a_sound_card_fills_the_buffers_of_its_callback(monkeypatch) -> None:
    module = types.SimpleNamespace(OutputStream=FakeStream, PortAudioError=FakePortAudioError)
    monkeypatch.setitem(sys.modules, "sounddevice", module)
    card = SoundCard("speaker")
    card.start(48_000, lambda out: out.fill(0.5))
    stream = FakeStream.opened[-1]
    assert stream.is_open
    assert (stream.options["samplerate"], stream.options["device"]) == (48_000, "speaker")
    out = np.zeros((480, 1), np.float32)
    stream.options["callback"](out, 480, None, None)
    assert (out == 0.5).all()
    card.stop()
    assert not stream.is_open


def test_a_sound_card_that_cannot_be_opened_is_an_os_error(monkeypatch) -> None:
    def refuse(**options) -> None:
        raise FakePortAudioError("no default output device")

    module = types.SimpleNamespace(OutputStream=refuse, PortAudioError=FakePortAudioError)
    monkeypatch.setitem(sys.modules, "sounddevice", module)
    with pytest.raises(OSError, match="no default output device"):
        SoundCard().start(48_000, lambda out: None)
