"""Which variant of the kernel runs which shape: how K is cut up, how wide a tile, how deep a ring."""

from __future__ import annotations

from dataclasses import dataclass

from ops.quantize import Kind
from ops.reference_fp8 import ceil_div

ROWS_PER_TILE = 64
_TILE_BYTES = 8192
_WIDTHS = (8, 16, 32, 64, 96, 128)


@dataclass(frozen=True)
class Plan:
    """One variant of `csrc/linear.cu`.

    Attributes:
        cols: rows of x that a CTA takes.
        warpgroups: 64 rows of the weight each.
        stages: K tiles in flight per CTA.
        split: CTAs that share a tile's K.
        prefetch: bytes of weights a CTA asks into the L2 beyond its ring before it waits.
        blocks_per_sm: CTAs an SM must have registers for.
    """

    cols: int
    warpgroups: int
    stages: int
    split: int
    prefetch: int = 0
    blocks_per_sm: int = 1

    def defines(self, is_fp8: bool, is_gate_up: bool) -> dict[str, int | str]:
        return {
            "IS_FP8": int(is_fp8),
            "GATE_UP": int(is_gate_up),
            "COLS": self.cols,
            "WARPGROUPS": self.warpgroups,
            "STAGES": self.stages,
            "SPLIT": self.split,
            "PREFETCH": self.prefetch,
            "BLOCKS_PER_SM": self.blocks_per_sm,
        }

    def cluster(self, is_gate_up: bool, is_fp8: bool) -> int:
        """CTAs of a cluster: the parts of K, or the CTAs that quantise 128 features together."""
        return 4 // self.warpgroups if is_gate_up and is_fp8 else self.split

    def shared_bytes(self, is_fp8: bool, is_gate_up: bool, num_blocks: int) -> int:
        """Dynamic shared memory, as the kernel lays it out."""
        stage = self.warpgroups * _TILE_BYTES + self.cols * 128 + is_fp8 * self.cols * 4
        exchange = 0
        if is_gate_up and is_fp8:
            exchange = (128 // 8 + 1) * self.cols * 4
        elif self.split > 1:
            exchange = ROWS_PER_TILE * self.warpgroups * self.cols * 4
        scales = is_fp8 * ceil_div(num_blocks, self.split) * self.warpgroups * 8
        return self.stages * (stage + 16) + exchange + scales


def plan_for(
    kind: Kind, num_rows: int, out_features: int, in_features: int, is_gate_up: bool
) -> Plan:
    """The plan for x [num_rows, in_features] and a weight [out_features, in_features]."""
    cols = next((width for width in _WIDTHS if num_rows <= width), _WIDTHS[-1])
    warpgroups = 1 if cols <= 32 else 2
    num_blocks = ceil_div(in_features, 128) * (1 if kind == "bsfp8" else 2)
    split = 1
    if not is_gate_up:
        tiles = ceil_div(out_features, ROWS_PER_TILE * warpgroups)
        while split < 8 and tiles * split < 160 and num_blocks >= 4 * split:
            split *= 2
    return Plan(cols, warpgroups, 6 if warpgroups == 1 else 4, split)
