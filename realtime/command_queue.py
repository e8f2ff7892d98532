"""A session's commands on their way to the engine, in order. Event loop only.

The engine takes a bounded number of a slot's commands at a time; a long text or a flood of small
pieces is more than that. What it does not take yet waits here, and the session's client is not read
from meanwhile: nothing is lost, memory is bounded by one message, and no other session is held up.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from realtime.errors import EngineError
from realtime.pingpong.messages import CloseSlot, Command

_RETRY_S = 0.01


class CommandQueue:
    """
    Args:
        submit: raises EngineError; code `engine_overloaded` means later.
        fail: called once when a command that waited is refused for good.
    """

    def __init__(
        self, submit: Callable[[Command], None], fail: Callable[[EngineError], None]
    ) -> None:
        self._submit = submit
        self._fail = fail
        self._waiting: deque[Command] = deque()
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def put(self, command: Command) -> None:
        """Raises EngineError when the engine is gone; what waited is discarded then."""
        is_close = isinstance(command, CloseSlot)
        if is_close:
            self._waiting.clear()  # with the slot closed, none of it would have an effect
        self._waiting.append(command)
        if is_close or self._is_empty.is_set():
            self._pass_on()

    async def wait_until_empty(self) -> None:
        await self._is_empty.wait()

    def _pass_on(self) -> None:
        self._is_empty.set()
        while self._waiting:
            try:
                self._submit(self._waiting[0])
            except EngineError as error:
                if error.code != "engine_overloaded":
                    self._waiting.clear()
                    raise
                self._is_empty.clear()
                asyncio.get_running_loop().call_later(_RETRY_S, self._retry)
                return
            self._waiting.popleft()

    def _retry(self) -> None:
        try:
            self._pass_on()
        except EngineError as error:
            self._fail(error)
