"""`plosive make-checkpoint`: all of it or nothing, and a sentence when it cannot be."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from realtime.__main__ import main
from tests.support.cli import leftovers


def make(*args: object) -> int:
    return main(["make-checkpoint", *map(str, args)])


def test_it_makes_a_checkpoint(tmp_path, capsys):
    out = tmp_path / "model"
    assert make(out, "--like", "tiny", "--frames", 5) == 0
    assert "10 MB in " in capsys.readouterr().out
    names = {file.name for file in out.iterdir()}
    assert names == {"config.json", "tokenizer.json", "model.safetensors", "codec.pth", "voices"}
    assert leftovers(tmp_path, out) == []


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("{}/there", "--like", "tiny"), "there exists already"),
        (("{}/no/model", "--like", "tiny"), "there is no directory"),
        (("{}/model", "--like", "tiny", "--seed", "-1"), "seed: got -1, expected 0 or more"),
        (
            ("{}/model", "--like", "tiny", "--reference-s", "200"),
            "frames=60 with reference_s=200 needs a context of 5307 positions, tiny has 2048",
        ),
        (("{}/model", "--like", "tiny", "--frames", "1700"), "tiny has 2048; ask for less"),
    ],
)
def test_what_it_cannot_do(tmp_path, capsys, args, message):
    there = tmp_path / "there"
    there.mkdir()
    assert make(*(arg.format(tmp_path) for arg in args)) == 1
    assert message in capsys.readouterr().err
    assert leftovers(tmp_path, there) == []


def test_a_full_disk_is_seen_before(tmp_path, capsys, monkeypatch):
    usage = type("usage", (), {"free": 1_000_000})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    assert make(tmp_path / "model", "--like", "s2-pro") == 1
    assert "1.0 MB free, 12.3 GB needed; make room" in capsys.readouterr().err
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("model.tensor_files.write_file", OSError(errno.ENOSPC, "No space left on device")),
        ("model.random_checkpoint.os.posix_fallocate", OSError(errno.ENOSPC, "No space")),
        ("model.random_checkpoint.torch.save", RuntimeError("unexpected pos 1528448")),
    ],
)
def test_a_disk_that_fills_meanwhile(tmp_path, capsys, monkeypatch, where, error):
    def full(*_: object) -> None:
        raise error

    monkeypatch.setattr(where, full)
    out = tmp_path / "model"
    assert make(out, "--like", "tiny") == 1
    expected = f"{out} was not made: its disk is full now; make room for 18.0 MB\n"
    assert capsys.readouterr().err == f"plosive make-checkpoint: {expected}"
    assert leftovers(tmp_path) == []


def test_a_mapped_file_has_its_blocks_before_it_is_written(tmp_path, monkeypatch):
    """Else a full disk is a SIGBUS, which nothing catches."""
    sparse: list[str] = []

    def look(*_: object) -> None:
        for file in tmp_path.rglob("scratch/*"):
            if file.stat().st_blocks * 512 < file.stat().st_size:
                sparse.append(file.name)

    monkeypatch.setattr("model.random_checkpoint.draw_codec_weight", look)
    assert make(tmp_path / "model", "--like", "tiny") == 0
    assert sparse == []


@pytest.mark.parametrize("name", ["a" * 255, "ü" * 127, "with space", "-x"])
def test_any_name_that_a_directory_can_have(tmp_path, name):
    assert make("--like", "tiny", "--", tmp_path / name) == 0
    assert leftovers(tmp_path, tmp_path / name) == []


def test_a_name_that_no_directory_can_have(tmp_path, capsys):
    out = tmp_path / ("a" * 256)
    assert make(out, "--like", "tiny") == 1
    assert f"{out} was not made: File name too long\n" in capsys.readouterr().err
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert make(tmp_path / "link", "--like", "tiny") == 1
    assert "link exists already" in capsys.readouterr().err
    assert leftovers(tmp_path, tmp_path / "link") == []


def test_an_interrupted_one_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("model.random_checkpoint.torch.save", interrupted)
    assert make(tmp_path / "model", "--like", "tiny") == 130
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_nothing(tmp_path, monkeypatch, number):
    before = signal.getsignal(number)
    monkeypatch.setattr(
        "model.random_checkpoint.torch.save", lambda *_: os.kill(os.getpid(), number)
    )
    with pytest.raises(SystemExit) as ended:
        make(tmp_path / "model", "--like", "tiny")
    assert ended.value.code == 128 + number
    assert leftovers(tmp_path) == []
    assert signal.getsignal(number) == before


def test_a_signal_that_is_ignored_is_ignored(tmp_path, monkeypatch):
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        monkeypatch.setattr(
            "model.random_checkpoint.torch.save", lambda *_: os.kill(os.getpid(), signal.SIGHUP)
        )
        assert make(tmp_path / "model", "--like", "tiny") == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_progress_bar_takes_nothing_that_must_be_given_back():
    """An engine's process ends without cleaning up; the resource tracker warned of a semaphore."""
    program = """
import multiprocessing, sys
from multiprocessing import resource_tracker
from realtime.cli.output_folder import progress_bar
multiprocessing.set_start_method("spawn")
resource_tracker.register = lambda *taken: sys.exit(f"taken: {taken}")
for num_bytes in (0, 1):
    with progress_bar(num_bytes, "title") as on_bytes:
        on_bytes(1)
"""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_two_at_a_time_do_not_mix(tmp_path, capsys, monkeypatch):
    out = tmp_path / "model"

    def other_is_first(*_: object) -> None:
        (out / "file").mkdir(parents=True)

    monkeypatch.setattr("model.random_checkpoint.write_checkpoint", other_is_first)
    assert make(out, "--like", "tiny") == 1
    assert f"{out} exists already" in capsys.readouterr().err
    assert leftovers(tmp_path, out) == []
