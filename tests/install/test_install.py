# SPDX-License-Identifier: Apache-2.0
"""What install, check and uninstall promise on an environment in order."""

import ast
import json
import os
import shutil

import pytest

from graft import copies, releases, versions
from tests.support.checkouts import make_checkout, with_release
from tests.support.environments import (
    FILES,
    Environment,
    install_tree,
    make_environment,
    module_name,
    own_version,
    pythons,
    sha256,
)

SERVE = "vllm serve google/gemma-4-E2B-it --kv-sharing-fast-prefill\n"
WHERE = f"""
import json
from importlib import import_module
print(json.dumps([import_module(name).__file__ for name in {[module_name(file) for file in FILES]}]))
"""


def origins(environment: Environment, *options, **variables) -> list[str]:
    """The files that both modules are imported from."""
    return json.loads(environment.run(*options, "-c", WHERE, **variables).stdout)


def site_names(environment: Environment) -> set[str]:
    return {path.name for path in environment.site_packages.glob("vllm_gaudi_overrides*")}


def packages(found: list[str]) -> set[str]:
    """The folders, less the files' own paths."""
    return {path.removesuffix(f"/{file}") for path, file in zip(found, FILES, strict=True)}


STYLES = ["wheel", "editable-path", "editable-finder"]


@pytest.mark.parametrize(
    "version,style",
    [(version, "wheel") for version in pythons()] + [(own_version(), style) for style in STYLES[1:]],
)
def test_install_check_uninstall(tmp_path, checkout, version, style):
    environment = with_release(tmp_path, "environment", style, version=version)
    before, pristine = environment.files(), packages(origins(environment))
    (tmp_path / "imported").unlink()

    assert checkout.state(environment)["code"] == 1
    assert checkout.ok("install", "0.30", environment=environment) == SERVE
    assert checkout.state(environment)["code"] == 0
    assert environment.check()["code"] == 0
    assert not (tmp_path / "imported").exists(), "the tool imported vllm_gaudi"
    merged = {str(checkout.releases / "v0.30.0" / "vllm_gaudi_overrides")}
    assert packages(origins(environment)) == merged
    assert packages(origins(environment, "-I", "-B")) == merged
    assert packages(origins(environment, VLLM_GAUDI_OVERRIDES="0")) == pristine
    assert environment.starts_silently()

    checkout.ok("uninstall", environment=environment)
    assert environment.files() == before
    assert checkout.state(environment)["code"] == 1
    assert packages(origins(environment)) == pristine
    assert list(checkout.releases.iterdir()) == []


def test_the_copies_hold_the_fix(checkout, environment):
    checkout.ok("install", "0.30", environment=environment)
    for file in FILES:
        source = ast.parse((copies.OVERRIDES / file).read_text())
        added = [node.name for node in source.body if isinstance(node, ast.FunctionDef) and node.name.startswith("_")]
        assert added
        environment.run("-c", f"from {module_name(file)} import {', '.join(added)}")


def test_installing_again_changes_nothing(checkout, environment):
    checkout.ok("install", "0.30", environment=environment)
    before = {path: path.stat().st_mtime_ns for path in environment.root.rglob("*")}
    before |= {path: path.stat().st_mtime_ns for path in checkout.releases.rglob("*")}
    answer = json.loads(checkout.ok("install", "0.30", "--json", environment=environment))
    assert answer["changed"] is False
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_installing_again_mends_what_was_damaged(checkout, environment):
    checkout.ok("install", "0.30", environment=environment)
    made = checkout.releases / "v0.30.0" / "vllm_gaudi_overrides"
    for path in (made / FILES[0], made / "manifest.json", environment.site_packages / "vllm_gaudi_overrides.pth"):
        path.write_text("")
        assert checkout.state(environment)["code"] == 1
        checkout.ok("install", "0.30", environment=environment)
        assert checkout.state(environment)["code"] == 0


def test_copies_inside_site_packages_live_without_the_checkout(tmp_path, checkout, environment):
    before = environment.files()
    checkout.ok("install", "0.30", "--copy", environment=environment)
    assert not checkout.releases.exists()
    assert checkout.state(environment)["code"] == 0
    checkout.root.rename(tmp_path / "moved")
    assert packages(origins(environment)) == {str(environment.site_packages / "vllm_gaudi_overrides")}
    assert environment.check()["code"] == 0
    make_checkout(checkout.root).ok("uninstall", environment=environment)
    assert environment.files() == before


@pytest.mark.parametrize("first", [(), ("--copy",)])
def test_changing_between_pointing_and_copying(checkout, environment, first):
    before = environment.files()
    other = () if first else ("--copy",)
    for options in (first, other, first):
        checkout.ok("install", "0.30", *options, environment=environment)
        assert checkout.state(environment)["code"] == 0
        inside = (environment.site_packages / "vllm_gaudi_overrides").exists()
        assert inside == bool(options)
    checkout.ok("uninstall", environment=environment)
    assert environment.files() == before


def test_another_release_replaces(tmp_path, checkout, environment):
    before = environment.files()
    checkout.ok("install", "0.30", environment=environment)
    info = environment.site_packages / "vllm_gaudi-0.30.0.dist-info"
    text = (info / "METADATA").read_text()
    (info / "METADATA").write_text(text.replace("0.30.0", "0.26.0"))
    unpin(checkout, "0.26")
    checkout.ok("install", "0.26", environment=environment)
    assert checkout.state(environment, "0.26")["code"] == 0
    other = checkout.state(environment, "0.30")
    assert other["code"] == 1 and "release 0.26 is installed" in other["files"][0]["cause"]
    assert len([name for name in site_names(environment) if name.endswith(".dist-info")]) == 1
    (info / "METADATA").write_text(text)
    checkout.ok("uninstall", environment=environment)
    assert environment.files() == before
    assert list(checkout.releases.iterdir()) == []


def unpin(checkout, release: str) -> None:
    """Make a pinned release go by its anchors."""
    path = checkout.root / "VERSIONS.toml"
    head, found, tail = path.read_text().partition(f'[releases."{release}".files]')
    lines = tail.splitlines(keepends=True)
    for index in (1, 2):
        lines[index] = f'{lines[index].split(" = ")[0]} = "unpinned"\n'
    path.write_text(head + found + "".join(lines))


def test_a_dry_run_prints_the_diff_and_writes_nothing(checkout, environment):
    before = environment.files()
    out = checkout.ok("install", "0.30", "--dry-run", environment=environment)
    assert "+    def fast_prefill_forward(" in out
    assert str(environment.site_packages / "vllm_gaudi_overrides.pth") in out
    assert environment.files() == before
    assert not checkout.releases.exists()


def test_quiet_says_nothing(checkout, environment):
    for words in (["install", "0.30"], ["check", "0.30"], ["uninstall"]):
        done = checkout.run(*words, "--quiet", environment=environment)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_uninstalling_what_is_not_there_says_so(checkout, environment):
    done = checkout.run("uninstall", environment=environment)
    assert done.returncode == 1
    assert done.stderr.startswith("graft: Nothing of ours is installed in ")
    assert len(done.stderr.splitlines()) == 1


def test_no_vllm_gaudi_at_all(tmp_path, checkout, environment):
    bare = make_environment(tmp_path / "bare", environment.version)
    for words in (["install", "0.30", "--python", bare.python], ["install", "0.30"]):
        done = checkout.run(*words, environment=bare)
        assert done.returncode == 1
        assert "No vllm-gaudi is installed" in done.stderr and len(done.stderr.splitlines()) == 1
    assert checkout.state(bare)["code"] == 1


def test_a_release_that_lacks_what_the_fix_imports_is_refused(checkout, environment):
    ops = environment.site_packages / "vllm_gaudi" / "extension" / "ops.py"
    ops.write_text(ops.read_text().replace("class LoraMask", "class AnotherMask"))
    before = environment.files()
    done = checkout.run("install", "0.30", "--quiet", environment=environment)
    assert done.returncode == 2
    assert "The fix imports what is not there: LoraMask in vllm_gaudi/extension/ops.py. Run" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert environment.files() == before


def test_an_interpreter_that_prints_at_its_start_is_no_obstacle(checkout, environment):
    hook = environment.site_packages / "sitecustomize.py"
    hook.write_text("import sys\nprint('{hello}')\nprint('noise', file=sys.stderr)\n")
    checkout.ok("install", "0.30", environment=environment)
    assert checkout.state(environment)["code"] == 0


def test_the_named_interpreter_goes_before_the_active_one(tmp_path, checkout, environment):
    other = with_release(tmp_path, "other", "wheel")
    checkout.ok("install", "0.30", "--python", other.python, environment=environment)
    assert site_names(other) and not site_names(environment)


def test_the_first_python_on_the_path_that_has_it(tmp_path, checkout, environment):
    bare = make_environment(tmp_path / "bare", environment.version)
    path = f"{bare.root / 'bin'}:{environment.root / 'bin'}"
    checkout.ok("install", "0.30", PATH=path)
    assert site_names(environment) and not site_names(bare)


def test_a_source_for_the_tests_is_not_installed_into(tmp_path, checkout, environment):
    checkout.ok("install", "0.30", environment=environment, GAUDI_FIXES_ROOT=tmp_path / "nowhere")


def test_two_environments_share_the_copies(tmp_path, checkout, environment):
    other = with_release(tmp_path, "other", "editable-path")
    checkout.ok("install", "0.30", environment=environment)
    checkout.ok("install", "0.30", environment=other)
    checkout.ok("uninstall", environment=environment)
    assert checkout.state(other)["code"] == 0
    checkout.ok("uninstall", environment=other)
    assert list(checkout.releases.iterdir()) == []


def test_copies_that_another_environment_uses_are_not_replaced_by_others(tmp_path, checkout, environment):
    other = with_release(tmp_path, "other", "wheel")
    path = other.site_packages / "vllm_gaudi" / FILES[1]
    path.write_text(path.read_text().replace("EDITION = 1", "EDITION = 2"))
    checkout.ok("install", "0.30", environment=environment)
    done = checkout.run("install", "0.30", environment=other)
    assert done.returncode == 0 and "inside site-packages, because" in " ".join(done.stderr.split())
    assert checkout.state(other)["code"] == checkout.state(environment)["code"] == 0


@pytest.mark.parametrize("name", ["with space", "ünïcode 測試", "a#b%c"])
def test_odd_paths(tmp_path, name):
    checkout = make_checkout(tmp_path / name / "checkout")
    environment = with_release(tmp_path / name, f"environment {name}", "wheel")
    before = environment.files()
    checkout.ok("install", "0.30", environment=environment)
    assert checkout.state(environment)["code"] == 0
    assert environment.starts_silently()
    assert (environment.site_packages / "vllm_gaudi_overrides.pth").read_bytes().isascii()
    for locale in ("C", "POSIX", "C.UTF-8"):
        answer = environment.run("-c", "pass", LC_ALL=locale, PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
        assert answer.stderr == ""
    checkout.ok("uninstall", environment=environment)
    assert environment.files() == before


def test_a_symlinked_site_packages(tmp_path, checkout, environment):
    real = tmp_path / "elsewhere"
    environment.site_packages.rename(real)
    environment.site_packages.symlink_to(real)
    before = environment.files(), sorted(path.name for path in real.iterdir())
    checkout.ok("install", "0.30", environment=environment)
    assert checkout.state(environment)["code"] == 0
    checkout.ok("uninstall", environment=environment)
    assert (environment.files(), sorted(path.name for path in real.iterdir())) == before


def test_an_unpinned_release_goes_by_its_anchors_and_says_so(checkout, environment):
    done = checkout.run("install", "0.30", environment=environment)
    assert "is not pinned in VERSIONS.toml: this went by the anchors alone" in " ".join(done.stderr.split())
    manifest = json.loads((checkout.releases / "v0.30.0/vllm_gaudi_overrides/manifest.json").read_text())
    assert manifest["pinned"] is False
    pristine = (environment.site_packages / "vllm_gaudi" / FILES[0]).read_bytes()
    assert manifest["modules"][module_name(FILES[0])]["pristine_sha256"] == sha256(pristine)


def test_pip_lists_it_and_can_remove_it(tmp_path, checkout, environment):
    """For the day when the checkout is gone."""
    before = environment.files()
    checkout.ok("install", "0.30", "--copy", environment=environment)
    code = "import importlib.metadata as m; print(m.version('vllm-gaudi-overrides'))"
    assert environment.run("-c", code).stdout == f"0.30.0+r{versions.get('0.30').override_revision}\n"
    shutil.rmtree(checkout.root)
    code = "import sys, runpy; sys.argv[0] = 'pip'; runpy.run_module('pip', run_name='__main__')"
    pip = next((p for p in pip_folders()), None)
    assert pip is not None
    environment.run("-c", code, "uninstall", "-y", "vllm-gaudi-overrides", PYTHONPATH=pip, PIP_NO_INPUT="1")
    assert {k: v for k, v in environment.files().items() if "__pycache__" not in k} == before


@pytest.mark.skipif("GAUDI_FIXES_ROOT" not in os.environ, reason="GAUDI_FIXES_ROOT names no release")
@pytest.mark.parametrize("style", STYLES)
def test_on_a_real_release(tmp_path, checkout, style):
    """A release's source tree, installed as its wheel and as both kinds of editable install lay it out."""
    tree = releases.find()
    release = next((r for r in versions.load().values() if is_of(r, tree)), None)
    if tree.package is None or release is None:
        pytest.skip(f"{tree.path} is not a folder with a pinned release")
    environment = make_environment(tmp_path / "environment", own_version())
    package = install_tree(environment, tree.package.parent, style, release.tag.removeprefix("v"))
    before = environment.files()
    checkout.ok("install", release.name, environment=environment)
    assert checkout.state(environment, release.name)["code"] == 0
    code = "from vllm_gaudi_overrides import verify; print(*[verify.without_importing(n).origin for n in {}])"
    names = [module_name(file) for file in FILES]
    merged = [str(checkout.releases / release.tag / "vllm_gaudi_overrides" / file) for file in FILES]
    assert environment.run("-c", code.format(names)).stdout.split() == merged
    pristine = environment.run("-c", code.format(names), VLLM_GAUDI_OVERRIDES="0").stdout.split()
    assert pristine == [str(package / file) for file in FILES]
    assert environment.starts_silently()
    checkout.ok("uninstall", environment=environment)
    assert environment.files() == before
    assert checkout.state(environment, release.name)["code"] == 1


def is_of(release, tree) -> bool:
    """Whether a tree's files are those pinned for a release."""
    return all(pin and sha256(tree.read(file)) == pin for file, pin in release.files.items())


def pip_folders() -> list:
    """Folders that hold a pip: an ensurepip wheel can be run from where it is."""
    import ensurepip
    from pathlib import Path

    return sorted(Path(ensurepip.__file__).parent.glob("_bundled/pip-*.whl"))
