# SPDX-License-Identifier: Apache-2.0
"""Real Python environments that hold a tiny vllm_gaudi of ours, for the tests of what is installed."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
SHADOW = REPOSITORY / "graft" / "shadow"
SITE_FILES = REPOSITORY / "graft" / "site_packages"
FILES = ("models/gemma4.py", "attention/backends/hpu_attn.py")
PROBE = """
import json, sys
from vllm_gaudi.models import gemma4
from vllm_gaudi.attention.backends import hpu_attn
print(json.dumps([gemma4.ORIGIN, hpu_attn.ORIGIN]))
"""
MERGED, PRISTINE = ["merged", "merged"], ["pristine", "pristine"]


def module_name(file: str) -> str:
    """vllm_gaudi's module at a path."""
    return "vllm_gaudi." + file[: -len(".py")].replace("/", ".")


@functools.cache
def pythons() -> dict[str, Path]:
    """The interpreters of this machine by version: this one, those on PATH, pyenv's and uv's."""
    candidates = [Path(sys.executable)]
    for minor in range(10, 16):
        candidates += [Path(p) for p in [shutil.which(f"python3.{minor}")] if p]
    if os.environ.get("PYENV_ROOT"):
        versions = Path(os.environ["PYENV_ROOT"], "versions")
        candidates += sorted(versions.glob("3.1[0-9]*/bin/python"))
    if shutil.which("uv"):
        command = ["uv", "python", "list", "--only-installed", "--output-format", "json"]
        listed = subprocess.run(command, capture_output=True, text=True)
        candidates += [Path(entry["path"]) for entry in json.loads(listed.stdout or "[]")]
    found: dict[str, Path] = {}
    code = "import sys, venv; print('%d.%d' % sys.version_info[:2], sys._base_executable)"
    for candidate in candidates:
        answer = subprocess.run([candidate, "-c", code], capture_output=True, text=True)
        if answer.returncode == 0:
            version, executable = answer.stdout.strip().split(" ", 1)
            if tuple(map(int, version.split("."))) >= (3, 10):
                found.setdefault(version, Path(executable))
    return dict(sorted(found.items()))


def own_version() -> str:
    """The version of the interpreter that runs the tests."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


@dataclass
class Environment:
    """A virtual environment without pip."""

    root: Path
    version: str

    @property
    def python(self) -> Path:
        return self.root / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        return self.root / "lib" / f"python{self.version}" / "site-packages"

    def run(self, *arguments, check: bool = True, **environment) -> subprocess.CompletedProcess:
        """Run its interpreter; the environment's variables are this process's less Python's own."""
        variables = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VLLM_"))}
        variables |= {"PYTHONDONTWRITEBYTECODE": "1"} | environment
        cwd = variables.pop("cwd", self.root)
        answer = subprocess.run(
            [self.python, *map(str, arguments)],
            capture_output=True,
            text=True,
            env={k: str(v) for k, v in variables.items() if v is not None},
            cwd=cwd,
        )
        if check and answer.returncode:
            raise AssertionError(f"exit {answer.returncode}\n{answer.stdout}\n{answer.stderr}")
        return answer

    def origins(self, *options, **environment) -> tuple[list[str], str]:
        """Import both modules: where each came from, and what was said on stderr meanwhile."""
        answer = self.run(*options, "-c", PROBE, **environment)
        return json.loads(answer.stdout), answer.stderr

    def starts_silently(self) -> bool:
        """Whether a plain interpreter start says nothing and succeeds, in any of its modes."""
        for options in ([], ["-I"], ["-W", "error", "-X", "dev"]):
            answer = self.run("-B", *options, "-c", "pass", check=False)
            if (answer.returncode, answer.stdout, answer.stderr) != (0, "", ""):
                return False
        return True

    def check(self, **environment) -> dict:
        """What `python -m vllm_gaudi_overrides --json` answers; the code is checked to agree."""
        answer = self.run("-m", "vllm_gaudi_overrides", "--json", check=False, **environment)
        assert answer.stderr == ""
        found = json.loads(answer.stdout)
        assert found["code"] == answer.returncode
        return found

    def files(self) -> dict[str, str]:
        """Every file and folder of the environment with its sha256."""
        return listing(self.root)


def listing(root: Path) -> dict[str, str]:
    """Every file, link and folder below `root`, with its sha256, target or nothing."""
    found = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = os.readlink(path)
        else:
            found[name] = sha256(path.read_bytes()) if path.is_file() else ""
    return found


def sha256(data: bytes) -> str:
    """Hexadecimal digest."""
    return hashlib.sha256(data).hexdigest()


def make_environment(root: Path, version: str) -> Environment:
    """Make an empty virtual environment of a Python version."""
    command = [pythons()[version], "-m", "venv", "--without-pip", root]
    subprocess.run(command, check=True, capture_output=True)
    return Environment(root, version)


def plain_tree(root: Path) -> Path:
    """Write a vllm_gaudi of a few lines whose modules say that they are the pristine ones."""
    package = root / "vllm_gaudi"
    for folder in ("", "models", "attention", "attention/backends"):
        (package / folder).mkdir(parents=True, exist_ok=True)
        (package / folder / "__init__.py").write_text("")
    for file in FILES:
        text = '"""Ours."""\nORIGIN = "pristine"\n\n\nclass Thing:\n    """A thing."""\n\n\n'
        text += 'def origin():\n    """Where this came from."""\n    return ORIGIN\n'
        text += '\n\nif __name__ == "__main__":\n    print(ORIGIN)\n'
        (package / file).write_text(text)
    return root


GEMMA4 = '''# SPDX-License-Identifier: Apache-2.0
"""A stand-in with the names that the fix meets, and nothing behind them."""

import torch
import torch.nn as nn
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.models.gemma4 import (
    Gemma4Model as UpstreamGemma4Model, )

logger = init_logger(__name__)
EDITION = 1


class HpuGemma4Model(UpstreamGemma4Model):

    def forward(self, input_ids, positions, **kwargs):
        if self.fast_prefill_enabled:
            return self.fast_prefill_forward(input_ids, positions)
        return positions


def _hpu_run_decoder_layers(decoder_layers, layer_idx_start, positions, hidden_states, per_layer_inputs=None, **kwargs):
    return hidden_states


def _apply_hpu_gemma4_patches(language_model: nn.Module) -> None:
    language_model.patched = True
'''

HPU_ATTN = '''# SPDX-License-Identifier: Apache-2.0
"""A stand-in with the names that the fix meets, and nothing behind them."""

from typing import Optional

import torch
from vllm.v1.attention.backend import AttentionImpl, AttentionLayer
from vllm_gaudi.attention.ops.hpu_paged_attn import HPUPagedAttention

EDITION = 1


class HPUAttentionMetadata:
    slot_mapping = seq_lens_tensor = attn_bias = window_attn_bias = window_block_list = block_size = is_prompt = None


class HPUAttentionImpl(AttentionImpl, torch.nn.Module):
    num_kv_heads = head_size = num_queries_per_kv = scale = sliding_window = sinks = alibi_slopes = None
    is_chunked_attention = enable_fp8_attn = k_cache = v_cache = use_merged_prefill = None
    kv_sharing_target_layer_name = None

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: Optional[torch.Tensor],
        value: Optional[torch.Tensor],
        kv_cache: torch.Tensor,
        attn_metadata: HPUAttentionMetadata,
        output: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """Attend."""
        return query
'''

OTHERS = {
    "attention/ops/hpu_paged_attn.py": """
class HPUPagedAttention:
    def split_kv_cache(*arguments):
        return arguments


class HPUPagedAttentionMetadata:
    block_list = None
""",
    "extension/logger.py": "def logger():\n    pass\n",
    "extension/ops.py": """
class LoraMask:
    def getLoraMask(self):
        pass

    def setLoraMask(self, mask):
        pass
""",
    "ops/hpu_rotary_embedding.py": """
class HPURotaryEmbedding:
    def prepare_cos_sin(self, positions):
        self.cos = self.sin = positions
""",
}

# Any module of torch and vllm, and any that vllm_gaudi lacks, with any class in it: enough to run the definitions.
ANYTHING = """
import importlib, sys
from importlib.machinery import ModuleSpec

class Anything:
    def find_spec(self, fullname, path=None, target=None):
        if fullname.split(".")[0] in ("torch", "vllm") or fullname.startswith("vllm_gaudi."):
            return ModuleSpec(fullname, self, is_package=True)
        return None
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        def get(name):
            if name.startswith("__"):
                raise AttributeError(name)
            if name == "nn":
                return importlib.import_module("torch.nn")
            nothing = lambda *a, **k: None
            return nothing if name.islower() else type(name, (), dict(register_model=nothing, process_inputs=nothing))
        module.__getattr__ = get

sys.meta_path.append(Anything())
"""


def anchored_tree(root: Path, *, imports_leave: Path | None = None) -> Path:
    """Write a vllm_gaudi that the fix can be merged into; importing it leaves a file behind."""
    package = root / "vllm_gaudi"
    for folder in ("", "models", "attention", "attention/backends", "attention/ops"):
        (package / folder).mkdir(parents=True, exist_ok=True)
        (package / folder / "__init__.py").write_text("")
    if imports_leave is not None:
        (package / "__init__.py").write_text(f"open({str(imports_leave)!r}, 'w').close()\n")
    for file, text in OTHERS.items():
        (package / file).parent.mkdir(exist_ok=True)
        (package / file).write_text(text)
    (package / FILES[0]).write_text(GEMMA4)
    (package / FILES[1]).write_text(HPU_ATTN)
    return root


def install_anything(environment: Environment) -> None:
    """Let an environment import any module of torch and vllm."""
    (environment.site_packages / "anything.py").write_text(ANYTHING)
    (environment.site_packages / "anything.pth").write_text("import anything\n")


def install_tree(environment: Environment, tree: Path, style: str, version: str = "0.30.0") -> Path:
    """Install the vllm_gaudi of a tree as pip would: "wheel", "editable-path", "editable-finder".

    Returns the folder of the package that an import would use.
    """
    site_packages = environment.site_packages
    info = site_packages / f"vllm_gaudi-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm-gaudi\nVersion: {version}\n")
    (info / "INSTALLER").write_text("pip\n")
    written = [info / "METADATA", info / "INSTALLER"]
    if style == "wheel":
        shutil.copytree(tree / "vllm_gaudi", site_packages / "vllm_gaudi")
        written += sorted((site_packages / "vllm_gaudi").rglob("*.py"))
    elif style == "editable-path":
        written += [site_packages / "__editable__.vllm_gaudi.pth"]
        written[-1].write_text(f"{tree}\n")
    else:
        finder = site_packages / "__editable___vllm_gaudi_finder.py"
        finder.write_text(EDITABLE_FINDER.format(package=str(tree / "vllm_gaudi")))
        hook = site_packages / "__editable__.vllm_gaudi.pth"
        hook.write_text("import __editable___vllm_gaudi_finder; __editable___vllm_gaudi_finder.install()")
        written += [finder, hook]
    if style != "wheel":
        url = {"url": tree.as_uri(), "dir_info": {"editable": True}}
        (info / "direct_url.json").write_text(json.dumps(url))
        written += [info / "direct_url.json"]
    record = "".join(f"{path.relative_to(site_packages)},,\n" for path in written)
    (info / "RECORD").write_text(record + f"{info.name}/RECORD,,\n")
    return (site_packages if style == "wheel" else tree) / "vllm_gaudi"


# The way build back ends make an editable install of one package: a finder behind all the others.
EDITABLE_FINDER = """
import sys
from importlib.util import spec_from_file_location
from pathlib import Path

PACKAGE = {package!r}

class Finder:
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        parts = fullname.split(".")
        if parts[0] != "vllm_gaudi":
            return None
        place = Path(PACKAGE, *parts[1:])
        for candidate in (place / "__init__.py", place.with_suffix(".py")):
            if candidate.is_file():
                return spec_from_file_location(fullname, candidate)
        return None

def install():
    sys.meta_path.append(Finder)
"""


def copies_of(package: Path, folder: Path, release: str = "0.30") -> Path:
    """Write copies of both modules, their manifest and the shadow; returns the package's folder."""
    copies = folder / "vllm_gaudi_overrides"
    modules = {}
    for file in FILES:
        pristine = (package / file).read_bytes()
        merged = pristine.replace(b"pristine", b"merged")
        (copies / file).parent.mkdir(parents=True, exist_ok=True)
        (copies / file).write_bytes(merged)
        modules[module_name(file)] = {
            "file": file,
            "pristine_sha256": sha256(pristine),
            "override_sha256": "0" * 64,
            "merged_sha256": sha256(merged),
        }
    manifest = {"schema": 1, "release": release, "tag": f"v{release}.0", "modules": modules}
    (copies / "manifest.json").write_text(json.dumps(manifest))
    for source in SHADOW.glob("*.py"):
        shutil.copy(source, copies)
    return copies


def turn_on(environment: Environment, folder: Path | None) -> None:
    """Write what turns the shadow on, by hand; `folder` holds the copies' package, None: in place."""
    for source in SITE_FILES.iterdir():
        if source.suffix in (".py", ".pth", ".start"):
            shutil.copy(source, environment.site_packages)
    if folder is not None:
        pth = environment.site_packages / "vllm_gaudi_overrides.pth"
        pth.write_text(f"{folder}\n{pth.read_text()}")
