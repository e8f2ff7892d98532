"""Reference clips are decoded in a process of their own: a file that crashes or stalls FFmpeg costs
its sender an error, and nobody else anything."""

import logging
import os
import subprocess
import sys

import numpy as np
from numpy.typing import NDArray

from model.errors import ClipError

_REFUSED = 3  # `clip_child.REFUSED`, which is not imported: it brings FFmpeg
_MAX_WALL_S = 30.0  # on a busy machine; the child's own limit counts only its CPU time

logger = logging.getLogger(__name__)


def read_clip_apart(clip: bytes, rate_hz: int, max_seconds: float) -> NDArray[np.float32]:
    """`model.audio.read_clip`, silence trimmed, in a child. Waits for it: 0.3 s and more.

    Returns:
        f32 [N] (host), at `rate_hz`.

    Raises:
        ClipError: what `read_clip` raises, or a clip on which the decoder fails.
    """
    try:
        child = subprocess.run(
            _command(rate_hz, max_seconds),
            input=clip,
            capture_output=True,
            timeout=_MAX_WALL_S,
            env=_environ(),
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise _unusable(f"it was not decoded within {_MAX_WALL_S:g} s") from error
    if child.returncode == _REFUSED:
        raise ClipError(child.stdout.decode("utf-8", "replace"))
    if child.returncode < 0:
        logger.warning("the decoder of a clip was ended by signal %d", -child.returncode)
        raise _unusable("the decoder fails on it")
    if child.returncode != 0:
        said = child.stderr.decode("utf-8", "replace")[-2_000:]
        raise RuntimeError(f"the decoder of clips ended with {child.returncode}: {said}")
    return np.frombuffer(child.stdout, "<f4").astype(np.float32)


def _unusable(why: str) -> ClipError:
    return ClipError(f"the clip cannot be used: {why}; export it again as WAV, 10 to 30 s of it")


def _command(rate_hz: int, max_seconds: float) -> list[str]:
    module = "realtime.pingpong.clip_child"
    return [sys.executable, "-P", "-m", module, str(rate_hz), str(max_seconds)]


def _environ() -> dict[str, str]:
    """What finds the same packages, without the server's own variables: they may hold keys."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PLOSIVE_")}
    return kept | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",  # each thread's buffers count as memory
    }
