"""`/v1/tts/live`: Fish's events as MessagePack maps, on one session for the life of the socket.

    start ... text, flush ... stop  ->  audio ..., finish{reason: "stop"}       any number of times

A `start` chooses the voice, which is prefilled at once. One that follows a `stop` is spoken after it;
one without a `stop` before it takes its place, and the old one is silent. A socket that closes ends
everything. What fails is answered by finish{reason: "error", message} and leaves the socket usable,
unless the session is over; one that has only been idle since its last `finish` closes without an
event (1000). Until a socket closes its slot is its own. Unknown events are ignored.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import ormsgpack
from fastapi import WebSocket, WebSocketDisconnect

from realtime.adapters.fish_alignment import Alignment
from realtime.adapters.fish_request import TtsRequest, parse_request, unpack
from realtime.adapters.fish_voices import Voices
from realtime.adapters.local import Item, LocalSession
from realtime.adapters.speech import MAX_LEAD_MS, SpeechEncoder, decode_pcm
from realtime.connection import close_stalled
from realtime.errors import CLOSE_CODE, ConnectionLost, PlosiveError, shorten
from realtime.wire import (
    MAX_TEXT_CHARS,
    AudioFormat,
    AudioPacket,
    SessionClosing,
    SessionStart,
    SessionUpdate,
    TurnDone,
    TurnText,
)

_MAX_TURN_CHARS = 40_000  # below the session's own limit by more than one append
_LONG_TURN_CHARS = 4_000  # at the end of a sentence a turn of this length is left for a new one
_LARGE_FRAME_BYTES = 64 * 1024  # one with clips in it
_MAX_BATCH = 8  # packets in one event, when they come faster than they are taken


class Speech:
    """What one `start` began: its encoder, and the session's turns that speak it."""

    def __init__(self, request: TtsRequest, input_rate: int) -> None:
        self._make_encoder = partial(request.make_encoder, input_rate)
        self._is_raw = request.format == "pcm"
        self.encoder: SpeechEncoder = self._make_encoder()
        self.turns: deque[int] = deque()  # not over yet; text goes to the last one
        self.num_chars = 0  # in the last one
        self.has_unflushed = False
        self.is_stopped = False
        self.alignment = Alignment(request.prosody.speed)
        self.started_s = time.monotonic()

    @property
    def turn_id(self) -> int:
        return self.turns[-1]

    def open_turn(self, turn_id: int) -> None:
        self.turns.append(turn_id)
        self.num_chars, self.has_unflushed = 0, False

    @property
    def is_over(self) -> bool:
        return self.is_stopped and not self.turns

    def end_turn(self) -> bytes:
        """What the encoder holds back: at the end of a stream, or where the next may be another."""
        if not self.is_over and not self._is_raw:
            return b""
        encoder, self.encoder = self.encoder, self._make_encoder()
        return encoder.finish()


class LiveSocket:
    """One accepted client.

    Args:
        charge: called with the number of characters that came with clips; the session counts what is
            to be spoken. Raises CapacityError.
    """

    def __init__(
        self,
        websocket: WebSocket,
        session: LocalSession,
        voices: Voices,
        *,
        charge: Callable[[int], None],
        pcm: AudioFormat,
        lead_ms: int,
        stall_s: float,
        with_timestamps: bool,
    ) -> None:
        self._websocket = websocket
        self._session = session
        self._voices = voices
        self._charge = charge
        self._pcm = pcm
        self._lead_ms = lead_ms
        self._stall_s = stall_s
        self._with_timestamps = with_timestamps
        self._is_session_started = False
        self._is_closing = False
        self._failed_code = ""  # of the last error that ended a reply
        self._was_idle = False  # for too long, with nothing left to speak
        self._speech: Speech | None = None  # the one that text goes to
        self._speeches: deque[Speech] = deque()  # in the order they are spoken
        self._next_turn_id = 1
        self._batch: list[bytes] = []  # packets of one turn
        self._batch_turn_id = 0
        self._ended = asyncio.Event()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._until_end(part)) for part in (self._read, self._speak)]
            await self._ended.wait()
            for task in tasks:
                task.cancel()

    async def _until_end(self, part: Callable[[], Awaitable[None]]) -> None:
        try:
            await part()
        except (WebSocketDisconnect, ConnectionLost):
            pass
        finally:
            self._ended.set()

    # ------------------------------------------------------------------ from the client

    async def _read(self) -> None:
        while True:
            message = await self._websocket.receive()
            if message["type"] == "websocket.disconnect":
                return
            try:
                await self._handle(await self._unpack(message.get("bytes")))
            except ConnectionLost:
                await asyncio.Event().wait()  # until `_speak` has said why
            except PlosiveError as error:
                with contextlib.suppress(ConnectionLost):
                    self._drop_open_speech()
                await self._send_error(error)

    async def _unpack(self, frame: bytes | None) -> dict[str, Any]:
        if frame is None:
            why = "got a text frame, expected MessagePack in a binary one"
            raise PlosiveError("invalid_body", why)
        if len(frame) < _LARGE_FRAME_BYTES:
            return unpack(frame)
        return await asyncio.to_thread(unpack, frame)

    async def _handle(self, event: dict[str, Any]) -> None:
        name = event.get("event")
        if name == "start":
            request = event.get("request")
            await self._start(parse_request(request if isinstance(request, dict) else {}))
        elif self._speech is not None:
            if name == "text":
                await self._append(self._speech, _text_of(event))
            elif name == "flush":
                await self._flush(self._speech)
            elif name == "stop":
                await self._stop(self._speech)

    async def _start(self, request: TtsRequest) -> None:
        self._drop_open_speech()
        voice = await self._voices.choose(request)
        self._charge(request.num_reference_chars)
        # What is played faster than it is made, once the lead is used up, would run dry.
        lead_ms = self._lead_ms if request.prosody.speed <= 1.0 else MAX_LEAD_MS
        settings = {"voice": voice, "sampling": request.sampling, "max_lead_ms": lead_ms}
        if self._is_session_started:
            await self._session.send(SessionUpdate.model_validate(settings))
        else:
            start = SessionStart.model_validate(settings | {"format": self._pcm})
            await self._session.send(start)
            self._is_session_started = True
        self._speech = Speech(request, self._pcm.sample_rate)
        self._speech.open_turn(self._take_turn_id())
        self._speeches.append(self._speech)
        await self._append(self._speech, request.text)

    async def _append(self, speech: Speech, text: str) -> None:
        for begin in range(0, len(text), MAX_TEXT_CHARS):
            piece = text[begin : begin + MAX_TEXT_CHARS]
            if speech.num_chars + len(piece) > _MAX_TURN_CHARS:
                await self._next_turn(speech)
            if speech is not self._speech:  # it has failed meanwhile
                return
            speech.num_chars += len(piece)
            speech.has_unflushed = True
            await self._session.append(speech.turn_id, piece)

    async def _flush(self, speech: Speech) -> None:
        """Nothing is heard of a flush without text; some clients send it at the end of a reply."""
        if not speech.has_unflushed:
            if speech.num_chars:
                await self._next_turn(speech)
            return
        speech.has_unflushed = False
        await self._session.flush(speech.turn_id)
        if speech.num_chars > _LONG_TURN_CHARS:
            await self._next_turn(speech)

    async def _next_turn(self, speech: Speech) -> None:
        """Unless the session is closing: it would refuse the turn, and fail what was said before."""
        if self._is_closing:
            return
        await self._session.commit(speech.turn_id)
        speech.open_turn(self._take_turn_id())

    async def _stop(self, speech: Speech) -> None:
        self._speech = None
        speech.is_stopped = True
        await self._session.commit(speech.turn_id)

    def _drop_open_speech(self) -> None:
        speech, self._speech = self._speech, None
        if speech is not None:
            self._drop(speech)

    def _drop(self, speech: Speech) -> None:
        if speech in self._speeches:
            self._speeches.remove(speech)
            for turn_id in tuple(speech.turns):
                self._session.cancel(turn_id)

    def _take_turn_id(self) -> int:
        self._next_turn_id += 1
        return self._next_turn_id - 1

    # ------------------------------------------------------------------ to the client

    async def _speak(self) -> None:
        while True:
            try:
                await self._take(await self._session.receive())
            except ConnectionLost as lost:
                code = 1000 if self._was_idle else lost.close_code or 1011
                await self._websocket.close(code, lost.message[:120])
                return
            except PlosiveError as error:
                await self._fail(error)

    async def _take(self, item: Item) -> None:
        match item:
            case AudioPacket():
                self._add_to_batch(item)
                if len(self._batch) == _MAX_BATCH:
                    await self._send_batch()
            case TurnText():
                speech = self._speech_of(item.turn_id)
                if speech is not None:
                    speech.alignment.add(item.text, item.audio_ms)
                await self._send_batch()
            case TurnDone():
                await self._send_batch()
                await self._finish_turn(item.turn_id)
            case SessionClosing():
                self._is_closing = True
        if not self._session.num_waiting:  # whatever came last
            await self._send_batch()

    def _add_to_batch(self, packet: AudioPacket) -> None:
        if packet.turn_id != self._batch_turn_id:
            self._batch.clear()  # of a turn that was dropped
            self._batch_turn_id = packet.turn_id
        self._batch.append(packet.payload)

    async def _send_batch(self) -> None:
        payloads, self._batch = self._batch, []
        speech = self._speech_of(self._batch_turn_id)
        if speech is not None and payloads:
            data = await asyncio.to_thread(speech.encoder.push, decode_pcm(payloads))
            await self._send_chunk(speech, data)

    async def _finish_turn(self, turn_id: int) -> None:
        speech = self._speech_of(turn_id)
        if speech is None:
            return
        speech.turns.remove(turn_id)
        await self._send_chunk(speech, await asyncio.to_thread(speech.end_turn))
        speech.alignment.next_chunk()
        if speech.is_over and speech in self._speeches:
            self._speeches.remove(speech)
            await self._send({"event": "finish", "reason": "stop"}, speech)

    async def _send_chunk(self, speech: Speech, data: bytes) -> None:
        if speech not in self._speeches:  # it was dropped while it was encoded
            return
        if self._with_timestamps and (data or speech.alignment.is_news):
            await self._send({"event": "audio", "audio": data, **speech.alignment.take()}, speech)
        elif data:
            await self._send({"event": "audio", "audio": data})

    async def _fail(self, error: PlosiveError) -> None:
        """Of one turn, or of all there are."""
        failed = [s for s in self._speeches if error.turn_id in (None, *s.turns)]
        for speech in failed:
            if speech is self._speech:
                self._speech = None
            with contextlib.suppress(ConnectionLost):
                self._drop(speech)
        is_told = error.fatal and error.code == self._failed_code  # of the replies that it ended
        if failed:
            self._failed_code = error.code
        elif error.code == "idle_timeout" and self._is_session_started and not is_told:
            self._was_idle = is_told = True
        if failed or (error.fatal and not is_told):
            await self._send_error(error)

    async def _send_error(self, error: PlosiveError) -> None:
        if self._with_timestamps:
            await self._send({"event": "error", "error": error.message})
        await self._send({"event": "finish", "reason": "error", "message": error.message})

    async def _send(self, event: dict[str, Any], speech: Speech | None = None) -> None:
        if self._with_timestamps and speech is not None:
            event["time"] = round(1000 * (time.monotonic() - speech.started_s))
        try:
            async with asyncio.timeout(self._stall_s):
                await self._websocket.send_bytes(ormsgpack.packb(event))
        except TimeoutError as error:
            close_stalled(self._websocket.scope, self._stall_s)
            raise WebSocketDisconnect(CLOSE_CODE["client_too_slow"]) from error

    def _speech_of(self, turn_id: int) -> Speech | None:
        return next((speech for speech in self._speeches if turn_id in speech.turns), None)


def _text_of(event: dict[str, Any]) -> str:
    text = event.get("text")
    if not isinstance(text, str):
        message = f"text: got {shorten(text)}, expected a string"
        raise PlosiveError("invalid_field", message, param="text")
    return text
