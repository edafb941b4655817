# SPDX-License-Identifier: Apache-2.0
"""Makes a copy of the stand-in with the fix merged in, and has this process's vLLM use it."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from graft import copies, releases, versions

STANDIN = Path(__file__).parent / "standin" / "vllm_gaudi"
VERSION = "0.0+standin"
ENTRY_POINTS = "[vllm.platform_plugins]\nhpu = vllm_gaudi:register\n"


def make(folder: Path, edits: Mapping[str, tuple[str, str]] | None = None, merge: bool = True) -> Path:
    """Lay the stand-in out below `folder` like a site-packages folder, with the fix merged in as into a release.

    Args:
        folder: an empty or missing folder; it becomes an entry of `sys.path` later.
        edits: per file below `vllm_gaudi/`, a text and what replaces it after the merge. The text must be there.
        merge: False leaves the stand-in without the fix, as a stock release is.
    Returns:
        `folder`.
    Raises:
        graft.errors.GraftError: the fix does not merge.
        ValueError: an edit whose text is not there.
    """
    package = folder / "vllm_gaudi"
    shutil.copytree(STANDIN, package, ignore=shutil.ignore_patterns("__pycache__"))
    facts = folder / f"vllm_gaudi-{VERSION}.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm-gaudi\nVersion: {VERSION}\n")
    (facts / "entry_points.txt").write_text(ENTRY_POINTS)
    if merge:
        for rel, merged in merged_files(folder).items():
            (package / rel).write_text(merged, newline="")
    for rel, (old, new) in (edits or {}).items():
        text = (package / rel).read_text()
        if text.count(old) != 1:
            raise ValueError(f"{rel}: the text to replace is there {text.count(old)} times: {old!r}")
        (package / rel).write_text(text.replace(old, new))
    return folder


def merged_files(folder: Path) -> dict[str, str]:
    """Merge the fix into the pristine files below `folder`, in memory, by the rules of a release."""
    newest = max(versions.load().values(), key=lambda release: tuple(map(int, release.name.split("."))))
    standin = dataclasses.replace(newest, files=dict.fromkeys(newest.files))  # no pinned hashes: by anchors
    plan = copies.plan(standin, releases.find(source=folder))
    return {rel: merged.text for rel, merged in plan.merged.items()}


def use(folder: Path) -> None:
    """Have vLLM find the plugin in `folder`; once per process, before anything imports vLLM."""
    if "vllm" in sys.modules:
        raise RuntimeError("vLLM is imported already and has chosen its platform. Call `use` first.")
    sys.path.insert(0, str(folder))
    import vllm_gaudi

    vllm_gaudi.register_ops()
    vllm_gaudi.register_models()
