"""What the commands of this package share: types of options, and how a command ends."""

import argparse
import math
import sys
from collections.abc import Callable

from clients import PlosiveError
from clients.explain import sentence
from clients.local_server import stopped_like_interrupted


def exit_status(name: str, run: Callable[[], int]) -> int:
    """What `run` returns; 1 with one sentence on stderr when it cannot be done, 130 when it is
    interrupted."""
    try:
        with stopped_like_interrupted():
            return run()
    except (PlosiveError, OSError) as error:
        print(f"{name}: {sentence(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number of at least 1")
    return int(text)


def count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number of at least 0")
    return int(text)


def positive_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number of more than 0")
    return value


def length_s(text: str) -> float:
    return 0.0 if text == "0" else positive_float(text)
