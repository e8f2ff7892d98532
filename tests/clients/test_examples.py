"""The examples run as programs; the client needs no torch."""

import asyncio
import importlib.util
import os
import re
import sys
import types
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from clients import Interruption, NullDevice, Player, Session, connect
from realtime.wire import TextAppend
from tests.clients.scripted_server import scripted_server, talker

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "clients" / "examples"
EXAMPLES_THAT_CONNECT = ["01_say_one_thing", "02_stream_text", "03_interrupt", "04_two_voices"]


async def run(*command: str, status: int = 0) -> str:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *command,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=environ,
    )
    output, _ = await process.communicate()
    assert process.returncode == status, output.decode()
    return output.decode()


async def test_01_say_one_thing(tmp_path) -> None:
    path = tmp_path / "hello.wav"
    async with scripted_server(talker) as server:
        output = await run(str(EXAMPLES / "01_say_one_thing.py"), server.url, str(path))
    assert "first audio" in output
    assert path.read_bytes()[:4] == b"RIFF"


@pytest.mark.parametrize(
    ("name", "said"), [("02_stream_text", "after a word"), ("03_interrupt", "unheard: 'Let me")]
)
async def test_examples_print_what_they_show(name, said) -> None:
    async with scripted_server(talker) as server:
        assert said in await run(str(EXAMPLES / f"{name}.py"), server.url)


async def test_03_interrupts_the_session(monkeypatch) -> None:
    interrupt, played = Session.interrupt, []

    async def noted(session: Session, played_ms: float | None = None) -> Interruption:
        played.append(played_ms)
        return await interrupt(session, played_ms)

    monkeypatch.setattr(Session, "interrupt", noted)
    async with scripted_server(talker) as server:
        await load("03_interrupt").main(server.url)
    assert played == [200.0]


@pytest.mark.parametrize("name", EXAMPLES_THAT_CONNECT)
async def test_examples_without_a_server_say_so_in_one_line(name) -> None:
    output = await run(str(EXAMPLES / f"{name}.py"), "http://127.0.0.1:9", status=1)
    assert output.count("\n") == 1 and "Errno" not in output
    assert "cannot connect to" in output and "connection refused. Is the server up?" in output


@pytest.mark.parametrize("name", ["01_say_one_thing", "04_two_voices"])
@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["a.flac"], "cannot write 'a.flac': its suffix must be one of"),
        (["nowhere/a.wav"], "cannot write 'a.wav': there is no folder 'nowhere'"),
        (["a.wav", "b.wav"], "[URL] [FILE]"),
    ],
)
async def test_a_file_that_cannot_be_is_refused_before_anything_is_spoken(name, words, why) -> None:
    async with scripted_server(talker) as server:
        output = await run(str(EXAMPLES / f"{name}.py"), server.url, *words, status=1)
    assert why in output and "Traceback" not in output and not server.peers


async def test_05_without_a_sound_output_says_so_in_one_line() -> None:
    without = "import sys, runpy; sys.modules['sounddevice'] = None; sys.argv = sys.argv[1:]\n"
    run_it = "runpy.run_path(sys.argv[0], run_name='__main__')"
    async with scripted_server(talker) as server:
        path = str(EXAMPLES / "05_microphone.py")
        output = await run("-c", without + run_it, path, server.url, status=1)
    assert output.count("\n") == 1 and 'pip install -e ".[audio]"' in output


@pytest.mark.parametrize(
    ("name", "framework"), [("06_pipecat_agent", "pipecat"), ("07_livekit_agent", "livekit")]
)
async def test_agents_without_their_framework_say_so_in_one_line(name, framework) -> None:
    without = f"import sys, runpy; sys.modules[{framework!r}] = None; sys.argv = sys.argv[1:]\n"
    run_it = "runpy.run_path(sys.argv[0], run_name='__main__')"
    output = await run("-c", without + run_it, str(EXAMPLES / f"{name}.py"), status=1)
    assert output.count("\n") == 1
    assert f'is not installed; in a clone of Plosive: pip install -e ".[{framework}]"' in output


def test_nothing_is_said_to_be_on_an_index() -> None:
    """Plosive is installed from a clone; a name on an index would be somebody else's."""
    folders = [ROOT / name for name in ("realtime", "clients", "model", "ops", "bench_ttfa")]
    sources = [ROOT / "README.md", *(path for f in folders for path in f.rglob("*.py"))]
    index = re.compile(r"pip install\s+(-U\s+)?['\"]?plosive\b")
    named = [str(path) for path in sources if index.search(path.read_text("utf-8"))]
    assert len(sources) > 100 and not named


async def test_04_two_voices(tmp_path) -> None:
    path = tmp_path / "conversation.wav"
    async with scripted_server(talker) as server:
        output = await run(str(EXAMPLES / "04_two_voices.py"), server.url, str(path))
    assert "ann and bob" in output
    voices = [peer.received[0].voice for peer in server.peers]
    assert sorted(voices) == ["ann", "bob"]
    assert path.read_bytes()[:4] == b"RIFF"


def load(name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def test_05_microphone_answers_and_is_interrupted(capsys) -> None:
    example = load("05_microphone")
    loud, quiet = np.full(320, 0.2, np.float32), np.zeros(320, np.float32)
    device = NullDevice()

    async def microphone(player: Player) -> AsyncIterator[np.ndarray]:
        for _ in range(20):
            yield loud
        for _ in range(40):
            yield quiet
        while not device.heard.any():  # the answer is playing
            device.advance(10)
            await asyncio.sleep(0)
        for _ in range(10):
            yield loud
        num_before = len(device.heard)
        device.advance(500)
        num_fading = 5 * device.sample_rate_hz // 1000
        assert not device.heard[num_before + num_fading :].any()

    async with (
        scripted_server(talker) as server,
        connect(server.url) as session,
        Player(session, device) as player,
    ):
        await example.converse(player, microphone(player))
        texts = [m.text for m in server.received if isinstance(m, TextAppend)]
        assert texts == [example.answer(20 * 20)]
    assert "interrupted" in capsys.readouterr().out


async def test_the_client_and_the_bench_import_no_torch() -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'pipecat', 'livekit', 'sounddevice'): sys.modules[name] = None\n"
        "import clients, clients.sync_player, bench_ttfa.__main__"
    )
    await run("-c", code)
