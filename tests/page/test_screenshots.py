"""The pictures of the README: each scene still comes about, and each picture is there and small."""

from pathlib import Path

import pytest

from tests.page.screenshots import FOLDER, SCENES, take
from tests.page.support import needs_browser
from tests.realtime.support import make_engine, serving

MAX_BYTES = 600_000  # in all
PNG = b"\x89PNG\r\n"


@needs_browser
@pytest.mark.parametrize("name", SCENES)
async def test_a_scene_comes_about(devtools: str, tmp_path: Path, name: str) -> None:
    engine = make_engine(tmp_path, num_slots=1)
    async with serving(tmp_path, engine) as served:
        picture = await take(devtools, f"http://127.0.0.1:{served.port}", name, SCENES[name])
        assert picture.startswith(PNG)
        await served.until_free()


def test_the_readme_shows_each_picture() -> None:
    readme = (FOLDER.parent.parent / "README.md").read_text("utf-8")
    files = {path.name: path for path in FOLDER.iterdir()}
    assert set(files) == {f"{name}.png" for name in SCENES}
    assert all(f"docs/page/{name}" in readme for name in files)
    assert all(path.read_bytes().startswith(PNG) for path in files.values())
    assert sum(path.stat().st_size for path in files.values()) < MAX_BYTES
