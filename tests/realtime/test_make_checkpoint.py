"""`plosive make-checkpoint`: all of it or nothing, and a sentence when it cannot be."""

import pytest

from realtime.__main__ import main
from tests.support.cli import leftovers


def make(*args: object) -> int:
    return main(["make-checkpoint", *map(str, args)])


def test_it_makes_a_checkpoint(tmp_path, capsys):
    out = tmp_path / "model"
    assert make(out, "--like", "tiny", "--frames", 5) == 0
    assert "10 MB in " in capsys.readouterr().out
    names = {file.name for file in out.iterdir()}
    assert names == {"config.json", "tokenizer.json", "model.safetensors", "codec.pth", "voices"}
    assert leftovers(tmp_path, out) == []


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("{}/there", "--like", "tiny"), "there exists already"),
        (("{}/no/model", "--like", "tiny"), "there is no directory"),
        (("{}/model", "--like", "tiny", "--seed", "-1"), "seed: got -1, expected 0 or more"),
    ],
)
def test_what_it_cannot_do(tmp_path, capsys, args, message):
    there = tmp_path / "there"
    there.mkdir()
    assert make(*(arg.format(tmp_path) for arg in args)) == 1
    assert message in capsys.readouterr().err
    assert leftovers(tmp_path, there) == []


def test_a_full_disk_is_seen_before(tmp_path, capsys, monkeypatch):
    usage = type("usage", (), {"free": 1_000_000})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    assert make(tmp_path / "model", "--like", "s2-pro") == 1
    assert "0.0 GB free, 12.3 GB needed" in capsys.readouterr().err
    assert leftovers(tmp_path) == []


def test_an_interrupted_one_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("model.random_checkpoint.torch.save", interrupted)
    assert make(tmp_path / "model", "--like", "tiny") == 130
    assert leftovers(tmp_path) == []


def test_two_at_a_time_do_not_mix(tmp_path, capsys, monkeypatch):
    out = tmp_path / "model"

    def other_is_first(*_: object) -> None:
        (out / "file").mkdir(parents=True)

    monkeypatch.setattr("model.random_checkpoint.write_checkpoint", other_is_first)
    assert make(out, "--like", "tiny") == 1
    assert f"{out} exists already" in capsys.readouterr().err
    assert leftovers(tmp_path, out) == []
