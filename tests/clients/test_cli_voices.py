"""`plosive voices` as a user runs it, against scripted servers."""

import argparse
import asyncio
import json
import shlex
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from realtime.__main__ import main
from realtime.cli import say, voices
from tests.clients.command_line import HOW_TO_GIVE_IT, MISSING_KEY, run
from tests.clients.scripted_server import scripted_server, talker


def test_voices_names_the_variable_that_the_address_is_from(monkeypatch, capsys) -> None:
    monkeypatch.setenv("PLOSIVE_URL", "localhost")
    assert run(voices) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first == "plosive voices: using the server at localhost (PLOSIVE_URL)"
    assert "'localhost' is no server address" in second


@pytest.mark.parametrize(("command", "args"), [(voices, []), (say, ["one", "--mute"])])
@pytest.mark.parametrize("address", ["127.0.0.1:9", "127.0.0.1:port"])
def test_no_command_shows_the_password_of_an_address(
    monkeypatch, capsys, command, args, address
) -> None:
    monkeypatch.setenv("PLOSIVE_URL", f"http://user:sec@ret@{address}")
    assert run(command, *args) == 1
    said = capsys.readouterr().err
    assert f"using the server at http://{address} (PLOSIVE_URL)" in said
    assert "sec" not in said and "ret" not in said and "user" not in said


@pytest.mark.parametrize("words", [["voices"], ["voices", "add"]])
def test_help_ends_in_a_line_to_copy(capsys, words) -> None:
    with pytest.raises(SystemExit):
        main([*words, "--help"])
    examples = capsys.readouterr().out.partition("examples:\n")[2]
    line = next(line for line in examples.splitlines() if "add" in line)
    parser = argparse.ArgumentParser()
    voices.add_arguments(parser)
    args = parser.parse_args(shlex.split(line)[2:])
    assert (args.action, args.name, args.clip) == ("add", "bob", Path("bob.wav"))


async def test_voices_list(capsys) -> None:
    async with scripted_server(talker) as server:
        assert await asyncio.to_thread(run, voices, "--url", server.url) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["ann", "default"], ["bob", "built"]]


ADDED = {"name": "eve", "duration_s": 1.5, "new_field": 1, "warnings": ["it is short"]}


class VoiceHandler(BaseHTTPRequestHandler):
    """Adds `eve`, and has no other voice to delete; whoever lists them has not the right key."""

    uploads: ClassVar[list[bytes]] = []

    def do_POST(self) -> None:
        self.uploads.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.answer(201, ADDED)

    def do_GET(self) -> None:
        self.answer(401, json.loads(MISSING_KEY))

    def do_DELETE(self) -> None:
        if self.path.endswith("/eve"):
            self.answer(204)
        else:
            self.answer(404, {"error": {"code": "voice_not_found", "message": "no voice 'bob'"}})

    def answer(self, status: int, content: object = None) -> None:
        body = json.dumps(content).encode() if content else b""
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args) -> None:
        pass


@pytest.fixture
def voice_server():
    with ThreadingHTTPServer(("127.0.0.1", 0), VoiceHandler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))  # seconds a poll
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_voices_add_and_delete(voice_server, tmp_path, capsys) -> None:
    clip = tmp_path / "clip.wav"
    clip.write_bytes(b"RIFF\0\xff\r\n--")
    words = ("add", "eve", "--clip", str(clip), "--text", "hi", "--url", voice_server)
    assert run(voices, *words) == 0
    assert run(voices, "delete", "eve", "--url", voice_server) == 0
    output = capsys.readouterr()
    assert output.out == "added eve (1.5 s)\ndeleted eve\n"
    assert output.err == "plosive voices: warning: it is short\n"
    assert clip.read_bytes() in VoiceHandler.uploads[0]
    assert run(voices, "delete", "bob", "--url", voice_server) == 1
    assert capsys.readouterr().err == "plosive voices: no voice 'bob'\n"
    assert run(voices, "add", "eve", "--clip", "/missing.wav", "--text", "hi") == 1
    assert capsys.readouterr().err == "plosive voices: /missing.wav: No such file or directory\n"
    assert run(voices, "--url", "http://127.0.0.1:9") == 1
    assert "http://127.0.0.1:9: connection refused. Is" in capsys.readouterr().err


def test_voices_without_a_key_tells_how_to_give_one(voice_server, monkeypatch, capsys) -> None:
    monkeypatch.delenv("PLOSIVE_API_KEY", raising=False)
    assert run(voices, "--url", voice_server) == 1
    assert capsys.readouterr().err == f"plosive voices: {HOW_TO_GIVE_IT}"
    assert run(voices, "--url", voice_server, "--api-key", "wrong") == 1
    assert capsys.readouterr().err.endswith("with status 401: send a header\n")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("add",), "plosive voices add bob --clip bob.wav --text 'What is said in it.'"),
        (("add", "eve"), "plosive voices add eve --clip eve.wav --text 'What is said in it.'"),
        (("add", "eve", "--clip", "a b.wav"), "add eve --clip 'a b.wav' --text 'What is said"),
        (("delete",), "plosive voices delete bob"),
        (("delete", "eve", "--clip", "x"), "plosive voices delete eve"),
        (("list", "eve"), "plosive voices list"),
    ],
)
def test_voices_wrong_usage_shows_a_line_to_copy(words, line, capsys) -> None:
    with pytest.raises(SystemExit) as exited:
        run(voices, *words)
    assert exited.value.code == 2
    assert line in capsys.readouterr().err
