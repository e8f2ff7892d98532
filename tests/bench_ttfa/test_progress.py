"""What a run shows while it lasts, and that nothing of it is left when it is ended."""

import io
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bench_ttfa import progress
from bench_ttfa.__main__ import main
from bench_ttfa.progress import Display, Progress

ROOT = Path(__file__).resolve().parents[2]
SCRIPTED = (sys.executable, "-m", "tests.clients.scripted_server")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_a_line_with_an_estimate() -> None:
    assert str(Progress(0, 30, 2.0)) == "0/30 turns, 2 s"
    assert str(Progress(10, 30, 20.0)) == "10/30 turns, 20 s, about 40 s left"


def test_a_line_now_and_then_where_none_can_be_overwritten(monkeypatch) -> None:
    stream = io.StringIO()
    display = Display(stream)
    display.step("c=1")
    display.show(Progress(1, 30, 1.0))
    monkeypatch.setattr(progress, "_INTERVAL_S", 0.0)
    display.show(Progress(2, 30, 2.0))
    display.clear()
    assert stream.getvalue() == "- c=1\n  2/30 turns, 2 s, about 28 s left\n"


def test_one_line_that_is_overwritten_on_a_terminal(monkeypatch) -> None:
    monkeypatch.setattr(progress, "_TTY_INTERVAL_S", 0.0)
    stream = Terminal()
    display = Display(stream)
    display.show(Progress(1, 2, 3.0))
    display.step("c=2")
    clear = "\r\x1b[K"
    assert stream.getvalue() == f"{clear}  1/2 turns, 3 s, about 3 s left{clear}- c=2\n"


def test_a_sweep_shows_it(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr("clients.local_server.SERVE", SCRIPTED)
    monkeypatch.setattr(progress, "_INTERVAL_S", 0.0)
    assert main(["-c", "1", "--turns", "2", "--out", str(tmp_path)]) == 0
    assert "/4 turns, " in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_run_that_is_ended_leaves_nothing_running(number, tmp_path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    code = (
        "import clients.local_server, sys\n"
        f"clients.local_server.SERVE = {SCRIPTED!r}\n"
        "from bench_ttfa.__main__ import main\n"
        "if __name__ == '__main__':\n"
        f"    sys.exit(main(['-c', '1', '--serve', '--mute', {str(fifo)!r}]))"
    )
    program = tmp_path / "bench.py"
    program.write_text(code)
    with subprocess.Popen(
        [sys.executable, str(program)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
    ) as process:
        server = os.pidfd_open(int(fifo.read_text()))  # waits until a text has come
        process.send_signal(number)
        _, error = process.communicate(timeout=20)
    try:
        assert select.select([server], [], [], 10.0)[0], "the server goes on"
        assert b"Traceback" not in error
        assert process.returncode == (-number if number == signal.SIGKILL else 130)
    finally:
        os.close(server)
