# SPDX-License-Identifier: Apache-2.0
"""The unit tests that go upstream pass on the fix after each of the patches that they go with."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from graft import copies, series

pytest.importorskip("torch")

# Stands for vllm and vllm_gaudi: the override sources as those modules, with whatever they take from elsewhere.
PLUGIN = """
import sys, types
import torch

VENDOR = {vendor!r}
MODULES = {{"vllm_gaudi." + file[:-3].replace("/", "."): file for file in {files!r}}}
sys.path.insert(0, VENDOR)


class Anything(types.ModuleType):
    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__") or f"{{self.__name__}}.{{name}}" in MODULES:
            raise AttributeError(name)
        return type(name, (), dict.fromkeys(("register_model", "process_inputs"), lambda *a: None))


class Finder:
    def find_spec(self, fullname, path=None, target=None):
        from importlib.machinery import ModuleSpec
        if fullname.split(".")[0] in ("vllm", "vllm_gaudi"):
            return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec):
        return Anything(spec.name)

    def exec_module(self, module):
        module.__file__ = "made up"
        if module.__name__ in MODULES:
            vars(module).update(HPUAttentionMetadata=object)
            exec(open(f"{{VENDOR}}/vllm_gaudi_overrides/{{MODULES[module.__name__]}}").read(), vars(module))


sys.meta_path.append(Finder())
"""


@pytest.mark.parametrize("number", range(len(list(series.SERIES.glob("*.patch")))))
def test_the_tests_for_upstream_pass(tmp_path, number):
    stage = series.stages()[number]
    stage.write(tmp_path / "vendor")
    merging = copies.OVERRIDES / "merging.py"
    (tmp_path / "vendor" / series.OVERRIDES / "merging.py").write_bytes(merging.read_bytes())
    (tmp_path / "plugin.py").write_text(PLUGIN.format(vendor=str(tmp_path / "vendor"), files=copies.overridden()))
    tests = [str(tmp_path / "vendor" / series.TESTS / file) for file in stage.tests]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "plugin", "-p", "no:cacheprovider", "--rootdir", tmp_path]
    done = subprocess.run(
        [*command, "-c", "/dev/null", *tests], capture_output=True, text=True, cwd=tmp_path, env=path(tmp_path)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout and "skipped" not in done.stdout


def path(folder: Path) -> dict[str, str]:
    """This process's variables, and the folder on the path."""
    return {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
