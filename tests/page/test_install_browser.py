"""`make browser` with a stub for apt-get: it installs once, tries twice, and never fails."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("install_browser.sh")
SKIPPED = "the tests of the page will be skipped"


def stub(folder: Path, name: str, *script: str) -> None:
    file = folder / name
    file.write_text("\n".join(("#!/bin/sh", *script)) + "\n")
    file.chmod(0o755)


def stub_apt_get(folder: Path, answer: str = "exit 100") -> None:
    """It notes what it is asked for."""
    stub(folder, "apt-get", f'echo "$1" >> {folder}/calls', answer)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A root without a browser; its apt-get fails."""
    for name in ("sh", "timeout", "cat"):
        found = shutil.which(name)
        assert found is not None
        (tmp_path / name).symlink_to(found)
    stub(tmp_path, "id", "echo 0")
    stub_apt_get(tmp_path)
    return tmp_path


def run(machine: Path) -> tuple[str, list[str]]:
    """What it said, and what apt-get was asked for."""
    done = subprocess.run(
        [str(SCRIPT)], env={**os.environ, "PATH": str(machine)}, capture_output=True, text=True
    )
    assert done.returncode == 0 and not done.stderr
    calls = machine / "calls"
    return done.stdout, calls.read_text().split() if calls.exists() else []


def test_where_there_is_one_nothing_is_done(machine: Path) -> None:
    stub(machine, "chromium-browser", "")
    assert run(machine) == ("", [])


def test_it_is_installed(machine: Path) -> None:
    stub_apt_get(machine, "exit 0")
    said, calls = run(machine)
    assert calls == ["install"] and SKIPPED not in said


def test_a_second_try_follows_an_update(machine: Path) -> None:
    stub_apt_get(machine, f'case "$(cat {machine}/calls)" in *update*) exit 0;; *) exit 100; esac')
    said, calls = run(machine)
    assert calls == ["install", "update", "install"] and SKIPPED not in said


def test_where_it_cannot_be_installed_it_says_what_that_means(machine: Path) -> None:
    said, calls = run(machine)
    assert calls == ["install", "update"] and SKIPPED in said


@pytest.mark.parametrize("missing", ["root", "apt-get"])
def test_where_it_may_not_be_installed_it_says_so(machine: Path, missing: str) -> None:
    if missing == "root":
        stub(machine, "id", "echo 1000")
    else:
        (machine / "apt-get").unlink()
    said, calls = run(machine)
    assert not calls and SKIPPED in said and said.count("\n") == 1
