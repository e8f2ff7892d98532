"""The README's Python program, run as written against a real server."""

import re
import subprocess
import sys
import wave
from pathlib import Path

from clients.local_server import LocalServer

ROOT = Path(__file__).resolve().parent.parent
PYTHON_BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


def test_the_first_example_speaks(tmp_path: Path) -> None:
    program = PYTHON_BLOCK.findall((ROOT / "README.md").read_text("utf-8"))[0]
    assert "asyncio.run(" in program
    with LocalServer(["--device", "cpu", "--max-slots", "1"]) as server:
        program = program.replace("http://127.0.0.1:8765", server.url)
        result = subprocess.run(
            [sys.executable, "-c", program],
            cwd=tmp_path,
            env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=False,
        )
    assert result.returncode == 0, result.stderr
    with wave.open(str(tmp_path / "hello.wav")) as wav:
        assert wav.getnframes() > wav.getframerate()
