"""Reference clips in a process of their own: the same samples and refusals, and what cannot spread."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from model.audio import read_clip
from model.errors import ClipError
from realtime.pingpong import clip_process
from realtime.pingpong.clip_child import MAX_CPU_S, REFUSED
from realtime.pingpong.clip_process import read_clip_apart
from tests.model.test_audio import RATE, babble, chirp, encode, wav_f32


def child_runs(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    command = [sys.executable, "-c", script]
    monkeypatch.setattr(clip_process, "_command", lambda rate_hz, max_seconds: command)


def test_the_same_samples() -> None:
    clip = encode(babble(1.5, 48_000), 48_000, "ogg", "libopus", 2)
    expected = read_clip(clip, RATE, max_seconds=10, trim_silence=True)
    assert np.array_equal(read_clip_apart(clip, RATE, 10.0), expected)


TONE = 0.1 * np.sin(np.arange(RATE) / 9)


@pytest.mark.parametrize("clip", [b"", b"nothing", wav_f32(np.zeros(RATE)), wav_f32(TONE)])
def test_the_same_refusals(clip: bytes) -> None:
    with pytest.raises(ClipError) as here:
        read_clip(clip, RATE, max_seconds=10, trim_silence=True, must_speak=True)
    with pytest.raises(ClipError) as there:
        read_clip_apart(clip, RATE, 10.0)
    assert str(there.value) == str(here.value)


def test_the_length_is_limited() -> None:
    with pytest.raises(ClipError, match="longer than 1 s"):
        read_clip_apart(wav_f32(chirp(1.5, RATE)), RATE, 1.0)


def test_a_crash_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    child_runs(monkeypatch, "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    with pytest.raises(ClipError, match="decoder fails on it"):
        read_clip_apart(b"clip", RATE, 10.0)


def test_a_stall_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    child_runs(monkeypatch, "import time; time.sleep(60)")
    monkeypatch.setattr(clip_process, "_MAX_WALL_S", 0.3)
    with pytest.raises(ClipError, match="not decoded within 0.3 s"):
        read_clip_apart(b"clip", RATE, 10.0)


def test_a_fault_of_ours_is_not_called_the_clips(monkeypatch: pytest.MonkeyPatch) -> None:
    child_runs(monkeypatch, "raise KeyError('lost')")
    with pytest.raises(RuntimeError, match="lost"):
        read_clip_apart(b"clip", RATE, 10.0)


def test_the_child_knows_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLOSIVE_API_KEYS", "secret-secret-secret")
    script = "import os, sys; print([n for n in os.environ if 'PLOSIVE' in n]); sys.exit(3)"
    child_runs(monkeypatch, script)
    with pytest.raises(ClipError, match=r"\[\]"):
        read_clip_apart(b"clip", RATE, 10.0)


@pytest.mark.parametrize(
    ("attempt", "outcome"),
    [
        ("bytearray(2**31)", "MemoryError"),
        ("open('written', 'wb', 0).write(b'x')", "File too large"),
        ("import resource; print(resource.getrlimit(resource.RLIMIT_CPU))", f"({MAX_CPU_S}, "),
    ],
)
def test_the_childs_limits(tmp_path: Path, attempt: str, outcome: str) -> None:
    script = f"from realtime.pingpong import clip_child; clip_child.limit_resources(); {attempt}"
    child = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=clip_process._environ() | {"PYTHONDONTWRITEBYTECODE": "1"},
        cwd=tmp_path,
        check=False,
    )
    assert outcome in child.stdout + child.stderr


def test_the_child_starts_without_torch() -> None:
    script = "import realtime.pingpong.clip_child, sys; sys.exit('torch' in sys.modules)"
    env = clip_process._environ()
    assert subprocess.run([sys.executable, "-c", script], env=env, check=False).returncode == 0
    assert REFUSED == clip_process._REFUSED
    assert os.pathsep in env["PYTHONPATH"]
