"""Where the sweep is, on stderr: a line that is overwritten, or one now and then where none can be."""

import sys
import time
from dataclasses import dataclass
from typing import TextIO

_TTY_INTERVAL_S = 0.25
_INTERVAL_S = 10.0


@dataclass(frozen=True)
class Progress:
    """Of one level."""

    num_done: int  # turns, those of the warm-up included
    num_turns: int
    elapsed_s: float
    of_s: float | None = None  # of a level that lasts a given time

    def __str__(self) -> str:
        if self.of_s is not None:
            return f"{self.num_done} turns, {self.elapsed_s:.0f} s (level of {self.of_s:g} s)"
        line = f"{self.num_done}/{self.num_turns} turns, {self.elapsed_s:.0f} s"
        if not self.num_done:
            return line
        left_s = self.elapsed_s * (self.num_turns - self.num_done) / self.num_done
        return f"{line}, about {left_s:.0f} s left"


class Display:
    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._is_tty = self._stream.isatty()
        self._shown_s = time.monotonic()

    def step(self, text: str) -> None:
        """What begins now."""
        self.clear()
        print(f"- {text}", file=self._stream, flush=True)
        self._shown_s = time.monotonic()

    def show(self, progress: Progress) -> None:
        """How far it is; most calls show nothing."""
        now_s = time.monotonic()
        if now_s - self._shown_s < (_TTY_INTERVAL_S if self._is_tty else _INTERVAL_S):
            return
        self._shown_s = now_s
        self.clear()
        end = "" if self._is_tty else "\n"
        print(f"  {progress}", end=end, file=self._stream, flush=True)

    def clear(self) -> None:
        if self._is_tty:
            print("\r\x1b[K", end="", file=self._stream, flush=True)
