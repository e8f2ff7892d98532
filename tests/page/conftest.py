"""One browser for the tests of a file; each has a tab in a profile of its own."""

from collections.abc import Iterator

import pytest

from tests.page.browser import chromium


@pytest.fixture(scope="module")
def devtools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with chromium(tmp_path_factory.mktemp("profile")) as url:
        yield url
