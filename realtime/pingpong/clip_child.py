"""The process that decodes one reference clip: `-m realtime.pingpong.clip_child RATE MAX_SECONDS`.

The clip comes on stdin. Its samples, f32, leave on stdout; or with exit code `REFUSED` the sentence
that says why it cannot be used. Whatever the decoder's C code does with a hostile file, it does it
here: with little memory, little time and no file to write to.
"""

import contextlib
import sys

from model.audio import read_clip
from model.errors import ClipError

REFUSED = 3
MAX_MEMORY_BYTES = 1536 * 2**20  # of address space; 30 s of anything need a third
MAX_CPU_S = 10  # 30 s of anything need less than one


def limit_resources() -> None:
    """For the rest of this process, where the system can."""
    with contextlib.suppress(ImportError):
        import resource

        for limit, value in (
            (resource.RLIMIT_AS, MAX_MEMORY_BYTES),
            (resource.RLIMIT_CPU, MAX_CPU_S),
            (resource.RLIMIT_FSIZE, 0),
            (resource.RLIMIT_CORE, 0),
        ):
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(limit, (value, value))


def main() -> int:
    limit_resources()
    rate_hz, max_seconds = int(sys.argv[1]), float(sys.argv[2])
    clip = sys.stdin.buffer.read()
    try:
        samples = read_clip(
            clip, rate_hz, max_seconds=max_seconds, trim_silence=True, must_speak=True
        )
    except ClipError as error:
        sys.stdout.buffer.write(str(error).encode("utf-8", "replace"))
        return REFUSED
    except MemoryError:
        sys.stdout.write("the clip takes too much memory to decode; export it again as WAV")
        return REFUSED
    sys.stdout.buffer.write(samples.astype("<f4", copy=False).tobytes())
    return 0


if __name__ == "__main__":
    sys.exit(main())
