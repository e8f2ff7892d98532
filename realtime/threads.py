"""Threads of a process: their names as the operating system shows them (`top -H`,
/proc/PID/task/TID/comm), and how they share the interpreter."""

import ctypes
import sys

_PR_SET_NAME = 15
_MAX_BYTES = 15
# The engine's threads take and give the GIL thousands of times a second, around short operations.
# Python's 5 ms of patience costs them 10 to 15 % of the frames/s (embedded model, 2 cores).
_SWITCH_S = 0.000_5


def share_interpreter() -> None:
    """Let a thread of this process that waits for the interpreter have it soon."""
    sys.setswitchinterval(_SWITCH_S)


def name_thread(name: str) -> None:
    """Name the calling thread; its first 15 bytes show. Linux only, elsewhere nothing happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:_MAX_BYTES], 0, 0, 0)
