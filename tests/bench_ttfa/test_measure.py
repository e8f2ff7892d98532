"""Percentiles, gaps and continuity by hand-made numbers."""

import pytest

from bench_ttfa.measure import continuity, percentile, stats, worst_gap_ms


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([5.0], 99, 5.0),
        ([1.0, 2.0], 50, 1.5),
        ([10.0, 20.0, 30.0], 75, 25.0),
        ([float(n) for n in range(101)], 95, 95.0),
        ([float(n) for n in range(101)], 99, 99.0),
        ([0.0, 100.0], 0, 0.0),
        ([0.0, 100.0], 100, 100.0),
    ],
)
def test_percentile(values, percent, expected) -> None:
    assert percentile(values, percent) == pytest.approx(expected)


def test_stats_of_unsorted_values() -> None:
    each = stats([3.0, 1.0, 2.0])
    assert each is not None
    assert (each.n, each.p50, each.min, each.max, each.mean) == (3, 2.0, 1.0, 3.0, 2.0)
    assert stats([]) is None


@pytest.mark.parametrize(
    ("arrivals_ms", "expected"),
    [
        ([], None),
        ([0], None),
        ([0, 20, 40], 0.0),  # each just in time
        ([0, 0, 0, 60], 0.0),  # a burst, then just in time
        ([0, 30], 10.0),
        ([0, 0, 100], 60.0),  # 40 ms played, 60 ms of silence
        ([0, 30, 50], 10.0),  # a late packet delays all that follow: no second gap
        ([0, 30, 60], 10.0),  # the second one is late by what the first had not yet cost
        ([500, 520, 600, 600, 600, 700], 60.0),  # the clock starts with the first packet
    ],
)
def test_worst_gap(arrivals_ms, expected) -> None:
    gap_ms = worst_gap_ms([arrival / 1000 for arrival in arrivals_ms], packet_ms=20.0)
    assert gap_ms == (expected if expected is None else pytest.approx(expected, abs=1e-9))


def test_continuity_leaves_out_streams_without_a_gap() -> None:
    gaps_ms = [0.0, 50.0, 51.0, None, 200.0]
    assert continuity(gaps_ms, 50.0) == 0.5
    assert continuity(gaps_ms, 100.0) == 0.75
    assert continuity([None], 50.0) is None
