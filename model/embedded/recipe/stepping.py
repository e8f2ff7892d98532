"""Small parts that both trainers use: captured steps, optimisers, clocks, atomic files."""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str | None:
        return super()._get_help_string(action) if action.default else action.help


def command_parser(name: str, doc: str) -> argparse.ArgumentParser:
    """Of the command `model.embedded.recipe.NAME`, whose module says in its first line what it does."""
    prog, first_line = f"python -m model.embedded.recipe.{name}", doc.splitlines()[0]
    return argparse.ArgumentParser(prog, description=first_line, formatter_class=_Help)


class StepRunner:
    """Runs a training step that allocates nothing outside itself; on CUDA as one replayed graph.

    The first calls run eagerly on a side stream (kernels are chosen, optimiser state is made); the step is
    then captured once. At batch sizes that fit a small model, launching a thousand small kernels costs
    more than running them.
    """

    NUM_WARMUP = 3

    def __init__(self, step: Callable[[], None], graph: bool) -> None:
        self.step, self.use_graph = step, graph and torch.cuda.is_available()
        self.graph: torch.cuda.CUDAGraph | None = None
        self.num_calls = 0

    def __call__(self) -> None:
        self.num_calls += 1
        if not self.use_graph:
            self.step()
        elif self.num_calls <= self.NUM_WARMUP:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self.step()
            torch.cuda.current_stream().wait_stream(stream)
        else:
            if self.graph is None:
                self.graph = torch.cuda.CUDAGraph()
                torch.cuda.synchronize()
                with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                    self.step()
            self.graph.replay()


def adamw(
    groups: list[dict[str, Any]], betas: tuple[float, float], device: torch.device
) -> torch.optim.AdamW:
    """On CUDA the learning rate is a tensor and the update may be captured."""
    if device.type != "cuda":
        return torch.optim.AdamW(groups, lr=0.0, betas=betas)
    for group in groups:
        group["lr"] = torch.zeros((), device=device)
    lr = torch.zeros((), device=device)
    return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=True, capturable=True)


def set_lr(optimizer: torch.optim.Optimizer, rates: Sequence[float]) -> None:
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def save_atomically(write: Callable[[Path], Any], path: Path) -> None:
    """Write beside `path`, then rename: a reader never sees half a file."""
    part = path.with_name(path.name + ".part")
    write(part)
    part.chmod(0o644)
    part.replace(path)


def log_record(record: dict[str, Any], path: Path) -> None:
    """Print a line of JSON and append it to a file."""
    line = json.dumps(record)
    print(line, flush=True)
    with path.open("a") as file:
        file.write(line + "\n")


class Stopwatch:
    """Seconds of this run added to those of earlier ones, laps, and timers by name."""

    def __init__(self, spent_s: float) -> None:
        now = time.monotonic()
        self.start, self.lap = now - spent_s, now
        self.marks: dict[str, float] = {}

    @property
    def total_s(self) -> float:
        return time.monotonic() - self.start

    def lap_ms(self) -> float:
        now = time.monotonic()
        lap_ms, self.lap = 1e3 * (now - self.lap), now
        return lap_ms

    def since(self, name: str, period_s: float) -> bool:
        """True at most once per period."""
        now = time.monotonic()
        if now - self.marks.setdefault(name, now) < period_s:
            return False
        self.marks[name] = now
        return True
