"""The jitter buffer, sample by sample."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clients.play_buffer import PlayBuffer, Track


def ramp(start: int, num: int) -> np.ndarray:
    """Samples that say which they are: 1, 2, 3, ..."""
    return np.arange(start + 1, start + num + 1, dtype=np.float32)


def pull(buffer: PlayBuffer, num: int) -> list[float]:
    out = np.full(num, np.nan, np.float32)
    buffer.pull(out)
    return out.tolist()


@pytest.fixture
def over() -> list[str]:
    return []


def add(buffer: PlayBuffer, over: list[str], name: str = "a") -> Track:
    track = Track(lambda: over.append(name))
    buffer.add(track)
    return track


def test_a_track_begins_when_enough_is_there(over) -> None:
    buffer = PlayBuffer(4)
    track = add(buffer, over)
    buffer.feed(track, ramp(0, 3))
    assert pull(buffer, 2) == [0, 0]
    buffer.feed(track, ramp(3, 1))
    assert pull(buffer, 3) == [1, 2, 3]
    assert (track.num_played, track.num_underruns, over) == (3, 0, [])


def test_a_short_track_begins_at_its_end(over) -> None:
    buffer = PlayBuffer(100)
    track = add(buffer, over)
    buffer.feed(track, ramp(0, 2))
    buffer.end(track)
    assert pull(buffer, 3) == [1, 2, 0]
    assert (track.num_played, track.num_underruns, over) == (2, 0, ["a"])


def test_a_track_that_runs_dry_is_counted_and_waits_again(over) -> None:
    buffer = PlayBuffer(2)
    track = add(buffer, over)
    buffer.feed(track, ramp(0, 2))
    assert pull(buffer, 2) == [1, 2]
    assert track.num_underruns == 0  # nothing was missing yet
    assert pull(buffer, 2) == [0, 0]
    buffer.feed(track, ramp(2, 1))
    assert pull(buffer, 2) == [0, 0]
    assert track.num_underruns == 1
    buffer.feed(track, ramp(3, 1))
    assert pull(buffer, 3) == [3, 4, 0]
    assert (track.num_underruns, track.num_played) == (2, 4)


def test_tracks_follow_each_other_without_a_gap(over) -> None:
    buffer = PlayBuffer(2)
    first, second = add(buffer, over, "first"), add(buffer, over, "second")
    buffer.feed(second, ramp(10, 3))
    assert pull(buffer, 2) == [0, 0]  # its turn has not come
    buffer.feed(first, ramp(0, 3))
    buffer.end(first)
    assert pull(buffer, 5) == [1, 2, 3, 11, 12]
    assert over == ["first"]


def test_nothing_old_is_pulled_after_clear(over) -> None:
    buffer = PlayBuffer(0)
    first, second = add(buffer, over, "first"), add(buffer, over, "second")
    buffer.feed(first, ramp(0, 10))
    buffer.feed(second, ramp(20, 10))
    assert pull(buffer, 3) == [1, 2, 3]
    assert buffer.clear() == [first, second]
    buffer.feed(first, ramp(50, 10))
    buffer.feed(second, ramp(60, 10))
    third = add(buffer, over, "third")
    buffer.feed(third, ramp(100, 2))
    assert pull(buffer, 4) == [101, 102, 0, 0]
    assert (first.num_played, second.num_played) == (3, 0)
    assert over == ["first", "second"]
    assert buffer.clear() == [third]


@given(
    num_fade=st.integers(0, 8),
    num_there=st.integers(0, 12),
    num_heard=st.integers(1, 12),
    pulls=st.lists(st.integers(1, 5), min_size=12, max_size=12),
)
def test_what_is_cleared_while_it_sounds_fades_out(num_fade, num_there, num_heard, pulls) -> None:
    buffer = PlayBuffer(1, num_fade)
    first, waiting = add(buffer, []), add(buffer, [])
    buffer.feed(first, np.ones(num_there, np.float32))
    buffer.feed(waiting, np.full(9, 5.0, np.float32))
    is_sounding = pull(buffer, num_heard)[-1] != 0
    assert buffer.clear() == [first, waiting]
    assert buffer.clear() == []
    later = add(buffer, [])
    buffer.feed(later, np.full(3, 2.0, np.float32))
    heard = [sample for num in pulls for sample in pull(buffer, num)]

    num_faded = min(num_fade, num_there - num_heard) if is_sounding else 0
    fading = np.array([1.0, *heard[:num_faded], 0.0])
    np.testing.assert_allclose(np.diff(fading), -1 / (num_faded + 1), atol=1e-6)
    assert heard[num_faded : num_faded + 3] == [2.0] * 3
    assert not any(heard[num_faded + 3 :])
    assert first.num_played == min(num_there, num_heard) + num_faded
    assert (waiting.num_played, later.num_played) == (0, 3)


def test_a_track_without_audio_is_over_with_the_next_pull(over) -> None:
    buffer = PlayBuffer(4)
    buffer.end(add(buffer, over))
    assert pull(buffer, 1) == [0]
    assert over == ["a"]


@given(
    chunks=st.lists(st.integers(0, 7), max_size=20),
    pulls=st.lists(st.integers(1, 9), max_size=20),
    num_prebuffered=st.integers(0, 8),
)
def test_every_sample_is_pulled_once_in_order(chunks, pulls, num_prebuffered) -> None:
    buffer = PlayBuffer(num_prebuffered)
    track = add(buffer, [])
    heard: list[float] = []
    num_fed = 0
    for i in range(max(len(chunks), len(pulls))):
        if i < len(chunks):
            buffer.feed(track, ramp(num_fed, chunks[i]))
            num_fed += chunks[i]
        if i < len(pulls):
            heard += [sample for sample in pull(buffer, pulls[i]) if sample]
            assert track.num_played == len(heard)
    buffer.end(track)
    heard += [sample for sample in pull(buffer, num_fed + 1) if sample]
    assert heard == ramp(0, num_fed).tolist()
