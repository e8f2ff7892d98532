"""`plosive say` as a user runs it, against scripted servers."""

import asyncio
import io
import os
import signal
import subprocess
import sys
import threading
import tomllib
from contextlib import nullcontext
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from clients import ConnectionFailed
from clients.local_server import LocalServer, running_server
from realtime.__main__ import main
from realtime.cli import say
from realtime.wire import SessionStart, TurnStarted, TurnText
from tests.clients.command_line import HOW_TO_GIVE_IT, MISSING_KEY, run
from tests.clients.scripted_server import (
    OPUS,
    PACKET_SAMPLES,
    Peer,
    opus_payloads,
    respond,
    scripted_server,
    talker,
    tone,
)

ROOT = Path(__file__).resolve().parents[2]
SCRIPTED = (sys.executable, "-m", "tests.clients.scripted_server")


@pytest.fixture(autouse=True)
def scripted_serve(monkeypatch):
    """Where a local server is started, it is the scripted one."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("PLOSIVE_URL", raising=False)
    monkeypatch.setattr("clients.local_server.SERVE", SCRIPTED)
    monkeypatch.setattr(say, "running_server", lambda: None)


def test_say_starts_a_local_server_and_saves(tmp_path, capsys) -> None:
    path = tmp_path / "hello.wav"
    assert run(say, "one two three", "--out", str(path)) == 0
    output = capsys.readouterr().out
    for part in ("ready ", "TTFA ", "audible ", "audio 0.18 s", "real-time factor ", "hello.wav"):
        assert part in output
    assert path.stat().st_size == 44 + 34 + 2 * 48_000 * 180 // 1000  # RIFF and INFO, 0.18 s


async def test_say_uses_a_running_server(capsys) -> None:
    async with scripted_server(talker) as server:
        words = ("one", "--mute", "--url", server.url, "--voice", "bob", "--seed", "3")
        assert await asyncio.to_thread(_run_in_thread, words) == 0
    start = server.received[0]
    assert isinstance(start, SessionStart)
    assert (start.voice, start.sampling.seed) == ("bob", 3)


async def test_a_running_server_is_found_only_where_one_is_ready() -> None:
    async with scripted_server(talker) as server:
        assert await asyncio.to_thread(running_server, server.url) == server.url
    assert await asyncio.to_thread(running_server, server.url) is None


async def test_say_takes_the_server_that_runs_here(monkeypatch, capsys) -> None:
    async with scripted_server(talker) as server:
        monkeypatch.setattr(say, "running_server", lambda: server.url)
        assert await asyncio.to_thread(_say_in_thread, "one", "--mute") == 0
        assert len(server.peers) == 1
        assert f"using the server at {server.url} (--local" in capsys.readouterr().err
        assert await asyncio.to_thread(_say_in_thread, "one", "--mute", "--local") == 0
        assert await asyncio.to_thread(_say_in_thread, "one", "--mute", "--device", "cpu") == 0
        assert len(server.peers) == 1
        monkeypatch.setenv("PLOSIVE_URL", server.url)
        capsys.readouterr()
        assert await asyncio.to_thread(_say_in_thread, "one", "--mute") == 0
        assert len(server.peers) == 2
        assert f"using the server at {server.url} (PLOSIVE_URL)" in capsys.readouterr().err


def test_the_demo_speaks_through_a_server_of_its_own() -> None:
    made = subprocess.run(
        ["make", "-n", "demo"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert "plosive say --local --out demo.wav" in made.stdout


NOT_HEARD = 'sounddevice is not installed; in a clone of Plosive: pip install -e ".[audio]"'


def test_say_that_nobody_would_hear_fails_before_it_speaks(monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "sounddevice", None)
    monkeypatch.setattr(say, "running_server", lambda: pytest.fail("it looked for a server"))
    assert run(say, "one") == 1
    way_out = "--out FILE saves it instead, --mute says it to nobody"
    error = capsys.readouterr().err
    assert error == f"plosive say: it would not be heard: {NOT_HEARD}. {way_out}\n"


def test_say_to_nobody(monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.setitem(sys.modules, "sounddevice", None)
    monkeypatch.chdir(tmp_path)
    assert run(say, "one two", "--mute") == 0
    assert "audio 0.12 s" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_say_tells_every_warning_in_one_line(capsys, tmp_path) -> None:
    assert run(say, "one two?!", "--prompt", "calm", "--out", str(tmp_path / "one.wav")) == 0
    output = capsys.readouterr()
    assert "audio 0.12 s" in output.out
    assert output.err.splitlines()[1:] == [
        "plosive say: warning: text: left out '?!'",
        "plosive say: warning: scripted takes no prompt",
    ]


def test_say_without_anything_to_say_writes_nothing(capsys, tmp_path) -> None:
    path = tmp_path / "e.wav"
    assert run(say, "🎉🎉", "--out", str(path)) == 1
    output = capsys.readouterr()
    assert f"nothing that can be spoken; {path} is not written" in output.err
    assert not path.exists() and not output.out


async def breaks_off(peer: Peer) -> None:
    """Says 600 ms of a turn, tells what it said, and is gone."""
    await peer.accept()
    await peer.expect_turn()
    await peer.send(TurnStarted(turn_id=1))
    await peer.audio(1, opus_payloads(tone(30 * PACKET_SAMPLES))[:30])
    await peer.send(TurnText(turn_id=1, text="one two", audio_ms=600))
    await peer.socket.close(1011)


async def test_say_keeps_what_had_come_when_the_connection_ends(
    tmp_path, monkeypatch, capsys
) -> None:
    path = tmp_path / "cut.wav"
    async with scripted_server(breaks_off) as server:
        words = ("one two three", "--url", server.url)
        assert await asyncio.to_thread(_say_in_thread, *words, "--out", str(path)) == 1
        output = capsys.readouterr()
        reason = "the connection closed before all that was asked for had come (close code 1011)"
        kept = f"{path} holds the first 0.59 s; the rest is missing: {reason}"
        assert (output.out, output.err) == ("", f"plosive say: {kept}\n")
        num_samples = 2 * (30 * PACKET_SAMPLES - OPUS.pre_skip_samples)  # at 48 kHz
        assert path.stat().st_size == 44 + 34 + 2 * num_samples
        assert await asyncio.to_thread(_say_in_thread, *words, "--mute") == 1
        assert capsys.readouterr().err == f"plosive say: {reason}\n"


def _say_in_thread(*words: str) -> int:
    """Like `run`, where only the main thread may handle signals."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(say, "stopped_like_interrupted", nullcontext)
        return run(say, *words)


def _run_in_thread(words: tuple[str, ...]) -> int:
    code = f"import sys; from realtime.__main__ import main; sys.exit(main(['say', *{words!r}]))"
    return subprocess.run([sys.executable, "-c", code], check=False).returncode


class EagerCard:
    """Pulls as fast as it can, from a thread of its own."""

    heard: ClassVar[list[np.ndarray]] = []

    def start(self, sample_rate_hz: int, pull) -> None:
        self.is_open = True
        self.thread = threading.Thread(target=self._play, args=(sample_rate_hz, pull))
        self.thread.start()

    def _play(self, sample_rate_hz: int, pull) -> None:
        while self.is_open:
            block = np.zeros(sample_rate_hz // 100, np.float32)
            pull(block)
            self.heard.append(block)

    def stop(self) -> None:
        self.is_open = False
        self.thread.join()


class NoCard(EagerCard):
    def start(self, sample_rate_hz: int, pull) -> None:
        raise OSError("cannot open the sound output: there is none")


@pytest.fixture
def sounddevice(monkeypatch) -> None:
    monkeypatch.setattr(say, "load_sounddevice", lambda: None)
    monkeypatch.setattr(say, "SoundCard", EagerCard)
    monkeypatch.setattr(EagerCard, "heard", [])


def test_say_plays_where_sounddevice_is_installed(sounddevice, capsys) -> None:
    assert run(say, "one two three") == 0
    assert "audio 0.18 s" in capsys.readouterr().out
    audible = np.flatnonzero(np.concatenate(EagerCard.heard))
    assert audible[-1] - audible[0] >= 48_000 * 0.15


def test_say_saves_instead_of_playing(sounddevice, tmp_path) -> None:
    assert run(say, "one", "--out", str(tmp_path / "one.wav")) == 0
    assert not EagerCard.heard


def test_say_without_a_sound_output_says_so_and_fails(sounddevice, monkeypatch, capsys) -> None:
    monkeypatch.setattr(say, "SoundCard", NoCard)
    assert run(say, "one two") == 1
    output = capsys.readouterr()
    assert "it would not be heard: cannot open the sound output: there is none. --out" in output.err
    assert not output.out


def test_say_reads_standard_input(monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one two\n"))
    assert run(say, "-", "--mute") == 0
    assert "audio 0.12 s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((" \n",), "the text is empty"),
        (("hi", "--out", "hi.flac"), ".wav, .ogg, .opus, .mp3"),
        (("hi", "--out", "missing/hi.wav"), "there is no directory missing"),
        (("hi", "--url", "http://localhost:1", "--model", "x"), "for a server of its own"),
        (("hi", "--seed", "-1"), "got '-1', expected 0 to 9223372036854775807"),
        (("hi", "--seed", str(2**63)), "expected 0 to 9223372036854775807"),
        (("hi", "--device", "gpu"), 'got \'gpu\', expected "auto", "cpu", "cuda" or'),
    ],
)
def test_say_wrong_usage_exits_2(words, message, capsys) -> None:
    with pytest.raises(SystemExit) as exited:
        run(say, *words)
    assert exited.value.code == 2
    assert message in capsys.readouterr().err


def test_say_errors_are_one_sentence(capsys, tmp_path) -> None:
    assert run(say, "hi", "--mute", "--model", "broken") == 1
    error = capsys.readouterr().err
    assert "ended with status 1 before it was ready" in error
    assert "the model: it is broken" in error
    assert "Traceback" not in error
    assert run(say, "hi", "--mute", "--url", "http://127.0.0.1:9") == 1
    assert "/v1/realtime: connection refused. Is the server up?" in capsys.readouterr().err
    assert run(say, "hi", "--out", str(tmp_path / ("x" * 300 + ".wav"))) == 1
    error = capsys.readouterr().err
    assert "xxx.wav: File name too long" in error and "Errno" not in error


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupted_say_stops_its_server(signal_number, tmp_path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    code = (
        "import clients.local_server, sys\n"
        f"clients.local_server.SERVE = {(*SCRIPTED, '--mute', str(fifo))!r}\n"
        "from realtime.__main__ import main\n"
        "sys.exit(main(['say', 'hello', '--mute', '--local']))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE) as process:
        server_pid = int(fifo.read_text())  # waits until the server has got the text
        process.send_signal(signal_number)
        _, error = process.communicate(timeout=20)
    assert (process.returncode, error) == (130, b"")
    with pytest.raises(ProcessLookupError):
        os.kill(server_pid, 0)


def test_a_local_server_that_dies_tells_why() -> None:
    with (
        pytest.raises(ConnectionFailed, match="it is broken"),
        LocalServer(["--model", "broken"]),
    ):
        pass


def test_a_local_server_reports_progress_and_runs_as_long_as_the_block() -> None:
    waited_s = []
    with LocalServer(on_wait=waited_s.append) as server:
        assert server.is_running
        assert server.url.startswith("http://127.0.0.1:")
        assert waited_s == sorted(waited_s)
    assert not server.is_running


TELLS_ITS_ENVIRONMENT = """
import json, os, sys
fd = int(sys.argv[sys.argv.index("--announce-fd") + 1])
names = sorted(name for name in os.environ if name.startswith("PLOSIVE_"))
os.write(fd, json.dumps({"url": " ".join(names)}).encode() + b"\\n")
"""


def test_a_local_server_is_of_this_machine_alone_without_key_or_certificate(monkeypatch) -> None:
    of_another = ("HOST", "PORT", "API_KEYS", "API_KEYS_FILE", "SSL_CERTFILE", "SSL_KEYFILE")
    for name in (*of_another, "MAX_SLOTS"):
        monkeypatch.setenv(f"PLOSIVE_{name}", "2")
    command = [sys.executable, "-c", TELLS_ITS_ENVIRONMENT]
    with LocalServer(command=command) as server:
        assert server.url == "PLOSIVE_MAX_SLOTS"


@pytest.mark.parametrize("key", [None, ""])
async def test_say_without_a_key_tells_how_to_give_one(key, monkeypatch, capsys) -> None:
    monkeypatch.delenv("PLOSIVE_API_KEY", raising=False)
    words = ("--mute",) if key is None else ("--mute", "--api-key", key)
    async with scripted_server(talker, refusal=respond(401, MISSING_KEY)) as server:
        assert await asyncio.to_thread(_say_in_thread, "one", "--url", server.url, *words) == 1
        assert capsys.readouterr().err == f"plosive say: {HOW_TO_GIVE_IT}"
        words = ("one", "--mute", "--url", server.url, "--api-key", "wrong")
        assert await asyncio.to_thread(_say_in_thread, *words) == 1
        assert capsys.readouterr().err.endswith("with status 401: send a header\n")


def test_help_is_fast_to_reach_and_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from realtime.__main__ import main\n"
        "main([sys.argv[1], '--help'])"
    )
    for command in ("say", "voices"):
        result = subprocess.run(
            [sys.executable, "-c", code, command], capture_output=True, text=True, check=True
        )
        assert "--url" in result.stdout


def test_words_without_quotes_are_answered_with_quotes(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["say", "hi", "there", "friend", "--mute"])
    why = "a text of several words is quoted: plosive say 'hi there friend'"
    said = capsys.readouterr().err
    assert said.endswith(f"plosive say: error: unrecognized arguments: there friend; {why}\n")
    with pytest.raises(SystemExit):
        main(["say", "hi", "--mut3"])
    assert capsys.readouterr().err.endswith("unrecognized arguments: --mut3\n")


def test_version(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    assert (ended.value.code, capsys.readouterr().out) == (0, f"plosive {version}\n")


def test_without_a_command_there_is_help(capsys) -> None:
    assert main([]) == 2
    assert "speak one text, through a server" in capsys.readouterr().err
