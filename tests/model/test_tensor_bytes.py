"""Memory of all that an object holds."""

from dataclasses import dataclass

import torch
from torch import nn

from model.tensor_bytes import tensor_bytes


@dataclass
class Holder:
    first: torch.Tensor
    others: dict[str, list[torch.Tensor]]


def test_tensors_are_found_wherever_they_are_and_counted_once() -> None:
    base = torch.zeros(10, dtype=torch.float32)
    holder = Holder(base, {"views": [base[2:], base.view(2, 5)], "own": [torch.zeros(3).half()]})
    assert tensor_bytes(holder) == 40 + 6
    assert tensor_bytes([holder, holder]) == 46
    linear = nn.Linear(3, 2)
    assert tensor_bytes({"layer": (linear,)}) == (3 * 2 + 2) * 4
