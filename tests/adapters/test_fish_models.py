"""`/model`: voices as Fish's models, and every form that cannot be used."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.adapters.fish_support import TEXT
from tests.adapters.test_fish_http import refusal
from tests.realtime.support import Served, serving, write_voice
from tests.realtime.test_voices import clip


async def create(http: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    data = {"title": "Anna", "texts": ["what I said"], "train_mode": "fast", "type": "tts"}
    num_clips = fields.pop("num_clips", 1)
    audio = fields.pop("audio", clip())
    files = [("voices", ("upload", audio)) for _ in range(num_clips)]
    return await http.post("/model", data=data | fields, files=files)


async def titles(http: httpx.AsyncClient, **query: Any) -> list[str]:
    response = await http.get("/model", params=query)
    assert response.status_code == 200, response.text
    return [model["title"] for model in response.json()["items"]]


async def test_create_use_change_and_delete(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, served.http() as http:
        response = await create(
            http,
            description="calm",
            tags=["calm", "female"],
            visibility="unlist",
            num_clips=2,
            texts=["one", "two"],
        )
        assert response.status_code == 201, response.text
        model = response.json()
        voice = served.hub._voices.get(model["_id"])
        assert voice.text == "one\ntwo" and voice.codes.shape[1] == 50
        assert (model["title"], model["description"]) == ("Anna", "calm")
        assert (model["tags"], model["visibility"]) == (["calm", "female"], "unlist")
        path = f"/model/{model['_id']}"
        assert (await http.get(path)).json() == model
        speech = {"text": TEXT, "reference_id": model["_id"]}
        assert (await http.post("/v1/tts", json=speech)).status_code == 200
        changed = await http.patch(path, data={"title": "Anne"})
        assert changed.status_code == 200
        assert changed.json()["title"] == "Anne" and changed.json()["description"] == "calm"
        assert changed.json()["created_at"] == model["created_at"]
        assert (await http.patch(path, json={"tags": ["x"]})).json()["tags"] == ["x"]
        assert await titles(http) == ["tone", "Anne"]
        await survives_a_restart(tmp_path, model["_id"])
        assert (await http.delete(path)).status_code == 204
        refusal(await http.get(path), 404, "there is no model")
        refusal(await http.post("/v1/tts", json=speech), 404, "there is no voice")
        assert not list((tmp_path / "voices").rglob("*.*"))


async def survives_a_restart(folder: Path, model_id: str) -> None:
    async with serving(folder) as served, served.http() as http:
        assert (await http.get(f"/model/{model_id}")).json()["title"] == "Anne"


async def test_search(tmp_path: Path) -> None:
    write_voice(tmp_path / "builtin", "other")
    async with serving(tmp_path) as served, served.http() as http:
        for title, tags in (("Anna", ["a", "b"]), ("Hannah", ["b"]), ("Bob", [])):
            made = await create(http, title=title, tags=tags, languages=["en", title[0]])
            assert made.status_code == 201 and made.json()["visibility"] == "private"
        assert (await http.get("/model/other")).json()["visibility"] == "public"
        assert set(await titles(http, language=["H", "B"])) == {"Hannah", "Bob"}
        assert await titles(http, title="ANN", sort_by="created_at") == ["Hannah", "Anna"]
        assert await titles(http, tag=["a", "b"]) == ["Anna"]
        assert len(await titles(http, self="true")) == 3
        assert await titles(http, author_id="somebody") == []
        for number in ("0", "x", "9" * 5_000):
            refused = await http.get("/model", params={"page_number": number})
            assert refused.status_code == 422 and "page_number" in refused.json()["message"]
        first, second = [
            (await http.get("/model", params={"page_size": 3, "page_number": n})).json()
            for n in (1, 2)
        ]
        assert (first["total"], len(first["items"]), first["has_more"]) == (5, 3, True)
        assert (second["total"], len(second["items"]), second["has_more"]) == (5, 2, False)
        for query in ({"page_size": 0}, {"page_size": 101}, {"page_number": "x"}):
            refusal(await http.get("/model", params=query), 422, "page_")


async def test_a_full_store_is_said_before_the_clip_is_encoded_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, max_voices=1) as served, served.http() as http:
        assert (await create(http)).status_code == 201
        files = sorted((tmp_path / "voices").rglob("*.*"))
        refused = await create(http, audio=b"no audio, which nobody notices")
        assert refused.status_code == 400 and "1 " in refused.json()["message"], refused.text
        monkeypatch.setattr(served.hub._voices, "check_addable", lambda name, text: None)
        assert (await create(http)).status_code == 400  # noticed late, by the store itself
        assert sorted((tmp_path / "voices").rglob("*.*")) == files


async def test_forms_that_cannot_be_used(tmp_path: Path) -> None:
    async with serving(tmp_path, max_clip_bytes=1_000_000) as served, served.http() as http:
        no_file = {"title": "x", "texts": "y"}
        for response, status, message in (
            (await create(http, texts=[]), 400, "does not transcribe"),
            (await create(http, texts=["a", "b"]), 400, "got 2 for 1"),
            (await create(http, title=""), 422, "title"),
            (await create(http, title="x" * 500), 422, "title"),
            (await create(http, visibility="secret"), 422, "visibility"),
            (await create(http, train_mode="full"), 400, "train_mode"),
            (await create(http, type="svc"), 400, "type"),
            (await create(http, audio=b"no audio"), 422, "not audio"),
            (await create(http, audio=clip(level=0)), 422, "silent"),
            (await create(http, audio=b"\0" * 5_000_000), 413, "bytes"),
            (await create(http, num_clips=30), 400, ""),
            (await http.post("/model", data=no_file), 422, "voices"),
            (await http.post("/model", files={"title": (None, "x")}), 422, "voices"),
            (await http.post("/model", content=b"x"), 415, "multipart"),
            (await http.post("/model", json=[1]), 400, "object"),
            (await http.patch("/model/tone", data={"title": "mine"}), 403, "built-in"),
            (await http.delete("/model/tone"), 403, "built-in"),
            (await http.delete("/model/nobody"), 404, "nobody"),
            (await http.get("/model/..%2f..%2fetc%2fpasswd"), 404, "there is no model"),
            (await http.delete("/model/a%2F..%2Fb.json"), 404, "there is no model"),
            (await http.patch("/model/%00", data={"title": "x"}), 404, "there is no model"),
            (await http.put("/model"), 405, ""),
        ):
            refusal(response, status, message)
        broken = {"Content-Type": "multipart/form-data; boundary=x"}
        for content in (b"", b"--x", b"--x\r\nContent-Disposition: form-data\r\n\r\n"):
            response = await http.post("/model", content=content, headers=broken)
            assert response.status_code in (400, 422), response.text
            refusal(response, response.status_code, "")
        assert (await create(http)).status_code == 201


async def test_clips_wait_in_a_short_line(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, served.http() as http:
        served.engine.encode_gate.clear()
        waiting = [asyncio.create_task(create(http)) for _ in range(4)]
        num_early = await until_one_is_refused(served, http)
        served.engine.encode_gate.set()
        statuses = sorted(r.status_code for r in await asyncio.gather(*waiting))
        assert statuses == [201] * (4 - num_early) + [503] * num_early, "four places in all"


async def until_one_is_refused(served: Served, http: httpx.AsyncClient) -> int:
    """How many came early enough to take a place."""
    num_early = 0
    async with asyncio.timeout(10.0):
        while (response := await late(http)).status_code != 503:
            num_early += 1
    refusal(response, 503, "waiting")
    return num_early


async def late(http: httpx.AsyncClient) -> httpx.Response:
    try:
        return await asyncio.wait_for(create(http), 0.2)
    except TimeoutError:  # it was early enough to wait with the others
        return httpx.Response(202)
