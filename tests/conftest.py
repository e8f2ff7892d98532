"""What holds for every test: one thread computes, and signals do what they do at a prompt."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from clients.local_server import LocalServer

# Before torch is imported. With more threads a product's bits depend on how it is shared out.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell ignores SIGINT and SIGQUIT for what it starts in the background, `nohup` SIGHUP, and child
# processes inherit that: tests that interrupt a server would wait for ever.
for _number in (signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch  # which tests of clients do without

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.fixture
def inference() -> Iterator[None]:
    import torch

    with torch.inference_mode():
        yield


@pytest.fixture(scope="session")
def voices_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server of `url` keeps voices."""
    return tmp_path_factory.mktemp("voices")


@pytest.fixture(scope="session")
def url(voices_dir: Path) -> Iterator[str]:
    """Of a server in a process of its own with the embedded model and its 4 slots, one for all tests:
    a slot may still be held by a session that has just ended."""
    with LocalServer(["--device", "cpu", "--voices-dir", str(voices_dir)]) as server:
        yield server.url
