"""Which variant of the kernel runs which shape: how K is cut up, how wide a tile, how deep a ring."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from ops.quantize import Kind
from ops.reference_fp8 import ceil_div

ROWS_PER_TILE = 64
_TILE_BYTES = 8192
# Rows that CTAs take themselves, and items of 16 bytes a thread. A layer of 512 positions, H200:
# in 8 bits of 3 rows 38.5 -> 36.2 us, of 4 38.8 -> 36.9; in bf16 of 4 rows 62.9, so taken 66.5.
_MAX_COPIED_ROWS, _MAX_COPIED_FP8_ROWS, _MAX_COPIED_ITEMS = 2, 4, 8
_MAX_OWN_EXCHANGE = 8192  # a larger one lies in the ring, when that is done with
_WIDTHS = (8, 16, 32)  # more rows go through `csrc/linear_wide.cu`


@dataclass(frozen=True)
class Plan:
    """One variant of `csrc/linear.cu`.

    Attributes:
        cols: rows of x that a CTA takes.
        warpgroups: 64 rows of the weight each.
        stages: K tiles in flight per CTA.
        split: CTAs that share a tile's K.
        blocks_per_sm: CTAs an SM must have registers for.
        own_rows: rows that every CTA takes from memory itself, and makes what the product takes
            (normalises them); 0 if they come through the copy engine.
        is_copied: those rows come as the product takes them.
    """

    cols: int
    warpgroups: int
    stages: int
    split: int
    blocks_per_sm: int = 1
    own_rows: int = 0
    is_copied: bool = False

    kernel: ClassVar[str] = "linear"

    @property
    def rows(self) -> int:
        """Of x that a CTA takes."""
        return self.cols

    def box_rows(self, _num_rows: int) -> int:
        """Of x that the copy engine fetches at once."""
        return self.cols

    def num_ctas(self, row_tiles: int, cluster: int) -> int:
        """Along the weight; whole clusters."""
        assert row_tiles % self.warpgroups == 0, (self, row_tiles)
        count = row_tiles // self.warpgroups * self.split
        assert count % cluster == 0, (self, count)
        return count

    def defines(self, is_fp8: bool, is_gate_up: bool, in_features: int) -> dict[str, int | str]:
        return {
            "IS_FP8": int(is_fp8),
            "GATE_UP": int(is_gate_up),
            "COLS": self.cols,
            "WARPGROUPS": self.warpgroups,
            "STAGES": self.stages,
            "SPLIT": self.split,
            "BLOCKS_PER_SM": self.blocks_per_sm,
            "OWN_ROWS": self.own_rows,
            "IS_COPIED": int(self.is_copied),
            "IN_FEATURES": in_features if self.own_rows else 0,
            "ITEMS": self._items(is_fp8, in_features) if self.own_rows else 1,
        }

    def _items(self, is_fp8: bool, in_features: int) -> int:
        """What a thread takes of a row: four values at a time, or 16 bytes of this CTA's part."""
        if self.is_copied:
            blocks = ceil_div(ceil_div(in_features, 128 if is_fp8 else 64), self.split)
            return ceil_div(blocks, 16 * self.warpgroups)
        return ceil_div(ceil_div(in_features, 128), 4 * self.warpgroups)

    def can_copy(self, is_fp8: bool, num_rows: int, in_features: int) -> bool:
        """Whether the CTAs can take so many rows themselves: they pass through registers."""
        items = replace(self, is_copied=True)._items(is_fp8, in_features)
        most = _MAX_COPIED_FP8_ROWS if is_fp8 else _MAX_COPIED_ROWS
        return num_rows <= most and num_rows * items <= _MAX_COPIED_ITEMS

    @property
    def threads(self) -> int:
        return 128 * self.warpgroups + 32

    def cluster(self, is_gate_up: bool, is_fp8: bool) -> int:
        """CTAs of a cluster: the parts of K, or the CTAs that quantise 128 features together."""
        return 4 // self.warpgroups if is_gate_up and is_fp8 else self.split

    def shared_bytes(self, is_fp8: bool, is_gate_up: bool, num_blocks: int) -> int:
        """Dynamic shared memory, as the kernel lays it out."""
        most_blocks = ceil_div(num_blocks, self.split)
        items = self._items(is_fp8, num_blocks * (128 if is_fp8 else 64))
        row_bytes = 128 + 4 * is_fp8  # of a block of an activation
        exchange = 0
        if is_gate_up and is_fp8:
            exchange = 4 * 17 * self.cols
        elif self.split > 1:
            exchange = 4 * ROWS_PER_TILE * self.warpgroups * self.cols
        return (
            self.stages * (self.warpgroups * _TILE_BYTES + 16)
            + (most_blocks if self.own_rows else self.stages) * self.cols * row_bytes
            + (exchange if exchange <= _MAX_OWN_EXCHANGE else 0)
            + is_fp8 * most_blocks * self.warpgroups * 8
            + self.own_rows * self.warpgroups * items * 16
            + 8  # the barrier of the exchange
        )


@dataclass(frozen=True)
class WidePlan:
    """One variant of `csrc/linear_wide.cu`.

    Attributes:
        width: rows of the weight that a warpgroup multiplies.
        row_groups: warpgroups along the rows of x, 64 each.
        col_groups: warpgroups along the rows of the weight.
        stages: K tiles of weights in flight per CTA, two or more.
        row_stages: the same of x.
        split: CTAs that share a tile's K.
        groups: of 128 features that a cluster quantises.
        blocks_per_sm: CTAs an SM must have registers for.
        batch: K tiles in straight code, products of 8 bits overlapping.
        producers: threads that load: 32, or 128, whose registers go to two warpgroups that sum.
        scales_rows: x lacks the factors of its norm, which the sums are multiplied by.
        norms: the next norm is made as well, but for these factors.
    """

    width: int
    row_groups: int
    col_groups: int
    stages: int
    row_stages: int
    split: int = 1
    groups: int = 1
    blocks_per_sm: int = 1
    batch: int = 1
    producers: int = 32
    scales_rows: bool = False
    norms: bool = False

    kernel: ClassVar[str] = "linear_wide"

    @property
    def rows(self) -> int:
        """Of x that a CTA takes."""
        return 64 * self.row_groups

    def box_rows(self, num_rows: int) -> int:
        """Of x that the copy engine fetches at once."""
        return min(self.rows, ceil_div(num_rows, 8) * 8)

    @property
    def features(self) -> int:
        """Rows of the weight that a CTA takes."""
        return self.width * self.col_groups

    def defines(self, is_fp8: bool, is_gate_up: bool, in_features: int) -> dict[str, int | str]:
        return {
            "IS_FP8": int(is_fp8),
            "GATE_UP": int(is_gate_up),
            "WIDTH": self.width,
            "ROW_GROUPS": self.row_groups,
            "COL_GROUPS": self.col_groups,
            "STAGES": self.stages,
            "ROW_STAGES": self.row_stages,
            "SPLIT": self.split,
            "GROUPS": self.groups,
            "BLOCKS_PER_SM": self.blocks_per_sm,
            "BATCH": self.batch,
            "PRODUCERS": self.producers,
            "NORMS": int(self.norms),
            "SCALES_ROWS": int(self.scales_rows),
            "IN_FEATURES": in_features if self.scales_rows else 0,
        }

    @property
    def threads(self) -> int:
        return 128 * self.row_groups * self.col_groups + self.producers

    def cluster(self, is_gate_up: bool, is_fp8: bool) -> int:
        """CTAs of a cluster: the parts of K, or the CTAs that quantise features together."""
        if is_gate_up and is_fp8:
            return 256 * self.groups // self.features
        return self.split * (128 // self.features if self.norms else 1)

    def can_norm(self, is_fp8: bool, out_features: int) -> bool:
        """Whether a cluster can finish all of 128 columns: eight of a row for each of its threads."""
        if not is_fp8 or self.split == 1 or 128 % self.features or out_features % 128:
            return False
        ctas, warpgroups = self.split * (128 // self.features), self.row_groups * self.col_groups
        return ctas <= 8 and self.rows == ctas * warpgroups * 8

    def num_ctas(self, row_tiles: int, cluster: int) -> int:
        """Along the weight; whole clusters."""
        tiles = ceil_div(row_tiles * ROWS_PER_TILE, self.features)
        return ceil_div(tiles * self.split, cluster) * cluster

    def shared_bytes(self, is_fp8: bool, is_gate_up: bool, num_blocks: int) -> int:
        """Dynamic shared memory, as the kernel lays it out."""
        exchange = 0
        if is_gate_up and is_fp8:
            places = 1 if 256 % self.features == 0 else 2
            exchange = places * (1 + self.cluster(is_gate_up, is_fp8)) * self.rows
        elif self.split > 1:
            exchange = self.rows * self.features
        rows_per_scale = 8 if self.width % ROWS_PER_TILE else 32
        scales = ceil_div(num_blocks, self.split) * self.features // rows_per_scale
        return (
            self.stages * (128 * self.features + 8)
            + self.row_stages * (128 * self.rows + 8 + is_fp8 * 4 * self.rows)
            + 8 * max(self.stages, self.row_stages)
            + 8
            + 4 * (exchange + is_fp8 * scales)
        )


# By (N, K) of S2 Pro's layers, then by the most rows: what made a whole layer fastest on an H200.
# More rows are wide: a frame of 32 streams in bf16 5.39 -> 5.22 ms, in 8 bits 3.546 -> 3.533.
_FEW_ROWS: dict[tuple[int, int], dict[int, Plan]] = {
    (6144, 2560): {8: Plan(8, 1, 8, 2), 16: Plan(16, 1, 8, 2)},
    (2560, 4096): {8: Plan(8, 1, 6, 4), 16: Plan(16, 1, 6, 4)},
    (19456, 2560): {8: Plan(8, 1, 8, 1), 16: Plan(16, 1, 6, 1)},
    (2560, 9728): {8: Plan(8, 1, 6, 8), 16: Plan(16, 1, 6, 8)},
}
_WO, _DOWN, _CODE_HEAD, _SEMANTIC_HEAD = (2560, 4096), (2560, 9728), (4096, 2560), (4097, 2560)
_MANY_ROWS: dict[tuple[Kind, int, int], dict[int, WidePlan]] = {
    ("bsfp8", 6144, 2560): {
        64: WidePlan(64, 1, 1, 6, 5, split=2, blocks_per_sm=2),
        128: WidePlan(96, 2, 1, 5, 5, split=2, batch=2, producers=128),
    },
    ("bsfp8", 19456, 2560): {
        # Few stages of x: two CTAs fit an SM beside one of wo, and fetch while that still runs. With two
        # products in flight they take registers that others would have: frames of 64 streams 3.998 -> 4.021.
        64: WidePlan(64, 1, 1, 4, 3, blocks_per_sm=3),
        128: WidePlan(192, 2, 1, 4, 5, groups=3, producers=128),
    },
    **{
        ("bsfp8", *shape): {
            64: WidePlan(64, 1, 1, 6, 5, split=4, blocks_per_sm=2, batch=2),
            128: WidePlan(96, 2, 1, 5, 5, split=4, batch=2, producers=128),
        }
        for shape in (_WO, _DOWN)
    },
    ("bf16", 6144, 2560): {
        64: WidePlan(96, 1, 1, 6, 6, split=2),
        128: WidePlan(96, 2, 1, 5, 5, split=2),
        192: WidePlan(96, 3, 1, 5, 3, split=2),
    },
    ("bf16", 19456, 2560): {
        64: WidePlan(160, 1, 1, 7, 5),
        128: WidePlan(160, 2, 1, 5, 3),
        192: WidePlan(160, 3, 1, 5, 3),
    },
    **{
        ("bf16", *shape): {
            64: WidePlan(96, 1, 1, 6, 6, split=4),
            128: WidePlan(96, 2, 1, 5, 5, split=4),
            192: WidePlan(96, 3, 1, 5, 3, split=4),
        }
        for shape in (_WO, _DOWN)
    },
    **{
        ("bf16", *shape): {
            64: WidePlan(64, 1, 1, 8, 8, split=2),
            128: WidePlan(64, 2, 1, 7, 7, split=2),
        }
        for shape in (_CODE_HEAD, _SEMANTIC_HEAD)
    },
}
_MAX_NORM_STAGES = 6  # of gate_up: x takes shared memory too, and three CTAs are to fit an SM
_NUM_CTAS = 160  # that fill the SMs


def plan_for(
    kind: Kind,
    num_rows: int,
    out_features: int,
    in_features: int,
    *,
    is_gate_up: bool = False,
    has_norm: bool = False,
) -> Plan | WidePlan:
    """The plan for x [num_rows, in_features] and a weight [out_features, in_features]."""
    plan = _few_rows_plan(kind, num_rows, out_features, in_features, is_gate_up)
    if plan is None:
        return _wide_plan(kind, num_rows, out_features, in_features, is_gate_up)
    is_copied = not has_norm and plan.can_copy(kind == "bsfp8", num_rows, in_features)
    if not has_norm and not is_copied:
        return plan
    stages = min(plan.stages, _MAX_NORM_STAGES) if is_gate_up else plan.stages
    return replace(plan, stages=stages, own_rows=num_rows, is_copied=is_copied)


def _few_rows_plan(
    kind: Kind, num_rows: int, out_features: int, in_features: int, is_gate_up: bool
) -> Plan | None:
    """None: so many rows are not few."""
    measured = _FEW_ROWS.get((out_features, in_features))
    if measured is not None:
        return next((plan for most, plan in measured.items() if num_rows <= most), None)
    cols = next((width for width in _WIDTHS if num_rows <= width), None)
    if cols is None:
        return None
    split = 1 if is_gate_up else _split(kind, out_features, in_features)
    return Plan(cols, 1, 6, split)


def _wide_plan(
    kind: Kind, num_rows: int, out_features: int, in_features: int, is_gate_up: bool
) -> WidePlan:
    measured = _MANY_ROWS.get((kind, out_features, in_features), {})
    for most, plan in measured.items():
        if num_rows <= most:
            return plan
    split = 1 if is_gate_up else _split(kind, out_features, in_features)
    row_groups, stages = (1, 4) if num_rows <= ROWS_PER_TILE else (2, 3)
    return WidePlan(64, row_groups, 1, stages, stages, split, blocks_per_sm=2)


def _split(kind: Kind, out_features: int, in_features: int) -> int:
    """Parts of K that make about as many CTAs of 64 rows as fill the SMs."""
    num_blocks = ceil_div(in_features, 128) * (1 if kind == "bsfp8" else 2)
    tiles, split = ceil_div(out_features, ROWS_PER_TILE), 1
    while split < 8 and tiles * split < _NUM_CTAS and num_blocks >= 4 * split:
        split *= 2
    return split
