"""The codec's call times: one line and one entry a call, as they are measured."""

import json

import pytest

from bench_ttfa import codec


def test_a_call_is_timed_and_filed(tmp_path, capsys):
    path = tmp_path / "codec.json"
    assert (
        codec.main(["--device", "cpu", "--batch", "2", "--frames", "1", "--json", str(path)]) == 0
    )
    record = json.loads(path.read_text())
    (call,) = record["calls"]
    assert (call["batch"], call["frames"]) == (2, 1)
    assert call["us"] > 0, call
    assert call["frames_per_s"] == pytest.approx(2e6 / call["us"])
    assert record["software"]["sources"]
    assert capsys.readouterr().out.splitlines()[-1] == codec.line_of(call)


def test_what_was_measured_before_it_was_cut_is_shown_and_filed(tmp_path, capsys, monkeypatch):
    timed = codec.CallTime(1, 1, 10.0, 9.0, 1.0, 1e5, 4000)

    def time_call(_codec, _device, _batch, frames):
        if frames == 4:
            raise KeyboardInterrupt
        return timed

    monkeypatch.setattr(codec, "time_call", time_call)
    path = tmp_path / "codec.json"
    options = ["--device", "cpu", "--batch", "1", "--frames", "1,4", "--json", str(path)]
    with pytest.raises(KeyboardInterrupt):
        codec.main(options)
    assert [call["frames"] for call in json.loads(path.read_text())["calls"]] == [1]
    assert "     10        9 " in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--batch", "--frames"])
@pytest.mark.parametrize("value", ["0", "1,-2", "8,", "many"])
def test_calls_of_no_streams_or_frames_are_refused_in_words(option, value, capsys):
    with pytest.raises(SystemExit) as ended:
        codec.main([option, value, "--device", "cpu"])
    assert ended.value.code == 2
    assert "expected a whole number of at least 1" in capsys.readouterr().err
