"""Which engine runs where, and `plosive serve` over several of them."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from clients import PlosiveError, Sampling, Session, connect
from clients.local_server import LocalServer
from realtime.cli.placement import has_own_process, load_alone, place
from realtime.cli.serve import load_engine, load_on_device
from realtime.config import ConfigError, ServerConfig
from realtime.pingpong.fleet import Fleet
from realtime.pingpong.slots import Slots
from realtime.pingpong.tone import ToneConfig, ToneEngine
from realtime.remote.engine import RemoteEngine


def config(**options: object) -> ServerConfig:
    return ServerConfig(model="tone:1,0", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("device", "engine_process", "expected"),
    [
        ("cpu", "auto", False),
        ("cpu", "yes", True),
        ("cpu", "no", False),
        ("cuda", "auto", True),
        ("cuda:1", "no", False),
        ("cpu,cpu", "auto", True),
        ("cuda:0,cuda:1", "no", True),  # several engines always
    ],
)
def test_who_gets_a_process(device: str, engine_process: str, expected: bool) -> None:
    assert has_own_process(config(device=device, engine_process=engine_process)) is expected


def test_one_engine_here() -> None:
    engine = place(config(device="cpu", max_slots=3), load_on_device)
    assert isinstance(engine, ToneEngine) and engine.info.num_slots == 3


def test_one_engine_in_its_own_process() -> None:
    engine = place(config(device="cpu", engine_process="yes", max_slots=3), load_on_device)
    assert isinstance(engine, RemoteEngine) and engine.info.num_slots == 3
    engine.stop()


def test_slots_are_shared_out_over_the_devices() -> None:
    engine = place(config(device="cpu,cpu,cpu", max_slots=8), load_on_device)
    assert isinstance(engine, Fleet)
    shares = [each.info.num_slots for each in engine._engines]
    assert shares == [3, 3, 2] and engine.info.num_slots == 8
    engine.stop()


@pytest.mark.parametrize(
    ("device", "visible", "seen", "asked"),
    [
        ("cuda:1", None, "1", "cuda"),
        ("cuda:1", "4,7", "7", "cuda"),
        ("cuda:0", "GPU-1a,GPU-2b", "GPU-1a", "cuda"),
        ("cuda", "4,7", "4,7", "cuda"),
        ("cpu", None, None, "cpu"),
    ],
)
def test_an_engine_sees_its_own_gpu_alone(monkeypatch, device, visible, seen, asked) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")  # put back afterwards
    if visible is None:
        del os.environ["CUDA_VISIBLE_DEVICES"]
    loaded: list[tuple[str, str | None]] = []

    def load(config: ServerConfig, device: str, slots: Slots) -> ToneEngine:
        loaded.append((device, os.environ.get("CUDA_VISIBLE_DEVICES")))
        return ToneEngine(ToneConfig(num_slots=slots.num_slots), slots)

    load_alone(load, config(), device, Slots(1))
    assert loaded == [(asked, seen)]


def test_a_gpu_that_is_not_visible_is_said(monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    with pytest.raises(PlosiveError, match="cuda:1: CUDA_VISIBLE_DEVICES=4 leaves no such device"):
        load_alone(load_on_device, config(), "cuda:1", Slots(1))


def test_what_cannot_be_placed_is_said(tmp_path: Path) -> None:
    with pytest.raises(PlosiveError, match="one for each of 3 devices"):
        place(config(device="cpu,cpu,cpu", max_slots=2), load_on_device)
    missing = ServerConfig(model=str(tmp_path / "none"), device="cpu,cpu")
    with pytest.raises(PlosiveError, match="no checkpoint directory"):
        place(missing, load_on_device)
    for device in ("cuda", "cpu,cpu"):
        elsewhere = ServerConfig(model=str(tmp_path / "none"), device=device)
        with pytest.raises(PlosiveError) as caught:
            load_engine(elsewhere)
        assert caught.value.message == f"there is no checkpoint directory {tmp_path / 'none'}"
    for device in ("cpu,", "auto,cpu", "gpu", "cuda:x"):
        with pytest.raises(ConfigError, match="expected"):
            config(device=device)
    with pytest.raises(ConfigError, match="one of auto, yes, no"):
        config(engine_process="maybe")


async def speak(session: Session, text: str = "One of several.") -> int:
    return len([packet async for packet in session.say(text)])


def children(pid: int) -> list[int]:
    """Processes that `pid` has started for engines; multiprocessing's tracker is none."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    found = [child for task in tasks for child in (task / "children").read_text().split()]
    engines = [c for c in found if "spawn_main" in Path(f"/proc/{c}/cmdline").read_text()]
    return [int(each) for each in engines]


def reason(server: LocalServer) -> str:
    """That /ready gives."""
    url = server.url.replace("ws", "http", 1).partition("/v1")[0] + "/ready"
    return str(httpx.get(url, trust_env=False).json()["reason"])


def wait_until_whole(server: LocalServer) -> None:
    for _ in range(1200):
        if reason(server) == "ready":
            return
        time.sleep(0.05)
    raise AssertionError(reason(server))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
def test_serve_goes_on_when_one_of_its_engines_is_killed_and_starts_another() -> None:
    options = ["--model", "tone:1,0", "--device", "cpu,cpu", "--max-slots", "2"]
    with LocalServer(options) as server:

        async def talk() -> None:
            async with connect(server.url) as one, connect(server.url) as two:
                assert min(await asyncio.gather(speak(one), speak(two))) > 10
                os.kill(children(server.pid)[0], signal.SIGKILL)
                said = await asyncio.gather(speak(one), speak(two), return_exceptions=True)
                failed = [each for each in said if isinstance(each, PlosiveError)]
                assert len(failed) == 1, said
                assert "exit code -9" in failed[0].message
                survivor = one if isinstance(said[0], int) else two
                assert await speak(survivor) > 10
                await asyncio.to_thread(wait_until_whole, server)
                async with connect(server.url) as again:
                    assert min(await asyncio.gather(speak(survivor), speak(again))) > 10

        asyncio.run(talk())
        assert server.is_running
        pids = children(server.pid)
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
def test_an_engine_does_not_outlive_its_server() -> None:
    options = ["--model", "tone:1,0", "--device", "cpu", "--engine-process", "yes"]
    with LocalServer(options) as server:
        (engine,) = children(server.pid)
        os.kill(server.pid, signal.SIGKILL)
        end_s = time.monotonic() + 10.0
        while Path(f"/proc/{engine}").exists() and time.monotonic() < end_s:
            time.sleep(0.05)
        assert not Path(f"/proc/{engine}").exists()


def test_a_signal_to_the_whole_group_lets_the_turn_end() -> None:
    """As a terminal or a supervisor sends it: the server drains, and its engine works until then."""
    options = ["--model", "tone:1,0", "--device", "cpu", "--engine-process", "yes"]
    with LocalServer(options) as server:

        async def talk() -> int:
            async with connect(server.url, max_lead_ms=200) as session:
                num_packets = 0
                async for _ in session.say("A turn that goes on for a while. " * 2):
                    num_packets += 1
                    if num_packets == 10:
                        os.killpg(server.pid, signal.SIGTERM)
                return num_packets

        assert asyncio.run(talk()) > 100


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_engines_load_ends_everything_without_a_word(
    number: signal.Signals, code: int
) -> None:
    options = ["--port", "0", "--model", "random:tiny", "--device", "cpu,cpu"]
    server = subprocess.Popen(
        [sys.executable, "-m", "realtime", "serve", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    with server:
        try:
            while len(engines := children(server.pid)) < 2:
                assert server.poll() is None
                time.sleep(0.01)
            os.killpg(server.pid, number)
            output, _ = server.communicate(timeout=20.0)
        finally:
            server.kill()
    assert (server.returncode, output) == (code, b"")
    for engine in engines:
        assert not Path(f"/proc/{engine}").exists()


def test_serve_over_two_real_engines() -> None:
    """The same seed says the same on either."""
    options = ["--model", "random:tiny", "--device", "cpu,cpu", "--max-slots", "2"]
    with LocalServer(options) as server:

        async def talk() -> list[list[bytes]]:
            seed = Sampling(seed=1)
            async with (
                connect(server.url, sampling=seed) as one,
                connect(server.url, sampling=seed) as two,
            ):
                return [await payloads(one), await payloads(two)]

        first, second = asyncio.run(talk())
    assert first and first == second


async def payloads(session: Session) -> list[bytes]:
    return [packet.payload async for packet in session.say("The same on either.")]
