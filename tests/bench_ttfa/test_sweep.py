"""A whole sweep, from options to JSON, against a scripted server in a process of its own."""

import argparse
import asyncio
import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench_ttfa import report
from bench_ttfa.__main__ import _serve_options, main
from bench_ttfa.measure import DEFINITIONS
from bench_ttfa.run import UNPACED_MS, Config, Level, LevelResult, SweepResult
from bench_ttfa.worker import Connection, Plan, TurnRecord, WorkerResult, run
from clients import AudioFormat
from tests.clients.scripted_server import Peer, scripted_server

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def scripted_serve(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    command = (sys.executable, "-m", "tests.clients.scripted_server")
    monkeypatch.setattr("clients.local_server.SERVE", command)


def test_a_sweep_measures_and_reports(scripted_serve, tmp_path, capsys) -> None:
    options = ["-c", "2", "--rate", "50", "--turns", "4", "--warmup", "1"]
    assert main([*options, "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.json")
    summary = json.loads(path.read_text())
    assert [level["name"] for level in summary["levels"]] == ["c=2", "50/s"]
    assert summary["definitions"] == DEFINITIONS
    assert summary["ready_cold_ms"]["n"] == 2  # ann and bob
    assert summary["ready_cached_ms"]["n"] == 20
    assert summary["server_peak_mib"] > 1
    for level in summary["levels"]:
        assert len(level["turns"]) == 4
        assert level["errors"] == {}
        for name in ("ttfa_ms", "ttfa_audible_ms", "server_ttfa_ms", "real_time_factor"):
            assert level[name]["n"] == 4
        silence_ms = level["ttfa_audible_ms"]["p50"] - level["ttfa_ms"]["p50"]
        assert silence_ms == pytest.approx(10, abs=10)  # it starts with 20 ms of silence
        assert level["timeline_ms"]["first_packet"]["p50"] == 2.0
        assert level["c100"] is not None
        assert level["throughput"] > 0
    output = capsys.readouterr().out
    assert "ttfa_audible_ms" in output
    assert str(path) in output


async def test_text_can_arrive_word_by_word() -> None:
    async def script(peer: Peer) -> None:
        await peer.accept()
        pieces = [(await peer.next()).text for _ in range(3)]
        assert pieces == ["one", " two", " three"]
        await peer.audio(1, [b"\0\x40" * 480])
        await peer.next()
        await peer.done(1, 1)

    async with scripted_server(script) as server:
        connection = Connection(
            server.url, None, AudioFormat(codec="pcm_s16le"), 1, None, words_per_s=1000.0
        )
        result = await _run(Plan(connection, 0, [["one two three"]], []))
    (turn,) = result.turns
    assert turn.error is None
    assert turn.ttfa_first_text_ms is not None and turn.ttfa_ms is not None
    assert turn.ttfa_first_text_ms > turn.ttfa_ms
    assert turn.worst_gap_ms is None  # one packet


async def test_failures_are_counted_as_errors() -> None:
    async def script(peer: Peer) -> None:
        await peer.accept()
        await peer.next()
        await peer.next()
        await peer.done(1, 0)
        await peer.next()
        await peer.socket.close(1011)

    async with scripted_server(script) as server:
        connection = Connection(server.url, None, AudioFormat(), 1, None, None)
        result = await _run(Plan(connection, 0, [["a", "b", "c"]], []))
    assert [turn.error for turn in result.turns] == [
        "no_audio",
        "connection_lost",
        "connection_lost",
    ]


async def _run(plan: Plan) -> WorkerResult:
    """On a thread, where it may have an event loop of its own."""
    return await asyncio.to_thread(run, plan)


def test_a_level_with_lagging_clients_is_not_valid() -> None:
    config = Config(levels=(), connection=Connection("ws://x", None, AudioFormat(), 1, None, None))
    good = WorkerResult([TurnRecord(5)], lag_ms=[0.1] * 100, started_s=0.0, ended_s=1.0)
    bad = WorkerResult(
        [TurnRecord(5, error="refused_503"), TurnRecord(5, late_ms=50.0)],
        lag_ms=[20.0] * 100,
        started_s=0.0,
        ended_s=2.0,
    )
    level = Level("closed", 3, 2)
    result = SweepResult(
        config, levels=[LevelResult(level, [good]), LevelResult(level, [good, bad])]
    )
    first, second = report.summarize(result, "now")["levels"]
    assert first["load_generation_valid"]
    assert not second["load_generation_valid"]
    assert len(second["invalid_because"]) == 3
    assert second["errors"] == {"refused_503": 1}
    assert "NO" in report.text(report.summarize(result, "now"))
    assert report.validity(first) == "yes"
    assert report.validity(second) == "; ".join(["NO", *second["invalid_because"]])


def test_runs_are_kept_out_of_the_record() -> None:
    """Unless they are filed: `bench_ttfa/results/README.md`."""
    root = Path(report.__file__).resolve().parents[1]
    ignored = (root / ".gitignore").read_text("utf-8").split()
    assert f"/{report.RUNS_DIR.relative_to(root)}/" in ignored


def test_turns_of_the_ramp_count_as_load_but_are_not_measured() -> None:
    config = Config(levels=(), connection=Connection("ws://x", None, AudioFormat(), 1, None, None))
    turns = [
        TurnRecord(5, is_early=True, ttfa_ms=900.0, num_in_time=50),
        TurnRecord(5, ttfa_ms=10.0, num_in_time=100),
    ]
    level = Level("closed", 0, 2, seconds=2.0, ramp_s=1.0)
    result = SweepResult(config, levels=[LevelResult(level, [WorkerResult(turns, [], 0.0, 2.0)])])
    (measured,) = report.summarize(result, "now")["levels"]
    assert measured["ttfa_ms"]["max"] == 10.0 and len(measured["turns"]) == 1
    assert measured["throughput"] == 1.5, "150 packets of 20 ms in 2 s"


def test_loops_that_begin_at_once_or_are_alone_have_no_ramp(
    scripted_serve, tmp_path, monkeypatch
) -> None:
    """A long text's only turn would begin in it, and not be measured."""
    levels = []
    monkeypatch.setattr(
        "bench_ttfa.run._run_levels", lambda config, *_: levels.extend(config.levels)
    )
    options = ["-c", "2", "--at-once", "2", "--lengths", "800", "--seconds", "1", "--ramp", "0.5"]
    main([*options, "--out", str(tmp_path)])
    assert [(level.name, level.concurrency, level.ramp_s) for level in levels] == [
        ("c=2", 2, 0.5),
        ("at once, streams 2", 2, 0.0),
        ("text, characters 800", 1, 0.0),
    ]


def test_a_directory_that_takes_no_file_is_told_before_anything_runs(
    tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr("bench_ttfa.__main__.LocalServer", None)  # it would be started
    file = tmp_path / "file"
    file.touch()
    assert main(["--out", str(file / "runs")]) == 1
    assert capsys.readouterr().err == f"bench_ttfa: {file / 'runs'}: Not a directory\n"
    assert main(["--out", str(file)]) == 1


async def test_a_ramp_comes_before_what_is_measured(monkeypatch) -> None:
    ticks = itertools.count()

    def now_s() -> float:
        return 0.001 * next(ticks)

    clock = SimpleNamespace(monotonic=now_s, perf_counter=now_s)
    for module in ("bench_ttfa.worker", "clients.link", "clients.turn"):
        monkeypatch.setattr(f"{module}.time", clock)
    monkeypatch.setattr("bench_ttfa.worker.random.random", lambda: 0.0)

    async def script(peer: Peer) -> None:
        await peer.accept()
        for turn_id in range(1, 1000):
            await peer.next()
            await peer.next()
            await peer.audio(turn_id, [b"\0\x40" * 480])
            await peer.done(turn_id, 1)

    async with scripted_server(script) as server:
        connection = Connection(server.url, None, AudioFormat(codec="pcm_s16le"), 1, None, None)
        plan = Plan(connection, 0, [["word"] * 900], [], seconds=0.2, ramp_s=0.02)
        result = await _run(plan)
    early = [turn.is_early for turn in result.turns]
    assert early == sorted(early, reverse=True) and early[0] and not early[-1]
    assert early.count(True) > 2
    num_in_time = sum(turn.num_in_time for turn in result.turns)
    assert num_in_time <= early.count(False) + 1, "one may have begun in the ramp"
    assert num_in_time >= early.count(False) - 1, "one may be heard behind the end"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-c"], "nothing to run"),
        (["-c", "0"], "at least 1"),
        (["-c", "x"], "got 'x', expected a whole number of at least 1"),
        (["--warmup", "-1"], "expected a whole number of at least 0"),
        (["--rate", "fast"], "got 'fast', expected a number of more than 0"),
        (["--rate", "-1"], "more than 0"),
        (["--url", "ws://x", "--serve", "--device", "cpu"], "for a local server"),
    ],
)
def test_wrong_usage_exits_2(options, message, capsys) -> None:
    with pytest.raises(SystemExit) as exited:
        main(options)
    assert exited.value.code == 2
    assert message in capsys.readouterr().err


def test_an_unreachable_server_is_one_sentence(capsys) -> None:
    assert main(["--url", "http://127.0.0.1:9"]) == 1
    assert "cannot connect to" in capsys.readouterr().err


def test_help_teaches_the_use(capsys) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["--help"])
    assert exited.value.code == 0
    output = capsys.readouterr().out
    for word in ("--rate", "--words-per-s", "open loop", "Closed loop", "C50", "up to 8 minutes"):
        assert word in output


def test_the_local_server_never_paces_a_closed_loop() -> None:
    """Lead adds up over a session's turns; at the server's usual cap a loop would be real time."""
    args = argparse.Namespace(serve=[], concurrency=[2], rate=[], paced=[], at_once=[])
    options = _serve_options(args)
    assert options[options.index("--max-lead-cap-ms") + 1] == str(UNPACED_MS)
    args.serve = ["--max-slots", "9", "--max-lead-cap-ms", "500"]
    assert _serve_options(args) == args.serve
