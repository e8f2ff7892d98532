"""A record names the commit whose sources ran, or none."""

import json
import subprocess

import pytest

from bench_ttfa import provenance
from bench_ttfa.provenance import commit_digest, commit_here, commit_of, file, source_digest
from bench_ttfa.system import describe_software


def git(root, *command):
    who = ("-c", "user.name=A", "-c", "user.email=a@example.com")
    subprocess.run(["git", "-C", root, *who, *command], check=True, capture_output=True)


def commit(root):
    git(root, "add", ".")
    git(root, "commit", "-qm", "a change")
    return provenance.git(root, "rev-parse", "HEAD")[0]


@pytest.fixture
def root(tmp_path):
    git(tmp_path, "init", "-q")
    for name, text in (("ops/a.py", "1"), ("model/csrc/b.cu", "2"), ("docs/c.py", "3")):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    return tmp_path


def test_a_commit_is_named_only_if_the_files_are_its_own(root):
    first = commit(root)
    assert commit_here(root) == first and commit_digest(first, root) == source_digest(root)
    (root / "ops" / "a.py").write_text("1 changed")
    assert commit_here(root) is None
    (root / "ops" / "a.py").write_text("1")
    (root / "ops" / "new.py").write_text("")  # untracked, and imported all the same
    assert commit_here(root) is None
    second = commit(root)
    assert commit_here(root) == second != first
    (root / "docs" / "c.py").write_text("no source of ours")
    assert commit_here(root) == second


def test_sources_of_an_old_commit_are_found(root):
    first, digest = commit(root), source_digest(root)
    (root / "ops" / "a.py").write_text("later")
    commit(root)
    assert commit_of(digest, root) == first
    assert commit_of("of no commit", root) is None


def test_filing_writes_the_commit_and_never_a_wrong_one(root, tmp_path):
    first, digest = commit(root), source_digest(root)
    record = tmp_path / "record.json"
    for sources, wrong, right in ((digest, "0123", first), ("of no commit", "0123", None)):
        text = json.dumps(
            {"software": {"commit": wrong, "sources": sources}, "us": [1.5]}, indent=1
        )
        record.write_text(text + "\n")
        assert file(record, root) == right
        assert json.loads(record.read_text())["software"]["commit"] == right
        assert record.read_text() == text.replace('"0123"', json.dumps(right)) + "\n"


def test_without_a_repository_there_is_no_commit(tmp_path):
    (tmp_path / "ops").mkdir()
    (tmp_path / "ops" / "a.py").write_text("1")
    assert commit_here(tmp_path) is None and len(source_digest(tmp_path)) == 12


def test_software_is_described_by_its_sources():
    software = describe_software()
    assert software["sources"] == source_digest()
    assert software["commit"] in (None, *provenance.git(provenance.ROOT, "rev-parse", "HEAD"))
