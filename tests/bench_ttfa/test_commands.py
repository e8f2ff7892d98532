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

# What is said of options that make no sense, before anything is measured.
REFUSED = [
    (["codec", "--batch", "0"], "argument --batch: got '0', expected a whole number of at least 1"),
    (["codec", "--json", "nowhere/x.json"], "nowhere/x.json: there is no directory nowhere"),
    (["codec", "--model", "nowhere"], "argument --model: 'nowhere' is no directory; expected that"),
    (["counters", "--rows", "1,x"], "argument --rows: got 'x', expected a whole number"),
    (["counters", "--json", "."], "argument --json: . is a directory, expected a file"),
    (
        ["engine", "--model", "nowhere"],
        "argument --model: 'nowhere' is no directory; expected that",
    ),
    (
        ["frames", "--model", "nowhere"],
        "argument --model: 'nowhere' is no directory; expected that",
    ),
    (["frames", "--batch", "-1"], "argument --batch: got '-1', expected a whole number"),
    (["frames", "--format", "fp4"], "argument --format: 'fp4' is none of eager, bf16, bsfp8"),
    (["frames", "--gate", "NONE"], "argument --gate: NONE: there is no such file"),
    (["frames", "--gate", "TEXT"], "argument --gate: TEXT is no JSON"),
    (["frames", "--device", "cpu"], "argument --device: this times CUDA devices alone"),
    (["frames", "--device", "gpu"], "device 'gpu' is none of cpu, cuda, cuda:0, ..."),
    (["frames", "--device", "cuda:1"], "device 'cuda:1': torch finds 1 here"),
    (["gate_quantised", "--model", "big"], "argument --model: 'big' is none of embedded, embedd"),
    (
        ["gate_quantised", "--model", "random:big"],
        "argument --model: random:big: there is no such geometry",
    ),
    (["gate_quantised", "--streams", "0"], "argument --streams: got '0', expected a whole number"),
    (["gate_quantised", "--device", "cuda:7"], "device 'cuda:7': torch finds 1 here"),
    (["gate_speed", "NONE"], "argument RECORD.json: NONE: No such file or directory"),
    (["gate_speed", "."], "argument RECORD.json: .: Is a directory"),
    (["gate_speed", "TEXT"], "argument RECORD.json: TEXT is no JSON"),
    (["gate_speed", "LIST"], "argument RECORD.json: LIST is no such record: it has no 'model'"),
    (["gate_speed", "--baseline", "LIST", "x"], "argument --baseline: LIST is no such record"),
    (["kernels", "--rows", "1.5"], "argument --rows: got '1.5', expected a whole number"),
    (["kernels", "--ops", "wq"], "argument --ops: 'wq' is none of wqkv, wo, gate_up, down"),
    (["kernels_attention", "--json", "nowhere/x"], "nowhere/x: there is no directory nowhere"),
    (["peers", "--peers", "bf16,vllm"], "argument --peers: 'vllm' is none of bsfp8, bf16"),
    (["peers", "--rows", "0"], "argument --rows: got '0', expected a whole number of at least 1"),
    (["provenance", "NONE"], "argument RECORD.json: NONE: No such file or directory"),
    (["provenance", "LIST"], "argument RECORD.json: LIST is no such record: it has no 'software'"),
]


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


@pytest.mark.parametrize(("arguments", "told"), REFUSED, ids=str)
def test_what_makes_no_sense_is_refused_at_once(arguments, told, tmp_path, monkeypatch, capsys):
    (tmp_path / "TEXT").write_text("frames")
    (tmp_path / "LIST").write_text("[1]")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    command, *options = arguments
    with pytest.raises(SystemExit) as status:
        main_of(command)(options)
    assert status.value.code == 2
    assert told in capsys.readouterr().err.splitlines()[-1]


def test_a_profiler_that_may_not_count_is_told(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr("shutil.which", lambda _: "/bin/false")
    monkeypatch.setattr("bench_ttfa.counters.profile", refusing)
    with pytest.raises(SystemExit) as status:
        main_of("counters")([])
    assert status.value.code == 2
    assert "ERR_NVGPUCTRPERM" in capsys.readouterr().err.splitlines()[-1]


def refusing(*_):
    raise RuntimeError("ncu: ERR_NVGPUCTRPERM")
