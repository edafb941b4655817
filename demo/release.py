# SPDX-License-Identifier: Apache-2.0
"""Merges the fix into a real release and says what could be checked without the device and without its engine."""

from __future__ import annotations

import importlib.metadata
import tempfile
from collections.abc import Iterator
from pathlib import Path

from graft import copies, releases, versions
from graft.errors import GraftError
from graft.merge import strip


def check(name: str, source: Path | None) -> Iterator[str]:
    """Merge into a release's pristine files, in memory, and tell line by line what holds.

    Args:
        name: a release of VERSIONS.toml.
        source: where its files are; the environment that holds vllm_gaudi if None.
    Raises:
        GraftError: the release is unknown, its files cannot be had, do not fit or do not compile.
    """
    release = versions.get(name)
    tree = releases.find(source)
    plan = copies.plan(release, tree)
    pinned = "pinned, the pristine files have the hashes" if plan.manifest["pinned"] else "not pinned: went by anchors"
    yield f"vllm-gaudi {release.tag} from {tree.path} ({tree.kind}); {pinned}"
    for file in plan.files:
        if strip(file.merged) != file.pristine:
            raise GraftError(f"{file.file}: taking the insertions out does not give upstream's text", "Report this")
        compile_merged(file.file, file.merged.text)
        yield f"{file.file}: {len(file.merged.insertions)} insertions, compiles, upstream's text is intact around them"
        yield from (f"    {insertion.what}" for insertion in file.merged.insertions)
    with tempfile.TemporaryDirectory() as folder:
        written = copies.write(plan, Path(folder))
        files = sum(path.is_file() for path in written.rglob("*"))
        yield f"full copies, manifest and shadow can be written ({files} files, gone again)"
    yield from environment(release)
    yield "Not run here: the plugin's own engine on these files. `nox -s engine` runs it on the CPU"


def compile_merged(file: str, text: str) -> None:
    """Compile a merged file.

    Raises:
        GraftError: it does not.
    """
    try:
        compile(text, file, "exec")
    except SyntaxError as error:
        raise GraftError(f"{file} does not compile after the merge: {error}", "Report this") from None


def environment(release: versions.Release) -> Iterator[str]:
    """Tell whether this environment's vLLM and torch are the ones that the release goes with."""
    for package, wanted in (("vllm", release.vllm), ("torch", release.torch)):
        found = importlib.metadata.version(package)
        fits = found == wanted or found.startswith((f"{wanted}.", f"{wanted}+"))
        yield f"{package} {wanted} goes with it; here is {found}" + ("" if fits else ", another one")
