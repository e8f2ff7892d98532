"""Paths that the documents name exist, and every source file has its line in STRUCTURE.md."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PATH = re.compile(r"`((?:[\w.-]+/)*[\w.-]+\.(?:py|md|toml|json|cu|wav)|(?:[\w-]+/)+)`")
GENERATED = {"bench_ttfa/runs/", "demo.wav", "hello.wav"}
PACKAGES = ("realtime", "model", "ops", "clients", "bench_ttfa", "tests")


def exists(name: str) -> bool:
    """From the root, or, for a bare file name, anywhere among the sources. An empty directory is
    not there: a clone has none."""
    if name.endswith("/"):
        return any((ROOT / name).glob("*"))
    if "/" in name or (ROOT / name).exists():
        return (ROOT / name).exists()
    return any(next((ROOT / package).rglob(name), None) for package in PACKAGES)


@pytest.mark.parametrize("document", ["README.md", "STRUCTURE.md"])
def test_named_paths_exist(document: str) -> None:
    names = PATH.findall((ROOT / document).read_text("utf-8"))
    assert names, f"{document} names no path"
    missing = [name for name in names if name not in GENERATED and not exists(name)]
    assert not missing, f"{document} names what is not there: {missing}"


FLAT = (
    "ops",
    "model",
    "clients",
    "bench_ttfa",
    "realtime",
)  # folders whose every file has its line
FLAT += tuple(f"realtime/{name}" for name in ("adapters", "pingpong", "session"))


def test_structure_is_short_and_complete() -> None:
    text = (ROOT / "STRUCTURE.md").read_text("utf-8")
    assert len(text.splitlines()) < 80
    named = {Path(name).name for name in PATH.findall(text)}
    files = [path for folder in FLAT for path in (ROOT / folder).glob("*.py")]
    missing = [
        str(path.relative_to(ROOT)) for path in files if path.name not in {"__init__.py", *named}
    ]
    assert not missing, f"STRUCTURE.md has no line for {missing}"
