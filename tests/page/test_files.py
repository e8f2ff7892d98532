"""The page's files: their types, a strict policy, nothing from elsewhere."""

import re
import tomllib
from pathlib import Path

import pytest

from realtime.page_routes import ASSETS_PATH, FOLDER, MEDIA_TYPES
from tests.realtime.support import serving

ROOT = Path(__file__).resolve().parent.parent.parent
FILES = sorted(path.name for path in FOLDER.iterdir())


async def test_every_file_is_served_with_its_type_and_a_strict_policy(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, served.http() as http:
        for name in FILES:
            url = "/" if name == "index.html" else ASSETS_PATH + name
            response = await http.get(url)
            assert response.status_code == 200, name
            assert response.content == (FOLDER / name).read_bytes()
            assert response.headers["content-type"] == MEDIA_TYPES[Path(name).suffix]
            assert response.headers["x-content-type-options"] == "nosniff"
            policy = response.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
            assert "unsafe" not in policy and "*" not in policy and "http" not in policy
            assert (await http.head(url)).status_code == 200
        missing = await http.get(ASSETS_PATH + "nothing.js")
        assert missing.status_code == 404
        assert missing.json()["error"]["code"] == "not_found"


@pytest.mark.parametrize("name", FILES)
def test_files_name_no_other_host_and_nothing_inline(name: str) -> None:
    text = (FOLDER / name).read_text("utf-8").replace('xmlns="http://www.w3.org/2000/svg"', "")
    urls = set(re.findall(r"(?:https?:)?//[\w-]+(?:\.[\w-]+)+", text))
    assert urls <= {"http://127.0.0.1"}  # in a sentence
    assert not re.search(r"<style|\sstyle=|\son\w+=\"|<script(?![^>]*\ssrc=)", text)


def test_files_are_in_the_package() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    patterns = config["tool"]["setuptools"]["package-data"]["*"]
    assert {f"*{Path(name).suffix}" for name in FILES} <= set(patterns)
