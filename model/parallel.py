"""Work on several cores whose results are wanted in order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

MAX_THREADS = 8


def num_places() -> int:
    """Results of `map_in_order` that exist at a time."""
    return min(MAX_THREADS, len(os.sched_getaffinity(0))) + 1


def map_in_order(
    function: Callable[[ItemT, int], ResultT], items: Iterable[ItemT]
) -> Generator[ResultT, None, None]:
    """`map`, whose next few results are being made while one is used.

    For functions that leave the interpreter alone, as tensor operations do.

    Args:
        function: gets an item and a place below `num_places()`. No other result of that place is in
            use any more, so that it may stand for memory: fresh memory of many threads is given
            back late.
    """
    num_threads = num_places() - 1
    waiting: deque[Future[ResultT]] = deque()
    with ThreadPoolExecutor(num_threads) as pool:
        try:
            for i, item in enumerate(items):
                waiting.append(pool.submit(function, item, i % (num_threads + 1)))
                if len(waiting) > num_threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
