# SPDX-License-Identifier: Apache-2.0
"""What the shadow promises where all is well: which modules load, and from where."""

import ast
import json
import sys

import pytest

from tests.shadow.conftest import shadow
from tests.support.environments import (
    MERGED,
    PRISTINE,
    REPOSITORY,
    SHADOW,
    SITE_FILES,
    copies_of,
    install_tree,
    make_environment,
    plain_tree,
    sha256,
    turn_on,
)

FROM_CHILDREN = """
import json, multiprocessing, sys

def origins(queue):
    from vllm_gaudi.models import gemma4
    from vllm_gaudi.attention.backends import hpu_attn
    queue.put([gemma4.origin(), hpu_attn.origin()])

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    queue = context.SimpleQueue()
    child = context.Process(target=origins, args=(queue,))
    child.start()
    print(json.dumps(queue.get()))
    child.join()
"""


@pytest.mark.parametrize("style", ["wheel", "editable-path", "editable-finder"])
def test_both_modules_come_from_the_copies(tmp_path, bare, style):
    shadowed = shadow(tmp_path, bare, style)
    assert bare.origins() == (MERGED, "")
    assert bare.check()["code"] == 0
    answer = bare.run("-c", "from vllm_gaudi.models import gemma4; print(gemma4.__file__)")
    assert answer.stdout.strip() == str(shadowed.copies / "models" / "gemma4.py")
    assert bare.starts_silently()


@pytest.mark.parametrize("options", [["-I"], ["-E"], ["-B"], ["-O"], ["-W", "error"], ["-X", "dev"]])
def test_interpreter_options_change_nothing(shadowed, options):
    assert shadowed.environment.origins(*options) == (MERGED, "")


def test_without_site_the_pristine_modules_load(shadowed):
    path = {"PYTHONPATH": shadowed.environment.site_packages}
    assert shadowed.environment.origins("-S", **path) == (PRISTINE, "")


def test_the_kill_switch_gives_the_pristine_modules_silently(shadowed):
    environment = shadowed.environment
    assert environment.origins(VLLM_GAUDI_OVERRIDES="0") == (PRISTINE, "")
    found = environment.check(VLLM_GAUDI_OVERRIDES="0")
    assert found["code"] == 1
    assert all("VLLM_GAUDI_OVERRIDES=0" in line["cause"] for line in found["files"])


def test_the_kill_switch_works_from_within_the_process(shadowed):
    code = "import os; os.environ['VLLM_GAUDI_OVERRIDES'] = '0'\nfrom vllm_gaudi.models import gemma4"
    answer = shadowed.environment.run("-c", f"{code}\nprint(gemma4.ORIGIN)")
    assert (answer.stdout, answer.stderr) == ("pristine\n", "")


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_children_of_multiprocessing_see_the_copies(tmp_path, shadowed, method):
    script = tmp_path / "script.py"
    script.write_text(FROM_CHILDREN)
    assert json.loads(shadowed.environment.run(script, method).stdout) == MERGED


def test_subprocesses_see_the_copies(shadowed):
    code = "import subprocess, sys; subprocess.run([sys.executable, '-m', 'vllm_gaudi.models.gemma4'])"
    assert shadowed.environment.run("-c", code).stdout == "merged\n"


def test_pickles_cross_between_a_shadowed_and_a_pristine_process(shadowed):
    environment = shadowed.environment
    code = "import pickle; from vllm_gaudi.models.gemma4 import Thing; print(pickle.dumps(Thing()).hex())"
    data = environment.run("-c", code).stdout.strip()
    assert b"vllm_gaudi.models.gemma4" in bytes.fromhex(data)
    code = f"import pickle; print(type(pickle.loads(bytes.fromhex('{data}'))).__module__)"
    answer = environment.run("-c", code, VLLM_GAUDI_OVERRIDES="0")
    assert answer.stdout.strip() == "vllm_gaudi.models.gemma4"


def test_inspect_and_tracebacks_show_the_lines_of_the_copy(shadowed):
    code = (
        "import inspect, traceback\nfrom vllm_gaudi.models import gemma4\n"
        "print(inspect.getsource(gemma4.origin)); print(inspect.getsourcefile(gemma4.Thing))\n"
        "gemma4.ORIGIN = property\ndel gemma4.ORIGIN\n"
        "try: gemma4.origin()\nexcept NameError: print(traceback.format_exc())"
    )
    out = shadowed.environment.run("-c", code).stdout
    assert out.count("return ORIGIN") == 2
    assert out.count(str(shadowed.copies / "models" / "gemma4.py")) == 2


def test_reload_and_find_spec_stay_with_the_copy(shadowed):
    code = (
        "import importlib, importlib.util\nfrom vllm_gaudi.models import gemma4\n"
        "print(importlib.reload(gemma4).ORIGIN)\n"
        "print(importlib.util.find_spec('vllm_gaudi.models.gemma4').origin)"
    )
    out = shadowed.environment.run("-c", code).stdout.split()
    assert out == ["merged", str(shadowed.copies / "models" / "gemma4.py")]


def test_only_our_two_modules_are_shadowed(shadowed):
    (shadowed.package / "models" / "other.py").write_text("ORIGIN = 'pristine'\n")
    answer = shadowed.environment.run("-c", "from vllm_gaudi.models import other; print(other.__file__)")
    assert answer.stdout.strip() == str(shadowed.package / "models" / "other.py")


def test_no_bytecode_is_written_beside_the_copies(shadowed):
    shadowed.environment.origins(PYTHONDONTWRITEBYTECODE=None)
    assert not list((shadowed.copies / "models").glob("__pycache__"))
    assert not list((shadowed.package / "models").glob("__pycache__/gemma4*"))


def test_stale_bytecode_beside_a_copy_is_never_used(shadowed):
    copy = shadowed.copies / "models" / "gemma4.py"
    stale = copy.with_name("stale.py")
    stale.write_bytes(copy.read_bytes().replace(b'"merged"', b'"staler"'))
    target = copy.parent / "__pycache__" / f"gemma4.cpython-{shadowed.environment.version.replace('.', '')}.pyc"
    code = (
        "import py_compile, sys; py_compile.compile(sys.argv[1], sys.argv[2], "
        "invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)"
    )
    shadowed.environment.run("-c", code, stale, target)
    assert target.exists()
    assert shadowed.environment.origins() == (MERGED, "")


def test_threads_that_import_both_at_once_get_the_copies(shadowed):
    code = (
        "import importlib, threading\nfound = []\n"
        "names = ['vllm_gaudi.models.gemma4', 'vllm_gaudi.attention.backends.hpu_attn'] * 8\n"
        "ts = [threading.Thread(target=lambda n=n: found.append(importlib.import_module(n).ORIGIN))"
        " for n in names]\n"
        "[t.start() for t in ts]; [t.join() for t in ts]\nprint(len(found), set(found))"
    )
    assert shadowed.environment.run("-c", code).stdout == "16 {'merged'}\n"


def test_copies_inside_site_packages_need_no_path_entry(tmp_path, bare):
    package = install_tree(bare, plain_tree(tmp_path / "tree"), "wheel")
    copies_of(package, bare.site_packages)
    turn_on(bare, None)
    assert bare.origins() == (MERGED, "")
    assert bare.check()["code"] == 0


def test_a_second_environment_can_share_the_copies(tmp_path, shadowed, version):
    other = make_environment(tmp_path / "second", version)
    install_tree(other, tmp_path / "tree", "wheel")
    turn_on(other, shadowed.copies.parent)
    assert other.origins() == shadowed.environment.origins() == (MERGED, "")


@pytest.mark.parametrize("name", ["with space", "naïve ünïcode 測試", "%41#x"])
def test_odd_names_of_the_environment(tmp_path, version, name):
    environment = make_environment(tmp_path / name, version)
    package = install_tree(environment, plain_tree(tmp_path / "tree"), "wheel")
    copies_of(package, environment.site_packages)
    turn_on(environment, None)
    assert environment.origins() == (MERGED, "")
    assert environment.starts_silently()
    assert environment.check()["code"] == 0


def test_a_symlinked_site_packages(tmp_path, bare):
    real = tmp_path / "elsewhere"
    bare.site_packages.rename(real)
    bare.site_packages.symlink_to(real)
    shadow(tmp_path, bare, "wheel")
    assert bare.origins() == (MERGED, "")
    assert bare.check()["code"] == 0


def test_starting_twice_puts_one_finder_in_place(shadowed):
    code = (
        "import sys, vllm_gaudi_overrides, vllm_gaudi_overrides_start as s\n"
        "s.start(); vllm_gaudi_overrides.start()\n"
        "print(sum(type(f).__module__ == 'vllm_gaudi_overrides' for f in sys.meta_path))"
    )
    assert shadowed.environment.run("-c", code).stdout == "1\n"


def test_a_start_imports_nothing_but_the_shadow(shadowed):
    code = "import sys; print(*sorted(sys.modules))"
    with_ours = set(shadowed.environment.run("-c", code).stdout.split())
    for file in shadowed.environment.site_packages.glob("vllm_gaudi_overrides*"):
        file.unlink()
    # Reading any .pth file makes Python 3.13 import a codec.
    (shadowed.environment.site_packages / "other.pth").write_text("# nothing\n")
    without = set(shadowed.environment.run("-c", code).stdout.split())
    assert with_ours - without == {"vllm_gaudi_overrides", "vllm_gaudi_overrides_start"}


def test_the_check_imports_no_module_of_vllm_gaudi(shadowed):
    (shadowed.package / "__init__.py").write_text("raise SystemExit('imported')\n")
    assert shadowed.environment.check()["code"] == 0


def test_the_check_in_words(shadowed):
    answer = shadowed.environment.run("-m", "vllm_gaudi_overrides")
    assert answer.stdout.splitlines() == [
        "models/gemma4.py: applied",
        "attention/backends/hpu_attn.py: applied",
    ]


@pytest.mark.parametrize("source", [*SHADOW.glob("*.py"), *SITE_FILES.glob("*.py")], ids=lambda p: p.name)
def test_the_shadow_needs_only_the_standard_library(source):
    imported = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module.split(".")[0])
    assert imported <= set(sys.stdlib_module_names) | {"vllm_gaudi_overrides"}


def test_the_documentation_has_the_hashes_of_what_is_written():
    """Scanners and people compare them."""
    page = (REPOSITORY / "docs" / "install.md").read_text()
    for name in ("vllm_gaudi_overrides.pth", "vllm_gaudi_overrides.start", "vllm_gaudi_overrides_start.py"):
        assert sha256((SITE_FILES / name).read_bytes()) in page
    comment, line = (SITE_FILES / "vllm_gaudi_overrides.pth").read_bytes().splitlines(keepends=True)
    assert line == b"import vllm_gaudi_overrides_start\n" and line.decode() in page
    assert comment.decode() in page
    assert sha256(line) in page
