"""What the kernel bench prints; its figures need a GPU."""

from bench_ttfa import kernels
from bench_ttfa.gpu_timing import Timing, rotated


def test_table_compares_within_one_op_and_number_of_rows():
    timings = [
        Timing("wo", "torch bf16", 1, 9.0, 2000.0),
        Timing("wo", "bsfp8", 1, 4.5, 2400.0),
        Timing("wo", "bsfp8", 64, 6.0, 1800.0),
    ]
    lines = kernels.table(timings, bandwidth=4000.0).splitlines()
    assert len(lines) == 4
    assert "4.50" in lines[2] and "60%" in lines[2] and lines[2].endswith("torch bf16 2.00")
    assert "6.00" in lines[3] and "torch" not in lines[3]


def test_all_copies_are_used_in_turn():
    seen = []
    calls = rotated(lambda i: lambda: seen.append(i), 5)
    for call in calls:
        call()
    assert len(seen) >= 24 and seen[:6] == [0, 1, 2, 3, 4, 0] and len(seen) % 5 == 0


def test_bytes_count_scales():
    assert kernels.weight_bytes([(256, 256)], "bf16") == 2 * 256 * 256
    assert kernels.weight_bytes([(256, 256)], "bsfp8") == 256 * 256 + 4 * 4
