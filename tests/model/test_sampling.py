"""Sampling parameters are refused by name when they are out of range."""

import math

import pytest

from model.errors import SamplingError
from model.sampling import SamplingParams
from ops.sampling import MAX_TOP_K


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", math.nan),
        ("temperature", "0.8"),
        ("top_p", 1.01),
        ("top_p", math.inf),
        ("top_k", 0),
        ("top_k", MAX_TOP_K + 1),
        ("top_k", 2.5),
        ("seed", 1 << 63),
        ("seed", True),
    ],
)
def test_parameters_out_of_range(field, value):
    kind = "an integer" if field in ("top_k", "seed") else "a number"
    with pytest.raises(SamplingError, match=rf"{field}: got .*, expected {kind} from "):
        SamplingParams(**{field: value})


def test_parameters_in_range():
    SamplingParams(0, 0.0, 1, -(1 << 63))
    SamplingParams(2, 1, MAX_TOP_K, (1 << 63) - 1)
