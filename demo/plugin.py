# SPDX-License-Identifier: Apache-2.0
"""Makes a copy of the stand-in with the fix merged in, and has this process's vLLM use it."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from graft import copies
from graft.merge import merge

STANDIN = Path(__file__).parent / "standin" / "vllm_gaudi"
VERSION = "0.0+standin"
ENTRY_POINTS = "[vllm.platform_plugins]\nhpu = vllm_gaudi:register\n"


def make(folder: Path, *, fix: bool = True, overrides: Path = copies.OVERRIDES) -> Path:
    """Lay the stand-in out below `folder` like a site-packages folder, with the fix merged in as into a release.

    Args:
        folder: an empty or missing folder; it becomes an entry of `sys.path` later.
        overrides: the folder of the override sources.
        fix: False leaves the stand-in without the fix, as a stock release is.
    Returns:
        `folder`.
    Raises:
        graft.errors.GraftError: the fix does not merge.
    """
    package = folder / "vllm_gaudi"
    shutil.copytree(STANDIN, package, ignore=shutil.ignore_patterns("__pycache__"))
    facts = folder / f"vllm_gaudi-{VERSION}.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm-gaudi\nVersion: {VERSION}\n")
    (facts / "entry_points.txt").write_text(ENTRY_POINTS)
    if fix:
        for file, text in merged_files(overrides).items():
            (package / file).write_text(text)
    return folder


def stock_files() -> dict[str, str]:
    """The files of the stand-in that the fix changes, by path."""
    return {file: (STANDIN / file).read_text() for file in copies.overridden()}


def merged_files(overrides: Path = copies.OVERRIDES) -> dict[str, str]:
    """Merge override sources into the stand-in's files, in memory, by a release's rules; their texts by path."""
    merged = {}
    for file, pristine in stock_files().items():
        merged[file] = merge(pristine, (overrides / file).read_text(), name=file, release="the stand-in").text
    return merged


def use(folder: Path) -> Path:
    """Have vLLM find the plugin in `folder`; once per process, before anything imports vLLM."""
    if "vllm" in sys.modules:
        raise RuntimeError("vLLM is imported already and has chosen its platform. Call `use` first.")
    sys.path.insert(0, str(folder))
    import vllm_gaudi

    vllm_gaudi.register_ops()
    return folder
