"""The examples run as programs; the client needs no torch."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from tests.clients.scripted_server import scripted_server, talker

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "clients" / "examples"


async def run(*command: str) -> str:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *command,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=environ,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
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


async def test_the_client_and_the_bench_import_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import clients, bench_ttfa.__main__"
    await run("-c", code)
