"""How paged attention is cut among CTAs: tables from measurements, by launch shape alone."""

from __future__ import annotations

from typing import NamedTuple


class Plan(NamedTuple):
    """How paged attention is cut.

    As many CTAs of a cluster share a row and key/value head as give each of their warps `min_tiles`
    tiles of 16 positions: a long row gets more, whatever the others need.
    """

    splits: int  # CTAs of a cluster: most that share a row; splits * warps <= 32
    warps: int
    blocks: int  # CTAs per SM that registers must allow
    min_tiles: int = 1
    depth: int = 0  # tiles asked into the L2 ahead of the one in flight


class SplitPlan(NamedTuple):
    """How few rows are shared by `splits` CTAs (an even number), whose results the linear after attention
    merges."""

    splits: int
    warps: int
    blocks: int  # CTAs per SM that registers must allow
    depth: int = 0  # see `Plan`


class PartsPlan(NamedTuple):
    """How many rows are cut, each into equal parts of at most `part_tiles` tiles (16 or more)."""

    warps: int
    blocks: int  # CTAs per SM that registers must allow, and that are launched
    part_tiles: int
    depth: int = 0


# Pairs of a row and a key/value head, and the plan for up to that many; measured on an H200 for eight
# key/value heads of 128 at 100 to 8192 positions. Few rows need clusters; many pay for them, because
# all CTAs of a cluster keep their place until the last is done.
_PLANS = (
    (8, Plan(8, 4, 3, 1, 2)),
    (48, Plan(8, 4, 3, 2, 2)),
    (96, Plan(4, 4, 3, 2)),
    (160, Plan(4, 4, 3, 6)),
    (200, Plan(2, 4, 3, 6)),
    (288, Plan(2, 4, 4, 6)),
    (396, Plan(1, 4, 3)),
)
# Of 8-bit keys and values, half as much to read.
_FP8_PLANS = (
    (8, Plan(8, 4, 3, 1)),
    (96, Plan(4, 4, 3, 2)),
    (288, Plan(2, 4, 4, 6)),
)
_MANY = Plan(1, 4, 4)
# Rows of more pairs than this are cut into parts, if one may be longer than a part: a long row among short
# ones would take longer than all of them together. Whole -> in parts, us of 64 rows on an H200, bf16 and
# fp8: 32 to 4096 positions 98.5 -> 75.4 and 61.4 -> 43.4, 300 to 4000 158 -> 144 and 89.5 -> 80.6,
# 100 to 1500 63.3 -> 62.7 and 37.4 -> 33.2, 600 each 39.5 -> 40.7 and 23.0 -> 23.0.
_MAX_WHOLE_PAIRS = 396
_PART_TILES = 96
MAX_PARTED_ROWS, MAX_PARTS = 128, 16  # attention_parts.cu
# Of a row or two. H200, one row of 600 positions, a frame: bf16 8 x 4 warps 2.50 ms, 8 x 8 2.51, 4 x 8 2.51;
# 8 bits 2.52, 2.50, 2.52.
SPLIT_PLAN, FP8_SPLIT_PLAN = SplitPlan(8, 4, 3, 2), SplitPlan(8, 8, 1)


def plan_for(
    num_rows: int, num_kv_heads: int, max_pages: int, page_size: int, *, is_fp8: bool = False
) -> Plan:
    """The plan for a launch shape."""
    num_pairs, max_tiles = num_rows * num_kv_heads, -(-max_pages * page_size // 16)
    plans = _FP8_PLANS if is_fp8 else _PLANS
    plan = next((plan for most, plan in plans if num_pairs <= most), _MANY)
    useful = -(-max_tiles // (plan.warps * plan.min_tiles))
    return plan._replace(splits=min(plan.splits, 1 << (useful - 1).bit_length()))


def part_tiles_of(max_tiles: int) -> int:
    """Most tiles of a part, if rows have up to so many."""
    return max(_PART_TILES, -(-max_tiles // MAX_PARTS))


def most_parts_of(max_tiles: int) -> int:
    """Parts that a row of so many tiles may have."""
    return -(-max_tiles // part_tiles_of(max_tiles))


def parts_plan_for(num_rows: int, num_kv_heads: int, max_tiles: int) -> PartsPlan | None:
    """The plan for a launch shape whose rows are cut into parts; None: they are not."""
    is_many = num_rows * num_kv_heads > _MAX_WHOLE_PAIRS and num_rows <= MAX_PARTED_ROWS
    if not is_many or max_tiles <= _PART_TILES:
        return None
    return PartsPlan(4, 4, part_tiles_of(max_tiles))
