"""One dataclass, and the command line and environment that are generated from it."""

import argparse
from pathlib import Path

import pytest

from realtime.config import ConfigError, ServerConfig, add_arguments, from_args


def parse(*argv: str, **environ: str) -> ServerConfig:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return from_args(parser.parse_args(argv), environ)


def test_defaults() -> None:
    assert parse() == ServerConfig()
    assert (ServerConfig().host, ServerConfig().port) == ("127.0.0.1", 8765)


def test_who_sends_no_text_stays_connected_for_ten_minutes() -> None:
    config = ServerConfig()
    assert (config.idle_timeout_s, config.idle_warning_s) == (600.0, 30.0)
    assert config.ping_interval_s == 10.0  # proxies close what is silent for 30 to 60 s


def test_command_line_over_environment_over_default() -> None:
    environ = {"PLOSIVE_PORT": "1", "PLOSIVE_DRAIN_S": "2.5", "PLOSIVE_URL": "x", "HOME": "y"}
    environ |= {"PLOSIVE_KERNEL_CACHE": "z"}  # which `ops.nvrtc` reads
    config = parse("--port", "0", "--voices-dir", "/tmp/v", **environ)
    assert (config.port, config.drain_s, config.voices_dir) == (0, 2.5, Path("/tmp/v"))
    assert config.resolved_voices_dir() == Path("/tmp/v")


def test_every_option_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    text = capsys.readouterr().out
    for name in ServerConfig.__dataclass_fields__:
        assert "--" + name.replace("_", "-") in text
    assert "PLOSIVE_MAX_SLOTS" in text and "--num-threads N" in text
    assert "on SIGTERM or Ctrl-C: time for current turns" in " ".join(text.split())


def test_unknown_variable_names_the_nearest_ones_or_else_all() -> None:
    with pytest.raises(ConfigError, match=r"PLOSIVE_PROT; there is PLOSIVE_PORT(, \w+){,2}$"):
        parse(PLOSIVE_PROT="1")
    with pytest.raises(
        ConfigError, match=r"PLOSIVE_.*QQQ; there is PLOSIVE_A.*PLOSIVE_WRITE_STALL"
    ):
        parse(PLOSIVE_QQQQQQQQQ="1")


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("PLOSIVE_PORT", "many"),
        ("PLOSIVE_PORT", "70000"),
        ("PLOSIVE_DRAIN_S", "nan"),
        ("PLOSIVE_MAX_SLOTS", "0"),
        ("PLOSIVE_NUM_THREADS", "-1"),
        ("PLOSIVE_NUM_THREADS", "99999999999"),
        ("PLOSIVE_MAX_LEAD_MS", "70000"),
        ("PLOSIVE_LOW_WATER_MS", "1000"),
        ("PLOSIVE_LOG_LEVEL", "loud"),
        ("PLOSIVE_WRITE_STALL_S", "0"),
        ("PLOSIVE_DEVICE", "gpu"),
        ("PLOSIVE_FORMAT", "fp8"),
        ("PLOSIVE_KV_FORMAT", "int4"),
        ("PLOSIVE_MAX_CONTEXT", "0"),
        ("PLOSIVE_KV_FRACTION", "1.5"),
        ("PLOSIVE_PUBLIC_METRICS", "maybe"),
        ("PLOSIVE_HOST", ""),
        ("PLOSIVE_MODEL", ""),
        ("PLOSIVE_VOICES_DIR", ""),
    ],
)
def test_values_that_make_no_sense(variable: str, value: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(**{variable: value})
    assert refused.value.param == variable.removeprefix("PLOSIVE_").lower()
    assert value.lower() in refused.value.message
    assert refused.value.message.startswith(f"{variable}: got "), "named as it was given"


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:1"])
def test_the_devices_there_are(device: str) -> None:
    assert parse("--device", device).device == device


def test_a_value_on_the_command_line_is_named_by_its_option() -> None:
    with pytest.raises(ConfigError, match=r"^invalid_config: --max-slots: got 0, expected 1 to"):
        parse("--max-slots", "0", PLOSIVE_MAX_SLOTS="1")


def test_a_bad_variable_is_named_although_the_command_line_wins() -> None:
    with pytest.raises(ConfigError, match=r"PLOSIVE_PORT: got 'abc', expected a whole number"):
        parse("--port", "0", PLOSIVE_PORT="abc")


def test_a_limit_that_another_option_sets_is_said_with_its_name() -> None:
    with pytest.raises(ConfigError, match=r"got 2000, expected 40 to 100, .* max_lead_cap_ms"):
        parse(PLOSIVE_MAX_LEAD_CAP_MS="100")
    with pytest.raises(ConfigError, match=r"got 500, expected 0 to below 9, .* high_water_ms"):
        parse("--high-water-ms", "9")


def test_unknown_option_and_bad_number(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["--prot", "1"], ["--drain-s", "inf"]):
        with pytest.raises(SystemExit):
            parse(*argv)
        assert argv[0] in capsys.readouterr().err
