"""What ncu writes becomes counters by part; reading them needs a GPU."""

import pytest
import torch

from bench_ttfa import counters
from bench_ttfa.counters import read, table_of

HEADER = (
    '"ID","Process ID","Kernel Name","gpu__time_duration.sum",'
    '"gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",'
    '"smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",'
    '"smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio"'
)
UNITS = '"","","","ns","%","inst","inst"'
TOLD = "\n".join(
    [
        "==PROF== Connected to process 12",
        HEADER,
        UNITS,
        '"0","12","linear(Params)","12,340","61.5","3.25","0.5"',
        '"1","12","sample(int)","2,000","4.0","","7"',
    ]
)


def test_launches_are_given_to_their_parts() -> None:
    linear, sampler = read(TOLD, {"layer": 1, "sampler": 1})
    assert (linear.part, linear.kernel, linear.us) == ("layer", "linear", 12.34)
    assert linear.dram_percent == 61.5 and linear.l2_percent is None
    assert linear.stalls == {"long_scoreboard": 3.25, "barrier": 0.5}
    assert sampler.part == "sampler" and sampler.us == 2.0
    assert sampler.stalls == {"barrier": 7.0}
    shown = table_of([linear, sampler]).splitlines()
    assert "61.5" in shown[1] and "long_scoreboard 3.25" in shown[1]


def test_launches_that_nobody_counted_are_not_guessed_at() -> None:
    with pytest.raises(RuntimeError, match="2 launches of 3"):
        read(TOLD, {"layer": 2, "sampler": 1})
    with pytest.raises(RuntimeError, match="0 launches of 1: no permission"):
        read("no permission", {"layer": 1})


def test_without_ncu_it_says_so(capsys, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(counters.shutil, "which", lambda _name: None)
    with pytest.raises(SystemExit):
        counters.main([])
    assert "ncu" in capsys.readouterr().err.splitlines()[-1]
