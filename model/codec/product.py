"""Matrix products whose rows do not feel each other."""

from __future__ import annotations

from torch import Tensor

from ops import reference


class Product:
    """x @ weight (+ bias), with the weight laid out as the device multiplies it fastest.

    On x86 in f32 that is oneDNN's own layout: 84 us against 166 us for addmm, whose library does
    not use AVX-512 on every CPU, at [32, 1344] x [1344, 192] on one core. It also computes a row
    the same way whatever the other rows are, so that a stream's samples are the same bits
    whatever else is in the batch.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight [K, N], bias [N]."""
        self.weight = reference.pack_weight(weight.T.contiguous())
        self.bias = bias

    @property
    def is_row_exact(self) -> bool:
        """A row's bits depend on nothing but the row."""
        return bool(self.weight.is_mkldnn)

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, K] -> [M, N]."""
        # A single row takes another kernel, with another rounding.
        is_alone = self.is_row_exact and x.shape[0] == 1
        y = reference.linear(x.expand(2, -1) if is_alone else x, self.weight, self.bias)
        return y[:1] if is_alone else y
