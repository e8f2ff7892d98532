"""How a stack's work is dealt out to the CTAs of `csrc/persistent.cu`, and what it takes of an SM."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from ops.quantize import Kind

UNIT_ROWS = 16  # of a weight: what one CTA multiplies by all of K
_TILES_PER_STAGE = 4
_STAGE_BYTES = 8192
_MAX_SHARED_BYTES = 227 * 1024
_MAX_SPLITS = 8
_LAYER_BYTES = 32  # pointers that stay in shared memory
_MAX_LAYERS = 48
ROWS = (2, 4)  # of variants of the kernel


@dataclass(frozen=True)
class Geometry:
    """Widths of a stack's blocks."""

    dim: int
    ffn: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """(out, in) of wqkv, wo, gate_up, down: the phases of a layer."""
        q_dim = self.num_heads * self.head_dim
        return (
            (q_dim + 2 * self.num_kv_heads * self.head_dim, self.dim),
            (self.dim, q_dim),
            (2 * self.ffn, self.dim),
            (self.dim, self.ffn),
        )


def is_supported(geometry: Geometry, kind: Kind) -> bool:
    """Whether the kernel can run such blocks (without biases, with norms of queries and keys)."""
    columns = _TILES_PER_STAGE * _values_per_tile(kind)
    group = geometry.num_heads // geometry.num_kv_heads
    return (
        geometry.head_dim == 128
        and group in (2, 4, 8)
        and all(n % UNIT_ROWS == 0 and k % columns == 0 for n, k in geometry.matrices)
    )


@dataclass(frozen=True)
class Plan:
    """One variant of the kernel.

    Attributes:
        rows: most rows of x.
        warpgroups: that multiply.
        spare: SMs left to what runs beside it, which would find no room for as long as it runs.
    """

    rows: int
    warpgroups: int = 3
    spare: int = 0

    @property
    def threads(self) -> int:
        return 128 * (self.warpgroups + 1)

    def max_splits(self, geometry: Geometry, num_ctas: int) -> int:
        """Most CTAs that share a row's positions: a CTA has one part of one row and key/value head.
        It depends on the variant, not on how many rows there are, so that a row's bits do not."""
        splits = num_ctas // (geometry.num_kv_heads * self.rows)
        assert splits > 0, (geometry.num_kv_heads, self.rows, num_ctas)
        return min(splits, _MAX_SPLITS)

    def operand_bytes(self, geometry: Geometry, kind: Kind) -> int:
        """Of the rows in shared memory: of the deepest matrix, and no less than attention needs."""
        deepest = max(k for _, k in geometry.matrices)
        group, warps = geometry.num_heads // geometry.num_kv_heads, min(8, 4 * self.warpgroups)
        head = geometry.head_dim
        meeting = 2 * group * (head + 32) + 8 * head + warps * group * (4 * head + 8) + 8 * group
        return max(deepest * self.rows * (1 if kind == "bsfp8" else 2), -(-meeting // 1024) * 1024)

    def _fixed_bytes(self, geometry: Geometry, kind: Kind) -> int:
        operand, warps = self.operand_bytes(geometry, kind), 4 * self.warpgroups
        scales = operand // 128 * 4 if kind == "bsfp8" else 0
        return (
            operand
            + scales
            + _MAX_LAYERS * _LAYER_BYTES
            + 4 * self.rows * warps * (2 * UNIT_ROWS + 1)
        )

    def _stage_bytes(self, kind: Kind) -> int:
        return _STAGE_BYTES + 16 + (_TILES_PER_STAGE * 8 if kind == "bsfp8" else 0)

    def stages(self, geometry: Geometry, kind: Kind) -> int:
        """Of the ring of every warpgroup: all that an SM has."""
        room = _MAX_SHARED_BYTES - 1024 - self._fixed_bytes(geometry, kind)
        return room // self._stage_bytes(kind) // self.warpgroups

    def shared_bytes(self, geometry: Geometry, kind: Kind) -> int:
        stages = self.warpgroups * self.stages(geometry, kind)
        return self._fixed_bytes(geometry, kind) + stages * self._stage_bytes(kind)

    def defines(
        self, geometry: Geometry, kind: Kind, page_size: int | None
    ) -> dict[str, int | str]:
        """Args:
        page_size: positions of a page; None: the short memory of the fast AR.
        """
        return {
            "IS_FP8": int(kind == "bsfp8"),
            "ROWS": self.rows,
            "WARPGROUPS": self.warpgroups,
            "STAGES": self.stages(geometry, kind),
            "OPERAND_BYTES": self.operand_bytes(geometry, kind),
            "NORM_ITEMS": -(-geometry.dim // (8 * 128 * self.warpgroups)),
            "HEAD_DIM": geometry.head_dim,
            "GROUP": geometry.num_heads // geometry.num_kv_heads,
            "PAGE": page_size or 16,
            "IS_FAST": int(page_size is None),
            "MOST_ASKED": 4,
            "SPIN_LIMIT": 0,
            "SKIP_WAITS": 0,
        }


def _values_per_tile(kind: Kind) -> int:
    return 128 if kind == "bsfp8" else 64


def deal(
    geometry: Geometry, num_logits: int, num_ctas: int, *, is_level: bool = False
) -> list[list[int]]:
    """First unit of every CTA in every phase, the head the last, and the end: [5][num_ctas + 1].

    What a phase has is dealt evenly; units of deep matrices are few, so some CTAs get one more. Those
    get fewer units of gate and up, so that every CTA streams as much in a layer.

    Args:
        is_level: gate and up are dealt evenly too.
    """
    units = [n // UNIT_ROWS for n, _ in geometry.matrices]
    costs = [k for _, k in geometry.matrices]
    counts = [_even(total, num_ctas) for total in units]
    counts[1].reverse()  # the CTAs with more of one phase are not those with more of the other
    if not is_level:
        others = [
            sum(counts[phase][cta] * costs[phase] for phase in (0, 1, 3)) for cta in range(num_ctas)
        ]
        counts[2] = _fill(others, units[2], costs[2])
    counts.append(_even(-(-num_logits // UNIT_ROWS), num_ctas))
    return [[0, *itertools.accumulate(phase)] for phase in counts]


def _even(total: int, num_ctas: int) -> list[int]:
    return [total * (cta + 1) // num_ctas - total * cta // num_ctas for cta in range(num_ctas)]


def _fill(levels: Sequence[int], num_units: int, cost: int) -> list[int]:
    """Deals units to whoever is lowest."""
    level, counts = list(levels), [0] * len(levels)
    for _ in range(num_units):
        lowest = min(range(len(level)), key=level.__getitem__)
        level[lowest] += cost
        counts[lowest] += 1
    return counts


# Most rows for which one launch measured faster than one per op.
MOST_ROWS: dict[Kind, int] = {"bsfp8": 0, "bf16": 0}


def plan_for(kind: Kind, num_rows: int) -> Plan | None:
    """The variant for so many rows, if any is the fastest way."""
    if num_rows > MOST_ROWS[kind]:
        return None
    return Plan(next(rows for rows in ROWS if num_rows <= rows))
