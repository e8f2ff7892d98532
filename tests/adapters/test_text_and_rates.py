"""What is no text, and rates that no audio has: refused by every API, in its own shape."""

from pathlib import Path
from typing import Any

import ormsgpack
import pytest

from tests.adapters.fish_support import TEXT, live
from tests.adapters.test_client_limits import POSTS
from tests.realtime.support import TIMEOUT_S, serving

HALVES = (r"\ud83d", r"\ude00", r"a\ud83db", r"\ude00\ud83d", "\\ud83d ")
JSON = {"Content-Type": "application/json"}
FAST_HZ = 2**31 - 1


def shape_of(path: str) -> set[str]:
    return {"error"} if path == "/v1/audio/speech" else {"status", "message"}


@pytest.mark.parametrize("path", POSTS)
async def test_half_a_surrogate_pair_is_no_text(tmp_path: Path, path: str) -> None:
    field = "input" if "input" in POSTS[path] else "text"
    known = "".join(f'"{k}": "{v}", ' for k, v in POSTS[path].items() if k != field)
    async with serving(tmp_path) as served, served.http() as http:
        for text in HALVES:
            body = "{" + known + f'"{field}": "Hello {text}."' + "}"
            response = await http.post(path, content=body, headers=JSON)
            assert response.status_code == 400, (text, response.text)
            assert set(response.json()) == shape_of(path) and "JSON" in response.text
        assert not served.engine.commands  # no slot was touched
        body = "{" + known + f'"{field}": "Hello ' + r'\ud83d\ude00."}'
        assert (await http.post(path, content=body, headers=JSON)).status_code == 200


async def test_half_a_surrogate_pair_is_no_text_of_a_reference_or_a_title(tmp_path: Path) -> None:
    bodies = {
        ("POST", "/v1/tts"): r'{"text": "Hi.", "references": [{"audio": "", "text": "\ud800"}]}',
        ("PATCH", "/model/tone"): r'{"title": "\ud800"}',
    }
    async with serving(tmp_path) as served, served.http() as http:
        for (method, path), body in bodies.items():
            response = await http.request(method, path, content=body, headers=JSON)
            assert (
                response.status_code == 400
                and "surrogate" in response.text
                or "hex" in (response.text)
            )


async def test_half_a_surrogate_pair_in_messagepack(tmp_path: Path) -> None:
    half = ormsgpack.packb({"event": "text", "text": "Hi???"}).replace(b"???", b"\xed\xa0\x80")
    async with serving(tmp_path) as served, live(served) as fish:
        await fish.start()
        await fish.socket.send(half)
        finish = await fish.next()
        assert finish["reason"] == "error" and "UTF-8" in finish["message"]
        await fish.start(text=TEXT)
        await fish.send("stop")
        assert await fish.until_finish()


ODD_TEXTS = {  # whether it is spoken
    "": False,
    " \n ": False,
    "...": False,
    "\n***\n": False,
    "a " * 100_000: False,
    "Hello\0 there, \0\0 Anna.": True,
    "\u202eHello\u202c there, \u200fAnna\u200e.": True,
    "\ufeffHello there.": True,
    "Hello \U0001f44b there.": True,
}


@pytest.mark.parametrize("path", POSTS)
async def test_odd_text(tmp_path: Path, path: str) -> None:
    field = "input" if "input" in POSTS[path] else "text"
    async with serving(tmp_path) as served, served.http() as http:
        for text, is_spoken in ODD_TEXTS.items():
            response = await http.post(path, json=POSTS[path] | {field: text}, timeout=TIMEOUT_S)
            assert response.status_code in ((200,) if is_spoken else (400, 422)), text[:40]
            assert is_spoken or set(response.json()) == shape_of(path)
            assert not is_spoken or response.content
            await served.until_free()


async def test_odd_text_on_a_live_socket(tmp_path: Path) -> None:
    """What has nothing to say is silent, and what is too long goes on in another turn."""
    async with serving(tmp_path) as served, live(served) as fish:
        for text, is_spoken in ODD_TEXTS.items():
            if len(text) > 1_000:
                continue
            await fish.start(text=text)
            await fish.send("stop")
            assert bool(await fish.until_finish()) == is_spoken, text[:40]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "9", "-1"])
async def test_numbers_out_of_range(tmp_path: Path, number: str) -> None:
    async with serving(tmp_path) as served, served.http() as http:
        for path in POSTS:
            known = ", ".join(f'"{k}": "{v}"' for k, v in POSTS[path].items())
            extra = "speed" if path == "/v1/audio/speech" else "temperature"
            body = "{" + known + f', "{extra}": {number}' + "}"
            response = await http.post(path, content=body, headers=JSON)
            assert response.status_code in (400, 422), response.text
            assert set(response.json()) == shape_of(path)
        assert not served.engine.commands


RATES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/tts", {"format": "mp3"}),
    ("/v1/tts", {"format": "wav"}),
    ("/v1/tts", {"format": "pcm"}),
    ("/v1/tts", {"format": "opus"}),
    ("/v1/tts/stream/with-timestamp", {"format": "pcm"}),
]


@pytest.mark.parametrize(("path", "fields"), RATES)
@pytest.mark.parametrize("rate", [FAST_HZ, 2**63, 0, -1, 44_099])
async def test_rates_that_are_not_offered(
    tmp_path: Path, path: str, fields: dict[str, Any], rate: int
) -> None:
    async with serving(tmp_path) as served, served.http() as http:
        response = await http.post(path, json={"text": "Hi.", "sample_rate": rate} | fields)
    assert response.status_code in (400, 422) and set(response.json()) == {"status", "message"}
    assert "sample_rate" in response.text


async def test_rates_that_are_not_offered_on_a_live_socket(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, live(served) as fish:
        await fish.start(sample_rate=FAST_HZ)
        finish = await fish.next()
        assert finish["reason"] == "error"
        assert f"sample_rate: pcm is not offered at {FAST_HZ} Hz" in finish["message"]
