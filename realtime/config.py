"""Every option of the server: one frozen dataclass, from which CLI and environment are generated.

An option `write_stall_s` is `--write-stall-s` on the command line and `PLOSIVE_WRITE_STALL_S` in
the environment; the command line wins. `OTHER_ENV` lists the variables that are no server option.
Nothing is read at import, and an unknown variable or value is an error that names the valid ones.
"""

import argparse
import dataclasses
import difflib
import ipaddress
import math
import os
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from realtime.errors import PlosiveError

ENV_PREFIX = "PLOSIVE_"
OTHER_ENV: dict[str, str] = {
    "PLOSIVE_URL": "clients: the server that `plosive say` and `plosive voices` talk to",
    "PLOSIVE_API_KEY": "clients: the key that they show it",
    "PLOSIVE_API_KEYS": "server: valid keys, comma-separated, in addition to those of the file",
    "PLOSIVE_KERNEL_CACHE": "server: the folder where compiled GPU kernels are kept",
}


class ConfigError(PlosiveError):
    """An option that does not exist or whose value makes no sense."""

    default_code = "invalid_config"


def _option(group: str, default: Any, help: str) -> Any:
    return field(default=default, metadata={"group": group, "help": help})


_network, _model, _limit, _timeout, _operation = (
    partial(_option, group) for group in ("network", "model", "limits", "timeouts", "operations")
)

_MAX_THREADS = 4_096  # more are not started by torch, or starve the machine
_MAX_SLOTS = 1_000_000  # a table of more takes seconds and gigabytes by itself
DEVICES = '"auto", "cpu", "cuda" or "cuda:N", or several with commas between: one engine for each'

_LEAST = {
    **dict.fromkeys(("max_context", "max_voices", "max_clip_bytes", "high_water_ms"), 1),
    **dict.fromkeys(("max_sessions_per_client", "encode_processes"), 0),
    **dict.fromkeys(("max_text_chars_per_s", "max_client_text_chars_per_s", "auto_flush_ms"), 0),
    **dict.fromkeys(("ping_timeout_s", "idle_warning_s", "drain_s"), 0),
    "max_lead_cap_ms": 40,
}
_POSITIVE = (
    *("max_clip_s", "write_stall_s", "start_timeout_s", "body_timeout_s"),
    *("idle_timeout_s", "ping_interval_s"),
)
_ONE_OF = {
    "format": ("auto", "bf16", "bsfp8", "eager"),
    "kv_format": ("bf16", "fp8"),
    "engine_process": ("auto", "yes", "no"),
    "log_level": ("critical", "error", "warning", "info", "debug"),
}


def is_device(name: str) -> bool:
    return re.fullmatch(r"auto|(cpu|cuda(:\d+)?)(,(cpu|cuda(:\d+)?))*", name) is not None


def _is_network(name: str) -> bool:
    try:
        ipaddress.ip_network(name.strip())
    except ValueError:
        return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Options of `plosive serve`."""

    host: str = _network("127.0.0.1", "address to listen on")
    port: int = _network(8765, "port to listen on; 0 takes any free one")
    api_keys_file: Path | None = _network(None, "valid API keys, one a line; clients must show one")
    allowed_origins: str = _network(
        "",
        "origins whose pages may use the server, its own among them, comma-separated; empty: any",
    )
    trusted_proxies: str = _network(
        "",
        "addresses or networks of proxies, comma-separated, whose X-Forwarded-For says who the client "
        "is; each must append to it or set it; empty: none, the header means nothing",
    )
    ssl_certfile: Path | None = _network(
        None, "certificate chain (PEM) for https and wss; default: http and ws"
    )
    ssl_keyfile: Path | None = _network(
        None, "private key (PEM, no password) where the certificate's file has none"
    )
    public_metrics: bool = _network(False, "/metrics asks for no API key, like /health and /ready")
    model: str = _model(
        "embedded",
        '"embedded", the path of a checkpoint directory, real shapes with random weights '
        '("random:s2-pro", "random:s1-mini", "random:tiny"), or "tone", an engine without a model',
    )
    device: str = _model("auto", DEVICES)
    engine_process: str = _model(
        "auto",
        '"yes": each engine in a process of its own; "auto": unless it is one on a CPU; "no"',
    )
    format: str = _model(
        "auto",
        'how the weights run: "bf16"; "bsfp8", 8 bits in blocks of 128x128, quantised while they '
        'load; "eager", plain PyTorch, the slow reference; "auto": as the checkpoint is',
    )
    max_context: int = _model(
        4096, "positions of a session: voice, prompt, dialogue, text and speech (a frame is one)"
    )
    kv_format: str = _model(
        "bf16",
        'keys and values of contexts and voices: "bf16", or "fp8", 8 bits: twice the contexts in '
        "the same memory, and faster where many stream at once",
    )
    kv_fraction: float = _model(
        0.8, "share of the GPU memory left beside the weights that contexts and voices may fill"
    )
    num_threads: int = _model(0, "CPU threads of the model; 0 leaves the choice to the model")
    voices_dir: Path | None = _model(None, "added voices; default: plosive/voices in user data")
    max_slots: int | None = _limit(
        None,
        "sessions served at the same time; more are refused with 503 (default: 4, 64 for each GPU)",
    )
    max_sessions_per_client: int = _limit(
        0,
        "sessions of one API key, or without keys of one address (IPv6: /64), at a time; 0: any "
        "number",
    )
    max_lead_ms: int = _limit(2_000, "audio rendered ahead of playback, unless a session asks")
    max_lead_cap_ms: int = _limit(60_000, "the most lead that a session may ask for")
    max_text_chars_per_s: int = _limit(
        1_000,
        "text, prompts too, that a session may send a second on average, after a whole turn; 0: any",
    )
    max_client_text_chars_per_s: int | None = _limit(
        None,
        "the same of one API key, or without keys of one address, over all its connections, after a "
        "minute's worth; 0: any (default: for as many sessions as it may have)",
    )
    max_voices: int = _limit(256, "added voices kept")
    max_clip_bytes: int = _limit(20 * 1024 * 1024, "size of an uploaded reference clip")
    max_clip_s: float = _limit(30.0, "length of an uploaded reference clip")
    high_water_ms: int = _limit(1_000, "audio the socket has not taken at which a stream pauses")
    low_water_ms: int = _limit(500, "... and below which it goes on")
    write_stall_s: float = _timeout(
        30.0, "a client that reads nothing for so long is closed (4001)"
    )
    auto_flush_ms: int = _timeout(
        500, "a sentence that no more text follows for so long is spoken; 0: it waits for a flush"
    )
    start_timeout_s: float = _timeout(30.0, "a connection without session.start closes (4000)")
    body_timeout_s: float = _timeout(
        20.0, "a request body must come in this time, and 1 s more for each 32 KiB (408)"
    )
    idle_timeout_s: float = _timeout(600.0, "a session without a message or audio closes (4000)")
    idle_warning_s: float = _timeout(30.0, "how long before that close the client is warned")
    ping_interval_s: float = _timeout(10.0, "time between WebSocket pings")
    ping_timeout_s: float = _timeout(20.0, "a client that answers no ping for so long is dropped")
    drain_s: float = _timeout(20.0, "on SIGTERM or Ctrl-C: time for current turns to finish")
    announce_fd: int | None = _operation(
        None, "file descriptor that gets one JSON line when the server is ready"
    )
    lifeline_fd: int | None = _operation(
        None, "file descriptor of a pipe; when its other end is closed, the server drains and ends"
    )
    encode_processes: int | None = _operation(
        None, "processes that encode audio; 0: threads; default: by slots, from 8 cores on"
    )
    log_level: str = _operation("warning", "critical, error, warning, info or debug")

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            self._check(name, value is None or value >= least, f"{least} or more")
        for name in _POSITIVE:
            self._check(name, getattr(self, name) > 0, "more than 0")
        for name, valid in _ONE_OF.items():
            self._check(name, getattr(self, name) in valid, f"one of {', '.join(valid)}")
        num_slots = self.max_slots
        is_in_range = num_slots is None or 1 <= num_slots <= _MAX_SLOTS
        self._check("max_slots", is_in_range, f"1 to {_MAX_SLOTS}")
        self._check("num_threads", 0 <= self.num_threads <= _MAX_THREADS, f"0 to {_MAX_THREADS}")
        self._check("kv_fraction", 0 < self.kv_fraction <= 1, "more than 0, at most 1")
        self._check("host", bool(self.host), "an address, 0.0.0.0 for all of this machine")
        self._check("model", bool(self.model), '"embedded" or another model')
        self._check("port", 0 <= self.port <= 65_535, "0 to 65535")
        self._check("device", is_device(self.device), DEVICES)
        has_urls = all("://" in origin or origin == "null" for origin in self.origins())
        self._check("allowed_origins", has_urls, "origins like https://example.org")
        self._check(
            "trusted_proxies",
            all(map(_is_network, filter(None, self.trusted_proxies.split(",")))),
            "addresses and networks like 10.0.0.5 or 10.0.0.0/8",
        )
        has_certificate = self.ssl_certfile is not None or self.ssl_keyfile is None
        self._check("ssl_keyfile", has_certificate, "an --ssl-certfile beside it")
        cap_ms = self.max_lead_cap_ms
        expected = f"40 to {cap_ms}, which is max_lead_cap_ms"
        self._check("max_lead_ms", 40 <= self.max_lead_ms <= cap_ms, expected)
        top_ms = self.high_water_ms
        expected = f"0 to below {top_ms}, which is high_water_ms"
        self._check("low_water_ms", 0 <= self.low_water_ms < top_ms, expected)

    def _check(self, name: str, is_valid: bool, expected: str) -> None:
        if not is_valid:
            value = getattr(self, name)
            shown = str(value) if isinstance(value, Path) else repr(value)
            raise ConfigError(message=f"{name}: got {shown}, expected {expected}", param=name)

    def client_text_chars_per_s(self, num_slots: int) -> int:
        """0: any number."""
        if self.max_client_text_chars_per_s is not None:
            return self.max_client_text_chars_per_s
        return self.max_text_chars_per_s * (self.max_sessions_per_client or num_slots)

    def devices(self) -> tuple[str, ...]:
        return tuple(self.device.split(","))

    def origins(self) -> frozenset[str]:
        names = (origin.strip().lower().rstrip("/") for origin in self.allowed_origins.split(","))
        return frozenset(filter(None, names))

    def resolved_voices_dir(self) -> Path:
        """Where added voices live; nothing is created before one is added."""
        if self.voices_dir is not None:
            return self.voices_dir
        data_home = os.environ.get("XDG_DATA_HOME")
        base = Path(data_home) if data_home else Path.home() / ".local" / "share"
        return base / "plosive" / "voices"


# ---------------------------------------------------------------------------- generated from it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One `--option` per field, in groups, with the field's help text and default."""
    parser.usage = "%(prog)s [--OPTION VALUE ...]"
    parser.epilog = (
        f"Each option has an environment variable: --max-slots is {ENV_PREFIX}MAX_SLOTS. "
        "The command line wins."
    )
    groups: dict[str, argparse._ArgumentGroup] = {}
    for option in dataclasses.fields(ServerConfig):
        title: str = option.metadata["group"]
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        groups[title].add_argument(
            _flag(option.name),
            dest=option.name,
            default=argparse.SUPPRESS,  # so that the environment is asked before the default
            metavar=_metavar(option.name),
            type=_parser_of(option.name),
            help=_help(option),
        )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def named(name: str) -> str:
    """An option for a message about its value, where it is not known which way it was given.

    Example:
        >>> named("voices_dir")
        '--voices-dir (PLOSIVE_VOICES_DIR)'
    """
    return f"{_flag(name)} ({ENV_PREFIX}{name.upper()})"


def _metavar(name: str) -> str:
    """The unit where the name ends in one, else what kind of thing it is."""
    last = name.rpartition("_")[2]
    if last == "s" and not name.endswith("_per_s"):
        return "SECONDS"
    if last in ("ms", "bytes", "fd", "file", "dir", "port"):
        return last.upper()
    kinds: dict[Any, str] = {_int: "N", _float: "X", _bool: "yes|no"}
    return kinds.get(_parser_of(name), last.upper())


def _help(option: "dataclasses.Field[Any]") -> str:
    text: str = option.metadata["help"]
    default: Any = option.default
    if isinstance(default, bool):
        default = "yes" if default else "no"
    elif isinstance(default, float):
        default = f"{default:g}"
    shown = "" if default in (None, "") else f" (default: {default})"
    return (text + shown).replace("%", "%%")


def from_args(args: argparse.Namespace, environ: Mapping[str, str] | None = None) -> ServerConfig:
    """Command line over environment over defaults.

    Raises:
        ConfigError: an unknown `PLOSIVE_*` variable, or a value out of range.
    """
    environ = os.environ if environ is None else environ
    fields = dataclasses.fields(ServerConfig)
    given = {f.name: vars(args)[f.name] for f in fields if f.name in vars(args)}
    values = _from_environ(environ) | given
    try:
        return ServerConfig(**values)
    except ConfigError as error:
        if error.param is None:
            raise
        name, variable = error.param, ENV_PREFIX + error.param.upper()
        source = variable if name not in given and variable in environ else _flag(name)
        why = error.message.removeprefix(f"{name}: ")
        raise ConfigError(message=f"{source}: {why}", param=name) from None


def _from_environ(environ: Mapping[str, str]) -> dict[str, Any]:
    names = {ENV_PREFIX + f.name.upper(): f.name for f in dataclasses.fields(ServerConfig)}
    values: dict[str, Any] = {}
    for variable, text in environ.items():
        if not variable.startswith(ENV_PREFIX) or variable in OTHER_ENV:
            continue
        if variable not in names:
            valid = sorted([*names, *OTHER_ENV])
            near = difflib.get_close_matches(variable, valid, n=3) or valid
            raise ConfigError(
                message=f"unknown environment variable {variable}; there is {', '.join(near)}"
            )
        name = names[variable]
        try:
            values[name] = _parser_of(name)(text)
        except argparse.ArgumentTypeError as error:
            raise ConfigError(message=f"{variable}: {error}", param=name) from None
    return values


def _parser_of(name: str) -> Callable[[str], Any]:
    """Of the field's type without `None`. Raises ArgumentTypeError, whose text argparse shows."""
    hint = typing.get_type_hints(ServerConfig)[name]
    if isinstance(hint, types.UnionType):
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    parsers: dict[Any, Callable[[str], Any]] = {
        int: _int,
        float: _float,
        bool: _bool,
        str: str,
        Path: _path,
    }
    return parsers[hint]


def _int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number") from None


def _float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a finite number")
    return value


def _path(text: str) -> Path:
    if not text:  # which would be the directory that the server happens to start in
        raise argparse.ArgumentTypeError("got '', expected a path")
    return Path(text)


def _bool(text: str) -> bool:
    values = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if text.lower() not in values:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected yes or no")
    return values[text.lower()]
