"""For tests of commands that write."""

from pathlib import Path


def leftovers(folder: Path, *expected: Path) -> list[str]:
    """What lies in a folder, hidden things included, besides what was expected."""
    return sorted(path.name for path in folder.iterdir() if path not in expected)
