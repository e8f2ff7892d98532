"""A directory that a command fills: room checked first, progress shown, there as a whole or not."""

import errno
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from realtime.errors import PlosiveError

_MAX_NAME_CHARS = 40  # of a name that is still short enough with something before and after it


@contextmanager
def output_folder(
    out: Path, num_bytes: int, title: str, num_shown: int | None = None
) -> Iterator[tuple[Path, Callable[[int], object]]]:
    """Yields a directory beside `out` that becomes `out` when all went well, and a function to be
    told how many bytes were written, `num_shown` (`num_bytes`) in the end.

    Whatever ends the command, SIGTERM too, nothing is left of it; SIGKILL alone leaves the directory
    `.NAME.PID`.

    Raises:
        PlosiveError: `out` exists, or cannot be written, or the disk has no room.
    """
    out = out.absolute()
    exists = PlosiveError("invalid_config", f"{out} exists already; choose another name")
    if os.path.lexists(out):
        raise exists
    if not out.parent.is_dir():
        raise PlosiveError("invalid_config", f"there is no directory {out.parent}")
    free = shutil.disk_usage(out.parent).free
    if free < num_bytes:
        raise PlosiveError(
            "invalid_config",
            f"{out.parent}: {_in_words(free)} free, {_in_words(num_bytes)} needed; make room or "
            "choose another disk",
        )
    partial = out.with_name(f".{out.name[:_MAX_NAME_CHARS]}.{os.getpid()}")
    try:
        with signals_raised():
            partial.mkdir()
            with progress_bar(num_shown or num_bytes, title) as on_bytes:
                yield partial, on_bytes
            partial.rename(out)
    except OSError as error:
        if os.path.lexists(out):  # made by somebody else meanwhile
            raise exists from None
        why = str(error)
        if error.errno == errno.ENOSPC:
            why = f"its disk is full now; make room for {_in_words(num_bytes)}"
        elif error.errno is not None and Path(str(error.filename)) in (partial, out):
            why = error.strerror or why  # of the name that the user knows
        raise PlosiveError("invalid_config", f"{out} was not made: {why}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def signals_raised() -> Iterator[None]:
    """What would end the process at once raises SystemExit, as Ctrl-C raises KeyboardInterrupt."""

    def end(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    is_main = threading.current_thread() is threading.main_thread()
    ending = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if is_main and signal.getsignal(number) == signal.SIG_DFL
    ]
    for number in ending:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in ending:
            signal.signal(number, signal.SIG_DFL)


def _in_words(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"


@contextmanager
def progress_bar(num_bytes: int, title: str) -> Iterator[Callable[[int], object]]:
    """A bar on a terminal, to be told how many bytes came; nothing for none, or elsewhere."""
    from tqdm import tqdm

    # Its own lock holds a semaphore for other processes, which an engine's process, ended by
    # os._exit, would leave to the resource tracker to remove and to complain about.
    tqdm.set_lock(threading.RLock())
    with tqdm(
        total=num_bytes,
        desc=title,
        unit="B",
        unit_scale=True,
        file=sys.stderr,
        disable=None if num_bytes else True,
    ) as bar:
        yield bar.update
