# SPDX-License-Identifier: Apache-2.0
"""VERSIONS.toml: what is read from it, and that a broken entry is named."""

import pytest

from graft import copies, versions
from graft.errors import GraftError

GOOD = f"""\
[releases."1.0"]
tag = "v1.0.0"
vllm = "1.0.0"
torch = "2.0"
gaudi-software = "1.2"
override-revision = 3

[releases."1.0".files]
"models/gemma4.py" = "sha256:{"ab" * 32}"
"attention/backends/hpu_attn.py" = "unpinned"

[[releases."1.0".evidence]]
what = "anchors"
where = "CPU"
by = "us"
"""


@pytest.fixture
def load(tmp_path):
    def load(text):
        path = tmp_path / "VERSIONS.toml"
        path.write_text(text)
        return versions.load(path)

    return load


def test_reads_a_release(load):
    release = load(GOOD)["1.0"]
    assert (release.name, release.tag, release.vllm, release.torch) == ("1.0", "v1.0.0", "1.0.0", "2.0")
    assert (release.gaudi_software, release.override_revision) == ("1.2", 3)
    assert release.files == {"models/gemma4.py": "ab" * 32, "attention/backends/hpu_attn.py": None}
    assert release.evidence == (versions.Evidence("anchors", "CPU", "us"),)
    assert not release.is_pinned


def test_a_release_is_pinned_once_every_file_is(load):
    assert load(GOOD.replace('"unpinned"', f'"sha256:{"cd" * 32}"'))["1.0"].is_pinned


def test_evidence_may_be_missing(load):
    assert load(GOOD.partition("\n[[")[0])["1.0"].evidence == ()


@pytest.mark.parametrize("name", ["1.0", "1.0.0", "v1.0.0"])
def test_finds_a_release_by_name_version_and_tag(tmp_path, name):
    path = tmp_path / "VERSIONS.toml"
    path.write_text(GOOD)
    assert versions.get(name, path).name == "1.0"


@pytest.mark.parametrize("name", ["1.1", "", "v1.0", "1"])
def test_an_unknown_release_is_refused_with_the_known_ones(tmp_path, name):
    path = tmp_path / "VERSIONS.toml"
    path.write_text(GOOD)
    with pytest.raises(GraftError, match=r"not in VERSIONS.toml. It knows 1\.0"):
        versions.get(name, path)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('tag = "v1.0.0"\n', "", "tag is missing"),
        ('tag = "v1.0.0"', "tag = 1", "tag is not a text"),
        ('tag = "v1.0.0"', 'tag = "v2.0.0"', "tag v2.0.0 is not one of it"),
        ('tag = "v1.0.0"', 'tag = "1.0.0"', "tag 1.0.0 is not one of it"),
        ('tag = "v1.0.0"', 'tag = "main"', "tag main is not one of it"),
        ('vllm = "1.0.0"', 'vllm = ""', "vllm is not a text"),
        ("gaudi-software", "gaudi_software", "gaudi-software is missing"),
        ('torch = "2.0"', 'torch = "2.0"\ncuda = "1"', "cuda is unknown"),
        ("override-revision = 3\n", "", "override-revision is not a whole number"),
        ("override-revision = 3", "override-revision = 0", "override-revision is not a whole number"),
        ("override-revision = 3", "override-revision = true", "override-revision is not a whole number"),
        ('"unpinned"', '"sha256:12"', "hash of attention/backends/hpu_attn.py is neither"),
        ('"unpinned"', "1", "hash of attention/backends/hpu_attn.py is neither"),
        ('"models/gemma4.py"', '"../gemma4.py"', "../gemma4.py is no path"),
        ('"models/gemma4.py"', '"/gemma4.py"', "/gemma4.py is no path"),
        ('"models/gemma4.py"', '"models//gemma4.py"', "models//gemma4.py is no path"),
        ('"models/gemma4.py"', '"models/gemma4.txt"', "models/gemma4.txt is no path"),
        ('by = "us"', "", "evidence needs"),
        ('by = "us"', 'by = "us"\nwhen = "now"', "evidence needs"),
        ('by = "us"', "by = 1", "evidence needs"),
        ('[[releases."1.0".evidence]]', '[releases."1.0".evidence]', "evidence needs"),
    ],
)
def test_names_what_is_wrong_with_an_entry(load, old, new, why):
    assert GOOD.count(old) >= 1
    with pytest.raises(GraftError) as caught:
        load(GOOD.replace(old, new))
    assert "VERSIONS.toml, release 1.0" in caught.value.cause
    assert why in caught.value.cause


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "names no release"),
        ("releases = 1", "names no release"),
        ("[releases]", "names no release"),
        ('releases = {"1.0" = 1}', "is not a table"),
        ("[releases", "is not TOML"),
        (GOOD.partition("\n[releases")[0], "files is missing"),
    ],
)
def test_names_what_is_wrong_with_the_file(load, text, why):
    with pytest.raises(GraftError, match=why):
        load(text)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(GraftError, match="cannot be read"):
        versions.load(tmp_path / "VERSIONS.toml")


def test_the_projects_own_file_names_every_file_that_has_an_override():
    for release in versions.load().values():
        assert set(release.files) == set(copies.overridden())
    assert {"0.30", "0.26"} <= versions.load().keys()
