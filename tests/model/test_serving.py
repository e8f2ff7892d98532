"""The section `plosive` of a config.json: defaults, and one clear line for whatever is wrong."""

from typing import Any

import pytest

from model.errors import ConfigError
from model.speech_model import Serving, read_serving


def test_a_config_without_the_section_is_served_as_s2_pro() -> None:
    assert read_serving({}) == Serving()
    assert read_serving({"plosive": {"temperature": 1}}) == Serving(temperature=1.0)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ([], "plosive: got"),
        ("x", "plosive: got 'x'"),
        (None, "plosive: got None"),
        ({"frames": 5}, "unknown field 'frames'"),
        ({"front_end": "french"}, "plosive.front_end: got 'french'"),
        ({"front_end": 5}, "plosive.front_end: got 5"),
        ({"context": "none"}, "plosive.context: got 'none'"),
        ({"has_prompt": "perhaps"}, "plosive.has_prompt: got 'perhaps'"),
        ({"default_voice": None}, "plosive.default_voice: got None"),
        ({"max_frames": "x"}, "plosive.max_frames: got 'x'"),
        ({"max_frames": 0}, "plosive.max_frames: got 0"),
        ({"max_segment_chars": -1}, "plosive.max_segment_chars: got -1"),
        ({"temperature": -0.1}, "plosive.temperature: got -0.1"),
        ({"temperature": float("nan")}, "plosive.temperature: got nan"),
        ({"top_p": 0}, "plosive.top_p: got 0"),
        ({"top_k": 1.5}, "plosive.top_k: got 1.5"),
    ],
)
def test_what_makes_no_sense_is_named(section: Any, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_serving({"plosive": section})
    assert message in str(refused.value)
