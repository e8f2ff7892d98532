"""The voice store on disk, and `/v1/voices` over HTTP."""

import asyncio
import io
import threading
import wave
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NoReturn

import httpx
import numpy as np
import pytest

from realtime import wire
from realtime.cli.serve import serve
from realtime.config import ServerConfig
from realtime.errors import VoiceError
from realtime.voices import VoiceStore, check_voices_dir
from tests.fakes import NUM_CODEBOOKS
from tests.realtime.support import make_engine, serving, session, write_voice

CODES = np.arange(NUM_CODEBOOKS * 10, dtype=np.int32).reshape(NUM_CODEBOOKS, 10)


def make_store(folder: Path, codec_id: str = "fake", max_voices: int = 3) -> VoiceStore:
    write_voice(folder / "builtin")
    return VoiceStore(
        folder / "builtin",
        folder / "voices",
        codec_id=codec_id,
        num_codebooks=NUM_CODEBOOKS,
        max_voices=max_voices,
    )


def refusal(store: VoiceStore, name: str, text: str = "some text") -> str:
    with pytest.raises(VoiceError) as refused:
        store.add(name, text, CODES)
    return refused.value.code


# ---------------------------------------------------------------------------- the store


def test_a_name_that_is_wrong_is_told_the_right_ones_or_some_of_many(tmp_path: Path) -> None:
    store = make_store(tmp_path, max_voices=30)
    names = ["tone", *(f"v{number:02}" for number in range(19))]
    for name in names[1:]:
        store.add(name, "some text", CODES)
    with pytest.raises(VoiceError, match=f"there are: {', '.join(names)}$"):
        store.get("nobody")
    store.add("v19", "some text", CODES)
    with pytest.raises(VoiceError, match=f"there are: {', '.join(names)}, ...$"):
        store.get("nobody")


@pytest.mark.parametrize("place", ["a file", "a file/voices", "/proc/voices", "a link to nowhere"])
def test_a_server_does_not_start_where_no_voice_can_be_stored(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a file").touch()
    (tmp_path / "a link to nowhere").symlink_to(tmp_path / "nowhere")
    folder = tmp_path / place

    def load(config: ServerConfig) -> NoReturn:
        pytest.fail(f"loaded a model although {config.voices_dir} cannot be used")

    assert serve(ServerConfig(port=0, voices_dir=folder), load) == 1
    error = capsys.readouterr().err
    assert error.startswith(
        f"plosive: --voices-dir (PLOSIVE_VOICES_DIR): no voice can be stored in {folder}: "
    )
    assert error.count("\n") == 1


def test_a_voices_dir_may_be_made_later(tmp_path: Path) -> None:
    check_voices_dir(tmp_path / "not" / "yet")
    check_voices_dir(tmp_path)
    assert not list(tmp_path.iterdir())


def test_added_voices_survive_a_restart(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    assert not (tmp_path / "voices").exists(), "created with the first voice"
    store.add("mine", "what I said", CODES)
    for again in (store, make_store(tmp_path)):
        voice = again.get("mine")
        assert voice.text == "what I said" and np.array_equal(voice.codes, CODES)
        assert [(info.name, info.is_builtin) for info in again.infos()] == [
            ("tone", True),
            ("mine", False),
        ]
    assert sorted(path.name for path in (tmp_path / "voices").iterdir()) == [
        "mine.json",
        "mine.safetensors",
    ]
    store.remove("mine")
    assert not list((tmp_path / "voices").iterdir())
    assert [info.name for info in make_store(tmp_path).infos()] == ["tone"]


@pytest.mark.parametrize("name", ["", "a" * 65, "../x", "a/b", "a\\b", "a.b", "ü", "a b", "a\n"])
def test_names_without_path_characters_only(tmp_path: Path, name: str) -> None:
    store = make_store(tmp_path)
    assert refusal(store, name) == "invalid_voice"
    with pytest.raises(VoiceError) as refused:
        store.remove(name)
    assert refused.value.code == "invalid_voice"
    assert not (tmp_path / "voices").exists()


def test_limits_and_protection(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    assert refusal(store, "tone") == "voice_protected"
    with pytest.raises(VoiceError, match="'tone' is a built-in voice and cannot be deleted or rep"):
        store.remove("tone")
    assert refusal(store, "x", "") == refusal(store, "x", "y" * 2_001) == "invalid_voice"
    with pytest.raises(VoiceError, match="int32"):
        store.add("x", "text", CODES[:2])
    for name in ("a", "b", "c"):
        store.add(name, "text", CODES)
    assert refusal(store, "a") == "voice_exists"
    assert refusal(store, "d") == "too_many_voices"
    for name, code in (("tone", "voice_protected"), ("nobody", "voice_not_found")):
        with pytest.raises(VoiceError) as refused:
            store.remove(name)
        assert refused.value.code == code
    with pytest.raises(VoiceError, match="no voice 'nobody'; those that were added: a, b, c$"):
        store.remove("nobody")
    with pytest.raises(VoiceError, match="tone, a, b, c"):
        store.get("nobody")


def test_damaged_and_foreign_voices_are_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_store(tmp_path).add("mine", "text", CODES)
    folder = tmp_path / "voices"
    (folder / "cut.safetensors").write_bytes((folder / "mine.safetensors").read_bytes()[:50])
    (folder / "cut.json").write_text('{"text": "x", "codec": "fake"}')
    (folder / "alone.safetensors").write_bytes((folder / "mine.safetensors").read_bytes())
    for i, description in enumerate(
        [b"", b"[]", b"null", b'"x"', b"{}", b"\xff", b'{"text": "x"}']
    ):
        (folder / f"odd{i}.safetensors").write_bytes((folder / "mine.safetensors").read_bytes())
        (folder / f"odd{i}.json").write_bytes(description)
    (folder / "folder.safetensors").mkdir()
    assert [info.name for info in make_store(tmp_path).infos()] == ["tone", "mine"]
    for name in ("cut", "alone", "folder", *(f"odd{i}" for i in range(7))):
        assert f"{name}.safetensors" in caplog.text
    other = make_store(tmp_path, codec_id="other")
    assert [info.name for info in other.infos()] == ["tone"]
    assert (folder / "mine.safetensors").exists()


def test_a_model_without_voices_speaks_without_a_reference(tmp_path: Path) -> None:
    store = VoiceStore(None, tmp_path, codec_id="fake", num_codebooks=NUM_CODEBOOKS)
    voice = store.get("default")
    assert voice.codes.shape == (NUM_CODEBOOKS, 0) and not voice.text
    assert [info.name for info in store.infos()] == ["default"]
    with pytest.raises(VoiceError, match="built-in"):
        store.remove("default")


# ---------------------------------------------------------------------------- over HTTP


SHORT = "the clip holds 1.0 s of speech; 10 to 30 s of one person who speaks clearly make a better voice"


def clip(duration_s: float = 1.0, level: int = 8_000) -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as wav:
        wav.setnchannels(1)
        wav.setsampwidth(2)
        wav.setframerate(8_000)
        wav.writeframes(np.full(round(8_000 * duration_s), level, "<i2").tobytes())
    return out.getvalue()


async def add(
    http: httpx.AsyncClient, name: str = "mine", data: bytes | None = None, **fields: str
) -> httpx.Response:
    form = {"name": name, "text": "what I said"} | fields
    return await http.post("/v1/voices", data=form, files={"file": data or clip()})


async def test_add_use_and_delete(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, served.http() as http:
        response = await add(http)
        assert response.status_code == 201, response.text
        assert response.json() == {
            "name": "mine",
            "text": "what I said",
            "num_frames": 25,
            "is_builtin": False,
            "duration_s": 1.0,
            "warnings": [SHORT],
        }
        async with session(served, voice="mine") as client:
            assert client.heard.of(wire.SessionReady)[0].voice == "mine"
            assert (await http.delete("/v1/voices/mine")).status_code == 204
            await client.say("It still speaks in this session.")
        listed = (await http.get("/v1/voices")).json()
        assert listed["default"] == "tone"
        assert [voice["name"] for voice in listed["voices"]] == ["tone"]


async def test_a_clip_that_is_short_or_not_its_text_is_taken_with_a_warning(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, served.http() as http:
        for duration_s, text, said in (
            (4.0, "what I said, word for word, in four seconds", []),
            (4.0, "几个字的一句话说得很慢", []),
            (0.6, "yes, it is", ["the clip holds 0.6 s of speech"]),
            (20.0, "one", ["text: got 3 characters for 20.0 s of speech, which is little"]),
            (4.0, "x" * 200, ["text: got 200 characters for 4.0 s of speech, which is much"]),
        ):
            response = await add(http, data=clip(duration_s), text=text)
            assert response.status_code == 201
            warnings = response.json()["warnings"]
            assert [
                warning[: len(start)] for warning, start in zip(warnings, said, strict=True)
            ] == said
            await http.delete("/v1/voices/mine")
        response = await add(http, data=clip(2.0), text="x" * 400)
        assert response.status_code == 400
        assert "400 characters for 2.0 s of speech, more than can be said" in response.text


async def test_clips_that_cannot_be_used(tmp_path: Path) -> None:
    async with serving(tmp_path, max_clip_bytes=10_000_000) as served, served.http() as http:
        for data, status, message in (
            (b"no audio at all", 422, "not audio"),
            (clip(level=0), 422, "silent"),
            (clip(duration_s=0.1), 422, "got 0.1 s"),
            (clip(duration_s=600.0), 422, "got 600.0 s"),
            (b"\0" * 11_000_000, 413, "10,000,000 bytes"),
        ):
            response = await add(http, data=data)
            assert response.status_code == status
            error = response.json()["error"]
            assert error["code"] == ("clip_too_large" if status == 413 else "invalid_clip")
            assert message in error["message"] and error["param"] == "file"
        assert (await add(http)).status_code == 201, "nothing was lost"


async def test_forms_that_cannot_be_used(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, served.http() as http:
        unlike = await http.post("/v1/voices", data={"nom": "x", "file": "y"})
        assert "got the form fields 'nom, file', expected name, text and" in unlike.text
        form = {"name": "x", "text": "y", "file": "z"}
        assert (
            "file: got 'z', expected the clip as a file"
            in (await http.post("/v1/voices", data=form)).text
        )
        form = {"name": "x", "text": "y"}
        misnamed = await http.post("/v1/voices", data=form, files={"clip": clip()})
        why = "file: got the form fields 'name, text, clip' without it, expected the clip as a file"
        assert misnamed.json()["error"]["message"] == why
        for response, status, code in (
            (await add(http, name="../x"), 400, "invalid_voice"),
            (await add(http, text=""), 400, "invalid_voice"),
            (await add(http, text="x" * 1_500), 400, "invalid_voice"),  # says the engine
            (await add(http, name="tone"), 403, "voice_protected"),
            (await http.post("/v1/voices", data={"name": "x", "text": "y"}), 400, "invalid_clip"),
            (await http.post("/v1/voices", files={"file": clip()}), 400, "invalid_voice"),
            (await http.post("/v1/voices", json={}), 400, "invalid_voice"),
            (await http.delete("/v1/voices/tone"), 403, "voice_protected"),
        ):
            error: dict[str, Any] = response.json()["error"]
            assert error["code"] == code
            assert response.status_code == (422 if code == "invalid_clip" else status)


async def test_all_methods_of_the_path_are_named(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, served.http() as http:
        for path, method, allowed, said in (
            ("/v1/voices", "PUT", "GET, POST", "GET and POST are"),
            ("/v1/voices", "OPTIONS", "GET, POST", "GET and POST are"),
            ("/v1/voices/x", "GET", "DELETE", "DELETE is"),
        ):
            response = await http.request(method, path)
            assert (response.status_code, response.headers["Allow"]) == (405, allowed)
            why = f"{method} is not possible there; {said}"
            assert response.json()["error"]["message"] == why


async def test_an_endless_upload_is_cut(tmp_path: Path) -> None:
    async def endless() -> AsyncIterator[bytes]:
        yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
        while True:
            yield b"\0" * 65_536

    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    async with serving(tmp_path, max_clip_bytes=1_000_000) as served, served.http() as http:
        try:
            response = await http.post("/v1/voices", content=endless(), headers=headers)
            assert response.status_code == 413
        except (httpx.WriteError, httpx.ReadError):
            pass  # the server closed while the client was still sending
        assert (await add(http)).status_code == 201


async def test_clips_wait_in_a_short_line_while_speech_goes_on(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    engine.encode_gate.clear()
    async with serving(tmp_path, engine) as served, served.http() as http:
        waiting = [asyncio.create_task(add(http, name=f"v{i}")) for i in range(4)]
        async with session(served) as client:
            await client.say("The event loop is free.")
        while not any(task.done() for task in waiting):
            response = await add(http, name="late")
            if response.status_code == 503:
                break
        assert response.json()["error"]["code"] == "at_capacity"
        assert int(response.headers["Retry-After"]) == 2
        engine.encode_gate.set()
        responses = await asyncio.gather(*waiting)
        assert [response.status_code for response in responses] == [201] * 4


def test_concurrent_adds_of_one_name_give_one_voice(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    results: list[str] = []

    def work() -> None:
        try:
            store.add("same", "text", CODES)
            results.append("added")
        except VoiceError as error:
            results.append(error.code)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == ["added"] + ["voice_exists"] * 7
