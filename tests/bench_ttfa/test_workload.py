"""Texts never repeat, and a seed gives the same run again."""

import pytest

from bench_ttfa.run import Config, Level, make_plans
from bench_ttfa.worker import Connection
from bench_ttfa.workload import KINDS, TextSource, poisson_arrivals_s
from clients import AudioFormat

CONNECTION = Connection("ws://x", None, AudioFormat(), 1, None, None)


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_unique_and_seeded(kind) -> None:
    texts = TextSource(5, kind).take(2000)
    assert len(set(texts)) == 2000
    assert texts == TextSource(5, kind).take(2000)
    assert texts[:50] != TextSource(6, kind).take(50)
    assert all(text[0].isupper() or text[0].isdigit() for text in texts)
    assert all(10 < len(text) < 400 and "{" not in text for text in texts)


def test_poisson_arrivals_have_the_rate() -> None:
    times_s = poisson_arrivals_s(4.0, 4000, seed=1)
    assert times_s == sorted(times_s)
    assert times_s[-1] == pytest.approx(1000.0, rel=0.1)


@pytest.mark.parametrize(("concurrency", "num_processes"), [(1, 1), (8, 1), (9, 2), (64, 8)])
def test_closed_loop_plans_share_turns_and_sessions(concurrency, num_processes) -> None:
    config = Config(levels=(), connection=CONNECTION)
    plans = make_plans(Level("closed", 100, concurrency), config, TextSource(1))
    assert len(plans) == num_processes
    loops = [loop for plan in plans for loop in plan.loops]
    assert len(loops) == concurrency
    assert sum(map(len, loops)) == 100
    assert len({text for loop in loops for text in loop}) == 100
    assert {len(loop) for loop in loops} <= {100 // concurrency, 100 // concurrency + 1}
    first_sessions = [plan.first_session for plan in plans]
    assert first_sessions == list(range(0, concurrency, 8))
    assert plans[0].connection.max_lead_ms == 600_000


def test_open_loop_plans_share_the_arrivals() -> None:
    config = Config(levels=(), connection=CONNECTION)
    plans = make_plans(Level("open", 50, rate_per_s=40.0), config, TextSource(1))
    assert len(plans) == 2
    times_s = sorted(arrival.after_s for plan in plans for arrival in plan.arrivals)
    assert times_s == poisson_arrivals_s(40.0, 50, seed=1)
    assert plans[0].connection.max_lead_ms is None


@pytest.mark.parametrize("kind", KINDS)
def test_short_texts_are_unique_too(kind) -> None:
    texts = TextSource(5, kind).take(1500, num_chars=42)
    assert len(set(texts)) == 1500
    assert all(20 < len(text) <= 43 for text in texts)
