"""`plosive quantize`: all of it or nothing, and a sentence when it cannot be."""

import pytest

from model.random_checkpoint import write_checkpoint
from model.random_model import RandomModel
from realtime.__main__ import main
from tests.support.cli import leftovers


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_checkpoint(RandomModel("tiny"), folder)
    return folder


def quantise(*args: object) -> int:
    return main(["quantize", *map(str, args)])


@pytest.mark.parametrize("format", ["bsgemm", "mxfp8"])
def test_it_quantises(tmp_path, tiny, capsys, format):
    out = tmp_path / "out"
    assert quantise(tiny, out, "--format", format) == 0
    assert f"({format}) in " in capsys.readouterr().out
    assert {path.name for path in tiny.iterdir()} == {path.name for path in out.iterdir()}
    assert leftovers(tmp_path, out) == []


def test_the_format_as_serve_calls_it(tmp_path, tiny, capsys):
    assert quantise(tiny, tmp_path / "out", "--format", "bsfp8") == 0
    assert "(bsgemm) in " in capsys.readouterr().out


def test_the_embedded_model_by_its_name(tmp_path, capsys):
    assert quantise("embedded", tmp_path / "out", "--format", "bsgemm") == 0
    assert "weights 25 MB -> 16 MB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("source", "out", "message"),
    [
        ("{tmp}/none", "{tmp}/out", "there is no checkpoint directory"),
        ("{tiny}", "{tmp}", "exists already"),
        ("{tmp}", "{tmp}/out", "config.json: cannot be read"),
    ],
)
def test_what_it_cannot_do(tmp_path, tiny, capsys, source, out, message):
    names = {"tmp": tmp_path, "tiny": tiny}
    assert quantise(source.format(**names), out.format(**names), "--format", "bsgemm") == 1
    assert message in capsys.readouterr().err
    assert leftovers(tmp_path) == []


def test_an_interrupted_one_leaves_nothing(tmp_path, tiny, monkeypatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("model.quantize_checkpoint.shutil.copyfile", interrupted)
    assert quantise(tiny, tmp_path / "out", "--format", "bsgemm") == 130
    assert leftovers(tmp_path) == []
