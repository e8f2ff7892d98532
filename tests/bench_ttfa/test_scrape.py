"""The server's counters, as far as a sweep needs them."""

from bench_ttfa.scrape import difference, parse, scrape

TEXT = """\
# HELP plosive_packets_total Packets encoded
# TYPE plosive_packets_total counter
plosive_packets_total 12.0
plosive_turns_total{end="done"} 3.0
plosive_encode_seconds_bucket{le="0.1"} 5.0
plosive_encode_seconds_sum 0.25
plosive_slots_free 2.0
odd line
"""


def test_samples_without_labels() -> None:
    assert parse(TEXT) == {
        "plosive_packets_total": 12.0,
        "plosive_encode_seconds_sum": 0.25,
        "plosive_slots_free": 2.0,
    }


def test_counters_are_what_they_grew_by_and_gauges_what_they_are() -> None:
    after = {"a_total": 5.0, "b_sum": 1.5, "c": 7.0, "new_total": 2.0}
    assert difference({"a_total": 3.0, "b_sum": 1.0, "c": 9.0}, after) == {
        "a_total": 2.0,
        "b_sum": 0.5,
        "c": 7.0,
        "new_total": 2.0,
    }


def test_a_server_without_metrics_is_no_error() -> None:
    assert scrape("http://127.0.0.1:9") == {}
