"""A random model in the engine: a turn of the length that its name says."""

import math
from pathlib import Path

from model.speech_model import load_speech_model
from tests.support.engine import open_slot, running, speak


def test_a_segment_is_as_long_as_it_is_told():
    tiny = load_speech_model(Path("random:tiny?frames=7"))
    with running(tiny, num_slots=1, max_positions=1024) as (engine, recorder):
        slot = open_slot(engine, recorder)
        pcm = speak(engine, recorder, slot, 1, "One segment.", "And another.")
    assert len(pcm) == 2 * 7 * tiny.codec.frame_samples
    assert 0.01 < float(abs(pcm).max()) < 1.0 and math.isfinite(float(pcm.sum()))
