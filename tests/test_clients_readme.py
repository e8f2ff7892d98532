"""What `tests_clients/README.md` says is tested is there, and the table is complete."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "tests_clients" / "README.md").read_text("utf-8")


def test_every_test_that_it_names_exists() -> None:
    sources = [
        path for folder in ("tests", "tests_clients") for path in (ROOT / folder).rglob("*.py")
    ]
    tests = {name for path in sources for name in re.findall(r"def (test_\w+)", path.read_text())}
    assert set(re.findall(r"`(test_\w+)`", README)) <= tests


def test_every_path_that_it_names_exists() -> None:
    paths = re.findall(r"`((?:tests|tests_clients|bench_ttfa)/[\w/.]*)`", README)
    assert paths and [path for path in paths if not (ROOT / path).exists()] == []


def test_each_of_the_45_has_its_row_and_its_state() -> None:
    rows = re.findall(r"^\| ([\d, ]+) \|.*?\| ([tdn]) \|", README, re.MULTILINE)
    numbers = [int(number) for cell, _ in rows for number in cell.split(",")]
    assert numbers == list(range(1, 46))
