"""What went wrong, in words for whoever reads a terminal: no error numbers, no Python types."""

import os
import re

from realtime.errors import PlosiveError

_NUMBER = re.compile(r"\[Errno (\d+)\]")


def cause(error: Exception) -> str:
    """Why a connection could not be made.

    Example:
        >>> cause(OSError("Multiple exceptions: [Errno 111] Connect call failed ('::1', 1), ..."))
        'connection refused'
    """
    reason = getattr(error, "reason", error)  # urllib wraps it
    numbers = dict.fromkeys(_NUMBER.findall(str(reason)))
    if numbers:
        return ", ".join(os.strerror(int(number)).lower() for number in numbers)
    return getattr(reason, "strerror", None) or str(reason) or type(reason).__name__


def sentence(error: PlosiveError | OSError) -> str:
    """The message of an error, without its code; of a file that cannot be used, its name and why."""
    if isinstance(error, PlosiveError):
        return error.message
    if error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)
