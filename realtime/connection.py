"""One client's socket: reads frames, applies the session's actions, writes what waits.

Five tasks in one group: reader, writer, start, text and idle watch. The first to end ends the others;
whatever the reason, the slot is given up at once. Nothing here waits for another connection or for the
engine.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sequence
from typing import Any, Protocol

from fastapi import WebSocketDisconnect

from realtime import wire
from realtime.command_queue import CommandQueue
from realtime.config import ServerConfig
from realtime.encoders import LoopEvent
from realtime.errors import CLOSE_CODE, EngineError, PlosiveError
from realtime.metrics import Metrics
from realtime.outbox import Audio, Closing, Item, Outbox, Text
from realtime.pingpong.messages import Command, SlotFailed, SlotRef
from realtime.session.actions import (
    Action,
    Bump,
    Close,
    Drop,
    OpenEncoder,
    Send,
    SendAudio,
    Submit,
)
from realtime.session.core import Session

INTERNAL_ERROR = "the server failed; its log says why"
ABORT_EXTENSION = "plosive.close_now"  # ASGI scope extensions of `realtime.websocket`
MAX_SIZE_EXTENSION = "plosive.set_max_size"
WRITE_NOW_EXTENSION = "plosive.write_now"
CUT_EXTENSION = "plosive.cut"  # of `realtime.http_protocol`
TEXT, BINARY = 0x1, 0x2  # opcodes of RFC 6455

WriteNow = Callable[[Sequence[tuple[int, bytes]]], bool]  # opcodes, messages; False: not written

logger = logging.getLogger(__name__)


class Socket(Protocol):
    """What a connection needs of a `fastapi.WebSocket`; `realtime.adapters.local` has another."""

    @property
    def scope(self) -> MutableMapping[str, Any]: ...

    async def receive(self) -> MutableMapping[str, Any]: ...

    async def send_text(self, data: str) -> None: ...

    async def send_bytes(self, data: bytes) -> None: ...

    async def close(self, code: int = 1000, reason: str | None = None) -> None: ...


class Backend(Protocol):
    """What a connection may do to the engine's side; implemented by `realtime.hub`."""

    def submit(self, command: Command) -> None: ...

    def set_blocked(self, slot: SlotRef, is_blocked: bool) -> None: ...

    def bump(self, slot: SlotRef) -> SlotRef: ...

    def open_encoder(self, slot: SlotRef, audio_format: wire.AudioFormat) -> None: ...


class Connection:
    """Create it when the upgrade is accepted; `run` returns when the socket is done with."""

    def __init__(
        self,
        websocket: Socket,
        session: Session,
        backend: Backend,
        config: ServerConfig,
        metrics: Metrics,
    ) -> None:
        self._websocket = websocket
        self._session = session
        self._backend = backend
        self._config = config
        self._metrics = metrics
        self._outbox = Outbox()
        self._commands = CommandQueue(backend.submit, self.fail)
        self._slot = session.slot
        self._now: WriteNow | None = None  # known once the upgrade is accepted
        self._unwritten: list[Text | Audio] = []  # of the call that is being applied
        self._is_blocked = False
        self._active_s = time.monotonic()
        self._text_came = asyncio.Event()
        self._ended = asyncio.Event()

    # ------------------------------------------------------------------ for the hub

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                watches = (self._watch_start, self._watch_text, self._watch_idle)
                parts = (self._read, self._write, *watches)
                tasks = [group.create_task(self._until_end(part)) for part in parts]
                await self._ended.wait()
                for task in tasks:
                    task.cancel()
        finally:
            self.apply(self._session.disconnected())

    def engine_event(self, event: LoopEvent) -> None:
        """An event of this connection's slot, from the egress thread."""
        if isinstance(event, SlotFailed):  # of whatever generation: the slot cannot go on
            self.fail(EngineError("engine_error", event.message))
        else:
            self.apply(self._session.engine_event(event, time.perf_counter_ns()))

    def shut_down(self, reason: str) -> None:
        self.apply(self._session.shut_down(reason))

    def fail(self, error: PlosiveError) -> None:
        self.apply(self._session.fail(error))

    # ------------------------------------------------------------------ the session's actions

    def apply(self, actions: Sequence[Action]) -> None:
        """All of them, in order. If the engine is gone, the session fails."""
        refusal: EngineError | None = None
        for action in actions:
            if isinstance(action, Submit):
                try:
                    self._commands.put(action.command)
                except EngineError as error:
                    refusal = error
            else:
                self._apply(action)
        self._flush()
        self._update_blocked()
        if refusal is not None:
            self.fail(refusal)

    def _apply(self, action: Action) -> None:
        match action:
            case Bump():
                self._slot = self._backend.bump(self._slot)
                assert self._slot == action.slot, (self._slot, action.slot)
            case OpenEncoder():
                self._backend.open_encoder(action.slot, action.format)
            case SendAudio():
                self._put_audio(action)
            case Send():
                self._put_message(action.message)
            case Drop():
                self._flush()
                self._outbox.drop(action.turn_id)
            case Close():
                self._flush()
                self._outbox.put(Closing(action.code, action.reason))

    def _put_audio(self, action: SendAudio) -> None:
        self._active_s = time.monotonic()
        frames = tuple(wire.pack_audio(packet) for packet in action.packets)
        audio_ms = float(wire.PACKET_MS * len(frames))
        is_first = action.packets[0].seq == 0
        self._unwritten.append(Audio(frames, action.turn_id, audio_ms, is_first))

    def _flush(self) -> None:
        """What one call of the session gave: in one write past the writer's task, where nothing waits
        and the socket has taken all it was given; else by way of the outbox."""
        items, self._unwritten = self._unwritten, []
        if not items:
            return
        if self._now is None:
            self._now = self._websocket.scope["extensions"].get(WRITE_NOW_EXTENSION, _never)
        if not self._outbox.is_idle or not self._now(list(_messages(items))):
            for item in items:
                self._outbox.put(item)
            return
        for item in items:
            if isinstance(item, Audio) and item.is_first:
                self._session.audio_written(item.turn_id, time.perf_counter_ns())

    def _put_message(self, message: wire.ServerMessage) -> None:
        turn_id = message.turn_id if isinstance(message, wire.TurnText) else None
        self._unwritten.append(Text(wire.encode(message), turn_id))
        match message:
            case wire.TurnDone():
                self._metrics.turn_done(message.metrics)
            case wire.TurnCancelled():
                self._metrics.turns.labels("cancelled").inc()
            case wire.SessionReady():
                self._metrics.ready.observe(message.prefill_ms / 1000.0)
            case wire.Error():
                self._metrics.errors.labels(message.code).inc()

    def _update_blocked(self) -> None:
        """Pause the stream above the high-water mark, resume it below the low one."""
        if self._session.is_closed:
            return
        limit_ms = self._config.low_water_ms if self._is_blocked else self._config.high_water_ms
        is_blocked = self._outbox.audio_ms > limit_ms
        if is_blocked != self._is_blocked:
            self._is_blocked = is_blocked
            self._backend.set_blocked(self._slot, is_blocked)
            self._metrics.blocked.inc(is_blocked)

    # ------------------------------------------------------------------ tasks

    async def _until_end(self, part: Callable[[], Awaitable[None]]) -> None:
        try:
            await part()
        except WebSocketDisconnect:
            pass
        except Exception:  # the client is told, the other clients go on
            logger.exception("session %s failed", self._session.session_id)
            self.fail(PlosiveError("internal_error", INTERNAL_ERROR))
            if part != self._write:
                return  # the writer says so and ends
        self._ended.set()

    async def _read(self) -> None:
        while True:
            message = await self._websocket.receive()
            if message["type"] == "websocket.disconnect":
                return
            self._active_s = time.monotonic()
            text, data = message.get("text"), message.get("bytes")
            if text is not None:
                self.apply(self._session.receive_text(text, time.perf_counter_ns()))
                self._text_came.set()
            else:
                self.apply(self._session.receive_binary(len(data or b"")))
            await self._outbox.wait_for_room()
            await self._commands.wait_until_empty()
            await asyncio.sleep(0)  # a burst of messages must not keep the other clients waiting

    async def _write(self) -> None:
        while True:
            item = await self._outbox.take()
            try:
                async with asyncio.timeout(self._config.write_stall_s):
                    await self._send(item)
            except TimeoutError:
                self._metrics.errors.labels("client_too_slow").inc()
                return close_stalled(self._websocket.scope, self._config.write_stall_s)
            if isinstance(item, Closing):
                return None
            self._outbox.taken(item)
            self._update_blocked()

    async def _send(self, item: Item) -> None:
        match item:
            case Text():
                await self._websocket.send_text(item.frame)
            case Audio():
                for frame in item.frames:
                    await self._websocket.send_bytes(frame)
                if item.is_first:
                    self._session.audio_written(item.turn_id, time.perf_counter_ns())
            case Closing():
                await self._websocket.close(item.code, item.reason[:120])

    async def _watch_start(self) -> None:
        """Whoever takes a slot says soon what for."""
        limit_s = self._config.start_timeout_s
        await asyncio.sleep(limit_s)
        if not self._session.is_started:
            self.fail(PlosiveError("idle_timeout", f"no session.start came for {limit_s:g} s"))
        await asyncio.Event().wait()  # the writer sends the close

    async def _watch_text(self) -> None:
        while True:
            await self._text_came.wait()
            self._text_came.clear()
            while (due_ns := self._session.auto_flush_ns) is not None:
                await asyncio.sleep(max(0.0, (due_ns - time.perf_counter_ns()) / 1e9))
                self.apply(self._session.auto_flush(time.perf_counter_ns()))

    async def _watch_idle(self) -> None:
        """Warn once before the limit, close at it. Messages and audio count as activity."""
        limit_s = self._config.idle_timeout_s
        warn_s = max(0.0, limit_s - self._config.idle_warning_s)
        warned_of_s: float | None = None
        while True:
            active_s = self._active_s
            is_warned = warned_of_s == active_s
            due_s = active_s + (limit_s if is_warned else warn_s)
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            if self._active_s != active_s:
                continue
            if is_warned:
                self.fail(PlosiveError("idle_timeout", f"nothing happened for {limit_s:g} s"))
                await asyncio.Event().wait()  # until the writer has sent the close
            warned_of_s = active_s
            left_s = limit_s - warn_s
            warning = f"the session is idle and closes in {left_s:g} s unless something is sent"
            self._put_message(wire.Warn(code="idle", message=warning))
            self._flush()


def close_stalled(scope: MutableMapping[str, Any], stall_s: float) -> None:
    """The socket takes nothing, a close frame included: write that one past the flow control where the
    server offers it, and let the client find it behind what it has not read."""
    close_now = scope["extensions"].get(ABORT_EXTENSION)
    if close_now is not None:
        close_now(CLOSE_CODE["client_too_slow"], f"nothing was read for {stall_s:g} s")


def _messages(items: Sequence[Text | Audio]) -> Iterator[tuple[int, bytes]]:
    for item in items:
        if isinstance(item, Text):
            yield TEXT, item.frame.encode()
        else:
            for frame in item.frames:
                yield BINARY, frame


def _never(messages: Sequence[tuple[int, bytes]]) -> bool:
    return False
