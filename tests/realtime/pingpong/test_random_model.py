"""Random models in the engine: a turn of the length that its name says, references that fit."""

import math
from bisect import bisect
from functools import partial
from pathlib import Path

import pytest
import torch

from model.config import DualARConfig
from model.errors import ConfigError
from model.geometries import GEOMETRIES, config_json
from model.prompt import PromptBuilder, Voice, load_tokenizer
from model.random_model import RandomModel
from model.speech_model import load_speech_model
from realtime.pingpong.prompt_rows import MIN_TEXT_POSITIONS
from realtime.voices import VoiceStore
from tests.support.engine import open_slot, running, speak


def test_a_segment_is_as_long_as_it_is_told():
    tiny = load_speech_model(Path("random:tiny?frames=7"))
    with running(tiny, num_slots=1, max_positions=1024) as (engine, recorder):
        slot = open_slot(engine, recorder)
        pcm = speak(engine, recorder, slot, 1, "One segment.", "And another.")
    assert len(pcm) == 2 * 7 * tiny.codec.frame_samples
    assert 0.01 < float(abs(pcm).max()) < 1.0 and math.isfinite(float(pcm.sum()))


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_the_longest_reference_that_is_taken_leaves_room_for_a_text(geometry, tmp_path):
    data = config_json(geometry)
    config = DualARConfig.from_dict(data)
    max_len = config.slow.max_len
    lengths_s = range(1, max_len)
    reference_s = lengths_s[bisect(lengths_s, False, key=partial(is_refused, geometry)) - 1]
    assert is_refused(geometry, reference_s + 1)
    RandomModel(geometry, reference_s=reference_s).write_small_files(tmp_path)
    store = VoiceStore(
        tmp_path / "voices", tmp_path, codec_id="", num_codebooks=config.num_codebooks
    )
    voice = store.get("default")
    prompt = PromptBuilder(load_tokenizer(tmp_path), config)
    prefix = prompt.prefix([Voice(voice.name, voice.text, torch.from_numpy(voice.codes))])
    room = max_len - prefix.shape[1] - 60
    assert MIN_TEXT_POSITIONS <= room < 4 * MIN_TEXT_POSITIONS


def is_refused(geometry: str, reference_s: int) -> bool:
    try:
        RandomModel(geometry, reference_s=reference_s)
    except ConfigError:
        return True
    return False
