# SPDX-License-Identifier: Apache-2.0
"""What the shadow promises where something is wrong: silence at start, pristine modules, one warning."""

import json
import os
import shutil

import pytest

from tests.shadow.conftest import shadow
from tests.support.environments import (
    FILES,
    MERGED,
    PRISTINE,
    copies_of,
    install_tree,
    plain_tree,
    pythons,
    turn_on,
)

OLDEST_AND_NEWEST = sorted({min(pythons()), max(pythons())})


@pytest.fixture(params=OLDEST_AND_NEWEST, ids=lambda version: f"py{version}")
def version(request) -> str:
    """What is no matter of the version is tried on two of them."""
    return request.param


def falls_back(shadowed, cause: str, code: int) -> None:
    """The pristine modules load with exactly one warning, starts are silent, the check agrees."""
    environment = shadowed.environment
    assert environment.starts_silently()
    origins, said = environment.origins()
    assert origins == PRISTINE
    assert said.count("vllm_gaudi_overrides: ") == 1
    assert len(said.splitlines()) == 1
    assert cause in said
    assert "To mend it: " in said
    assert environment.origins(VLLM_GAUDI_OVERRIDES="0") == (PRISTINE, "")
    found = environment.check()
    assert found["code"] == code
    assert any(cause in line["cause"] for line in found["files"])
    assert all(line["mend"] for line in found["files"])


def cut_short(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def emptied(path):
    path.write_bytes(b"")


def replaced(path):
    path.write_text("ORIGIN = 'someone else'\n")


def deleted(path):
    path.unlink()


def unreadable(path):
    path.unlink()
    path.symlink_to(path)  # root may read everything: a link to itself fails for root as well


def a_folder(path):
    path.unlink()
    path.mkdir()


DAMAGES = [cut_short, emptied, replaced, deleted, unreadable, a_folder]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_copy(shadowed, damage, file):
    damage(shadowed.copies / file)
    falls_back(shadowed, f"the copy {shadowed.copies / file}", 1)


@pytest.mark.parametrize("file", FILES)
def test_one_damaged_copy_holds_the_other_back(shadowed, file):
    emptied(shadowed.copies / file)
    other = next(line for line in shadowed.environment.check()["files"] if line["file"] != file)
    assert (other["state"], other["cause"]) == ("not applied", f"right by itself, held back with {file}")


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_manifest(shadowed, damage):
    damage(shadowed.copies / "manifest.json")
    falls_back(shadowed, "manifest.json", 1)


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 2},
        {"modules": {}},
        {"modules": None},
        {"modules": {"vllm_gaudi.models.gemma4": {"file": "models/gemma4.py"}}},
        {"modules": {"os": {"file": "os.py", "pristine_sha256": "", "merged_sha256": ""}}},
        {"release": None},
    ],
)
def test_a_manifest_that_is_not_ours(shadowed, change):
    path = shadowed.copies / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    falls_back(shadowed, "manifest.json", 1)


@pytest.mark.parametrize("text", ["[]", "3", "null", '"x"', "{}"])
def test_a_manifest_of_another_shape(shadowed, text):
    (shadowed.copies / "manifest.json").write_text(text)
    falls_back(shadowed, "manifest.json", 1)


@pytest.mark.parametrize("name", ["__init__.py", "verify.py"])
@pytest.mark.parametrize("damage", [cut_short, emptied, replaced, deleted, unreadable])
def test_a_damaged_shadow(shadowed, damage, name):
    damage(shadowed.copies / name)
    environment = shadowed.environment
    assert environment.starts_silently()
    origins, said = environment.origins()
    assert origins == PRISTINE
    assert len(said.splitlines()) == 1
    assert said.startswith("vllm_gaudi_overrides: the fast-prefill fix is off")
    assert environment.run("-m", "vllm_gaudi_overrides", check=False).returncode == 1


@pytest.mark.parametrize("how", ["moved", "deleted"])
def test_the_checkout_is_gone(tmp_path, shadowed, how):
    if how == "moved":
        (tmp_path / "checkout").rename(tmp_path / "moved")
    else:
        shutil.rmtree(tmp_path / "checkout")
    environment = shadowed.environment
    assert environment.starts_silently()
    origins, said = environment.origins()
    assert origins == PRISTINE
    assert said.count("moved, deleted or damaged") == 1 and len(said.splitlines()) == 1
    assert environment.run("-m", "vllm_gaudi_overrides", check=False).returncode == 1
    assert environment.origins(VLLM_GAUDI_OVERRIDES="0") == (PRISTINE, "")


@pytest.mark.parametrize("file", FILES)
def test_vllm_gaudi_is_upgraded_or_edited_in_place(shadowed, file):
    path = shadowed.package / file
    path.write_text(path.read_text() + "\n# edited\n")
    falls_back(shadowed, "was upgraded or edited since", 2)


def test_the_source_of_an_editable_install_is_edited(tmp_path, bare):
    shadowed = shadow(tmp_path, bare, "editable-finder")
    path = shadowed.package / FILES[0]
    path.write_text(path.read_text() + "\n# edited\n")
    falls_back(shadowed, "was upgraded or edited since", 2)


def test_going_back_to_the_old_release_brings_the_copies_back(shadowed):
    path = shadowed.package / FILES[0]
    old = path.read_bytes()
    path.write_bytes(old + b"# newer\n")
    assert shadowed.environment.origins()[0] == PRISTINE
    path.write_bytes(old)
    assert shadowed.environment.origins() == (MERGED, "")


def test_a_release_without_one_of_the_modules(shadowed):
    (shadowed.package / FILES[1]).unlink()
    environment = shadowed.environment
    answer = environment.run("-c", "from vllm_gaudi.models import gemma4; print(gemma4.ORIGIN)")
    assert answer.stdout == "pristine\n"
    assert len(answer.stderr.splitlines()) == 1
    assert environment.check()["code"] == 2
    answer = environment.run("-c", "import vllm_gaudi.attention.backends.hpu_attn", check=False)
    assert "ModuleNotFoundError" in answer.stderr


def test_vllm_gaudi_is_removed(shadowed):
    shutil.rmtree(shadowed.package)
    environment = shadowed.environment
    assert environment.starts_silently()
    answer = environment.run("-c", "import vllm_gaudi.models.gemma4", check=False)
    assert "No module named 'vllm_gaudi'" in answer.stderr
    assert "fast-prefill" not in answer.stderr
    found = environment.check()
    assert found["code"] == 1
    assert "this environment has no vllm_gaudi" in found["files"][0]["cause"]


def test_a_module_that_is_only_bytecode_is_left_alone(shadowed):
    path = shadowed.package / FILES[0]
    code = "import py_compile, sys; py_compile.compile(sys.argv[1], sys.argv[1] + 'c')"
    shadowed.environment.run("-c", code, path)
    path.unlink()
    falls_back(shadowed, "is not a source file", 2)


def test_read_only_folders(shadowed):
    for folder in (shadowed.copies, shadowed.environment.site_packages):
        os.chmod(folder, 0o555)
    try:
        assert shadowed.environment.origins(PYTHONDONTWRITEBYTECODE=None) == (MERGED, "")
    finally:
        for folder in (shadowed.copies, shadowed.environment.site_packages):
            os.chmod(folder, 0o755)


HOOK = """
import importlib.util, sys

class Loader:
    def __init__(self, loader):
        self.loader = loader
    def __getattr__(self, name):
        return getattr(self.loader, name)
    def exec_module(self, module):
        self.loader.exec_module(module)
        module.WATCHED = True

class Hook:
    busy = False
    def find_spec(self, fullname, path=None, target=None):
        if self.busy or not fullname.startswith("vllm_gaudi"):
            return None
        self.busy = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self.busy = False
        if spec is not None and spec.loader is not None:
            spec.loader = Loader(spec.loader)
        return spec

def install(place):
    sys.meta_path.insert(place, Hook())
"""


@pytest.mark.parametrize("place", ["front", "back"])
@pytest.mark.parametrize("order", ["aaa", "zzz"])
def test_another_tool_hooks_imports_too(shadowed, order, place):
    """Its .pth runs before or after ours, its finder wraps what all the others find."""
    site_packages = shadowed.environment.site_packages
    (site_packages / "other_hook.py").write_text(HOOK)
    where = 0 if place == "front" else 10
    (site_packages / f"{order}.pth").write_text(f"import other_hook; other_hook.install({where})\n")
    assert shadowed.environment.starts_silently()
    assert shadowed.environment.origins() == (MERGED, "")
    assert shadowed.environment.check()["code"] == 0


def test_a_hook_that_answers_by_itself_is_named_by_the_check(shadowed):
    site_packages = shadowed.environment.site_packages
    (site_packages / "selfish.py").write_text(
        "import sys\nfrom importlib.machinery import PathFinder\n"
        "class Selfish:\n"
        "    def find_spec(self, *arguments):\n"
        "        return PathFinder.find_spec(*arguments)\n"
        "sys.meta_path.insert(0, Selfish())\n"
    )
    (site_packages / "zzz.pth").write_text("import selfish\n")
    assert shadowed.environment.origins() == (PRISTINE, "")
    found = shadowed.environment.check()
    assert found["code"] == 1
    assert "selfish.Selfish" in found["files"][0]["mend"]


def test_a_warning_is_said_once_in_a_process_with_threads(shadowed):
    emptied(shadowed.copies / FILES[0])
    code = (
        "import importlib, threading\n"
        "names = ['vllm_gaudi.models.gemma4', 'vllm_gaudi.attention.backends.hpu_attn'] * 8\n"
        "ts = [threading.Thread(target=importlib.import_module, args=(n,)) for n in names]\n"
        "[t.start() for t in ts]; [t.join() for t in ts]"
    )
    assert len(shadowed.environment.run("-c", code).stderr.splitlines()) == 1


def test_a_file_that_changes_in_mid_process_never_mixes_the_two(shadowed):
    """The first import decides for both: a copy that is swapped afterwards is not half used."""
    code = (
        "import sys\nfrom vllm_gaudi.models import gemma4\n"
        "open(sys.argv[1], 'a').write('# edited'); open(sys.argv[2], 'w').close()\n"
        "from vllm_gaudi.attention.backends import hpu_attn\nprint(gemma4.ORIGIN, hpu_attn.ORIGIN)"
    )
    answer = shadowed.environment.run("-c", code, shadowed.package / FILES[1], shadowed.copies / FILES[1])
    assert (answer.stdout, answer.stderr) == ("merged merged\n", "")


def test_the_check_sees_that_the_fix_changed_since_the_merge(tmp_path, shadowed):
    folder = tmp_path / "checkout" / "vllm_gaudi_overrides" / "models"
    folder.mkdir(parents=True)
    (folder / "gemma4.py").write_text("# newer\n")
    found = shadowed.environment.check()
    assert found["code"] == 2
    assert "changed since the copy was merged" in found["files"][0]["cause"]
    assert shadowed.environment.origins() == (MERGED, "")  # what loads is still one consistent pair


def test_another_vllm_gaudi_comes_first_on_the_path(tmp_path, shadowed):
    newer = newer_tree(tmp_path).parent
    origins, said = shadowed.environment.origins(PYTHONPATH=newer)
    assert origins == PRISTINE
    assert "was upgraded or edited since" in said
    assert shadowed.environment.check(PYTHONPATH=newer)["code"] == 2


def newer_tree(tmp_path):
    """Another vllm_gaudi; answers its package."""
    package = plain_tree(tmp_path / "newer") / "vllm_gaudi"
    for file in FILES:
        (package / file).write_text((package / file).read_text() + "# newer\n")
    return package


def test_copies_of_another_release_do_not_load(tmp_path, bare):
    package = install_tree(bare, plain_tree(tmp_path / "tree"), "wheel")
    copies = copies_of(newer_tree(tmp_path), tmp_path / "releases", "0.31")
    turn_on(bare, copies.parent)
    origins, said = bare.origins()
    assert origins == PRISTINE
    assert f"{package / FILES[0]} is not the file that the copies for 0.31" in said
