"""How a model is served: the section `plosive` of its config.json, and whether kernels run it."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from model.errors import ConfigError
from model.speech_model import Serving, checked_run_as, read_serving
from tests.model.small_model import embedded_like_config


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


@pytest.mark.parametrize(
    ("capability", "heads", "dtype", "missing"),
    [
        ((9, 0), {}, torch.bfloat16, ""),
        ((8, 9), {}, torch.bfloat16, "compute capability 9.0 .Hopper., not that of a GPU"),
        ((9, 0), {"head_dim": 96}, torch.bfloat16, "head_dim 64 or 128 .*, not 96 and 5"),
        ((9, 0), {"num_heads": 9}, torch.bfloat16, ".* at most 8 queries a key, not 64 and 9"),
        ((9, 0), {}, torch.float16, "weights in bf16, not torch.float16"),
    ],
)
def test_a_device_without_kernels_runs_eagerly(monkeypatch, capability, heads, dtype, missing):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    config = embedded_like_config()
    config = replace(config, fast=replace(config.fast, **heads))
    model = SimpleNamespace(
        config=config, device=torch.device("cuda"), dtype=dtype, is_quantised=False
    )
    assert checked_run_as(None, model) == ("eager" if missing else "bf16")
    if missing:
        with pytest.raises(ConfigError, match=f"got 'bsfp8', whose kernels need {missing}"):
            checked_run_as("bsfp8", model)
