"""A session inside the server's own process, for adapters that speak another protocol to a client.

It is served by the same `Connection` as a WebSocket client's and goes the same way to the engine;
only the socket is in memory. Both directions are bounded: a caller that does not take what comes
pauses its own stream and, after `write_stall_s`, loses its session, like a client that stops reading.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, Generic, TypeVar

from fastapi import WebSocketDisconnect

from realtime import wire
from realtime.connection import ABORT_EXTENSION
from realtime.errors import ConnectionLost, PlosiveError
from realtime.hub import Hub
from realtime.pingpong.messages import SlotRef, VoicePrompt

_MAX_FRAMES = 16  # in each direction; 320 ms of audio

Item = wire.ServerMessage | wire.AudioPacket

_T = TypeVar("_T")
_serving: set[asyncio.Task[None]] = set()  # the event loop itself holds its tasks only weakly


@contextlib.asynccontextmanager
async def open_session(
    hub: Hub,
    start: wire.SessionStart | None = None,
    *,
    slot: SlotRef | None = None,
    client: str | None = None,
    find_voice: Callable[[str], VoicePrompt] | None = None,
) -> AsyncIterator["LocalSession"]:
    """A session, with `start` sent if it is given; leaving the context, also by cancellation,
    frees its slot.

    Args:
        slot: from `Hub.admit`, if the caller has admitted its client already; else one is taken.
        client: who is charged for the text; None where `Hub.charge_text` is called for it.
        find_voice: looks `start.voice` up instead of the voice store.

    Raises:
        CapacityError: all slots are taken, or the server is not ready.
    """
    socket = _MemorySocket()
    slot = hub.admit() if slot is None else slot
    serving = _Serving(hub, socket, slot, partial(hub.serve, socket, slot, client, find_voice))
    with hub.guest():
        try:
            session = LocalSession(socket)
            if start is not None:
                await session.send(start)
            yield session
        finally:
            serving.stop()
            await asyncio.wait((serving.task,))


class LocalSession:
    """The client's side. Iterate, or call `receive`, in one task; send from others, which wait while
    the session does not take more: it may wait for the first.

    Every message comes out as on the wire, except errors: they are raised, as `PlosiveError`. After
    one that is not `fatal` the session can be used and received from again.
    """

    def __init__(self, socket: "_MemorySocket") -> None:
        self._socket = socket
        self._cancelled: set[int] = set()

    # ------------------------------------------------------------------ to the session

    async def send(self, message: wire.ClientMessage) -> None:
        """Waits while the session is behind. Raises ConnectionLost when it is over."""
        await self._socket.to_server.put(wire.encode(message))

    async def append(self, turn_id: int, text: str) -> None:
        """Text of any length: it is sent in messages that are as long as they may be."""
        for start in range(0, len(text), wire.MAX_TEXT_CHARS):
            piece = text[start : start + wire.MAX_TEXT_CHARS]
            await self.send(wire.TextAppend(turn_id=turn_id, text=piece))

    async def flush(self, turn_id: int) -> None:
        await self.send(wire.TextFlush(turn_id=turn_id))

    async def commit(self, turn_id: int) -> None:
        await self.send(wire.TurnCommit(turn_id=turn_id))

    def cancel(self, turn_id: int, played_ms: float | None = None) -> None:
        """Stop the turn; none of its audio is received from now on. Does not wait, so that whoever
        receives can cancel: a session that is behind may wait for just that one to receive."""
        self._cancelled.add(turn_id)
        cancel = wire.TurnCancel(turn_id=turn_id, played_ms=played_ms)
        self._socket.to_server.put_at_once(wire.encode(cancel))

    # ------------------------------------------------------------------ from the session

    @property
    def num_waiting(self) -> int:
        """Items that can be received without waiting, at least."""
        return len(self._socket.to_client)

    async def receive(self) -> Item:
        """The next message or packet.

        Raises:
            PlosiveError: what the server sent as an error.
            ConnectionLost: the session is over (`close_code` 1000 after a `session.close`).
        """
        while True:
            frame = await self._socket.to_client.take()
            if isinstance(frame, bytes):
                packet = wire.unpack_audio(frame)
                if packet.turn_id not in self._cancelled:
                    return packet
                continue
            message = wire.decode_server(frame)
            if isinstance(message, wire.TurnCancelled):
                self._cancelled.discard(message.turn_id)
            if isinstance(message, wire.Error):
                raise _error(message)
            return message

    def __aiter__(self) -> "LocalSession":
        return self

    async def __anext__(self) -> Item:
        try:
            return await self.receive()
        except ConnectionLost as lost:
            if lost.close_code == 1000:
                raise StopAsyncIteration from lost
            raise


def _error(message: wire.Error) -> PlosiveError:
    return PlosiveError(
        message.code,
        message.message,
        param=message.param,
        turn_id=message.turn_id,
        fatal=message.fatal,
    )


# ---------------------------------------------------------------------------- the socket


class _Serving:
    """The task that runs the connection; the slot is given back also if it never got to run."""

    def __init__(
        self,
        hub: Hub,
        socket: "_MemorySocket",
        slot: SlotRef,
        serve: Callable[[], Awaitable[None]],
    ) -> None:
        self._hub = hub
        self._socket = socket
        self._slot = slot
        self._serve = serve
        self._has_run = False
        self.task = asyncio.create_task(self._run())
        _serving.add(self.task)
        self.task.add_done_callback(_serving.discard)

    def stop(self) -> None:
        if not self._has_run:
            self._hub.give_back(self._slot)
        self.task.cancel()

    async def _run(self) -> None:
        self._has_run = True
        try:
            await self._serve()
        finally:
            self._socket.end(ConnectionLost("the session is over"))


class _MemorySocket:
    """What a `Connection` knows of a WebSocket, and the two channels behind it."""

    def __init__(self) -> None:
        self.scope: dict[str, Any] = {"extensions": {ABORT_EXTENSION: self._end_with}}
        self.to_server: _Channel[str] = _Channel()
        self.to_client: _Channel[str | bytes] = _Channel()

    async def receive(self) -> dict[str, Any]:
        try:
            return {"type": "websocket.receive", "text": await self.to_server.take()}
        except ConnectionLost:
            return {"type": "websocket.disconnect"}

    async def send_text(self, data: str) -> None:
        await self._send(data)

    async def send_bytes(self, data: bytes) -> None:
        await self._send(data)

    async def _send(self, frame: str | bytes) -> None:
        try:
            await self.to_client.put(frame)
        except ConnectionLost as lost:
            raise WebSocketDisconnect(1006) from lost

    async def close(self, code: int = 1000, reason: str | None = None) -> None:
        self._end_with(code, reason or "")

    def _end_with(self, code: int, reason: str) -> None:
        self.end(ConnectionLost(f"the session has ended: {reason}", close_code=code))

    def end(self, lost: ConnectionLost) -> None:
        self.to_server.end(lost)
        self.to_client.end(lost)


class _Channel(Generic[_T]):
    """A short queue that can end: what is in it is still taken, then everybody gets the reason."""

    def __init__(self) -> None:
        self._items: deque[_T] = deque()
        self._putting = asyncio.Lock()
        self._changed = asyncio.Event()
        self._ended: ConnectionLost | None = None

    def __len__(self) -> int:
        return len(self._items)

    async def put(self, item: _T) -> None:
        """Of several that wait, the first comes first."""
        async with self._putting:
            while self._ended is None and len(self._items) >= _MAX_FRAMES:
                await self._wait()
            if self._ended is not None:
                raise self._ended
            self._items.append(item)
            self._changed.set()

    def put_at_once(self, item: _T) -> None:
        """Past those that wait; for what there is little of."""
        if self._ended is not None:
            raise self._ended
        self._items.append(item)
        self._changed.set()

    async def take(self) -> _T:
        while self._ended is None and not self._items:
            await self._wait()
        if not self._items:
            assert self._ended is not None
            raise self._ended
        item = self._items.popleft()
        self._changed.set()
        return item

    def end(self, reason: ConnectionLost) -> None:
        """The first reason stays."""
        if self._ended is None:
            self._ended = reason
            self._changed.set()

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()
