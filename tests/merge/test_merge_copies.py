# SPDX-License-Identifier: Apache-2.0
"""The full copies: what is written where, that it is all or nothing, and the `merge` command."""

import dataclasses
import errno
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from graft import copies, releases, versions
from graft.__main__ import main
from graft.errors import Drift, GraftError
from graft.merge import strip

from .conftest import FILES, OVERRIDES, write_files

MODEL, ATTENTION = "models/gemma4.py", "attention/backends/hpu_attn.py"


def sha256(text: str | bytes) -> str:
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def planned(release, checkout, overrides) -> copies.Plan:
    return copies.plan(release, releases.find(checkout), overrides=overrides)


# The plan


def test_every_override_source_is_merged(planned):
    assert [file.file for file in planned.files] == [ATTENTION, MODEL]
    for file in planned.files:
        assert strip(file.merged) == FILES[file.file]
        assert planned.contents[f"vllm_gaudi_overrides/{file.file}"] == file.merged.text.encode()


def test_the_manifest_names_modules_and_hashes(planned):
    manifest = planned.manifest
    assert (manifest["schema"], manifest["release"], manifest["tag"]) == (1, "1.0", "v1.0.0")
    assert (manifest["override_revision"], manifest["pinned"]) == (3, False)
    assert list(manifest["modules"]) == ["vllm_gaudi.attention.backends.hpu_attn", "vllm_gaudi.models.gemma4"]
    assert manifest["modules"]["vllm_gaudi.models.gemma4"] == {
        "file": MODEL,
        "pristine_sha256": sha256(FILES[MODEL]),
        "override_sha256": sha256(OVERRIDES[MODEL]),
        "merged_sha256": sha256(planned.contents[f"vllm_gaudi_overrides/{MODEL}"]),
        "insertions": [["Model.fast", 56, 97, ""]],
    }


def test_the_shadow_comes_along_as_it_is(planned, tmp_path):
    shadow = {path.name: path.read_bytes() for path in copies.SHADOW.glob("*.py")}
    assert planned.manifest["shadow"] == {name: sha256(data) for name, data in sorted(shadow.items())}
    written = copies.write(planned, tmp_path / "out")
    for name, data in shadow.items():
        assert (written / name).read_bytes() == data


def test_the_same_inputs_give_the_same_bytes(planned, release, checkout, overrides):
    again = copies.plan(release, releases.find(checkout), overrides=overrides)
    assert again.contents == planned.contents


def test_bytes_that_are_not_text_of_this_system_survive(release, checkout, overrides):
    data = b"\xef\xbb\xbf# \xc3\xa4\r\nclass Model:\r\n\tdef forward(self, x):\r\n\t\treturn x"
    (checkout / "vllm_gaudi" / MODEL).write_bytes(data)
    file = copies.plan(release, releases.find(checkout), overrides=overrides).files[1]
    assert strip(file.merged).encode() == data


def test_an_override_source_with_other_line_ends_merges_the_same_and_is_hashed_as_it_is(planned, overrides, checkout):
    data = OVERRIDES[MODEL].replace("\n", "\r\n").encode()
    (overrides / MODEL).write_bytes(data)
    plan = copies.plan(planned.release, releases.find(checkout), overrides=overrides)
    assert plan.files[1].merged == planned.files[1].merged
    assert plan.manifest["modules"]["vllm_gaudi.models.gemma4"]["override_sha256"] == sha256(data)


@pytest.mark.parametrize("data", [b"# -*- coding: latin-1 -*-\n# \xe4\n", b"# \xe4\n", b"# coding: nonsense\n"])
def test_a_file_that_is_not_utf8_is_refused(release, checkout, overrides, data):
    (checkout / "vllm_gaudi" / MODEL).write_bytes(data)
    with pytest.raises(Drift, match="models/gemma4.py of release 1.0 is not UTF-8"):
        copies.plan(release, releases.find(checkout), overrides=overrides)


def pin(release, **changed):
    files = {name: sha256(FILES[name]) for name in release.files}
    return dataclasses.replace(release, files=files | changed)


def test_pinned_files_that_match_are_merged_and_said_to_be_pinned(release, checkout, overrides):
    plan = copies.plan(pin(release), releases.find(checkout), overrides=overrides)
    assert plan.manifest["pinned"] is True


def test_a_pinned_file_that_differs_is_drift(release, checkout, overrides):
    changed = pin(release, **{MODEL: "0" * 64})
    tree = releases.find(checkout)
    with pytest.raises(Drift, match="models/gemma4.py of .* is not release 1.0's"):
        copies.plan(changed, tree, overrides=overrides)
    plan = copies.plan(changed, tree, overrides=overrides, allow_drift=True)
    assert plan.manifest["pinned"] is False


def test_a_release_that_is_half_pinned_goes_by_the_anchors_of_the_rest(release, checkout, overrides):
    plan = copies.plan(pin(release, **{MODEL: None}), releases.find(checkout), overrides=overrides)
    assert plan.manifest["pinned"] is False


@pytest.mark.parametrize("version", ["1.0.0", "1.0.0+local", "1.0.1", "1.0.0rc1", "1.0.1.dev3+gabc", None])
def test_a_version_of_the_release_is_taken(release, checkout, overrides, version):
    tree = dataclasses.replace(releases.find(checkout), version=version)
    assert copies.plan(release, tree, overrides=overrides)


@pytest.mark.parametrize("version", ["1.1.0", "0.9.0", "2.0", "1", "nonsense"])
def test_a_version_of_another_release_is_drift(release, checkout, overrides, version):
    tree = dataclasses.replace(releases.find(checkout), version=version)
    with pytest.raises(Drift, match=f"holds vllm-gaudi {version}, not release 1.0"):
        copies.plan(release, tree, overrides=overrides)


@pytest.mark.parametrize("allow_drift", [False, True])
def test_files_that_are_pinned_for_another_release_are_drift_whatever_is_allowed(
    release, checkout, overrides, monkeypatch, allow_drift
):
    other = dataclasses.replace(pin(release), name="0.9")
    monkeypatch.setattr(versions, "load", lambda: {"0.9": other})
    with pytest.raises(Drift, match="holds release 0.9's files, not release 1.0's"):
        copies.plan(release, releases.find(checkout), overrides=overrides, allow_drift=allow_drift)


def test_an_override_that_versions_toml_does_not_know_is_named(release, checkout, overrides):
    release = dataclasses.replace(release, files={MODEL: None})
    with pytest.raises(GraftError, match="does not name attention/backends/hpu_attn.py for release 1.0"):
        copies.plan(release, releases.find(checkout), overrides=overrides)


def test_a_folder_without_override_sources_is_named(release, checkout, tmp_path):
    with pytest.raises(GraftError, match="holds no override source"):
        copies.plan(release, releases.find(checkout), overrides=tmp_path / "none")


# Writing


def test_the_folder_holds_the_plan_and_nothing_else(planned, tmp_path):
    written = copies.write(planned, tmp_path / "a" / "out")
    assert written == tmp_path / "a" / "out" / "vllm_gaudi_overrides"
    assert snapshot(tmp_path / "a" / "out") == dict(planned.contents)
    assert json.loads((written / "manifest.json").read_text()) == planned.manifest
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["out"]


@pytest.fixture(params=["exchange", "file by file"])
def system(request, monkeypatch):
    """Systems that can exchange two folders, and others."""
    if request.param != "exchange":
        monkeypatch.setattr(copies, "_exchange", lambda one, other: False)


def test_older_copies_are_replaced_and_what_install_wrote_is_kept(planned, tmp_path, system):
    old = tmp_path / "out" / "vllm_gaudi_overrides"
    write_files(old, {"old.py": "", "models/gemma4.py": "old", "manifest.json": "{", "installed.json": "{}"})
    write_files(old, {"__pycache__/old.cpython-311.pyc": ""})
    copies.write(planned, tmp_path / "out")
    found = {name: data for name, data in snapshot(tmp_path / "out").items() if "pycache" not in name}
    assert found == {**planned.contents, "vllm_gaudi_overrides/installed.json": b"{}"}


def test_copies_that_are_right_are_not_touched(planned, tmp_path):
    copies.write(planned, tmp_path / "out")
    before = {path: path.stat() for path in (tmp_path / "out").rglob("*")}
    copies.write(planned, tmp_path / "out")
    assert {path: path.stat() for path in (tmp_path / "out").rglob("*")} == before


@pytest.mark.parametrize("damage", ["truncate", "remove", "add"])
def test_damaged_copies_are_written_again(planned, tmp_path, damage):
    written = copies.write(planned, tmp_path / "out")
    if damage == "truncate":
        (written / MODEL).write_text("")
    elif damage == "remove":
        (written / "manifest.json").unlink()
    else:
        (written / "other.py").write_text("")
    copies.write(planned, tmp_path / "out")
    assert snapshot(tmp_path / "out") == dict(planned.contents)


def test_other_files_in_the_folder_are_left_alone(planned, tmp_path):
    write_files(tmp_path / "out", {"theirs.txt": "x", "package/__init__.py": "y"})
    copies.write(planned, tmp_path / "out")
    assert {"theirs.txt": b"x", "package/__init__.py": b"y"}.items() <= snapshot(tmp_path / "out").items()


@pytest.mark.parametrize("kind", ["other files", "file", "link"])
def test_what_is_no_copies_is_never_replaced(planned, tmp_path, kind):
    target = tmp_path / "out" / "vllm_gaudi_overrides"
    target.parent.mkdir()
    if kind == "other files":
        write_files(target, {"thesis.tex": "all my work"})
    elif kind == "file":
        target.write_text("all my work")
    else:
        target.symlink_to(write_files(tmp_path / "elsewhere", {"a.py": ""}))
    before = snapshot(tmp_path)
    with pytest.raises(GraftError, match="something other than copies"):
        copies.write(planned, tmp_path / "out")
    assert snapshot(tmp_path) == before


def failing_at(count: int):
    """A stand-in for Path.write_bytes that fails at a call, as a full disk would."""
    real, calls = Path.write_bytes, []

    def write_bytes(path: Path, data: bytes) -> int:
        calls.append(path)
        if len(calls) == count:
            real(path, data[: len(data) // 2])
            raise OSError(28, "No space left on device")
        return real(path, data)

    return write_bytes


@pytest.mark.parametrize("with_old", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_write_that_fails_leaves_everything_as_it_was(planned, tmp_path, monkeypatch, count, with_old):
    out = tmp_path / "out"
    if with_old:
        write_files(out / "vllm_gaudi_overrides", {"models/gemma4.py": "old", "manifest.json": "{}"})
    before = snapshot(tmp_path)
    monkeypatch.setattr(Path, "write_bytes", failing_at(count))
    with pytest.raises(GraftError, match="cannot be written: No space left"):
        copies.write(planned, out)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("count", [0, 1, 2, 100])
def test_copies_replaced_file_by_file_have_no_manifest_until_all_are_there(planned, tmp_path, monkeypatch, count):
    out = tmp_path / "out"
    write_files(out / "vllm_gaudi_overrides", {"models/gemma4.py": "old", "manifest.json": "{}"})
    real, calls = os.replace, []

    def replace(old, new):
        calls.append(new)
        if len(calls) > count or len(calls) == len(planned.contents):
            raise OSError(5, "Input/output error")
        real(old, new)

    monkeypatch.setattr(copies, "_exchange", lambda one, other: False)
    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(GraftError, match="Input/output error"):
        copies.write(planned, out)
    assert not (out / "vllm_gaudi_overrides" / "manifest.json").exists()
    monkeypatch.undo()
    copies.write(planned, out)
    assert snapshot(out) == dict(planned.contents)


def test_a_folder_that_may_not_be_written_is_named(planned, tmp_path):
    (tmp_path / "out").write_text("a file")
    with pytest.raises(GraftError, match="out/vllm_gaudi_overrides cannot be written"):
        copies.write(planned, tmp_path / "out")
    assert (tmp_path / "out").read_text() == "a file"


def test_a_read_only_folder_is_named(planned, tmp_path, monkeypatch):
    def denied(*args, **kwargs):  # as for anybody but root, who may write everywhere
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(tempfile, "mkdtemp", denied)
    with pytest.raises(GraftError, match="cannot be written: Permission denied"):
        copies.write(planned, tmp_path / "out")


def test_two_at_once_both_succeed(planned, tmp_path):
    failures = []

    def work():
        try:
            for number in range(20):
                copies.write(planned, tmp_path / str(number))
        except GraftError as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for number in range(20):
        assert snapshot(tmp_path / str(number)) == dict(planned.contents)


# The command


@pytest.fixture
def known(release, monkeypatch, tmp_path, overrides):
    """A project whose VERSIONS.toml knows the release, and whose copies go to a folder of the test's."""
    monkeypatch.setattr(versions, "load", lambda path=None: {"1.0": release})
    monkeypatch.setattr(copies, "COPIES", tmp_path / "releases")


def test_merge_writes_the_copies_and_says_so(known, checkout, tmp_path, capsys):
    assert main(["merge", "1.0", "--source", str(checkout)]) == 0
    folder = tmp_path / "releases" / "v1.0.0" / "vllm_gaudi_overrides"
    assert (folder / "manifest.json").is_file()
    out, err = capsys.readouterr()
    assert out == ""
    assert str(folder) in err
    assert "went by the anchors alone" in err
    assert "\x1b" not in err


def test_merge_writes_where_it_is_told(known, checkout, tmp_path, capsys):
    assert main(["merge", "v1.0.0", "--source", str(checkout), "--output", str(tmp_path / "o")]) == 0
    assert (tmp_path / "o" / "vllm_gaudi_overrides" / "manifest.json").is_file()
    assert not (tmp_path / "releases").exists()


def test_a_pinned_release_does_not_go_by_anchors_alone(known, release, checkout, monkeypatch, capsys):
    monkeypatch.setattr(versions, "load", lambda path=None: {"1.0": pin(release)})
    assert main(["merge", "1.0", "--source", str(checkout)]) == 0
    assert "anchors alone" not in capsys.readouterr().err


def test_a_dry_run_prints_a_patch_and_writes_nothing(known, checkout, tmp_path, capsys):
    before = snapshot(tmp_path)
    assert main(["merge", "1.0", "--source", str(checkout), "--dry-run", "--quiet"]) == 0
    assert snapshot(tmp_path) == before
    out, err = capsys.readouterr()
    assert err == ""
    (tmp_path / "fix.patch").write_text(out)
    subprocess.run(["git", "apply", str(tmp_path / "fix.patch")], cwd=checkout, check=True)
    main(["merge", "1.0", "--source", str(checkout)])
    assert "holds the fix already" in capsys.readouterr().err


def test_the_patch_of_a_file_without_a_final_newline_applies_too(known, checkout, tmp_path, capsys):
    file = checkout / "vllm_gaudi" / ATTENTION
    file.write_text(FILES[ATTENTION].removesuffix("\n"))
    main(["merge", "1.0", "--source", str(checkout), "--dry-run"])
    (tmp_path / "fix.patch").write_text(capsys.readouterr().out)
    subprocess.run(["git", "apply", str(tmp_path / "fix.patch")], cwd=checkout, check=True)
    assert file.read_text().endswith("return query")


def test_json_is_all_that_is_printed(known, checkout, tmp_path, capsys):
    assert main(["merge", "1.0", "--source", str(checkout), "--json"]) == 0
    out, err = capsys.readouterr()
    outcome = json.loads(out)
    assert err == ""
    assert (outcome["release"], outcome["written"], outcome["pinned"]) == ("1.0", True, False)
    assert outcome["source"] == {"kind": "checkout", "path": str(checkout), "version": None}
    assert outcome["files"] == {MODEL: ["Model.fast"], ATTENTION: ["attend (before)"]}
    assert main(["merge", "1.0", "--source", str(checkout), "--json", "--dry-run"]) == 0
    outcome = json.loads(capsys.readouterr().out)
    assert not outcome["written"]
    assert "+    def fast" in outcome["diff"]


def test_quiet_prints_nothing(known, checkout, capsys):
    assert main(["merge", "1.0", "--source", str(checkout), "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["1.1", "--source", "{source}"], 1, "Release 1.1 is not in VERSIONS.toml"),
        (["1.0", "--source", "{source}/gone"], 1, "does not exist"),
        (["1.0", "--source", "{source}/pyproject.toml"], 1, "is no wheel and no sdist"),
        (["1.0", "--python", "{source}/gone"], 1, "cannot be run"),
        (["1.0", "--source", "{source}", "--output", "{source}/pyproject.toml"], 1, "cannot be written"),
        (["1.0", "--nonsense"], 1, "unrecognized arguments"),
        ([], 1, "required: release"),
    ],
)
def test_bad_input_is_one_line_and_exit_1(known, checkout, tmp_path, capsys, words, code, says):
    before = snapshot(tmp_path)
    try:
        found = main(["merge", *(word.format(source=checkout) for word in words)])
    except SystemExit as error:
        found = error.code
    assert found == code
    out, err = capsys.readouterr()
    assert out == ""
    last = err.splitlines()[-1]
    assert last.startswith("graft")
    assert says in last
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        (MODEL, "class Other:\n    pass\n", "graft: models/gemma4.py of release 1.0: Model is not there"),
        (MODEL, "class Model:\n    fast = 1\n", "upstream may have its own fix"),
        (ATTENTION, "def attend(q):\n    return q\n", "attend has no parameter query"),
        (ATTENTION, "def attend(query)\n", "does not parse"),
    ],
)
def test_drift_is_one_line_and_exit_2(known, checkout, tmp_path, capsys, file, text, says):
    (checkout / "vllm_gaudi" / file).write_text(text)
    before = snapshot(tmp_path)
    assert main(["merge", "1.0", "--source", str(checkout)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err.splitlines()[-1]
    assert snapshot(tmp_path) == before


def test_a_missing_file_of_the_source_is_exit_1(known, checkout, capsys):
    (checkout / "vllm_gaudi" / MODEL).unlink()
    assert main(["merge", "1.0", "--source", str(checkout)]) == 1
    assert "has no readable vllm_gaudi/models/gemma4.py" in capsys.readouterr().err


def test_no_command_is_exit_1(capsys):
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 1


def test_the_module_runs_and_answers_help():
    done = subprocess.run(
        [sys.executable, "-m", "graft", "merge", "--help"], cwd=copies.ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0
    assert "--source" in done.stdout
