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


def luminance(colour: str) -> float:
    """Of `#rrggbb`, as WCAG 2 has it."""
    shares = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_what_is_read_stands_out_from_what_is_behind_it(scheme: str) -> None:
    roots = re.findall(r":root \{(.*?)\}", (FOLDER / "style.css").read_text("utf-8"), re.DOTALL)
    assert len(roots) == 2
    root = roots[("light", "dark").index(scheme)]
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", root))

    def contrast(one: str, other: str) -> float:
        low, high = sorted((luminance(colours[one]), luminance(colours[other])))
        return (high + 0.05) / (low + 0.05)

    for behind in ("paper", "sheet"):
        for read in ("ink", "soft", "alarm"):
            assert contrast(read, behind) >= 4.5, (read, behind)
        for seen in ("edge", "accent", "server"):
            assert contrast(seen, behind) >= 3.0, (seen, behind)
    assert contrast("on-accent", "accent") >= 4.5
