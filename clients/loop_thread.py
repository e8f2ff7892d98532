"""An event loop on a thread of its own, for callers that block."""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import copy_context
from typing import Any, Self, TypeVar, cast

from realtime.errors import ConnectionLost, PlosiveError, SessionError

T = TypeVar("T")

_CANCEL_TIMEOUT_S = 2.0


class LoopThread:
    """Runs coroutines for any number of threads, for as long as the block lasts."""

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self._is_open = True
        self._process_id = os.getpid()
        self._thread = threading.Thread(target=self._work, name="plosive-client", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_open = False
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Wait for what the coroutine returns or raises. Ctrl-C cancels it, whenever it comes.

        Raises:
            ConnectionLost: the block was left already, or while it ran.
            SessionError: `other_process`, after a fork: the loop runs in the parent alone;
                `own_thread`, by what runs on the loop itself: it would wait for itself.
        """
        if refusal := self._refusal():
            coroutine.close()
            raise refusal
        tasks: list[asyncio.Task[T]] = []
        is_over = threading.Event()

        def start() -> None:
            tasks.append(self._loop.create_task(coroutine))
            tasks[0].add_done_callback(lambda _: is_over.set())

        def cancel() -> None:
            if tasks:
                tasks[0].cancel()
            else:
                coroutine.close()
                is_over.set()

        try:
            self._loop.call_soon_threadsafe(start)
            is_over.wait()
        except BaseException:
            self._loop.call_soon_threadsafe(cancel)
            is_over.wait(_CANCEL_TIMEOUT_S)
            raise
        if tasks[0].cancelled():
            raise _closed()
        return tasks[0].result()

    @property
    def is_of_a_parent(self) -> bool:
        """This process was forked while the block lasted; it runs in the parent alone."""
        return os.getpid() != self._process_id

    def _refusal(self) -> PlosiveError | None:
        if self.is_of_a_parent:
            why = "a session belongs to the process that opened it; connect() again after a fork"
            return SessionError("other_process", why)
        if threading.current_thread() is self._thread:
            why = "this runs on the session's own thread, which would wait for itself"
            return SessionError("own_thread", f"{why}; await what session.asynchronous has instead")
        return None if self._is_open else _closed()

    def _work(self) -> None:
        try:
            self._loop.run_until_complete(self._until_stopped())
        finally:
            self._loop.close()

    async def _until_stopped(self) -> None:
        await self._stopped.wait()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._loop.shutdown_asyncgens()


async def in_daemon_thread(function: Callable[[], T]) -> T:
    """Like `asyncio.to_thread`; but one that never returns keeps no program from ending."""
    loop, context = asyncio.get_running_loop(), copy_context()
    outcome: asyncio.Future[T] = loop.create_future()

    def tell(result: T | None, error: BaseException | None) -> None:
        if outcome.done():
            return  # nobody waits any more
        if error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(cast(T, result))

    def work() -> None:
        result: T | None = None
        error: BaseException | None = None
        try:
            result = context.run(function)
        except BaseException as raised:  # noqa: BLE001 - raised where it is awaited
            error = raised
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(tell, result, error)

    threading.Thread(target=work, name="plosive-text", daemon=True).start()
    return await outcome


def _closed() -> ConnectionLost:
    return ConnectionLost("the session was closed here")
