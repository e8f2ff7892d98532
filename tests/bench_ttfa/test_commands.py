"""What every command of this package says of itself, and on a machine without a CUDA device."""

import importlib
from pathlib import Path

import pytest
import torch

import bench_ttfa

COMMANDS = sorted(
    path.stem
    for path in Path(bench_ttfa.__file__).parent.glob("*.py")
    if 'if __name__ == "__main__"' in path.read_text("utf-8") and path.stem != "__main__"
)
ON_CUDA = {
    "codec": ["--device", "cuda"],
    "counters": [],
    "engine": ["--device", "cuda"],
    "frames": [],
    "gate_quantised": ["--model", "random:s2-pro"],
    "kernels": [],
    "kernels_attention": [],
    "peers": [],
}


def main_of(command):
    return importlib.import_module(f"bench_ttfa.{command}").main


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_and_explains_every_option(command, capsys):
    with pytest.raises(SystemExit) as status:
        main_of(command)(["--help"])
    usage, _, shown = capsys.readouterr().out.partition("\n\n")
    assert status.value.code == 0
    assert usage.startswith(f"usage: python -m bench_ttfa.{command} ")
    assert f"python -m bench_ttfa.{command}" in shown, shown
    lines = shown[shown.index("\noptions:") :].splitlines()
    for line, below in zip(lines, [*lines[1:], ""], strict=True):
        if line.startswith("  -"):
            is_explained = "  " in line.strip() or below.startswith("     ")
            assert is_explained, line


@pytest.mark.parametrize(("command", "arguments"), ON_CUDA.items())
def test_a_machine_without_a_device_is_told_so(command, arguments, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as status:
        main_of(command)(arguments)
    assert status.value.code == 2
    assert "needs a CUDA device" in capsys.readouterr().err.splitlines()[-1]
