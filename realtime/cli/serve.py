"""`plosive serve`: bind, load, serve until a signal, drain."""

import argparse
import asyncio
import errno
import json
import os
import socket
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import cast

import uvicorn

from model.embedded import embedded_path
from realtime import config as options
from realtime.auth import ApiKeys, load_api_keys
from realtime.cli.certificate import check_certificate
from realtime.cli.output_folder import progress_bar, signals_raised
from realtime.cli.placement import place
from realtime.config import ServerConfig
from realtime.errors import PlosiveError
from realtime.garbage import spare_what_is_loaded
from realtime.http_protocol import PlosiveHttp
from realtime.hub import Hub
from realtime.opus import load_opuslib
from realtime.pingpong import tone
from realtime.pingpong.api import Engine
from realtime.pingpong.slots import Slots
from realtime.server import create_app
from realtime.threads import share_interpreter
from realtime.voices import VoiceStore, check_voices_dir
from realtime.websocket import PlosiveWebSocket
from realtime.wire import MAX_MESSAGE_BYTES

EXAMPLES = """examples:
  plosive serve                                the embedded model
  plosive serve --model DIR                    a checkpoint: S2 Pro's layout, quantised or not
  plosive serve --model DIR --format bsfp8     the same, its weights in 8 bits (Hopper)
  plosive serve --model DIR --device cuda:0,cuda:1 --max-slots 256
                                               an engine on each GPU, 128 sessions on each
  plosive serve --model 'random:s2-pro?frames=60&reference_s=10'
                                               S2 Pro's shapes with random weights: every segment
                                               has 60 frames, the default voice 10 s of reference;
                                               the voices ref-0s, ref-10s and ref-30s are there too
"""

EngineFactory = Callable[[ServerConfig], Engine]

_WORTH_A_LINE_S = 2.0  # of warming up
_WORTH_A_LINE_BYTES = 10**9  # of weights: loading them takes seconds, which are accounted for


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_arguments(parser)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = f"{EXAMPLES}\n{textwrap.fill(parser.epilog or '', 79)}"


def run(args: argparse.Namespace) -> int:
    try:
        config = options.from_args(args)
        keys = load_api_keys(config.api_keys_file, os.environ)
    except PlosiveError as error:
        print(f"plosive serve: {error.message}", file=sys.stderr)
        return 2
    return serve(config, load_engine, keys)


def load_engine(config: ServerConfig) -> Engine:
    """What `--model`, `--device` and `--engine-process` ask for."""
    model_path(config)  # before any process starts: a wrong path is said once, and names no device
    return place(config, load_on_device)


def model_path(config: ServerConfig) -> Path:
    """Where the model is, unless its name alone says what it is (`tone:...`, `random:...`).

    Raises:
        PlosiveError: it is not there.
    """
    path = embedded_path() if config.model == "embedded" else Path(config.model)
    is_made_up = config.model.partition(":")[0] in (tone.MODEL, "random")
    if not is_made_up and not path.is_dir():
        raise PlosiveError("model_unusable", f"there is no checkpoint directory {path}")
    return path


def load_on_device(config: ServerConfig, device: str, slots: Slots) -> Engine:
    """The ping-pong engine on the configured model; the only function here that needs torch."""
    if config.model.partition(":")[0] == tone.MODEL:
        return tone.ToneEngine(tone.ToneConfig.parse(config.model, slots.num_slots), slots)
    path = model_path(config)

    import torch

    from model.errors import ModelError
    from model.kv_cache import KvFormat
    from model.speech_model import RunAs, load_speech_model
    from realtime.pingpong.engine import EngineConfig, PingPongEngine

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device.startswith("cuda") and not torch.cuda.is_available():
        raise PlosiveError(
            "model_unusable", "there is no CUDA device here; --device cpu does without"
        )
    run_as = None if config.format == "auto" else cast(RunAs, config.format)
    try:
        with progress_bar(_weight_bytes(path), f"loading {path.name}") as on_bytes:
            model = load_speech_model(
                path, name=path.name, device=device, run_as=run_as, on_bytes=on_bytes
            )
        if model.load_report.num_bytes >= _WORTH_A_LINE_BYTES:
            print(f"Loaded {path.name} on {device}: {model.load_report}", flush=True)
        engine_config = EngineConfig(
            num_slots=slots.num_slots,
            max_positions=config.max_context,
            kv_format=cast(KvFormat, config.kv_format),
            kv_memory_fraction=config.kv_fraction,
            num_threads=config.num_threads or 1,
        )
        return PingPongEngine(model, engine_config, slots)
    except (ModelError, OSError, RuntimeError) as error:
        raise PlosiveError("model_unusable", f"cannot load the model: {error}") from error


def _weight_bytes(path: Path) -> int:
    """Of a checkpoint's files; random weights are not read."""
    from model.checkpoint_files import weight_files

    return sum(file.stat().st_size for file in weight_files(path)) if path.is_dir() else 0


def serve(config: ServerConfig, engine_factory: EngineFactory, keys: ApiKeys | None = None) -> int:
    """Run the server until it is told to stop. Returns the exit code.

    The port is taken before the model is loaded, so that a port in use is known at once;
    connections made meanwhile wait.
    """
    started_s = time.monotonic()
    share_interpreter()
    try:
        _check_descriptors(config)
        check_certificate(config.ssl_certfile, config.ssl_keyfile)
        if config.voices_dir is not None:  # the default one may lie in a home that is read-only
            check_voices_dir(config.voices_dir)
        load_opuslib()
        sock = bind(config.host, config.port)
        with signals_raised():  # so that engines that load end with this process
            engine = engine_factory(config)
        return asyncio.run(_serve(config, engine, sock, started_s, keys))
    except PlosiveError as error:
        print(f"plosive: {error.message}", file=sys.stderr)
        return 1


def _check_descriptors(config: ServerConfig) -> None:
    for option, fd in (("announce_fd", config.announce_fd), ("lifeline_fd", config.lifeline_fd)):
        try:
            os.fstat(0 if fd is None else fd)
        except OSError as error:
            why = f"{options.named(option)}: file descriptor {fd} is not open"
            raise PlosiveError("invalid_config", why) from error


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, or a PlosiveError `address_unusable` that says why not."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            why = f"port {port} on {host} is in use; choose another with --port (0: any free one)"
        else:
            number = error.errno or 0  # not above 0: of the name's look-up
            cause = os.strerror(number) if number > 0 else error.strerror
            why = f"cannot listen on {host}, port {port}: {cause}"
        raise PlosiveError("address_unusable", why) from error


class DrainingServer(uvicorn.Server):
    """uvicorn's server, whose shutdown begins with the hub's drain. A second signal cuts it short,
    a third the rest.

    Signals are not raised again afterwards: a drained server ends with exit code 0.
    """

    def __init__(
        self, config: uvicorn.Config, hub: Hub, drain_s: float, lifeline_fd: int | None = None
    ) -> None:
        super().__init__(config)
        self._hub = hub
        self._drain_s = drain_s
        self._lifeline_fd = lifeline_fd
        self._drain: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._exit = asyncio.Event()

    def stop(self) -> None:
        """Drain and end. Callable from any thread and from a signal handler."""
        self.should_exit = True
        self._loop.call_soon_threadsafe(self._exit.set)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._drain is not None and not self._drain.done():
            self._loop.call_soon_threadsafe(self._drain.cancel)
        elif self.should_exit:
            self.force_exit = True
        self.stop()

    async def main_loop(self) -> None:
        if self._lifeline_fd is not None:
            self._loop.add_reader(self._lifeline_fd, self._read_lifeline, self._lifeline_fd)
        await self._exit.wait()  # uvicorn's own polls ten times a second

    def _read_lifeline(self, fd: int) -> None:
        if not os.read(fd, 4096):  # whoever started this server is gone
            self._loop.remove_reader(fd)
            self.stop()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._drain = asyncio.ensure_future(self._hub.drain(self._drain_s))
        await asyncio.wait((self._drain,))
        await super().shutdown(sockets)


def make_server(
    engine: Engine, config: ServerConfig, keys: ApiKeys | None = None
) -> tuple[DrainingServer, Hub]:
    """The whole server, not yet running, and the hub that knows when it is ready.

    Call it on the event loop that will run the server.
    """
    info = engine.info
    voices = VoiceStore(
        info.builtin_voices_path,
        config.resolved_voices_dir(),
        codec_id=info.codec_id,
        num_codebooks=info.num_codebooks,
        max_voices=config.max_voices,
    )
    app = create_app(engine, config, voices, keys or ApiKeys())
    hub: Hub = app.state.hub
    uvicorn_config = uvicorn.Config(
        app,
        http=PlosiveHttp,
        ws=PlosiveWebSocket,
        ws_max_size=4 * MAX_MESSAGE_BYTES,  # that many characters; beyond it the close is 1009
        ws_ping_interval=config.ping_interval_s,
        ws_ping_timeout=config.ping_timeout_s,
        proxy_headers=bool(config.trusted_proxies),
        forwarded_allow_ips=config.trusted_proxies,
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile=config.ssl_keyfile,
        ws_per_message_deflate=False,  # audio does not shrink; zlib costs memory per connection
        log_level=config.log_level,
        access_log=False,
        server_header=False,
        date_header=False,
        lifespan="on",  # a start that fails must not be taken for an app without one
        timeout_graceful_shutdown=2,
    )
    return DrainingServer(uvicorn_config, hub, config.drain_s, config.lifeline_fd), hub


async def _serve(
    config: ServerConfig,
    engine: Engine,
    sock: socket.socket,
    started_s: float,
    keys: ApiKeys | None,
) -> int:
    server, hub = make_server(engine, config, keys)
    announcing = asyncio.create_task(_announce(config, engine, hub, sock, started_s))
    announcing.add_done_callback(lambda task: _stop_if_failed(server, task))
    await server.serve(sockets=[sock])
    announcing.cancel()
    await asyncio.wait((announcing,))
    return 0 if announcing.cancelled() or announcing.exception() is None else 1


def memory_line(stats: dict[str, float]) -> str:
    """What a big model takes of its device; empty for a small one."""
    sizes = {name: size for name, size in stats.items() if name.endswith("_bytes") and size}
    if sum(sizes.values()) < _WORTH_A_LINE_BYTES:
        return ""
    parts = (
        f"{name.removesuffix('_bytes').replace('_', ' ')} {size / 1e9:.2f}"
        for name, size in sizes.items()
    )
    return f"Device memory in GB: {', '.join(parts)}"


def start_up_line(stats: dict[str, float], ready_s: float) -> str:
    """What a slow warm-up was slow for; empty for a fast one."""
    stages = {name: took_s for name, took_s in stats.items() if name.startswith("warm_up_")}
    before_s = ready_s - sum(stages.values())
    if ready_s - before_s < _WORTH_A_LINE_S:
        return ""
    parts = [
        f"{name.removeprefix('warm_up_').removesuffix('_s').replace('_', ' ')} {took_s:.1f}"
        for name, took_s in stages.items()
    ]
    return f"Start-up in s: {', '.join(parts)}, before that {before_s:.1f}"


def listening_line(url: str, model_name: str, num_slots: int, ready_s: float) -> str:
    slots = "1 slot" if num_slots == 1 else f"{num_slots} slots"
    return f"Plosive listening on {url} (model {model_name}, {slots}, ready in {ready_s:.1f} s)"


async def _announce(
    config: ServerConfig, engine: Engine, hub: Hub, sock: socket.socket, started_s: float
) -> None:
    """Say where the server listens once it admits sessions; never before."""
    try:
        await hub.wait_until_ready()
    except Exception as error:
        why = error.message if isinstance(error, PlosiveError) else error
        print(f"plosive: the model cannot be served: {why}", file=sys.stderr)
        raise
    spare_what_is_loaded()
    url, ready_s = url_of(config, sock), time.monotonic() - started_s
    stats = engine.stats()
    for line in (memory_line(stats), start_up_line(stats, ready_s)):
        if line:
            print(line, flush=True)
    print(listening_line(url, engine.info.model_name, engine.info.num_slots, ready_s), flush=True)
    if config.announce_fd is not None:
        announcement = {"url": url, "port": sock.getsockname()[1], "ready_s": round(ready_s, 3)}
        with os.fdopen(config.announce_fd, "w") as pipe:
            pipe.write(json.dumps(announcement) + "\n")


def _stop_if_failed(server: DrainingServer, task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        server.stop()


def url_of(config: ServerConfig, sock: socket.socket) -> str:
    scheme = "http" if config.ssl_certfile is None else "https"
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"{scheme}://{host}:{sock.getsockname()[1]}"
