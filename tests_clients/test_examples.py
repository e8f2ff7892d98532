"""The agent examples run; a recorder and an ear stand for the hardware."""

import asyncio
import importlib.util
import os
import sys
import types
import wave
from pathlib import Path

import pytest

from realtime.wire import TurnCancel
from tests.clients.scripted_server import PACKET_SAMPLES, scripted_server
from tests_clients.speakers import speaker

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "clients" / "examples"
TIMEOUT_S = 30.0


def load(name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def run_06(url: str, path: Path, status: int) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(EXAMPLES / "06_pipecat_agent.py"),
        url,
        str(path),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    output, _ = await process.communicate()
    assert process.returncode == status, output.decode()
    return output.decode()


async def test_06_pipecat_agent(tmp_path) -> None:
    pytest.importorskip("pipecat")
    path = tmp_path / "agent.wav"
    async with scripted_server(speaker) as server, asyncio.timeout(TIMEOUT_S):
        assert "cancelled: " in await run_06(server.url, path, status=0)
    assert any(isinstance(message, TurnCancel) for message in server.received)
    with wave.open(str(path)) as recorded:
        assert recorded.getnframes() > 2 * 5 * PACKET_SAMPLES  # "Sorry. My name is Plosive."


async def test_06_without_a_server_ends_with_a_sentence(tmp_path) -> None:
    pytest.importorskip("pipecat")
    async with asyncio.timeout(TIMEOUT_S):
        output = await run_06("http://127.0.0.1:9", tmp_path / "agent.wav", status=1)
    assert output.splitlines()[-1].endswith("connection refused. Is the server up?")


async def test_07_livekit_agent() -> None:
    pytest.importorskip("livekit.agents")
    from livekit.agents import Agent

    from tests_clients.test_livekit import Ear

    example = load("07_livekit_agent")
    async with scripted_server(speaker) as server, asyncio.timeout(TIMEOUT_S):
        session = example.make_session(server.url)
        ear = session.output.audio = Ear()
        await session.start(Agent(instructions="Speak."), record=False)
        await example.greet(session)
        assert ear.num_samples == 2 * (8 + 5) * PACKET_SAMPLES
        await session.aclose()
        await session.tts.aclose()
