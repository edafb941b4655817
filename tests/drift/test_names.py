# SPDX-License-Identifier: Apache-2.0
"""The check of the vLLM names that the fix relies on, on a vLLM of names alone."""

import importlib.util
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from graft import names as relied
from graft.errors import GraftError


@pytest.fixture
def tree(tmp_path) -> Path:
    """A folder with a vLLM that has every name the fix relies on, and nothing else."""
    texts: dict[str, list[str]] = {}
    owned: dict[tuple[str, str], list[str]] = {}
    for file, owner, names in relied.RELIED_ON["vllm"]:
        for name, given in names.items():
            line = f"{name}: int = 0"
            if given is not None:
                line = f"def {name}({', '.join(('self', *given))}):\n        self.called = 1"
            owned.setdefault((file, owner), []).append(f"    {line}\n")
    for (file, owner), lines in owned.items():
        texts.setdefault(file, []).append(f"class {owner}:\n{''.join(lines)}")
    for file, name in relied.imports("vllm"):
        if (file, name) not in owned:
            package = file.replace(".py", "/__init__.py") if file == "vllm/config.py" else file
            texts.setdefault(package, []).append(f"def {name}():\n    pass\n")
    for file, parts in texts.items():
        path = tmp_path / "tree" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n\n".join(parts))
    (tmp_path / "tree" / "vllm" / "__init__.py").write_text("")
    (tmp_path / "tree" / "PKG-INFO").write_text("Name: vllm\nVersion: 0.30.0+empty\n")
    return tmp_path / "tree"


def wrong(path: Path) -> dict[str, tuple[str, str]]:
    """What is not the same, with its state and detail."""
    found = relied.survey("vllm", relied.given(path).read)
    assert len(found) > 20
    return {name.symbol: (name.state, name.detail) for name in found if name.state != "same"}


def sdist(tree: Path) -> Path:
    path = tree.parent / "vllm-0.30.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.add(tree, "vllm-0.30.0")
    return path


def wheel(tree: Path) -> Path:
    path = tree.parent / "vllm-0.30.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file in tree.rglob("*.py"):
            archive.write(file, file.relative_to(tree))
        archive.write(tree / "PKG-INFO", "vllm-0.30.0.dist-info/METADATA")
    return path


@pytest.mark.parametrize("pack", [lambda tree: tree, lambda tree: tree / "vllm", sdist, wheel])
def test_a_vllm_with_every_name(tree, pack):
    path = pack(tree)
    assert wrong(path) == {}
    assert relied.given(path).version == "0.30.0"


@pytest.mark.parametrize("pack", [lambda tree: tree, sdist, wheel])
def test_a_name_that_is_gone(tree, pack):
    path = tree / relied.GEMMA4
    path.write_text(path.read_text().replace("def embed_input_ids", "def embed"))
    assert wrong(pack(tree)) == {"Gemma4Model.embed_input_ids": ("missing", "it is not there")}


def test_a_parameter_that_was_renamed(tree):
    path = tree / relied.GEMMA4
    path.write_text(path.read_text().replace("residual, per_layer_input)", "residual, ple)"))
    state, detail = wrong(tree)["Gemma4DecoderLayer.forward"]
    assert state == "signature"
    assert detail == ("it has no parameter per_layer_input (it takes self, positions, hidden_states, residual, ple)")


def test_a_class_or_a_file_that_is_gone(tree):
    path = tree / relied.ATTENTION
    path.write_text(path.read_text().replace("class Attention", "class Other"))
    (tree / "vllm" / "forward_context.py").unlink()
    found = wrong(tree)
    assert found["Attention.impl"] == ("missing", "there is no class Attention")
    assert found["get_forward_context"] == ("missing", "there is no such file")


@pytest.mark.parametrize("text", ["", "def broken(", "\x00"])
def test_a_file_of_something_else(tree, text):
    (tree / "vllm" / "logger.py").write_text(text)
    assert wrong(tree).keys() == {"_VllmLogger.info_once"}


def test_attributes_set_in_a_method_count(tree):
    path = tree / relied.ATTENTION
    path.write_text(path.read_text().replace("    impl: int = 0\n", "    def __init__(self):\n        self.impl = 1\n"))
    assert wrong(tree) == {}


def test_what_is_no_vllm_is_refused(tmp_path, tree):
    shutil.rmtree(tree / "vllm")
    (tmp_path / "text").write_text("no archive")
    for path in (tree, tmp_path / "text", tmp_path / "nothing", sdist(tree)):
        with pytest.raises(GraftError):
            relied.given(path)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="no vLLM is installed here")
def test_the_installed_vllm_has_every_name():
    vllm = relied.installed(Path(sys.executable))
    assert [name for name in relied.survey("vllm", vllm.read) if name.state != "same"] == []
