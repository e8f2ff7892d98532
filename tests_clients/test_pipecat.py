"""The Pipecat service inside a Pipecat pipeline, against scripted servers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

pytest.importorskip("pipecat")

from pipecat.frames.frames import (
    BotStoppedSpeakingFrame,
    ErrorFrame,
    InterruptionFrame,
    LLMFullResponseEndFrame,
    LLMFullResponseStartFrame,
    LLMTextFrame,
    MetricsFrame,
    TTSAudioRawFrame,
    TTSSpeakFrame,
    TTSStartedFrame,
    TTSTextFrame,
    TTSUpdateSettingsFrame,
)
from pipecat.metrics.metrics import TTFAMetricsData, TTFBMetricsData, TTSUsageMetricsData
from pipecat.processors.frame_processor import FrameDirection
from pipecat.services.settings import TTSSettings
from pipecat.services.tts_service import TextAggregationMode
from pipecat.utils.context.audio_context_manager import AudioContextManager

from clients import Reconnect
from clients.adapters.pipecat import PlosiveTTSService
from realtime.wire import (
    AudioFlags,
    AudioKind,
    AudioPacket,
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
    scripted_server,
    tone,
)
from tests_clients.pipecat_pipeline import TIMEOUT_S, Talk, piped
from tests_clients.speakers import say, speaker

PACKET_BYTES = 2 * PACKET_SAMPLES
STALE = b"\1" * PACKET_BYTES


@asynccontextmanager
async def talking(url: str, **options) -> AsyncIterator[Talk]:
    tts, cancelled = PlosiveTTSService(url=url, sample_rate=24_000, **options), []

    @tts.event_handler("on_turn_cancelled")
    async def on_turn_cancelled(service, context_id, account) -> None:
        cancelled.append(account)

    async with piped(tts) as talk:
        talk.cancelled = cancelled
        yield talk


async def test_a_turn_and_a_second_turn() -> None:
    async with scripted_server(speaker) as server, talking(server.url, voice="bob") as talk:
        await talk.reply("Hello", " there.", " How", " are", " you?")
        await talk.until_stopped(1)
        assert len(talk.downstream.audio) == 2 * 5 * PACKET_BYTES
        words = [frame.text for frame in talk.downstream.of(TTSTextFrame)]
        assert words == ["Hello", "there.", "How", "are", "you?"]
        contexts = {frame.context_id for frame in talk.downstream.of(TTSAudioRawFrame)}
        assert len(contexts) == 1

        await talk.reply("Fine.")
        await talk.until_stopped(2)
        assert len(talk.downstream.audio) == 2 * 6 * PACKET_BYTES
        assert not talk.upstream.of(ErrorFrame)
    start, *messages = server.received
    assert isinstance(start, SessionStart)
    assert (start.voice, start.format.codec, start.format.sample_rate) == (
        "bob",
        "pcm_s16le",
        24_000,
    )
    assert len(server.peers) == 1
    texts = [message.text for message in messages if isinstance(message, TextAppend)]
    assert "".join(texts[:-1]) == "Hello there. How are you?"
    assert len(texts) > 2  # token by token


async def test_sentences_do_not_run_into_each_other() -> None:
    mode = {"text_aggregation_mode": TextAggregationMode.SENTENCE}
    async with scripted_server(speaker) as server, talking(server.url, **mode) as talk:
        await talk.reply("Hello", " there.", " How", " are", " you?")
        await talk.until_stopped(1)
        assert len(talk.downstream.audio) == 2 * 5 * PACKET_BYTES
        words = [frame.text for frame in talk.downstream.of(TTSTextFrame)]
        assert words == ["Hello", "there.", "How", "are", "you?"]
    texts = [message.text for message in server.received if isinstance(message, TextAppend)]
    assert texts == ["Hello there. ", "How are you? "]


async def test_the_pipelines_own_metrics() -> None:
    async with scripted_server(speaker) as server, talking(server.url) as talk:
        await talk.reply("Hello there.")
        await talk.until_stopped(1)
        found = [data for frame in talk.downstream.of(MetricsFrame) for data in frame.data]
    ttfb = [data.value for data in found if isinstance(data, TTFBMetricsData) and data.value]
    assert len(ttfb) == 1 and 0 < ttfb[0] < TIMEOUT_S
    assert [data for data in found if isinstance(data, TTFAMetricsData)]
    assert [data.value for data in found if isinstance(data, TTSUsageMetricsData)] == [12]


async def barge_in(peer: Peer) -> None:
    """Speaks of the first turn without end until it is cancelled, and a little longer."""
    await peer.accept()
    while not isinstance(await peer.next(), TurnCommit):
        pass
    await say(peer, 1, "One", num_packets=3)
    await peer.expect(TurnCancel)
    await peer.audio(1, pcm_payloads(tone(3 * PACKET_SAMPLES)), first_seq=3)
    await peer.send(
        TurnCancelled(turn_id=1, spoken_text="One", remaining_text=" two three.", played_ms=60)
    )
    await peer.audio(1, pcm_payloads(tone(3 * PACKET_SAMPLES)), first_seq=6)
    while not isinstance(await peer.next(), TurnCommit):
        pass
    await say(peer, 2, "Sorry.")
    await peer.done(2, 2)
    await peer.until_closed()


async def test_a_barge_in_cancels_on_the_open_connection_and_nothing_stale_follows() -> None:
    async with scripted_server(barge_in) as server, talking(server.url) as talk:
        await talk.reply("One", " two", " three.")
        await talk.downstream.until(lambda: len(talk.downstream.audio) == 3 * PACKET_BYTES)
        await talk.send(InterruptionFrame())
        await talk.downstream.until(lambda: bool(talk.downstream.of(InterruptionFrame)))
        await talk.reply("Sorry.")
        await talk.until_stopped(1)
        assert len(talk.downstream.audio) == 5 * PACKET_BYTES
        audio = talk.downstream.of(TTSAudioRawFrame)
        started = talk.downstream.of(TTSStartedFrame)
        assert [frame.context_id for frame in audio[3:]] == [started[1].context_id] * 2
        assert [account.spoken_text for account in talk.cancelled] == ["One"]
        assert not talk.upstream.of(ErrorFrame)
    assert len(server.peers) == 1


async def test_a_packet_that_comes_as_its_reply_is_interrupted_is_not_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two are interrupted, the first of which is still being written: its packet is read when Pipecat
    has removed its context, and is about to remove the other's."""
    interrupted, is_aside_complete = [], asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.accept()
        await peer.expect(TextAppend)
        await say(peer, 1, "One")
        while True:
            match await peer.next():
                case TurnCommit(turn_id=2):
                    is_aside_complete.set()
                case TurnCommit(turn_id=3):
                    await say(peer, 3, "Sorry.")
                    await peer.done(3, 2)
                case TurnCancel(turn_id=turn_id):
                    account = {"spoken_text": "", "remaining_text": "", "played_ms": 0.0}
                    await peer.send(TurnCancelled(turn_id=turn_id, **account))

    async def on_interrupted(context_id: str) -> None:
        interrupted.append(context_id)
        if len(interrupted) == 1:
            packet = AudioPacket(AudioKind.PCM_S16LE, AudioFlags(0), 1, 2, 960, STALE)
            first.turn.deliver(packet, 0.0)
        else:
            await asyncio.sleep(0)  # it pushes metrics, and who gets them may wait
        await PlosiveTTSService.on_audio_context_interrupted(talk.tts, context_id)

    async with scripted_server(script) as server, talking(server.url) as talk:
        await talk.send(LLMFullResponseStartFrame(), LLMTextFrame("One two."))
        await talk.downstream.until(lambda: len(talk.downstream.audio) == 2 * PACKET_BYTES)
        (first,) = talk.tts._contexts.values()
        await talk.send(TTSSpeakFrame("Aside."))
        async with asyncio.timeout(TIMEOUT_S):
            await is_aside_complete.wait()
        monkeypatch.setattr(talk.tts, "on_audio_context_interrupted", on_interrupted)
        await talk.send(InterruptionFrame())
        await talk.downstream.until(lambda: bool(talk.downstream.of(InterruptionFrame)))
        await talk.reply("Sorry.")
        await talk.until_stopped(1)
        assert len(interrupted) == 2
        assert len(talk.downstream.audio) == 4 * PACKET_BYTES
        assert STALE not in [frame.audio for frame in talk.downstream.of(TTSAudioRawFrame)]


async def test_a_turn_that_is_with_the_transport_is_cancelled_too_until_it_was_played() -> None:
    async with scripted_server(speaker) as server, talking(server.url) as talk:
        await talk.reply("One two.")
        await talk.until_stopped(1)
        await talk.send(InterruptionFrame())
        await talk.reply("Three four.")
        await talk.until_stopped(2)
        assert [account.turn_id for account in talk.cancelled] == [1]
        await talk.worker.queue_frame(BotStoppedSpeakingFrame(), FrameDirection.UPSTREAM)
        await talk.upstream.until(lambda: bool(talk.upstream.of(BotStoppedSpeakingFrame)))
        await talk.send(InterruptionFrame())
        await talk.reply("Five.")
        await talk.until_stopped(3)
    cancels = [message for message in server.received if isinstance(message, TurnCancel)]
    assert [cancel.turn_id for cancel in cancels] == [1]


async def test_a_turn_may_be_silent_while_a_tool_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pipecat ends a turn that got nothing for 3 s, unless it is told otherwise."""
    limits_s: list[float] = []
    get = AudioContextManager.get

    def watched(self, context_id: str, **limit: float):
        limits_s.append(limit["timeout"])
        return get(self, context_id, **limit)

    monkeypatch.setattr(AudioContextManager, "get", watched)
    async with scripted_server(speaker) as server, talking(server.url) as talk:
        await talk.reply("Let me look.")
        await talk.until_stopped(1)
    assert limits_s and min(limits_s) >= 30.0, limits_s


async def test_what_the_application_says_itself() -> None:
    async with scripted_server(speaker) as server, talking(server.url) as talk:
        await talk.send(TTSSpeakFrame("One two."), TTSSpeakFrame("Three."))
        await talk.until_stopped(2)
        assert len(talk.downstream.audio) == 2 * 3 * PACKET_BYTES


async def test_what_must_not_be_interrupted_is_not_cancelled() -> None:
    async with scripted_server(speaker) as server, talking(server.url) as talk:
        announcement = TTSSpeakFrame("One two.")
        announcement.interruptible = False
        await talk.send(announcement)
        await talk.until_stopped(1)
        await talk.send(InterruptionFrame())
        await talk.reply("Three.")
        await talk.until_stopped(2)
        assert len(talk.downstream.audio) == 2 * 3 * PACKET_BYTES
    assert not any(isinstance(message, TurnCancel) for message in server.received)


async def test_another_voice_from_the_next_turn_on() -> None:
    async with scripted_server(speaker) as server, talking(server.url, voice="ann") as talk:
        await talk.reply("One.")
        await talk.until_stopped(1)
        await talk.send(TTSUpdateSettingsFrame(delta=TTSSettings(voice="bob")))
        await talk.reply("Two.")
        await talk.until_stopped(2)
    kinds = [type(message) for message in server.received]
    assert kinds.count(SessionUpdate) == 1
    assert kinds.index(SessionUpdate) > kinds.index(TurnCommit)


async def test_an_error_of_a_turn_ends_it_and_the_next_one_is_spoken() -> None:
    async def script(peer: Peer) -> None:
        await peer.accept()
        await peer.expect(TextAppend)
        await peer.send(Error(code="text_too_long", message="too long", turn_id=1))
        while not isinstance(message := await peer.next(), TurnCommit):
            pass
        await say(peer, message.turn_id, "Two.")
        await peer.done(message.turn_id, 2)
        await peer.until_closed()

    async with scripted_server(script) as server, talking(server.url) as talk:
        await talk.send(LLMFullResponseStartFrame(), LLMTextFrame("One"))
        await talk.upstream.until(lambda: bool(talk.upstream.of(ErrorFrame)))
        await talk.send(LLMTextFrame(" more."), LLMFullResponseEndFrame())
        await talk.reply("Two.")
        await talk.until_stopped(2)
        assert "text_too_long" in talk.upstream.of(ErrorFrame)[0].error
        assert len(talk.downstream.audio) == 2 * PACKET_BYTES


async def test_a_lost_connection_is_opened_again_for_the_next_turn() -> None:
    async def script(peer: Peer) -> None:
        if len(server.peers) > 1:
            await speaker(peer)
        await peer.accept()
        while not isinstance(await peer.next(), TurnCommit):
            pass
        await say(peer, 1, "One")
        await peer.socket.close(1012)

    options = {"reconnect": Reconnect(initial_delay_s=0.0)}
    async with scripted_server(script) as server, talking(server.url, options=options) as talk:
        await talk.reply("One two.")
        await talk.until_stopped(1)
        assert "of turn 1, 2 packets" in talk.upstream.of(ErrorFrame)[0].error
        await talk.reply("Two.")
        await talk.until_stopped(2)
        assert len(talk.downstream.audio) == 4 * PACKET_BYTES


async def test_a_server_that_is_not_there() -> None:
    async with scripted_server(speaker) as server:
        url = server.url
    async with talking(url) as talk:
        await talk.upstream.until(lambda: bool(talk.upstream.of(ErrorFrame)))  # when it starts
        await talk.reply("One.")
        await talk.until_stopped(1)
        assert "Is the server up" in talk.upstream.of(ErrorFrame)[0].error
