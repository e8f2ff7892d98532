"""Files are encoded beside the event loop, which every other call needs meanwhile."""

import threading
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from realtime.adapters.speech import SpeechEncoder
from tests.adapters.fish_support import TEXT, live
from tests.adapters.test_client_limits import POSTS
from tests.realtime.support import serving


@pytest.fixture
def encoding_threads(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Those that `SpeechEncoder` was called on."""
    threads: set[int] = set()
    push, finish = SpeechEncoder.push, SpeechEncoder.finish

    def watched_push(encoder: SpeechEncoder, pcm: NDArray[np.float32]) -> bytes:
        threads.add(threading.get_ident())
        return push(encoder, pcm)

    def watched_finish(encoder: SpeechEncoder) -> bytes:
        threads.add(threading.get_ident())
        return finish(encoder)

    monkeypatch.setattr(SpeechEncoder, "push", watched_push)
    monkeypatch.setattr(SpeechEncoder, "finish", watched_finish)
    return threads


@pytest.mark.parametrize("path", POSTS)
async def test_a_request_is_encoded_beside_the_loop(
    tmp_path: Path, encoding_threads: set[int], path: str
) -> None:
    async with serving(tmp_path) as served, served.http() as http:
        assert (await http.post(path, json=POSTS[path])).status_code == 200
    assert encoding_threads and threading.get_ident() not in encoding_threads


async def test_a_socket_is_encoded_beside_the_loop(
    tmp_path: Path, encoding_threads: set[int]
) -> None:
    async with serving(tmp_path) as served, live(served) as fish:
        await fish.start(format="mp3", sample_rate=None, text=TEXT)
        await fish.send("stop")
        assert await fish.until_finish()
    assert encoding_threads and threading.get_ident() not in encoding_threads
