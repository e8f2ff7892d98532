"""`plosive serve` as a process: announcing, refusing, draining on SIGTERM."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from realtime import wire
from realtime.cli.serve import (
    bind,
    listening_line,
    load_engine,
    memory_line,
    start_up_line,
)
from realtime.config import ServerConfig
from realtime.errors import PlosiveError

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import argparse, sys
from pathlib import Path
from realtime.cli.serve import serve
from realtime.config import ServerConfig
from tests.realtime.support import make_engine
from realtime.config import add_arguments, from_args
folder, frame_s, error = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
parser = argparse.ArgumentParser()
add_arguments(parser)
config = from_args(parser.parse_args([*sys.argv[4:], "--voices-dir", str(folder / "v")]))
def make(config):
    engine = make_engine(folder, frame_s=frame_s)
    engine.warm_up_error = RuntimeError(error) if error else None
    return engine
sys.exit(serve(config, make))
"""
FINISHING = "sessions that finish their turns: 1; 20 s at most, a second signal ends them now\n"


@contextmanager
def process(
    folder: Path, frame_s: float = 0.0, error: str = ""
) -> Iterator[tuple["subprocess.Popen[str]", dict[str, Any]]]:
    """The server and what it announced; nothing if it closed the pipe without a word."""
    read_fd, write_fd = os.pipe()
    lifeline_fd, held_fd = os.pipe()
    options = ["--port", "0", "--announce-fd", str(write_fd), "--lifeline-fd", str(lifeline_fd)]
    # Debug mode tells of slow steps on stderr: on a busy machine the set-up is one.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONASYNCIODEBUG"}
    child = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", PROGRAM, folder, str(frame_s), error, *options],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=[write_fd, lifeline_fd],
        text=True,
    )
    os.close(write_fd)
    os.close(lifeline_fd)
    with os.fdopen(read_fd) as pipe, child:
        try:
            line = pipe.readline()
            yield child, json.loads(line) | {"lifeline": held_fd} if line else {}
        finally:
            child.kill()
            with suppress(OSError):
                os.close(held_fd)


@contextmanager
def speaking(announced: dict[str, Any], text: str) -> Iterator[ClientConnection]:
    """A client that has begun to hear the text."""
    ws_url = announced["url"].replace("http", "ws") + wire.PATH
    with connect(ws_url, subprotocols=[wire.SUBPROTOCOL], proxy=None) as client:
        client.send(wire.encode(wire.SessionStart()))
        client.send(wire.encode(wire.TextAppend(turn_id=1, text=text)))
        client.send(wire.encode(wire.TurnCommit(turn_id=1)))
        while not isinstance(client.recv(timeout=10), bytes):
            pass
        yield client


def test_announce_serve_and_drain(tmp_path: Path) -> None:
    with process(tmp_path, frame_s=0.01) as (child, announced):
        url = announced["url"]
        assert httpx.get(url + "/ready", trust_env=False).json()["ready"]
        assert announced["ready_s"] > 0 and url.endswith(f":{announced['port']}")
        with speaking(announced, "A few words to say. " * 5) as client:
            child.send_signal(signal.SIGTERM)
            messages = []
            with pytest.raises(ConnectionClosed) as closed:
                while True:
                    frame = client.recv(timeout=10)
                    if isinstance(frame, str):
                        messages.append(wire.decode_server(frame).type)
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1001
        assert "session.closing" in messages and messages[-1] == "turn.done"
        stdout, stderr = child.communicate(timeout=10)
        assert child.returncode == 0, stderr
        assert stdout.startswith(f"Plosive listening on {url} (model fake, 2 slots, ready in ")
        assert stdout.count("\n") == 1 and stderr == FINISHING


def test_a_refused_connection_is_not_an_error_of_the_server(tmp_path: Path) -> None:
    with process(tmp_path) as (child, announced):
        ws_url = announced["url"].replace("http", "ws") + wire.PATH
        with connect(ws_url, proxy=None), connect(ws_url, proxy=None):
            for _ in range(3):
                with pytest.raises(InvalidStatus) as refused:
                    connect(ws_url, proxy=None)
                assert refused.value.response.status_code == 503
                assert b"at_capacity" in refused.value.response.body
        child.send_signal(signal.SIGTERM)
        _, stderr = child.communicate(timeout=10)
        lines = [
            line for line in stderr.splitlines() if not line.startswith("sessions that finish")
        ]
        assert (child.returncode, lines) == (0, [])  # who has just left may still be counted


def test_it_ends_when_its_lifeline_does(tmp_path: Path) -> None:
    with process(tmp_path) as (child, announced):
        os.close(announced["lifeline"])
        _, stderr = child.communicate(timeout=10)
        assert (child.returncode, stderr) == (0, "")


def test_it_outlives_no_parent_however_that_dies(tmp_path: Path) -> None:
    parent_program = (
        "import sys, time\n"
        "from clients.local_server import LocalServer\n"
        "server = LocalServer(command=[sys.executable, '-c', *sys.argv[1:]])\n"
        "with server:\n"
        "    print(server.pid, flush=True)\n"
        "    time.sleep(60)\n"
    )
    command = [sys.executable, "-c", parent_program, PROGRAM, tmp_path, "0", ""]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        server = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
    has_ended = bool(select.select([server], [], [], 10.0)[0])
    os.close(server)
    assert has_ended, "the server goes on without its parent"


def test_a_second_signal_cuts_the_drain_short(tmp_path: Path) -> None:
    with process(tmp_path, frame_s=0.1) as (child, announced):
        with speaking(announced, "A minute of words. " * 60) as client:
            child.send_signal(signal.SIGINT)
            with pytest.raises(ConnectionClosed):
                while True:
                    frame = client.recv(timeout=10)
                    if isinstance(frame, str) and "session.closing" in frame:
                        child.send_signal(signal.SIGINT)
        _, stderr = child.communicate(timeout=10)
        assert child.returncode == 0
        assert stderr == FINISHING


def test_a_model_that_does_not_warm_up(tmp_path: Path) -> None:
    with process(tmp_path, error="out of memory") as (child, announced):
        stdout, stderr = child.communicate(timeout=10)
        assert (child.returncode, announced, stdout) == (1, {}, "")
        assert "plosive: the model cannot be served: out of memory" in stderr


def plosive_serve(*argv: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "realtime", "serve", *argv]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_port_in_use_is_one_clear_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = plosive_serve("--port", str(port))
    assert result.returncode == 1
    assert result.stderr == (
        f"plosive: port {port} on 127.0.0.1 is in use; choose another with --port (0: any free one)\n"
    )


def test_bad_option_and_bad_host() -> None:
    result = plosive_serve("--max-slots", "0")
    assert result.returncode == 2
    assert result.stderr == "plosive serve: --max-slots: got 0, expected 1 to 1000000\n"
    result = plosive_serve("--prot", "1")
    assert result.returncode == 2 and result.stderr.startswith("usage: plosive serve [")
    assert result.stderr.endswith("plosive serve: error: unrecognized arguments: --prot 1\n")
    result = plosive_serve("--lifeline-fd", "99")
    assert "--lifeline-fd (PLOSIVE_LIFELINE_FD): file descriptor 99 is not" in result.stderr
    with pytest.raises(PlosiveError, match="cannot listen on nowhere.invalid"):
        bind("nowhere.invalid", 0)
    with pytest.raises(PlosiveError, match=r"1\.2\.3\.4, port 0: Cannot assign requested address$"):
        bind("1.2.3.4", 0)


def test_model_path_missing(tmp_path: Path) -> None:
    with pytest.raises(PlosiveError, match=str(tmp_path / "gone")) as refused:
        load_engine(ServerConfig(model=str(tmp_path / "gone")))
    assert refused.value.code == "model_unusable"


def test_a_device_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(PlosiveError, match="cuda:0: there is no CUDA device here; --device cpu "):
        load_engine(ServerConfig(device="cuda:0"))


def test_a_big_model_says_what_it_takes_of_its_device() -> None:
    stats = {"weight_bytes": 9.16e9, "kv_bytes": 1.2e10, "slots_active": 3.0, "graph_bytes": 0.0}
    assert memory_line(stats) == "Device memory in GB: weight 9.16, kv 12.00"
    assert memory_line({"weight_bytes": 8e7}) == ""


@pytest.mark.parametrize(("num_slots", "slots"), [(1, "1 slot"), (64, "64 slots")])
def test_where_it_listens(num_slots: int, slots: str) -> None:
    line = listening_line("http://h:1", "m", num_slots, 1.26)
    assert line == f"Plosive listening on http://h:1 (model m, {slots}, ready in 1.3 s)"


def test_a_slow_warm_up_says_what_it_was_slow_for() -> None:
    stats = {"warm_up_kernels_s": 3.21, "warm_up_frame_graphs_s": 6.0, "slots_active": 3.0}
    assert start_up_line(stats, 12.5) == (
        "Start-up in s: kernels 3.2, frame graphs 6.0, before that 3.3"
    )
    on_a_busy_cpu = {"warm_up_kernels_s": 0.0, "warm_up_voices_s": 0.1}
    assert start_up_line(on_a_busy_cpu, 8.8) == start_up_line({}, 12.5) == ""
