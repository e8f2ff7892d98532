"""Names of threads as the operating system shows them (`top -H`, /proc/PID/task/TID/comm)."""

import ctypes
import sys

_PR_SET_NAME = 15
_MAX_BYTES = 15


def name_thread(name: str) -> None:
    """Name the calling thread; its first 15 bytes show. Linux only, elsewhere nothing happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:_MAX_BYTES], 0, 0, 0)
