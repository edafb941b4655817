# SPDX-License-Identifier: Apache-2.0
"""What export promises: patches that `git am` takes, signed off, and a text that upstream's rules allow."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from graft import copies, export, releases, series, versions
from graft.__main__ import main
from tests.support.environments import anchored_tree

IDENTITY = {"GIT_CONFIG_COUNT": "2", "GIT_CONFIG_KEY_0": "user.name", "GIT_CONFIG_KEY_1": "user.email"}


def git(folder: Path, *words: str) -> str:
    """Git with no settings but an identity."""
    variables = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    command = ["git", "-c", "user.name=Someone", "-c", "user.email=someone@example.org", *words]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def signer(monkeypatch):
    """Git knows who signs."""
    for name, value in IDENTITY.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "Zoë Example")
    monkeypatch.setenv("GIT_CONFIG_VALUE_1", "zoe@example.org")


def repository(root: Path) -> Path:
    """A git repository of what is in a folder."""
    git(root, "init", "--quiet")
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "A release")
    return root


def check_patches(root: Path, folder: Path, release: str) -> list[str]:
    """Apply the exported patches; in the end the files must be the full copies. Answers the commits' messages."""
    plan = copies.plan(versions.get(release), releases.find(root))
    made = sorted(folder.glob("*.patch"))
    git(root, "am", *map(str, made))
    for file in plan.files:
        assert (root / "vllm_gaudi" / file.file).read_text(encoding="utf-8") == file.merged.text
    changed = set(git(root, "diff", "--name-only", f"HEAD~{len(made)}").split())
    tests = series.stages()[-1].tests
    assert changed == {f"vllm_gaudi/{file.file}" for file in plan.files} | {f"tests/{path}" for path in tests}
    assert git(root, "status", "--porcelain") == ""
    log = git(root, "log", "--reverse", f"HEAD~{len(made)}..", "--format=%an <%ae>%n%B%x00")
    return [message.strip() for message in log.split("\0") if message.strip()]


SIGNED = "Signed-off-by: Zoë Example <zoe@example.org>"


def test_git_am_gives_the_full_copies_part_by_part(tmp_path, signer):
    root = repository(anchored_tree(tmp_path / "release"))
    assert main(["export", "0.30", "--source", str(root), "--output", str(tmp_path / "out"), "--quiet"]) == 0
    messages = check_patches(root, tmp_path / "out", "0.30")
    assert messages == [f"Zoë Example <zoe@example.org>\n{stage.message}\n\n{SIGNED}" for stage in series.stages()]


def test_a_single_patch_on_request(tmp_path, signer):
    root = repository(anchored_tree(tmp_path / "release"))
    words = ["export", "0.30", "--source", str(root), "--output", str(tmp_path / "out"), "--quiet"]
    assert main(words) == main([*words, "--single"]) == 0  # the second in place of the first's patches
    [message] = check_patches(root, tmp_path / "out", "0.30")
    whole = (export.UPSTREAM / "commit_message.txt").read_text().strip()
    assert message == f"Zoë Example <zoe@example.org>\n{whole}\n\n{SIGNED}"


def test_patches_of_the_users_own_stay(tmp_path, signer):
    root = anchored_tree(tmp_path / "release")
    own = tmp_path / "out" / "0001-my-own-work.patch"
    own.parent.mkdir()
    own.write_text("mine")
    words = ["export", "0.30", "--source", str(root), "--output", str(own.parent), "--quiet"]
    assert main(words) == main([*words, "--single"]) == 0
    assert own.read_text() == "mine"
    assert len(list(own.parent.glob(export.OURS))) == 1


def test_a_release_that_one_stage_does_not_fit_is_refused_and_nothing_written(tmp_path, signer, capsys):
    root = anchored_tree(tmp_path / "release")
    (root / "vllm_gaudi" / "models" / "gemma4.py").write_text("import torch\n")
    assert main(["export", "0.30", "--source", str(root), "--output", str(tmp_path / "out")]) == 2
    assert "HpuGemma4Model" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_settings_of_the_user_do_not_change_the_patch(tmp_path, signer, monkeypatch):
    (tmp_path / ".gitconfig").write_text(
        "[core]\n autocrlf = true\n hooksPath = /nowhere\n[commit]\n gpgsign = true\n[diff]\n noprefix = true\n"
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    root = repository(anchored_tree(tmp_path / "release"))
    assert main(["export", "0.30", "--source", str(root), "--output", str(tmp_path / "out"), "--quiet"]) == 0
    check_patches(root, tmp_path / "out", "0.30")


@pytest.mark.parametrize("missing", ["user.name", "user.email"])
def test_without_an_identity_it_is_refused_with_a_hint(tmp_path, monkeypatch, capsys, missing):
    known = {"user.name": "Someone", "user.email": "someone@example.org"} | {missing: ""}
    monkeypatch.setenv("GIT_CONFIG_COUNT", "2")
    for number, (key, value) in enumerate(known.items()):
        monkeypatch.setenv(f"GIT_CONFIG_KEY_{number}", key)
        monkeypatch.setenv(f"GIT_CONFIG_VALUE_{number}", value)
    tree = anchored_tree(tmp_path / "release")
    assert main(["export", "0.30", "--source", str(tree), "--output", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert f"git does not know your {missing}" in said and f"git config --global {missing}" in said
    assert not (tmp_path / "out").exists()


def test_the_texts_keep_upstreams_rules():
    """Relative figures only, nothing internal, a title that fits."""
    messages = [stage.message for stage in series.stages()] + [(export.UPSTREAM / "commit_message.txt").read_text()]
    for message in messages:
        lines = export.signed(message, "A", "a@example.org").splitlines()
        assert len(lines[0]) <= 72 and lines[1] == ""
        assert all(len(line) <= 80 for line in lines)
    text = "\n".join([(export.UPSTREAM / "pull_request.md").read_text(), *messages])
    assert not re.search(r"\d\s*(tokens/s|tok/s|ms\b|seconds|GB)", text)
    assert not re.search(r"https?://|/mnt/|JIRA|[A-Z]{3,}-\d{3,}", text)


def test_a_file_without_a_final_newline_survives(tmp_path, signer):
    root = anchored_tree(tmp_path / "release")
    path = root / "vllm_gaudi" / "attention/backends/hpu_attn.py"
    path.write_text(path.read_text().rstrip("\n"))
    repository(root)
    assert main(["export", "0.30", "--source", str(root), "--output", str(tmp_path / "out"), "--quiet"]) == 0
    check_patches(root, tmp_path / "out", "0.30")


@pytest.mark.skipif("GAUDI_FIXES_ROOT" not in os.environ, reason="GAUDI_FIXES_ROOT names no release")
def test_on_a_real_release(tmp_path, signer):
    tree = releases.find()
    pinned = versions.get("0.26").files
    if tree.package is None or any(copies.sha256(tree.read(file)) != pinned[file] for file in copies.overridden()):
        pytest.skip("GAUDI_FIXES_ROOT is not release 0.26")
    root = tmp_path / "release"
    for file in copies.overridden():
        (root / "vllm_gaudi" / file).parent.mkdir(parents=True, exist_ok=True)
        (root / "vllm_gaudi" / file).write_bytes(tree.read(file))
    (root / "vllm_gaudi" / "__init__.py").write_text("")
    repository(root)
    assert main(["export", "0.26", "--source", str(root), "--output", str(tmp_path / "out"), "--quiet"]) == 0
    check_patches(root, tmp_path / "out", "0.26")
