"""What is installed without the extra `server` speaks through a server, and says what it lacks."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SERVER_ONLY = ("torch", "fastapi", "uvicorn", "soxr", "opuslib", "safetensors", "tokenizers")


def plosive(*args: str) -> subprocess.CompletedProcess[str]:
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({SERVER_ONLY!r}))\n"
        "from realtime.__main__ import main\n"
        f"sys.exit(main({list(args)!r}))\n"
    )
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("command", ["say", "voices"])
def test_client_commands_need_no_server_package(command: str) -> None:
    result = plosive(command, "--help")
    assert result.returncode == 0, result.stderr
    assert "usage: plosive" in result.stdout


def test_serve_says_how_to_install_what_is_missing() -> None:
    result = plosive("serve", "--port", "0")
    assert result.returncode == 1
    assert 'pip install -e ".[server]"' in result.stderr and "Traceback" not in result.stderr
