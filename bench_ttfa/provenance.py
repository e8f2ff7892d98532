"""Which commit a record is of, told by the sources that ran and by nothing else.

    python -m bench_ttfa.provenance RECORD.json...      # when a record is filed: writes its commit

A record holds a digest of the packages' source files as they were on the machine that ran them, which
may have no repository, or one that is older than its files. A commit is named only where the digest of
its tree is the same: at once if it is HEAD, else when the record is filed, by searching the history.

Exit code 1: a record's sources are no commit's.
"""

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench_ttfa.command import record_of

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("ops", "model", "realtime", "clients", "bench_ttfa")
_SUFFIXES = (".py", ".cu", ".cuh")
_MAX_COMMITS = 1000  # looked at, newest first


def source_digest(root: Path = ROOT) -> str:
    """Of every source file that is there, whether a commit has it or not."""
    paths = (path for package in PACKAGES for path in (root / package).rglob("*"))
    files = ((path.relative_to(root).as_posix(), path) for path in paths if path.is_file())
    return _digest((name, _blob(path)) for name, path in files if name.endswith(_SUFFIXES))


def commit_digest(commit: str, root: Path = ROOT) -> str:
    """Of the source files of a commit."""
    lines = git(root, "ls-tree", "-r", commit, "--", *PACKAGES)
    entries = (line.split("\t", 1) for line in lines)  # mode, "blob", its hash; its path
    return _digest((name, facts.split()[2]) for facts, name in entries if name.endswith(_SUFFIXES))


def commit_here(root: Path = ROOT) -> str | None:
    """HEAD, if the files that are here are its own."""
    head = git(root, "rev-parse", "HEAD")
    is_head = bool(head) and commit_digest(head[0], root) == source_digest(root)
    return head[0] if is_head else None


def commit_of(digest: str, root: Path = ROOT) -> str | None:
    """The newest commit whose sources have the digest."""
    commits = git(root, "log", f"--max-count={_MAX_COMMITS}", "--format=%H", "--", *PACKAGES)
    return next((commit for commit in commits if commit_digest(commit, root) == digest), None)


def file(record: Path, root: Path = ROOT) -> str | None:
    """Write the commit into a record; None, and no commit in it, if there is none."""
    contents = record.read_text("utf-8")
    software = json.loads(contents)["software"]
    commit = commit_of(software["sources"], root)
    start, known = contents.index('"software"'), f'"commit": {json.dumps(software["commit"])}'
    assert known in contents[start:], record  # a turn's times have a commit too, but no string
    filed = contents[start:].replace(known, f'"commit": {json.dumps(commit)}', 1)
    record.write_text(contents[:start] + filed, encoding="utf-8")
    return commit


def git(root: Path, *command: str) -> list[str]:
    """Lines of what it says; none where there is no git or no repository."""
    if shutil.which("git") is None:
        return []
    result = subprocess.run(
        ["git", "-C", str(root), *command], capture_output=True, text=True, check=False
    )
    return result.stdout.splitlines() if result.returncode == 0 else []


def _digest(files: Iterable[tuple[str, str]]) -> str:
    """Of names and the hashes of their blobs."""
    digest = hashlib.sha256()
    for name, blob in sorted(files):
        digest.update(f"{name}\0{blob}\0".encode())
    return digest.hexdigest()[:12]


def _blob(path: Path) -> str:
    """As git hashes a file."""
    data = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _record(text: str) -> Path:
    software = record_of("software")(text)["software"]
    if not {"sources", "commit"} <= software.keys():
        raise argparse.ArgumentTypeError(f"{text} does not say which sources ran")
    return Path(text)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench_ttfa.provenance",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("records", type=_record, nargs="+", metavar="RECORD.json")
    commits = {record: file(record) for record in parser.parse_args(argv).records}
    for record, commit in commits.items():
        print(f"{record}: {commit or 'its sources are no commit'}")
    return 0 if all(commits.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
