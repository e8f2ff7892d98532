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


def test_structure_is_short_and_complete() -> None:
    text = (ROOT / "STRUCTURE.md").read_text("utf-8")
    assert len(text.splitlines()) < 80
    packages = ("realtime", "realtime/pingpong", "realtime/session", "model", "ops", "clients")
    for package in (*packages, "bench_ttfa"):
        for path in (ROOT / package).glob("*.py"):
            if path.name != "__init__.py":
                assert path.name in text, f"STRUCTURE.md has no line for {path.relative_to(ROOT)}"
