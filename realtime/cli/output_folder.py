"""A directory that a command fills: room checked first, progress shown, there as a whole or not."""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from realtime.errors import PlosiveError


@contextmanager
def output_folder(
    out: Path, num_bytes: int, title: str, num_shown: int | None = None
) -> Iterator[tuple[Path, Callable[[int], object]]]:
    """Yields a directory beside `out` that becomes `out` when all went well, and a function to be
    told how many bytes were written, `num_shown` (`num_bytes`) in the end.

    Raises:
        PlosiveError: `out` exists, or the disk has no room.
    """
    out = out.absolute()
    exists = PlosiveError("invalid_config", f"{out} exists already; choose another name")
    if out.exists():
        raise exists
    if not out.parent.is_dir():
        raise PlosiveError("invalid_config", f"there is no directory {out.parent}")
    free = shutil.disk_usage(out.parent).free
    if free < num_bytes:
        raise PlosiveError(
            "invalid_config",
            f"{out.parent}: {free / 1e9:.1f} GB free, {num_bytes / 1e9:.1f} GB needed",
        )
    partial = out.with_name(f".{out.name}.{os.getpid()}")
    partial.mkdir()
    try:
        with progress_bar(num_shown or num_bytes, title) as on_bytes:
            yield partial, on_bytes
        try:
            partial.rename(out)
        except OSError:
            if out.exists():  # made by somebody else meanwhile
                raise exists from None
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def progress_bar(num_bytes: int, title: str) -> Iterator[Callable[[int], object]]:
    """A bar on a terminal, to be told how many bytes came; nothing for none, or elsewhere."""
    from tqdm import tqdm

    with tqdm(
        total=num_bytes,
        desc=title,
        unit="B",
        unit_scale=True,
        file=sys.stderr,
        disable=None if num_bytes else True,
    ) as bar:
        yield bar.update
