"""Several speakers in one Fish request: what the engine is told, and who cannot have them."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import ormsgpack
import pytest
import torch

from model.prompt import Voice
from realtime.adapters.fish_voices import _together
from realtime.pingpong.messages import OpenSlot, SetText, VoicePrompt
from tests.adapters.fish_support import live
from tests.fakes import FakeEngine
from tests.realtime.support import make_engine, serving, write_voice
from tests.realtime.test_voices import clip
from tests.support.engine import tiny_model, voice

TTS = "/v1/tts"
TEXT = (
    "<|speaker:0|>Good morning, how are you? It is early.<|speaker:1|>Very well. And you? Tell me."
)
SEGMENTS = [
    "<|speaker:0|>Good morning, how are you?",
    "<|speaker:0|>It is early.<|speaker:1|>Very well.",  # short sentences are spoken together
    "<|speaker:1|>And you? Tell me.",
]


def make_speakers(tmp_path: Path) -> FakeEngine:
    engine = make_engine(tmp_path)
    write_voice(tmp_path / "builtin", "anna", num_frames=20)
    engine.info = dataclasses.replace(engine.info, has_speakers=True)
    return engine


def spoken(engine: FakeEngine) -> list[str]:
    return [c.text for c in engine.seen(SetText) if isinstance(c, SetText) and c.is_closed]


async def post(http: Any, **request: object) -> Any:
    body = ormsgpack.packb({"text": TEXT, "format": "pcm", **request})
    return await http.post(TTS, content=body, headers={"content-type": "application/msgpack"})


async def test_stored_voices(tmp_path: Path) -> None:
    engine = make_speakers(tmp_path)
    async with serving(tmp_path, engine) as served, served.http() as http:
        for _ in range(2):
            assert (await post(http, reference_id=["anna", "tone"])).status_code == 200
            await served.until_free()
    first, second = [command.voices for command in engine.seen(OpenSlot)]
    assert first[0] is second[0], "one voice, whose prefix is cached"
    assert first[0].text == "<|speaker:0|>a tone\n<|speaker:1|>a tone"
    assert first[0].codes.shape == (4, 70)
    assert spoken(engine)[:3] == SEGMENTS


async def test_clips_of_several_speakers(tmp_path: Path) -> None:
    engine = make_speakers(tmp_path)
    speakers = [
        [{"audio": clip(1.0), "text": "one"}],
        [{"audio": clip(2.0), "text": "two"}, {"audio": clip(1.5), "text": "three"}],
    ]
    async with serving(tmp_path, engine) as served, served.http() as http:
        assert (await post(http, references=speakers)).status_code == 200
        (opening,) = engine.seen(OpenSlot)
        assert opening.voices[0].text == "<|speaker:0|>one\n<|speaker:1|>two\nthree"
        assert opening.voices[0].codes.shape == (4, 25 + 50 + 38)
        assert (await post(http, references=[speakers[0]])).status_code == 200
        assert engine.seen(OpenSlot)[1].voices[0].text == "one", "one speaker needs no tag"


async def test_over_the_socket(tmp_path: Path) -> None:
    engine = make_speakers(tmp_path)
    async with serving(tmp_path, engine) as served, live(served) as fish:
        await fish.start(reference_id=["anna", "tone"])
        for part in (TEXT[:7], TEXT[7:60], TEXT[60:]):
            await fish.send("text", text=part)
        await fish.send("stop")
        assert await fish.until_finish()
        assert spoken(engine) == SEGMENTS


@pytest.mark.parametrize(
    ("request_", "status", "message"),
    [
        ({"reference_id": ["anna", "nobody"]}, 404, "there is no voice 'nobody'"),
        ({"reference_id": ["anna"] * 6}, 422, "reference_id"),
        ({"reference_id": ["anna", 7]}, 422, "reference_id"),
        ({"references": [[{"audio": b"x", "text": "x"}]] * 6}, 422, "references"),
        ({"references": [[{"audio": b"x", "text": "x"}], "x"]}, 422, "references"),
    ],
)
async def test_what_cannot_be(tmp_path: Path, request_: dict, status: int, message: str) -> None:
    async with serving(tmp_path, make_speakers(tmp_path)) as served, served.http() as http:
        response = await post(http, **request_)
        assert response.status_code == status
        assert message in response.json()["message"]


async def test_a_model_with_one_speaker_refuses_several(tmp_path: Path) -> None:
    reference = {"audio": clip(), "text": "x"}
    async with serving(tmp_path) as served, served.http() as http:
        for request in (
            {"reference_id": ["tone", "tone"]},
            {"references": [[reference], [reference]]},
        ):
            response = await post(http, **request)
            assert response.status_code == 400
            assert response.json() == {
                "status": 400,
                "message": f"{next(iter(request))}: got 2 speakers, fake has one",
            }
        assert (await post(http, reference_id=["tone"])).status_code == 200


def test_the_prompt_is_that_of_several_references() -> None:
    """Byte for byte: tags, texts and codes."""
    voices = [voice(0, num_frames=5), voice(1, num_frames=7)]
    build = tiny_model().prompt.prefix

    def rows(*prompts: VoicePrompt) -> torch.Tensor:
        return build([Voice(v.name, v.text, torch.from_numpy(v.codes)) for v in prompts])

    assert torch.equal(rows(_together(voices)), rows(*voices))
    tagged = VoicePrompt("t", "<|speaker:3|>a voice", voices[0].codes)
    assert torch.equal(rows(_together([tagged, voices[1]])), rows(tagged, voices[1]))


def test_a_voice_without_a_reference_is_no_speaker() -> None:
    empty = VoicePrompt("default", "", np.zeros((4, 0), np.int32))
    with pytest.raises(Exception, match="'default' has no reference clip"):
        _together([voice(), empty])
