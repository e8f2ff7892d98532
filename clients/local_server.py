"""The server of this machine: one that runs already, or one's own, started as a child process and
stopped whatever happens."""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPException
from typing import IO, Self

from clients.address import DEFAULT_URL, http_url, opener
from realtime.errors import ConnectionFailed

SERVE = (sys.executable, "-m", "realtime", "serve")
STOP_TIMEOUT_S = 10.0
_READY_TIMEOUT_S = 600.0
_PROBE_TIMEOUT_S = 0.5
_POLL_S = 0.1
_NUM_LAST_LINES = 8
_OF_OTHER_SERVERS = (  # one's own is reached from this machine alone, without key or certificate
    *("PLOSIVE_HOST", "PLOSIVE_PORT"),
    *("PLOSIVE_API_KEYS", "PLOSIVE_API_KEYS_FILE"),
    *("PLOSIVE_SSL_CERTFILE", "PLOSIVE_SSL_KEYFILE"),
)


def running_server(url: str = DEFAULT_URL) -> str | None:
    """`url`, an address of this machine, if a server is ready there; it is asked no longer than
    half a second."""
    try:
        with opener(url).open(http_url(url, "/ready"), timeout=_PROBE_TIMEOUT_S) as response:
            answer = json.load(response)
    except urllib.error.HTTPError as error:
        error.close()
        return None
    except (OSError, HTTPException, ValueError):
        return None
    return url if isinstance(answer, dict) and answer.get("ready") is True else None


class LocalServer:
    """`plosive serve` on a free port of this machine, for as long as the block lasts, or this
    process: it holds one end of a pipe, and however it dies, the server sees that end close.

    Args:
        options: further options of `plosive serve`.
        on_wait: called about ten times a second with the seconds waited so far.
        command: what to run instead; it gets `--port 0`, `--announce-fd N`, on which it writes one
            JSON line `{"url": ..., "ready_s": ...}` when it is ready, and `--lifeline-fd N`, at
            whose end it stops.

    Example:
        with LocalServer(["--device", "cpu"]) as server:
            asyncio.run(talk_to(server.url))
    """

    url: str
    ready_s: float  # start of the process -> ready

    def __init__(
        self,
        options: Sequence[str] = (),
        *,
        on_wait: Callable[[float], None] = lambda _: None,
        command: Sequence[str] | None = None,
    ) -> None:
        self._command = [*(command or SERVE), "--port", "0", *options]
        self._on_wait = on_wait

    def __enter__(self) -> Self:
        """Start it and wait until it is ready.

        Raises:
            ConnectionFailed: it ended, with its last lines, or is not ready after 10 minutes.
        """
        started_s = time.perf_counter()
        announced, announce = os.pipe()
        lifeline, self._lifeline = os.pipe()
        with os.fdopen(announced, "rb") as reader:
            try:
                self._start(announce, lifeline)
            except BaseException:
                os.close(self._lifeline)
                raise
            finally:
                os.close(announce)
                os.close(lifeline)
            try:
                self.url = json.loads(self._first_line(reader, started_s))["url"]
            except BaseException:
                self._stop()
                raise
        self.ready_s = time.perf_counter() - started_s
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def last_lines(self) -> str:
        """The end of what it wrote to stdout and stderr."""
        self._log.flush()
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", "replace").rstrip().splitlines()
        return "\n".join(lines[-_NUM_LAST_LINES:])

    def _start(self, announce: int, lifeline: int) -> None:
        # Its own session: Ctrl-C reaches this process alone, which then stops the server.
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by _stop
        self._process = subprocess.Popen(
            [*self._command, "--announce-fd", str(announce), "--lifeline-fd", str(lifeline)],
            env={name: os.environ[name] for name in os.environ if name not in _OF_OTHER_SERVERS},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            pass_fds=[announce, lifeline],
            start_new_session=True,
        )

    def _first_line(self, reader: IO[bytes], started_s: float) -> bytes:
        while not select.select([reader], [], [], _POLL_S)[0]:
            waited_s = time.perf_counter() - started_s
            self._on_wait(waited_s)
            if waited_s > _READY_TIMEOUT_S:
                raise ConnectionFailed(
                    f"the local server is not ready after {waited_s:.0f} s:\n{self.last_lines()}"
                )
        line = reader.readline()
        if not line:  # the only writer has closed it
            status = self._process.wait(STOP_TIMEOUT_S)
            raise ConnectionFailed(
                f"the local server ended with status {status} before it was ready:\n"
                + self.last_lines()
            )
        return line

    def _stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        finally:
            self._log.close()
            os.close(self._lifeline)


@contextmanager
def stopped_like_interrupted() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind like Ctrl-C, so that a local server is stopped. A SIGHUP that is
    ignored (nohup) stays so. Main thread only."""
    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = [(number, signal.signal(number, signal.default_int_handler)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)
