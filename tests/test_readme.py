"""The README's Python program, run as written against a real server."""

import re
import subprocess
import sys
import wave
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON_BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


def test_the_first_example_speaks(url: str, tmp_path: Path) -> None:
    program = PYTHON_BLOCK.findall((ROOT / "README.md").read_text("utf-8"))[0]
    assert "asyncio.run(" in program
    result = subprocess.run(
        [sys.executable, "-c", program.replace("http://127.0.0.1:8765", url)],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    with wave.open(str(tmp_path / "hello.wav")) as wav:
        assert wav.getnframes() > wav.getframerate()
