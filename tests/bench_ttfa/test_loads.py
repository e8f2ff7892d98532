"""Paced streams, references, lengths and the host's cost, against a real server without a model."""

import asyncio
import importlib.util
import json
from pathlib import Path

import pytest

from bench_ttfa import host, plot, run
from bench_ttfa.__main__ import main, sessions_per_process
from bench_ttfa.references import closest, reference_voices
from bench_ttfa.run import Config, Level, LevelResult, is_continuous, make_plans
from bench_ttfa.worker import Connection, TurnRecord, WorkerResult
from bench_ttfa.workload import TextSource
from clients import AudioFormat
from clients.voices import Voice, list_voices
from tests.realtime.support import serving

TONE = ["--serve", "--model", "tone:1,0"]


def sweep(tmp_path: Path, *options: str) -> dict:
    assert main(["-c", *options, "--out", str(tmp_path), *TONE]) == 0
    (path,) = tmp_path.glob("*.json")
    return json.loads(path.read_text())


def test_paced_streams_are_heard_in_real_time_and_cut(tmp_path, capsys) -> None:
    summary = sweep(tmp_path, "--paced", "3", "--paced-seconds", "2")
    (level,) = summary["levels"]
    assert (level["name"], level["errors"], level["seconds"]) == ("3 paced", {}, 2.0)
    assert level["num_cut"] >= 1, "a stream was under way when the level ended"
    audio_s = sum(turn["audio_ms"] for turn in level["turns"]) / 1000
    assert audio_s <= 3 * (2.0 + 2.5), "nobody gets more than the time and the lead cap"
    assert level["c100"] is not None
    assert summary["model"] == "tone"
    threads = level["host_us_per_packet"]
    assert {"event loop", "plosive-egress", "plosive-tone"} <= set(threads)
    assert level["server_metrics"]["plosive_packets_total"] > 100
    output = capsys.readouterr().out
    assert "paced real-time streams with C100 = 100 %" in output
    assert "host us per packet" in output


def test_lengths_and_stages(tmp_path, capsys) -> None:
    summary = sweep(tmp_path, "--lengths", "30", "200", "--turns", "3", "--warmup", "0")
    short, long = summary["levels"]
    assert [level["name"] for level in (short, long)] == [
        "text, characters 30",
        "text, characters 200",
    ]
    assert all(12 < turn["num_chars"] <= 31 for turn in short["turns"])
    assert all(170 < turn["num_chars"] <= 201 for turn in long["turns"])
    assert [each["stage"] for each in short["stages"]][-4:] == [
        "encoded",
        "first_packet",
        "written",
        "client",
    ]
    output = capsys.readouterr().out
    head, first, second = output.splitlines()[:3]
    assert head.startswith("text, characters") and "ttfa_ms" in head
    assert [row.split()[:2] for row in (first, second)] == [["30", "3"], ["200", "3"]]
    assert "median ms after the commit" in output
    assert "api_key" not in json.dumps(summary)


def test_lengths_of_text_that_streams_in(tmp_path, capsys) -> None:
    options = ["--words-per-s", "200", "--turns", "2", "--warmup", "0"]
    summary = sweep(tmp_path, "--lengths", "30", "200", *options)
    assert [level["axis"] for level in summary["levels"]] == ["text at 200 words/s, characters"] * 2
    table = capsys.readouterr().out.splitlines()[0]
    assert "ttfa_first_text_ms" in table


def test_every_text_has_the_length_that_is_asked_for(tmp_path) -> None:
    options = ["2", "--rate", "20", "--chars", "42", "--turns", "6", "--warmup", "0"]
    summary = sweep(tmp_path, *options)
    lengths = [turn["num_chars"] for level in summary["levels"] for turn in level["turns"]]
    assert len(lengths) == 12 and all(25 < length <= 43 for length in lengths)


def test_a_level_of_seconds_begins_no_turn_after_them(tmp_path) -> None:
    assert main(["-c", "2", "--seconds", "1", "--warmup", "0", "--out", str(tmp_path), *TONE]) == 0
    (level,) = json.loads(next(tmp_path.glob("*.json")).read_text())["levels"]
    assert level["errors"] == {} and level["num_cut"] == 0
    assert 2 <= len(level["turns"]) <= 20  # there are no more texts


def test_more_paced_streams_are_left_out_after_a_stall(monkeypatch) -> None:
    tried: list[int] = []

    def run_level(level, *_) -> LevelResult:
        tried.append(level.concurrency)
        turn = TurnRecord(5, worst_gap_ms=50.0 if level.concurrency < 4 else 150.0)
        return LevelResult(level, [WorkerResult([turn], [], 0.0, 1.0)])

    async def no_probe(*_) -> None:
        pass

    monkeypatch.setattr(run, "_run_level", run_level)
    monkeypatch.setattr(run, "_probe_ready", no_probe)
    levels = tuple(Level("paced", 0, count, seconds=1.0) for count in (2, 4, 8))
    config = Config(levels, Connection("ws://x", None, AudioFormat(), 1, None, None))
    run.sweep(config)
    assert tried == [2, 4]
    tried.clear()
    run.sweep(Config(levels, config.connection, keeps_going=True))
    assert tried == [2, 4, 8]


def test_an_interrupted_run_keeps_what_it_has(monkeypatch) -> None:
    def run_level(level, *_) -> LevelResult:
        if level.concurrency == 4:
            raise KeyboardInterrupt
        return LevelResult(level, [WorkerResult([TurnRecord(5)], [], 0.0, 1.0)])

    async def no_probe(*_) -> None:
        pass

    monkeypatch.setattr(run, "_run_level", run_level)
    monkeypatch.setattr(run, "_probe_ready", no_probe)
    connection = Connection("ws://x", None, AudioFormat(), 1, None, None)
    levels = tuple(Level("closed", 1, count) for count in (2, 4, 8))
    result = run.sweep(Config(levels, connection))
    assert [each.level.concurrency for each in result.levels] == [2]
    assert result.was_interrupted
    with pytest.raises(KeyboardInterrupt):
        run.sweep(Config(levels[1:], connection))


def test_a_failed_stream_is_not_continuous() -> None:
    def result(*turns: TurnRecord) -> LevelResult:
        return LevelResult(Level("paced", 0, 1), [WorkerResult(list(turns), [], 0.0, 1.0)])

    assert is_continuous(result(TurnRecord(1, worst_gap_ms=99.0)))
    assert not is_continuous(result(TurnRecord(1, worst_gap_ms=101.0)))
    assert not is_continuous(
        result(TurnRecord(1, worst_gap_ms=0.0), TurnRecord(1, error="timeout"))
    )


def test_paced_plans_share_processes_and_keep_the_servers_lead() -> None:
    config = Config((), Connection("ws://x", None, AudioFormat(), 1, None, None))
    plans = make_plans(Level("paced", 0, 66, seconds=10.0), config, TextSource(1))
    assert [len(plan.loops) for plan in plans] == [32, 32, 2]
    assert all(plan.is_paced and plan.seconds == 10.0 for plan in plans)
    assert plans[0].connection.max_lead_ms is None
    assert plans[0].warmups == [[]] * 32


def test_sessions_share_a_process_where_cores_are_few() -> None:
    assert sessions_per_process(64, num_cores=2) == 8
    assert sessions_per_process(64, num_cores=32) == 4
    assert sessions_per_process(1, num_cores=32) == 1


async def test_references_are_found_or_made_and_made_ones_deleted(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        url = f"http://127.0.0.1:{served.port}"
        connection = Connection(url, None, AudioFormat(), 1, None, None)

        def names_of(lengths_s: list[float]) -> tuple[dict[float, str], dict[str, float]]:
            with reference_voices(connection, lengths_s) as names:
                return names, {voice.name: voice.duration_s for voice in list_voices(url)}

        names, known = await asyncio.to_thread(names_of, [0.0, 2.0, 5.0])
        assert names[2.0] == "tone", "of 2 s, which the server has"
        assert known[names[5.0]] == pytest.approx(5.0, abs=0.05)
        assert 0.0 not in names, "every voice of this model has a reference"
        assert [voice.name for voice in await asyncio.to_thread(list_voices, url)] == ["tone"]


def test_the_nearest_voice_counts_only_if_it_is_near() -> None:
    voices = [Voice("none"), Voice("nine", duration_s=9.2), Voice("ten", duration_s=10.5)]
    assert closest(voices, 10.0) == voices[2]
    assert closest(voices, 0.0) == voices[0]
    assert closest(voices, 30.0) is None
    assert closest([], 10.0) is None


def test_the_hosts_cost_is_told_by_thread(tmp_path, capsys) -> None:
    assert host.main(["--streams", "2", "--seconds", "1", "--out", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    for word in ("2 paced", "event loop", "plosive-egress", "us/packet", "step late"):
        assert word in output
    (path,) = tmp_path.glob("*.json")
    assert json.loads(path.read_text())["levels"][0]["host_us_per_packet"]


def test_without_matplotlib_the_run_says_so(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("bench_ttfa.__main__.can_plot", lambda: False)
    sweep(tmp_path, "--paced", "1", "--paced-seconds", "1")
    assert "matplotlib is not installed" in capsys.readouterr().out


@pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib, of the extra dev"
)
@pytest.mark.filterwarnings("default")
def test_every_kind_of_level_is_plotted(tmp_path) -> None:
    options = ["1", "2", "--rate", "9", "--paced", "1", "--lengths", "20", "40"]
    options += ["--turns", "2", "--chars", "20", "--warmup", "0", "--paced-seconds", "1"]
    summary = sweep(tmp_path, *options)
    path = tmp_path / "plot.png"
    plot.plot(summary, path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_directory_that_takes_no_file_is_told_before_the_hosts_cost(
    tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(host, "sweep", None)
    monkeypatch.setattr(host, "LocalServer", None)
    (tmp_path / "file").write_text("")
    assert host.main(["--out", str(tmp_path / "file" / "runs")]) == 1
    assert "file/runs: Not a directory" in capsys.readouterr().err
