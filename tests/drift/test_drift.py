# SPDX-License-Identifier: Apache-2.0
"""What drift promises: the right word for what upstream did, and the lines that show it."""

import json
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from graft import copies, drift, releases, versions
from tests.support.checkouts import with_release
from tests.support.environments import FILES, anchored_tree, sha256

GEMMA4, HPU_ATTN = FILES
VERSIONS = """
# A comment.
[releases."0.30"]
tag = "v0.30.0"
vllm = "0.30.0"
torch = "2.13"
gaudi-software = "1.24.2"
override-revision = 1

[releases."0.30".files]
"models/gemma4.py" = "{}"  # beside it
"attention/backends/hpu_attn.py" = "{}"
"""


@pytest.fixture
def pristine(tmp_path) -> Path:
    """A vllm_gaudi as the pinned release has it."""
    return anchored_tree(tmp_path / "pristine")


@pytest.fixture
def newer(tmp_path, pristine) -> Path:
    """Another one, to change."""
    shutil.copytree(pristine, tmp_path / "newer")
    return tmp_path / "newer"


@pytest.fixture(autouse=True)
def pinned(tmp_path, pristine, monkeypatch) -> Path:
    """A VERSIONS.toml of one release, pinned to the pristine files, and no kept copies."""
    path = tmp_path / "VERSIONS.toml"
    hashes = [f"sha256:{sha256((pristine / 'vllm_gaudi' / file).read_bytes())}" for file in FILES]
    path.write_text(VERSIONS.format(*hashes))
    monkeypatch.setattr(versions, "VERSIONS", path)
    monkeypatch.setattr(copies, "COPIES", tmp_path / "kept")
    return path


def edit(tree: Path, file: str, old: str, new: str) -> None:
    """Change a file of a tree."""
    path = tree / "vllm_gaudi" / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def survey(*trees: Path) -> dict[str, drift.File]:
    """The files of the last tree, the others being there to compare with."""
    found = drift.Reach(trees=[releases.find(tree) for tree in trees], kept=drift.kept())
    return {file.file: file for file in drift.reports(found)[-1].files}


def keep(tree: Path, tag: str = "v0.30.0") -> None:
    """Keep the copies made from a tree, as a merge does."""
    plan = copies.plan(versions.get("0.30"), releases.find(tree), allow_drift=True)
    copies.write(plan, copies.COPIES / tag)


def test_the_pinned_files_are_the_same(pristine):
    assert [file.state for file in survey(pristine).values()] == ["same", "same"]


def test_a_change_elsewhere_in_the_file_has_moved(pristine, newer):
    edit(newer, HPU_ATTN, "EDITION = 1", "EDITION = 2")
    found = survey(pristine, newer)
    assert (found[GEMMA4].state, found[HPU_ATTN].state) == ("same", "moved")
    assert found[HPU_ATTN].diff == ""
    assert "what the fix touches is as in vllm-gaudi pristine" in found[HPU_ATTN].detail


def test_a_change_inside_an_anchor_has_moved_and_is_shown(pristine, newer):
    edit(newer, HPU_ATTN, "        return query", "        return query + 0")
    found = survey(pristine, newer)[HPU_ATTN]
    assert found.state == "moved"
    assert "-        return query\n+        return query + 0\n" in found.diff
    assert "HPUAttentionImpl.forward" in found.diff and "EDITION" not in found.diff


def test_a_renamed_parameter_is_a_conflict_and_is_shown(pristine, newer):
    edit(newer, HPU_ATTN, "kv_cache: torch.Tensor", "cache: torch.Tensor")
    found = survey(pristine, newer)[HPU_ATTN]
    assert found.state == "conflict"
    assert "HPUAttentionImpl.forward has no parameter kv_cache" in found.detail
    assert "-        kv_cache: torch.Tensor,\n+        cache: torch.Tensor,\n" in found.diff


@pytest.mark.parametrize(
    "file,old,new,symbol",
    [
        (HPU_ATTN, "class HPUAttentionImpl(", "class OtherImpl(", "HPUAttentionImpl"),
        (GEMMA4, "def _apply_hpu_gemma4_patches", "def _patch", "_apply_hpu_gemma4_patches"),
        (GEMMA4, "class HpuGemma4Model(UpstreamGemma4Model)", "class HpuGemma4Model(nn.Module)", "HpuGemma4Model"),
        (GEMMA4, "def _hpu_run_decoder_layers(", "def _run(", "_hpu_run_decoder_layers"),
    ],
)
def test_an_anchor_that_is_gone_is_a_conflict(pristine, newer, file, old, new, symbol):
    edit(newer, file, old, new)
    found = survey(pristine, newer)[file]
    assert found.state == "conflict"
    assert symbol in found.detail


def test_what_upstream_defines_itself_is_merged_upstream(pristine, newer):
    edit(newer, GEMMA4, "    def forward(", "    def fast_prefill_forward(self):\n        return 1\n\n    def forward(")
    found = survey(pristine, newer)[GEMMA4]
    assert found.state == "merged upstream"
    assert "+    def fast_prefill_forward(self):\n+        return 1\n" in found.diff


def test_our_own_merge_is_merged_upstream(pristine, newer):
    plan = copies.plan(versions.get("0.30"), releases.find(pristine))
    for file in plan.files:
        (newer / "vllm_gaudi" / file.file).write_text(file.merged.text)
    assert {file.state for file in survey(newer).values()} == {"merged upstream"}


def test_a_file_that_is_not_there_is_a_conflict(newer):
    (newer / "vllm_gaudi" / GEMMA4).unlink()
    found = survey(newer)[GEMMA4]
    assert (found.state, found.detail) == ("conflict", "there is no such file")


@pytest.mark.parametrize("text", [b"\xff\xfe", b"def (", b""])
def test_a_file_that_is_no_python_is_a_conflict(newer, text):
    (newer / "vllm_gaudi" / GEMMA4).write_bytes(text)
    assert survey(newer)[GEMMA4].state == "conflict"


def test_a_release_that_is_not_pinned_has_moved_and_exits_with_0(pristine, pinned, capsys):
    pinned.write_text(VERSIONS.format("unpinned", "unpinned"))
    wheel = make_wheel(pristine)
    assert run("--source", wheel, "--table") == 0
    out = capsys.readouterr().out
    assert out.count("release 0.30 is not pinned; every anchor matches") == 2


def make_wheel(tree: Path) -> Path:
    """A wheel of a tree, as release 0.30.0."""
    wheel = tree.parent / "vllm_gaudi-0.30.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in sorted((tree / "vllm_gaudi").rglob("*.py")):
            archive.write(path, path.relative_to(tree))
        archive.writestr("vllm_gaudi-0.30.0.dist-info/METADATA", "Name: vllm-gaudi\nVersion: 0.30.0\n")
    return wheel


def make_sdist(tree: Path) -> Path:
    """An sdist of a tree."""
    sdist = tree.parent / "vllm_gaudi-0.30.0.tar.gz"
    (tree / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: vllm-gaudi\nVersion: 0.30.0\n")
    with tarfile.open(sdist, "w:gz") as archive:
        archive.add(tree, "vllm_gaudi-0.30.0")
    return sdist


def run(*words) -> int:
    """`python -m graft drift`, in this process."""
    from graft.__main__ import main

    return main(["drift", *map(str, words)])


@pytest.mark.parametrize("pack", [make_wheel, make_sdist, lambda tree: tree, lambda tree: tree / "vllm_gaudi"])
def test_wheels_sdists_checkouts_and_site_packages(newer, pack, capsys):
    edit(newer, HPU_ATTN, "EDITION = 1", "EDITION = 2")
    assert run("--source", pack(newer), "--json") == 2
    report = json.loads(capsys.readouterr().out)
    states = {file["file"]: file["state"] for file in report["releases"][0]["files"]}
    assert report["code"] == 2 and states == {GEMMA4: "same", HPU_ATTN: "moved"}


def test_kept_copies_are_compared_with(pristine, newer):
    keep(pristine)
    edit(newer, HPU_ATTN, "        return query", "        return query + 0")
    found = survey(newer)[HPU_ATTN]
    assert found.diff.startswith("--- kept v0.30.0  attention/backends/hpu_attn.py  HPUAttentionImpl.forward\n")
    assert "_is_last_token_prefill" not in found.diff, "our own lines are no drift"


def test_two_kept_copies_show_what_upstream_changed_between_them(pristine, newer):
    keep(pristine)
    edit(newer, HPU_ATTN, "        return query", "        return query + 0")
    keep(newer, "v0.31.0")
    one, other = drift.kept()
    shown = drift.between(one, other)
    assert "-        return query\n+        return query + 0\n" in shown
    assert "models/gemma4.py: what the fix touches is the same" in shown


def test_kept_copies_that_were_damaged_are_not_compared_with(pristine):
    keep(pristine)
    (copies.COPIES / "v0.30.0" / "vllm_gaudi_overrides" / GEMMA4).write_text("")
    assert [sorted(kept.texts) for kept in drift.kept()] == [[HPU_ATTN]]
    (copies.COPIES / "v0.30.0" / "vllm_gaudi_overrides" / "manifest.json").write_text("[]")
    assert drift.kept() == []


def test_nothing_within_reach_says_so_in_a_line(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    monkeypatch.delenv("GAUDI_FIXES_ROOT", raising=False)
    assert run() == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_day_of_drift(tmp_path, pristine, monkeypatch, pinned, capsys):
    """An upgraded vllm-gaudi is refused with the lines that changed; accepting it is told by the check."""
    from graft.__main__ import main

    environment = with_release(tmp_path, "environment", "wheel")
    keep(pristine)
    package = environment.site_packages / "vllm_gaudi"
    edit(environment.site_packages, HPU_ATTN, "        return query", "        return query + 0")
    words = ["0.30", "--python", str(environment.python)]
    assert main(["install", *words]) == 2
    said = capsys.readouterr()
    assert "+        return query + 0" in said.out
    assert "accept it with --allow-drift: every anchor matches" in said.err.splitlines()[-1]

    assert main(["install", *words, "--allow-drift"]) == 0
    assert environment.check()["code"] == 0
    capsys.readouterr()
    assert main(["check", *words]) == 2
    assert "with --allow-drift" in capsys.readouterr().out

    edit(environment.site_packages, HPU_ATTN, "kv_cache: torch.Tensor", "cache: torch.Tensor")
    assert main(["install", *words]) == 2
    said = capsys.readouterr()
    assert "--allow-drift" not in said.err, "not where an anchor changed"
    assert package.exists()


def test_pinning_keeps_every_comment(pristine, pinned):
    from graft.__main__ import main

    whole = pinned.read_text()
    pinned.write_text(VERSIONS.format("unpinned", "unpinned"))
    assert main(["pin", "0.30", "--source", str(pristine), "--quiet"]) == 0
    assert pinned.read_text() == whole
    assert main(["pin", "0.30", "--source", str(pristine), "--quiet"]) == 0
    assert pinned.read_text() == whole


def test_pinning_other_files_is_refused(newer, pinned, capsys):
    from graft.__main__ import main

    whole = pinned.read_text()
    edit(newer, HPU_ATTN, "EDITION = 1", "EDITION = 2")
    assert main(["pin", "0.30", "--source", str(newer)]) == 2
    assert "pins other files of release 0.30: attention/backends/hpu_attn.py" in capsys.readouterr().err
    assert pinned.read_text() == whole


def test_pinning_what_the_fix_does_not_fit_is_refused(newer, pinned):
    from graft.__main__ import main

    pinned.write_text(VERSIONS.format("unpinned", "unpinned"))
    edit(newer, HPU_ATTN, "kv_cache: torch.Tensor", "cache: torch.Tensor")
    assert main(["pin", "0.30", "--source", str(newer)]) == 2
    assert "sha256" not in pinned.read_text()


def test_an_install_from_a_pinned_release_says_so(tmp_path, pristine):
    from graft.__main__ import main

    environment = with_release(tmp_path, "environment", "wheel")
    package = environment.site_packages / "vllm_gaudi"
    for file in FILES:
        shutil.copy(pristine / "vllm_gaudi" / file, package / file)
    assert main(["install", "0.30", "--python", str(environment.python), "--quiet"]) == 0
    manifest = json.loads((copies.COPIES / "v0.30.0/vllm_gaudi_overrides/manifest.json").read_text())
    assert manifest["pinned"] is True
    assert main(["check", "0.30", "--python", str(environment.python), "--quiet"]) == 0
    assert subprocess.run([environment.python, "-m", "vllm_gaudi_overrides"], capture_output=True).returncode == 0
