# SPDX-License-Identifier: Apache-2.0
"""The project's override sources merged into a real release, checked by that release's own formatter and linter.

Needs the sources of a vllm-gaudi release in GAUDI_FIXES_ROOT.
"""

import difflib
import os
import py_compile
import subprocess
import sys
from pathlib import Path

import pytest

from graft import copies, releases, versions
from graft.errors import Drift
from graft.merge import compare, merge, strip
from graft.releases import PACKAGE

ROOT = os.environ.get("GAUDI_FIXES_ROOT")
pytestmark = pytest.mark.skipif(not ROOT, reason="needs a vllm-gaudi release: set GAUDI_FIXES_ROOT to its sources")

FILES = copies.overridden()

# vllm-gaudi's own settings; what is no release of it may come without its pyproject.toml.
YAPF = "{based_on_style: pep8, column_limit: 120}"
RUFF = [
    *("--isolated", "--line-length", "120", "--target-version", "py310"),
    *("--select", "E,F,UP,B,SIM,G", "--ignore", "F405,F403,E731,B007,UP032,UP007"),
]


def run(*words: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, **options)


@pytest.fixture(scope="module")
def tree() -> releases.Tree:
    return releases.find(Path(ROOT))


@pytest.fixture(scope="module")
def release(tree) -> versions.Release:
    """The release whose pinned files these are, else the first one that is not pinned."""
    found = {file: copies.sha256(tree.read(file)) for file in FILES}
    known = versions.load().values()
    pinned = [release for release in known if dict(release.files) == found]
    return (pinned or [release for release in known if not release.is_pinned])[0]


@pytest.fixture(scope="module")
def planned(release, tree) -> copies.Plan:
    return copies.plan(release, tree)


@pytest.fixture(scope="module")
def written(planned, tmp_path_factory) -> Path:
    return copies.write(planned, tmp_path_factory.mktemp("copies"))


def source_of(file: str) -> str:
    return (copies.OVERRIDES / file).read_text()


def test_every_file_is_merged_and_nothing_of_upstreams_is_changed(planned, tree):
    assert [file.file for file in planned.files] == list(FILES)
    for file in planned.files:
        assert strip(file.merged).encode() == tree.read(file.file)
        before, after = file.pristine.splitlines(), file.merged.text.splitlines()
        changes = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
        assert {kind for kind, *_ in changes} == {"equal", "insert"}


@pytest.mark.parametrize("file", FILES)
def test_the_merged_file_compiles(written, file, tmp_path):
    py_compile.compile(str(written / file), cfile=str(tmp_path / "x.pyc"), doraise=True)


@pytest.mark.parametrize("file", FILES)
def test_upstreams_formatter_changes_nothing(written, file):
    done = run("yapf", "--no-local-style", "--style", YAPF, "--diff", str(written / file))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("file", FILES)
def test_upstreams_linter_finds_nothing(written, file):
    done = run("ruff", "check", "--no-cache", *RUFF, str(written / file))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("file", FILES)
def test_a_merged_file_is_not_merged_again(planned, release, file):
    merged = next(known.merged.text for known in planned.files if known.file == file)
    with pytest.raises(Drift, match=f"{file} of release {release.name} holds the fix already"):
        merge(merged, source_of(file), name=file, release=release.name)


@pytest.mark.parametrize("file", FILES)
def test_every_anchor_is_needed(tree, file):
    """Renaming any definition that the override extends or changes is noticed."""
    pristine = tree.read(file).decode()
    symbols = [
        finding.symbol
        for finding in compare(pristine, source_of(file), name=file)
        if f"class {finding.symbol}" in pristine or f"def {finding.symbol.split('.')[-1]}(" in pristine
    ]
    assert symbols
    for symbol in symbols:
        name = symbol.split(".")[-1]
        renamed = pristine.replace(f"class {name}(", f"class {name}_(").replace(f"def {name}(", f"def {name}_(")
        with pytest.raises(Drift, match=symbol):
            merge(renamed, source_of(file), name=file, release="1.0")


def test_a_release_is_not_taken_for_another(release, tree):
    for other in versions.load().values():
        if other.name != release.name and release.is_pinned:
            with pytest.raises(Drift):
                copies.plan(other, tree)


def test_the_source_is_found_in_the_environment_variable(tree):
    assert releases.find(environ={"GAUDI_FIXES_ROOT": ROOT}).package == tree.package
    assert tree.package.name == PACKAGE
