"""What the commands of this package share: types of options, and how a command ends."""

import argparse
import json
import math
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

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


def positive_ints(text: str) -> list[int]:
    """Separated by commas."""
    return [positive_int(part) for part in text.split(",")]


def some_of(names: Collection[str]) -> Callable[[str], list[str]]:
    """A type of names separated by commas."""

    def chosen(text: str) -> list[str]:
        for name in text.split(","):
            if name not in names:
                known = ", ".join(names)
                raise argparse.ArgumentTypeError(f"{name!r} is none of {known}")
        return text.split(",")

    return chosen


def file_to_write(text: str) -> Path:
    """Refused before anything is measured, not after."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a directory, expected a file")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{path}: there is no directory {path.parent}")
    return path


def record_of(*fields: str) -> Callable[[str], dict[str, Any]]:
    """A type of JSON files with these fields."""

    def read(text: str) -> dict[str, Any]:
        try:
            record = json.loads(Path(text).read_text("utf-8"))
        except OSError as error:
            raise argparse.ArgumentTypeError(f"{text}: {error.strerror}") from None
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text} is no JSON") from None
        for field in fields:
            if not isinstance(record, dict) or field not in record:
                raise argparse.ArgumentTypeError(f"{text} is no such record: it has no {field!r}")
        assert isinstance(record, dict)
        return record

    return read


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
