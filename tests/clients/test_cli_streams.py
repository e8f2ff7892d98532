"""The commands where standard input and output are not what they should be."""

import io
import os
import sys

import pytest

from clients.explain import sentence
from realtime.__main__ import main
from realtime.cli import say
from tests.clients.command_line import run
from tests.clients.test_cli import scripted_serve

__all__ = ["scripted_serve"]


def test_a_text_from_an_input_that_is_closed_is_empty(monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(SystemExit) as exited:
        run(say, "-", "--mute")
    assert exited.value.code == 2
    assert "the text is empty" in capsys.readouterr().err


def test_input_and_output_of_another_encoding_are_read_and_written_as_they_can_be(
    monkeypatch, capsys
) -> None:
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    text = io.BytesIO(b"one \xff two")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(text, encoding="utf-8"))
    monkeypatch.setattr("sys.stdout", output)
    assert main(["say", "-", "--mute"]) == 0
    output.seek(0)
    assert "ms ? audio 0.12 s ?" in output.read()


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full")
def test_a_full_disk_is_said_without_its_number() -> None:
    with pytest.raises(OSError, match="space") as raised, open("/dev/full", "w") as file:  # noqa: PTH123
        file.write("x")
        file.flush()
    assert sentence(raised.value) == os.strerror(28)
