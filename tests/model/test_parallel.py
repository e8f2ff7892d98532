"""Results in order, a bounded number of them at a time."""

import threading
import time
from contextlib import closing

import pytest

from model.parallel import map_in_order, num_places


def test_order_and_places():
    in_use: set[int] = set()
    lock = threading.Lock()

    def work(item: int, place: int) -> tuple[int, int]:
        with lock:
            assert place not in in_use, "another result still has the place"
            in_use.add(place)
        time.sleep(0.001 * (item % 3))
        return item, place

    seen = []
    for item, place in map_in_order(work, range(40)):
        seen.append(item)
        assert 0 <= place < num_places()
        with lock:
            in_use.remove(place)
    assert seen == list(range(40))


def test_an_error_ends_it():
    def work(item: int, place: int) -> int:
        if item == 3:
            raise OSError("disk")
        return item

    results = map_in_order(work, range(100))
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OSError, match="disk"):
        next(results)


def test_nothing_goes_on_after_it_is_closed():
    started = []
    with closing(map_in_order(lambda item, place: started.append(item), range(1000))) as results:
        next(results)
    count = len(started)
    assert count <= num_places() + 1
    assert threading.active_count() < 50 and len(started) == count
