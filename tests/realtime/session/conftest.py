"""A session that has been started."""

import pytest

from tests.realtime.session.harness import Harness


@pytest.fixture
def opened() -> Harness:
    harness = Harness()
    harness.start()
    return harness
