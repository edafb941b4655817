# SPDX-License-Identifier: Apache-2.0
"""The plugin, the full copies that shadow two of its modules, and the environment that an arm runs in."""

import ast
import os
import shutil
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from graft import copies, releases, versions
from graft.errors import GraftError
from graft.versions import Release

PROJECT = Path(__file__).resolve().parents[1]
BRIDGE = Path(__file__).resolve().parent / "bridge"
START = PROJECT / "graft" / "site_packages"  # what an installation puts into site-packages

# What every arm is started with; a case's own settings come on top.
ENVIRON = {
    "PT_HPU_LAZY_MODE": "0",
    "VLLM_SKIP_WARMUP": "true",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # the probe's functions travel to the workers
    "VLLM_BUILD": "1.24.0.0",  # the Gaudi software the plugin is to believe in
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
_OWN = ("VLLM_", "PT_HPU_", "HABANA_", "HPU_")


@dataclass(frozen=True)
class Plugin:
    """Folders for the module path: one holds `vllm_gaudi`, one the copies and the shadow.

    declared: holds the metadata that names the plugin's entry points, and the probe's.
    """

    stock: Path
    copies: Path
    declared: Path


def prepare(source: Path, release: Release, overrides: Path, folder: Path, drifted: bool) -> Plugin:
    """Copy the plugin below `folder`, unpacked if it is an archive, and make the full copies beside it.

    Args:
        source: a checkout, a site-packages folder, a wheel or an sdist.
        drifted: go by the anchors where the source's files are not the release's pinned ones.
    Raises:
        GraftError: there is no plugin, or the fix does not fit it.
    """
    root = _root(source, folder / "unpacked")
    stock = folder / "stock"
    shutil.copytree(
        root / releases.PACKAGE, stock / releases.PACKAGE, ignore=shutil.ignore_patterns("__pycache__", "*.pyc")
    )
    plan = copies.plan(release, releases.find(root), overrides=overrides, allow_drift=drifted)
    copies.write(plan, folder / "copies")
    declared = folder / "declared"
    _declare(declared, "engine_probe", "[vllm.general_plugins]\n99.engine = engine.probe:install\n")
    installed = [path.read_text() for path in root.glob("vllm_gaudi-*.dist-info/entry_points.txt")]
    _declare(declared, "vllm_gaudi", installed[0] if installed else entry_points(root / "setup.py"))
    return Plugin(stock, folder / "copies", declared)


def release_of(tree: releases.Tree) -> Release | None:
    """The release of VERSIONS.toml that a tree is of, by its files or else by its version."""
    known = versions.load().values()
    for release in known:
        if release.is_pinned and all(copies.sha256(tree.read(file)) == pin for file, pin in release.files.items()):
            return release
    for release in known:
        if tree.version is not None and tree.version.startswith(f"{release.name}."):
            return release
    return None


def _root(source: Path, folder: Path) -> Path:
    """The folder that holds the package `vllm_gaudi` of `source`."""
    tree = releases.find(source)
    if tree.package is not None:
        return tree.package.parent
    if zipfile.is_zipfile(source):
        with zipfile.ZipFile(source) as archive:
            archive.extractall(folder)
    else:
        with tarfile.open(source) as archive:
            archive.extractall(folder, filter="data")
    package = next(p for p in folder.rglob(releases.PACKAGE) if (p / "__init__.py").is_file())
    return package.parent


def entry_points(setup: Path) -> str:
    """What a checkout's setup.py declares, read without running it, as entry_points.txt says it.

    Raises:
        GraftError: it declares none in plain sight.
    """
    if setup.is_file():
        for node in ast.walk(ast.parse(setup.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "entry_points":
                groups = ast.literal_eval(node.value).items()
                return "\n".join(line for group, points in groups for line in (f"[{group}]", *points))
    raise GraftError(
        f"{setup} declares no entry points that can be read",
        "Install this vllm-gaudi with `pip install --no-deps --target FOLDER` and give FOLDER",
    )


def _declare(folder: Path, name: str, entry_points: str) -> None:
    info = folder / f"{name}-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
    (info / "entry_points.txt").write_text(entry_points)


def environ(plugin: Plugin, *, fixed: bool, scratch: Path, extra: dict[str, str]) -> dict[str, str]:
    """The environment of an arm: the caller's without its plugin settings, then ours, then `extra`.

    Every interpreter started with it has the bridge; a fixed one also the shadow, as the .pth of an installation
    would turn it on.
    """
    path = [BRIDGE, plugin.declared, plugin.stock, PROJECT]
    if fixed:
        path += [plugin.copies, START]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_OWN)}
    kept.pop("PYTHONDONTWRITEBYTECODE", None)
    return {
        **kept,
        **ENVIRON,
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "VLLM_CACHE_ROOT": str(scratch / "cache"),
        "VLLM_CONFIG_ROOT": str(scratch / "config"),
        **extra,
    }
