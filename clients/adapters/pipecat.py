"""Plosive in a Pipecat pipeline: `pip install -e ".[pipecat]"` in a clone.

from clients.adapters.pipecat import PlosiveTTSService

tts = PlosiveTTSService(url="http://localhost:8765", voice="af_heart")
pipeline = Pipeline([transport.input(), stt, llm, tts, transport.output()])
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from pipecat.frames.frames import (
    BotStoppedSpeakingFrame,
    CancelFrame,
    EndFrame,
    Frame,
    InterruptionFrame,
    StartFrame,
    TTSAudioRawFrame,
    TTSStoppedFrame,
)
from pipecat.processors.frame_processor import FrameDirection
from pipecat.services.settings import TTSSettings
from pipecat.services.tts_service import TextAggregationMode, TTSService

from clients.adapters.shared_session import SharedSession
from clients.adapters.words import WordTimes
from clients.opening import ConnectOptions
from clients.reconnect import is_retryable
from clients.turn import Turn
from realtime.errors import ConnectionFailed, PlosiveError, VoiceError
from realtime.wire import AudioFormat, AudioPacket, TurnDone, TurnText

# A context that gets nothing for so long is given up by Pipecat. Every turn here has an end of its
# own, and a language model that waits for a tool may well be silent for longer than the usual 3 s.
_SILENCE_TIMEOUT_S = 60.0


@dataclass
class _Context:
    """One of Pipecat's audio contexts."""

    turn: Turn | None = None
    is_complete: bool = False  # no more text comes
    has_failed: bool = False


class PlosiveTTSService(TTSService):
    """Pipecat's TTS service over one Plosive session.

    Each of Pipecat's contexts is a turn. Text is passed on token by token, because the server
    speaks the first clause while the rest is being written. An interruption cancels the turn on the
    open connection: no reconnect, and no late audio. The end of a turn is the server's own, not a
    timeout. Words come with their times, so that the conversation's context holds what was heard.
    TTFB and TTFA are measured by Pipecat; `on_turn_cancelled` is called with the context's id and
    the server's account of what was heard.

    Args:
        url: the server, like "http://localhost:8765".
        voice: None is the server's default voice. `TTSUpdateSettingsFrame` changes it.
        sample_rate: None is the pipeline's `audio_out_sample_rate`.
        lead_in_ms: silence before each turn's audio, where a receiver swallows the first word.
        text_aggregation_mode: SENTENCE makes Pipecat hold text back until a sentence is complete.
        options: of `clients.connect`: prompt, sampling, api_key, reconnect, ...

    Example:
        tts = PlosiveTTSService(url="http://localhost:8765", voice="af_heart")

        @tts.event_handler("on_turn_cancelled")
        async def on_turn_cancelled(service, context_id, account):
            print("heard:", account.spoken_text)
    """

    _turn_context_id: str | None

    def __init__(
        self,
        *,
        url: str = "http://localhost:8765",
        voice: str | None = None,
        sample_rate: int | None = None,
        lead_in_ms: int = 0,
        text_aggregation_mode: TextAggregationMode = TextAggregationMode.TOKEN,
        options: ConnectOptions | None = None,
        **service_options: Any,
    ) -> None:
        super().__init__(
            text_aggregation_mode=text_aggregation_mode,
            push_text_frames=False,  # they come with the words' times
            push_start_frame=True,
            append_trailing_space=True,  # between sentences, where Pipecat makes them
            stop_frame_timeout_s=_SILENCE_TIMEOUT_S,
            sample_rate=sample_rate,
            settings=TTSSettings(model=None, voice=voice, language=None),
            **service_options,
        )
        self._url = url
        self._options: ConnectOptions = {**(options or {}), "voice": voice}
        self._lead_in_ms = lead_in_ms
        self._shared: SharedSession | None = None
        self._contexts: dict[str, _Context] = {}  # those that are not over, by their ids
        self._played: deque[tuple[str, Turn]] = deque(maxlen=16)  # done, with the transport
        self._tasks: set[asyncio.Task[None]] = set()
        self._register_event_handler("on_turn_cancelled")

    @property
    def supports_processing_metrics(self) -> bool:
        return False  # text is handed over; TTFB and TTFA tell what is to be told

    def can_generate_metrics(self) -> bool:
        return True

    async def start(self, frame: StartFrame) -> None:
        """Open the session, so that the voice is prefilled before the first reply."""
        await super().start(frame)
        format = AudioFormat(
            codec="pcm_s16le", sample_rate=self.sample_rate, lead_in_ms=self._lead_in_ms
        )
        options: ConnectOptions = {**self._options, "format": format}
        self._shared = SharedSession(self._url, **options)
        try:
            await self._shared.get()
        except PlosiveError as error:
            await self._report(error)
        else:
            await self._call_event_handler("on_connected")

    async def stop(self, frame: EndFrame) -> None:
        await super().stop(frame)
        await self._close()

    async def cancel(self, frame: CancelFrame) -> None:
        await super().cancel(frame)
        await self._close()

    async def cleanup(self) -> None:
        await super().cleanup()
        await self._close()

    async def run_tts(self, text: str, context_id: str) -> AsyncGenerator[Frame | None, None]:
        """Send a piece of a turn's text; its audio comes through the audio context."""
        context = self._contexts.setdefault(context_id, _Context())
        if not context.has_failed:  # else the rest of its text is not spoken
            try:
                if context.turn is None:
                    context.turn = await self._open_turn(context_id)
                await context.turn.append(text)
                await self.start_tts_usage_metrics(text)
            except PlosiveError as error:
                await self._fail(context_id, error)
        yield None

    async def flush_audio(self, context_id: str | None = None) -> None:
        """The context's text is complete."""
        context_id = context_id or self.get_active_audio_context_id() or ""
        context = self._contexts.get(context_id)
        if context is None or context.is_complete:
            return
        context.is_complete = True
        if context.has_failed or context.turn is None:
            await self._end(context_id)
            return
        try:
            await context.turn.commit()
        except PlosiveError as error:
            await self._fail(context_id, error)

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        if isinstance(frame, BotStoppedSpeakingFrame):
            self._played.clear()
        await super().process_frame(frame, direction)

    async def on_audio_context_interrupted(self, context_id: str) -> None:
        """Cancel the turn at once; its account comes later, through `on_turn_cancelled`."""
        await self.stop_all_metrics()
        context = self._contexts.pop(context_id, None)
        if context is not None and context.turn is not None:
            self._spawn(self._cancel_turn(context_id, context.turn))
        await super().on_audio_context_interrupted(context_id)

    async def _handle_interruption(
        self, frame: InterruptionFrame, direction: FrameDirection
    ) -> None:
        """Turns whose audio is with the transport already are cancelled too: it drops that."""
        played = list(self._played)
        self._played.clear()
        await super()._handle_interruption(frame, direction)
        for context_id, turn in played:
            self._spawn(self._cancel_turn(context_id, turn))

    async def _update_settings(self, delta: TTSSettings) -> dict[str, Any]:
        changed: dict[str, Any] = await super()._update_settings(delta)
        if "voice" not in changed or self._shared is None:
            return changed
        if self._turn_context_id in self._contexts:
            await self.flush_audio(self._turn_context_id)  # what was sent keeps its voice
            self._turn_context_id = None
            self._turn_context_id = self.create_context_id()
        try:
            await self._shared.set_voice(self._settings.voice)
        except PlosiveError as error:
            await self._report(error)
        return changed

    async def _open_turn(self, context_id: str) -> Turn:
        assert self._shared is not None, "text came before the StartFrame"
        turn = (await self._shared.get()).turn()
        self._spawn(self._read(context_id, turn))
        return turn

    async def _read(self, context_id: str, turn: Turn) -> None:
        """All that the server says of a turn, into its audio context, up to its end."""
        words = WordTimes(self._lead_in_ms)
        try:
            async for event in turn:
                match event:
                    case AudioPacket(payload=payload) if payload:
                        frame = TTSAudioRawFrame(
                            payload, self.sample_rate, 1, context_id=context_id
                        )
                        await self._append(context_id, frame)
                    case TurnText():
                        times = [(word.text.strip(), word.start_s) for word in words.words(event)]
                        await self.add_word_timestamps(times, context_id)
                    case TurnDone():
                        tts_context = self._tts_contexts.get(context_id)
                        if tts_context is None or tts_context.interruptible:
                            self._played.append((context_id, turn))
                        await self._end(context_id)
        except PlosiveError as error:
            await self._fail(context_id, error)

    async def _cancel_turn(self, context_id: str, turn: Turn) -> None:
        try:
            account = await turn.cancel()
        except PlosiveError:
            return  # it had ended otherwise, and that was reported
        await self._call_event_handler("on_turn_cancelled", context_id, account)

    async def _append(self, context_id: str, frame: Frame | None) -> None:
        """None ends the context. One that was interrupted takes nothing more: while its reply is still
        being written, Pipecat would make it anew."""
        if self.audio_context_available(context_id):
            await self.append_to_audio_context(context_id, frame)

    async def _end(self, context_id: str) -> None:
        """The context has all its audio and all its text."""
        self._contexts.pop(context_id, None)
        await self._append(context_id, TTSStoppedFrame(context_id=context_id))
        await self._append(context_id, None)

    async def _fail(self, context_id: str, error: PlosiveError) -> None:
        """Report what ended a turn, once. What came of its audio is played; the rest of its text,
        which may still be being written, is not spoken."""
        context = self._contexts.get(context_id)
        if context is None or context.has_failed:
            return
        context.has_failed = True
        await self._report(error)
        if context.is_complete:
            await self._end(context_id)

    async def _report(self, error: PlosiveError) -> None:
        await self._call_event_handler("on_connection_error", str(error))
        is_refusal = isinstance(error, ConnectionFailed | VoiceError)
        await self.push_error(
            str(error), error, force_treat_as_permanent=is_refusal and not is_retryable(error)
        )

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _close(self) -> None:
        self._contexts.clear()
        self._played.clear()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._shared is not None:
            shared, self._shared = self._shared, None
            await shared.close()
            await self._call_event_handler("on_disconnected")
