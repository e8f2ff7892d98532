"""One session for all that an agent says: its voice stays prefilled between the replies."""

import asyncio
from contextlib import AsyncExitStack, suppress
from typing import Unpack

from clients.opening import ConnectOptions, connect
from clients.reconnect import Reconnect
from clients.session import Session
from realtime.errors import ConnectionLost


class SharedSession:
    """Opened when it is first needed, and again when it has ended.

    A connection that is lost is opened again at once, unless `reconnect` says otherwise, so that
    the next reply does not wait for it.
    """

    def __init__(self, url: str, **options: Unpack[ConnectOptions]) -> None:
        self._url = url
        self._options: ConnectOptions = {"reconnect": Reconnect(), **options}
        self._session: Session | None = None
        self._stack = AsyncExitStack()
        self._lock = asyncio.Lock()

    async def get(self) -> Session:
        """The open session.

        Raises:
            PlosiveError: it cannot be opened; the next call tries again.
        """
        async with self._lock:
            if self._session is not None and self._session.has_ended:
                await self._close()
            if self._session is None:
                opening = connect(self._url, **self._options)
                self._session = await self._stack.enter_async_context(opening)
            return self._session

    @property
    def is_open(self) -> bool:
        return self._session is not None and not self._session.has_ended

    async def set_voice(self, voice: str | None) -> None:
        """For the next turn, and for every session from now on. Raises like `Session.update`."""
        async with self._lock:
            if self._session is not None and not self._session.has_ended and voice is not None:
                with suppress(ConnectionLost):  # the next session begins with it
                    await self._session.update(voice=voice)
            self._options["voice"] = voice

    async def close(self) -> None:
        async with self._lock:
            await self._close()

    async def _close(self) -> None:
        self._session = None
        await self._stack.aclose()
