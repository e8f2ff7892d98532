"""Waiting for what another thread does and tells nobody of."""

import time
from collections.abc import Callable

TIMEOUT_S = 30.0


def wait_until(is_true: Callable[[], bool]) -> None:
    end_s = time.monotonic() + TIMEOUT_S
    while not is_true():
        assert time.monotonic() < end_s, "it never came true"
        time.sleep(0.001)
