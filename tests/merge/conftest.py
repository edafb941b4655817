# SPDX-License-Identifier: Apache-2.0
"""A small vllm_gaudi, written here, and a release of it."""

from pathlib import Path

import pytest

from graft import copies
from graft.versions import Release

FILES = {
    "__init__.py": 'raise ImportError("vllm_gaudi must not be imported")\n',
    "models/__init__.py": "",
    "models/gemma4.py": "class Model:\n\n    def forward(self, x):\n        return x\n",
    "attention/backends/hpu_attn.py": "def attend(query):\n    return query\n",
}

OVERRIDES = {
    "merging.py": "",
    "models/gemma4.py": "class Model:\n\n    def fast(self, x):\n        return x\n",
    "attention/backends/hpu_attn.py": (
        "from vllm_gaudi_overrides.merging import before\n\n\n"
        "@before\ndef attend(query):\n    if query is None:\n        return None\n"
    ),
}


def write_files(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.fixture
def checkout(tmp_path) -> Path:
    """The root of a checkout that does not say which version it is."""
    root = tmp_path / "checkout"
    write_files(root / "vllm_gaudi", FILES)
    (root / "pyproject.toml").write_text('[project]\nname = "vllm_gaudi"\nversion = "9.9"\n')
    return root


@pytest.fixture
def release() -> Release:
    return Release(
        name="1.0",
        tag="v1.0.0",
        vllm="1.0.0",
        torch="2.0",
        gaudi_software="1.2",
        override_revision=3,
        files=dict.fromkeys(("models/gemma4.py", "attention/backends/hpu_attn.py")),
        evidence=(),
    )


@pytest.fixture
def overrides(tmp_path, monkeypatch) -> Path:
    """Override sources for the small vllm_gaudi."""
    folder = write_files(tmp_path / "overrides", OVERRIDES)
    monkeypatch.setattr(copies, "OVERRIDES", folder)
    return folder
