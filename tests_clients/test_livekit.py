"""The LiveKit plugin: streams by themselves, then an AgentSession with an ear for a room."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

pytest.importorskip("livekit.agents")

from livekit import rtc
from livekit.agents import (
    Agent,
    AgentSession,
    APIConnectionError,
    APIConnectOptions,
    APIError,
    APIStatusError,
    APITimeoutError,
)
from livekit.agents.metrics import TTSMetrics
from livekit.agents.types import USERDATA_TIMED_TRANSCRIPT
from livekit.agents.voice import io

from clients import Reconnect
from clients.adapters.livekit import TTS
from realtime.wire import (
    Error,
    SessionStart,
    SessionUpdate,
    TextAppend,
    TurnCancel,
    TurnCancelled,
    TurnCommit,
)
from tests.clients.scripted_server import (
    PACKET_SAMPLES,
    Peer,
    pcm_payloads,
    respond,
    scripted_server,
    tone,
)
from tests_clients.speakers import say, speaker

TIMEOUT_S = 10.0
NO_RETRY = APIConnectOptions(max_retry=0)
AT_ONCE = APIConnectOptions(max_retry=2, retry_interval=0.0)


@asynccontextmanager
async def plugin(url: str, **options) -> AsyncIterator[TTS]:
    speech = TTS(url=url, **options)
    try:
        yield speech
    finally:
        await speech.aclose()


async def spoken(speech: TTS, *tokens: str) -> tuple[bytes, list]:
    """All audio and all timed words of a stream."""
    audio, words = [], []
    async with speech.stream(conn_options=NO_RETRY) as stream:
        for token in tokens:
            stream.push_text(token)
        stream.end_input()
        async for event in stream:
            audio.append(bytes(event.frame.data.cast("b")))
            words += event.frame.userdata.get(USERDATA_TIMED_TRANSCRIPT, [])
    return b"".join(audio), words


async def test_two_turns_on_one_connection_whole_and_aligned() -> None:
    async with scripted_server(speaker) as server, plugin(server.url, voice="bob") as speech:
        audio, words = await spoken(speech, "Hello", " there.", " How", " are", " you?")
        assert len(audio) == 2 * 10 * PACKET_SAMPLES
        assert "".join(words) == "Hello there. How are you?"
        assert [str(word) for word in words] == ["Hello", " there.", " How", " are", " you?"]
        assert words[0].start_time == 0.0
        assert words[-1].end_time == pytest.approx(0.2)
        assert all(a.end_time == b.start_time for a, b in zip(words, words[1:], strict=False))
        audio, _ = await spoken(speech, "Fine.")
        assert len(audio) == 2 * 2 * PACKET_SAMPLES
        assert (speech.model, speech.provider) == ("scripted", "Plosive")
    start = server.received[0]
    assert isinstance(start, SessionStart)
    assert (start.voice, start.format.codec) == ("bob", "pcm_s16le")
    texts = [message.text for message in server.received if isinstance(message, TextAppend)]
    assert texts == ["Hello", " there.", " How", " are", " you?", "Fine."]
    assert len(server.peers) == 1


async def test_synthesize() -> None:
    async with scripted_server(speaker) as server, plugin(server.url) as speech:
        frame = await speech.synthesize("One two.", conn_options=NO_RETRY).collect()
        assert frame.samples_per_channel == 4 * PACKET_SAMPLES


async def test_its_own_metrics() -> None:
    collected: list[TTSMetrics] = []
    async with scripted_server(speaker) as server, plugin(server.url) as speech:
        speech.on("metrics_collected", collected.append)
        for text in ("One two.", "Three."):
            await spoken(speech, text)
    first, second = collected
    assert 0 < first.ttfb < TIMEOUT_S
    assert (first.characters_count, second.characters_count) == (8, 6)
    assert first.audio_duration == pytest.approx(0.08)
    assert not first.connection_reused and second.connection_reused
    assert second.acquire_time <= first.acquire_time
    assert not first.cancelled


async def test_a_stream_without_text_says_nothing() -> None:
    async with scripted_server(speaker) as server, plugin(server.url) as speech:
        assert await spoken(speech) == (b"", [])
    assert len(server.received) == 1


async def test_prewarm_opens_the_session() -> None:
    """Before there is anything to say."""
    is_open = asyncio.Event()

    async def script(peer: Peer) -> None:
        is_open.set()
        await speaker(peer)

    async with scripted_server(script) as server, plugin(server.url) as speech:
        speech.prewarm()
        async with asyncio.timeout(TIMEOUT_S):
            await is_open.wait()
        assert await spoken(speech, "One.")
    assert len(server.peers) == 1


async def test_another_voice_from_the_next_stream_on() -> None:
    async with scripted_server(speaker) as server, plugin(server.url) as speech:
        await spoken(speech, "One.")
        speech.update_options(voice="bob")
        await spoken(speech, "Two.")
    updates = [message for message in server.received if isinstance(message, SessionUpdate)]
    assert [update.voice for update in updates] == ["bob"]


async def test_another_voice_is_kept_though_the_connection_is_lost() -> None:
    """With or without a connection that is opened again by itself."""

    async def script(peer: Peer) -> None:
        if len(server.peers) > 1:
            await speaker(peer)
        else:
            await peer.accept()
            await peer.expect(SessionUpdate)
            await peer.socket.close(1012)

    for policy in (Reconnect(initial_delay_s=0.0), Reconnect(max_attempts=0)):
        options = {"reconnect": policy}
        async with scripted_server(script) as server, plugin(server.url, options=options) as speech:
            await speech.session()
            speech.update_options(voice="bob")
            await spoken(speech, "Two.")
            asked = [getattr(message, "voice", None) for message in server.peers[1].received]
            assert "bob" in asked


def barge_in(cancel_arrived: asyncio.Event):
    """Speaks of the first turn without end; its cancel reaches the server while it speaks."""

    async def script(peer: Peer) -> None:
        await peer.accept()
        while not isinstance(await peer.next(), TurnCommit):
            pass
        await say(peer, 1, "One", num_packets=30)
        await peer.expect(TurnCancel)
        cancel_arrived.set()
        await peer.audio(1, pcm_payloads(tone(3 * PACKET_SAMPLES)), first_seq=30)
        await peer.send(
            TurnCancelled(turn_id=1, spoken_text="One", remaining_text=" two.", played_ms=60)
        )
        await peer.audio(1, pcm_payloads(tone(3 * PACKET_SAMPLES)), first_seq=33)
        while not isinstance(await peer.next(), TurnCommit):
            pass
        await say(peer, 2, "Sorry.")
        await peer.done(2, 2)
        await peer.until_closed()

    return script


async def test_closing_a_stream_cancels_its_turn_at_once() -> None:
    cancel_arrived = asyncio.Event()
    async with scripted_server(barge_in(cancel_arrived)) as server, plugin(server.url) as speech:
        async with speech.stream(conn_options=NO_RETRY) as stream:
            stream.push_text("One two.")
            stream.end_input()
            await anext(stream)
        async with asyncio.timeout(TIMEOUT_S):
            await cancel_arrived.wait()
        audio, _ = await spoken(speech, "Sorry.")
        assert len(audio) == 2 * 2 * PACKET_SAMPLES
    assert len(server.peers) == 1


@pytest.mark.parametrize(
    ("status", "kind"), [(401, APIStatusError), (503, APIStatusError), (None, APIConnectionError)]
)
async def test_refusals_are_livekits_errors(status, kind) -> None:
    refusal = respond(status) if status else None
    async with scripted_server(speaker, refusal=refusal) as server:
        url = server.url if status else "http://127.0.0.1:1"
        async with plugin(url) as speech:
            with pytest.raises(kind) as raised:
                await spoken(speech, "One.")
            assert raised.value.retryable is (status != 401)


async def test_a_server_that_does_not_get_ready_is_a_timeout() -> None:
    async with scripted_server(Peer.until_closed) as server, plugin(server.url) as speech:
        stream = speech.stream(conn_options=APIConnectOptions(max_retry=0, timeout=0.05))
        stream.push_text("One.")
        with pytest.raises(APITimeoutError):
            await anext(stream)
        await stream.aclose()


async def test_an_error_of_a_turn_is_not_tried_again() -> None:
    async def script(peer: Peer) -> None:
        await peer.accept()
        await peer.expect(TextAppend)
        await peer.send(Error(code="text_too_long", message="too long", turn_id=1))
        await peer.until_closed()

    async with scripted_server(script) as server, plugin(server.url) as speech:
        stream = speech.stream(conn_options=AT_ONCE)
        stream.push_text("One.")
        stream.end_input()
        with pytest.raises(APIError, match="text_too_long"):
            await anext(stream)
        await stream.aclose()


async def test_livekit_tries_again_what_was_lost_before_any_audio() -> None:
    async def script(peer: Peer) -> None:
        if len(server.peers) > 1:
            await speaker(peer)
        await peer.accept()
        await peer.expect(TextAppend)
        await peer.socket.close(1012)

    async with scripted_server(script) as server, plugin(server.url) as speech:
        async with speech.stream(conn_options=AT_ONCE) as stream:
            stream.push_text("One.")
            stream.end_input()
            frames = [event.frame async for event in stream]
        assert sum(frame.samples_per_channel for frame in frames) == 2 * PACKET_SAMPLES


class Ear(io.AudioOutput):
    """A room's loudspeaker; everything given to it counts as played when a test says so."""

    def __init__(self) -> None:
        super().__init__(
            label="ear", capabilities=io.AudioOutputCapabilities(pause=False), sample_rate=24_000
        )
        self.num_samples = 0
        self.plays_at_once = True
        self._num_pending = 0
        self._heard = asyncio.Event()

    async def capture_frame(self, frame: rtc.AudioFrame) -> None:
        await super().capture_frame(frame)
        if self._num_pending == 0:
            self.on_playback_started(created_at=time.time())
        self.num_samples += frame.samples_per_channel
        self._num_pending += frame.samples_per_channel
        self._heard.set()

    def flush(self) -> None:
        super().flush()
        if self.plays_at_once:
            self._finish(interrupted=False)

    def clear_buffer(self) -> None:
        self._finish(interrupted=True)

    def _finish(self, *, interrupted: bool) -> None:
        if self._num_pending:
            position_s = self._num_pending / 24_000
            self._num_pending = 0
            self.on_playback_finished(playback_position=position_s, interrupted=interrupted)

    async def until(self, is_there: Callable[[], bool]) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not is_there():
                self._heard.clear()
                await self._heard.wait()


async def test_an_agent_speaks_is_interrupted_and_speaks_again() -> None:
    cancel_arrived = asyncio.Event()
    async with (
        scripted_server(barge_in(cancel_arrived)) as server,
        plugin(server.url) as speech,
        AgentSession(tts=speech, use_tts_aligned_transcript=True) as agent_session,
    ):
        ear = Ear()
        agent_session.output.audio = ear
        await agent_session.start(Agent(instructions="Speak."), record=False)
        ear.plays_at_once = False
        first = agent_session.say("One two.")
        await ear.until(lambda: ear.num_samples > 0)
        await agent_session.interrupt()
        async with asyncio.timeout(TIMEOUT_S):
            await cancel_arrived.wait()
            await first
        assert first.interrupted

        ear.plays_at_once, ear.num_samples = True, 0
        async with asyncio.timeout(TIMEOUT_S):
            await agent_session.say("Sorry.")
        assert ear.num_samples == 2 * PACKET_SAMPLES
        said = [item.text_content for item in agent_session.history.items if item.type == "message"]
        assert said[-1] == "Sorry."
    assert len(server.peers) == 1
