# SPDX-License-Identifier: Apache-2.0
"""The full copies of a release: upstream's files with the fix merged in, their manifest and the shadow beside them."""

import argparse
import ctypes
import difflib
import hashlib
import io
import json
import os
import shutil
import sys
import tempfile
import tokenize
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from graft import releases, versions
from graft.errors import Drift, GraftError
from graft.merge import Merged, merge
from graft.progress import Progress
from graft.releases import PACKAGE, Tree
from graft.versions import Release

ROOT = Path(__file__).resolve().parent.parent
OVERRIDES = ROOT / "vendor" / "vllm_gaudi_overrides"
COPIES = ROOT / "vendor" / "releases"
SHADOW = Path(__file__).resolve().parent / "shadow"

NAME = "vllm_gaudi_overrides"
MANIFEST = "manifest.json"
# What install writes beside the manifest; copies that are written again leave it there.
KEPT = ("installed.json",)

_NOT_MERGED = ("merging.py", "__init__.py")


@dataclass(frozen=True)
class File:
    """One upstream file and what becomes of it. file: its path below vllm_gaudi; module: its dotted name."""

    file: str
    module: str
    pristine: str
    merged: Merged


@dataclass(frozen=True)
class Plan:
    """The copies of a release, in memory. contents: by path below the folder that `write` gets."""

    release: Release
    tree: Tree
    files: tuple[File, ...]
    manifest: Mapping[str, Any]
    contents: Mapping[str, bytes]


def folder(release: Release) -> Path:
    """Where the copies of a release are kept."""
    return COPIES / release.tag


def overridden(overrides: Path | None = None) -> tuple[str, ...]:
    """The files below vllm_gaudi that have an override source, as posix paths."""
    overrides = overrides or OVERRIDES
    found = (path.relative_to(overrides).as_posix() for path in overrides.rglob("*.py"))
    return tuple(sorted(file for file in found if file not in _NOT_MERGED))


def module_name(file: str) -> str:
    return f"{PACKAGE}.{file.removesuffix('.py').replace('/', '.')}"


def plan(
    release: Release,
    tree: Tree,
    *,
    overrides: Path | None = None,
    allow_drift: bool = False,
) -> Plan:
    """Merge every override source into the tree's file of the same path. Nothing is written.

    Args:
        overrides: the folder of the override sources; this project's unless given.
        allow_drift: go by the anchors where a pinned file has another hash.
    Raises:
        Drift: the tree is another release's, a pinned file differs, or an override cannot be merged.
        GraftError: a file is missing, or VERSIONS.toml does not name it.
    """
    check_release(release, tree)
    overrides = overrides or OVERRIDES
    files, modules, contents = [], {}, {}
    read = {file: tree.read(file) for file in overridden(overrides)}
    if not read:
        raise GraftError(f"{overrides} holds no override source", "Restore it from git")
    if not allow_drift:
        _check_hashes(release, tree, read)
    _check_is_no_other(release, tree, read)
    for file, data in read.items():
        source = (overrides / file).read_bytes()
        pristine = _decode(data, file, release)
        merged = merge(pristine, source.decode(), name=file, release=release.name)
        content = merged.text.encode()
        files.append(File(file, module_name(file), pristine, merged))
        contents[f"{NAME}/{file}"] = content
        modules[module_name(file)] = {
            "file": file,
            "pristine_sha256": sha256(data),
            "override_sha256": sha256(source),
            "merged_sha256": sha256(content),
            # What `strip` needs to give the pristine text back, on the day of drift.
            "insertions": [[i.what, i.start, i.end, i.replaced] for i in merged.insertions],
        }
    shadow = {path.name: path.read_bytes() for path in sorted(SHADOW.glob("*.py"))}
    manifest = {
        "schema": 1,
        "release": release.name,
        "tag": release.tag,
        "override_revision": release.override_revision,
        "pinned": all(release.files[file] == sha256(data) for file, data in read.items()),
        "modules": modules,
        "shadow": {name: sha256(data) for name, data in shadow.items()},
    }
    contents |= {f"{NAME}/{name}": data for name, data in shadow.items()}
    contents[f"{NAME}/{MANIFEST}"] = (json.dumps(manifest, indent=2) + "\n").encode()
    return Plan(release, tree, tuple(files), manifest, contents)


def check_release(release: Release, tree: Tree) -> None:
    """Refuse a tree that says it is of another release.

    Raises:
        Drift: its version is known and not of this release.
    """
    if tree.version is None:
        return
    try:
        fits = Version(tree.version).release[:2] == Version(release.name).release
    except InvalidVersion:
        fits = False
    if not fits:
        raise Drift(
            f"{tree.path} holds vllm-gaudi {tree.version}, not release {release.name}",
            f"Give a vllm-gaudi {release.name}, or ask for the release it is of",
        )


def _check_hashes(release: Release, tree: Tree, read: Mapping[str, bytes]) -> None:
    hashes = {file: sha256(data) for file, data in read.items()}
    for file, found in hashes.items():
        if file not in release.files:
            raise GraftError(
                f"VERSIONS.toml does not name {file} for release {release.name}",
                f'Add "{file}" = "{versions.UNPINNED}" to its files',
            )
        pin = release.files[file]
        if pin is not None and pin != found:
            raise Drift(
                f"{file} of {tree.path} is not release {release.name}'s "
                f"(its sha256 is {found[:12]}..., pinned is {pin[:12]}...)",
                f"Give a pristine vllm-gaudi {release.name}, or see docs/drift.md",
            )


def _check_is_no_other(release: Release, tree: Tree, read: Mapping[str, bytes]) -> None:
    """Refuse, for a release that is not pinned, files that are exactly another release's."""
    if release.is_pinned:
        return
    hashes = {file: sha256(data) for file, data in read.items()}
    for other in versions.load().values():
        if other.name != release.name and dict(other.files) == hashes:
            raise Drift(
                f"{tree.path} holds release {other.name}'s files, not release {release.name}'s",
                f"Give a vllm-gaudi {release.name}, or ask for release {other.name}",
            )


def _decode(data: bytes, file: str, release: Release) -> str:
    """The text of a file, line ends and byte order mark included."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        if encoding in ("utf-8", "utf-8-sig"):
            return data.decode("utf-8")
    except (SyntaxError, UnicodeDecodeError):
        pass
    raise Drift(f"{file} of release {release.name} is not UTF-8 text", "Give the pristine file")


def write(plan: Plan, folder: Path) -> Path:
    """Put the copies into a folder, as its subfolder vllm_gaudi_overrides; answer that one.

    All of it is written beside the copies first and then takes their place in one step, so that
    whatever fails, what stood there stands there still. Nothing else in the folder is touched.

    Raises:
        GraftError: it cannot be written, or something that is no copy stands in its place.
    """
    copies = folder / NAME
    contents = {name.removeprefix(f"{NAME}/"): data for name, data in plan.contents.items()}
    if _holds(copies, contents):
        return copies
    try:
        _check_is_ours(copies)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{NAME}.", dir=folder, ignore_cleanup_errors=True) as temporary:
            new = Path(temporary, NAME)
            for name, content in contents.items():
                file = new / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)
            for name in KEPT:
                if (copies / name).is_file():
                    shutil.copy2(copies / name, new / name)
            _take_place(new, copies)
    except OSError as error:
        raise GraftError(
            f"{copies} cannot be written: {error.strerror or error}",
            "Free space or permissions, or name another folder",
        ) from None
    return copies


def _holds(copies: Path, contents: Mapping[str, bytes]) -> bool:
    """Whether a folder holds these copies already, byte for byte, and no other Python file."""
    try:
        found = {path.relative_to(copies).as_posix() for path in copies.rglob("*.py")}
        same = all((copies / name).read_bytes() == data for name, data in contents.items())
    except OSError:
        return False
    return same and found == {name for name in contents if name.endswith(".py")}


def _check_is_ours(copies: Path) -> None:
    """Refuse to take the place of anything but copies, broken ones included."""
    if not os.path.lexists(copies):
        return
    ours = copies.is_dir() and all(
        path.is_dir() or path.suffix in (".py", ".pyc", ".json") for path in copies.rglob("*")
    )
    if not ours or copies.is_symlink():
        raise GraftError(f"{copies} holds something other than copies", "Move it away, or name another folder")


def _take_place(new: Path, copies: Path) -> None:
    """Put the new copies where the old ones are; those end up in the place of the new ones."""
    if not copies.exists():
        try:
            new.rename(copies)
            return
        except OSError:
            if not copies.exists():  # else somebody else has just put copies there
                raise
    if not _exchange(new, copies):
        _replace_files(new, copies)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two folders in one step, where the system can: Linux, on most file systems."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return renameat2(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0


def _replace_files(new: Path, copies: Path) -> None:
    """Replace the copies file by file, the manifest last; without one the copies are not used."""
    (copies / MANIFEST).unlink(missing_ok=True)
    files = [path.relative_to(new) for path in new.rglob("*") if path.is_file()]
    for path in copies.rglob("*.py"):
        if path.relative_to(copies) not in files:
            path.unlink()
    for file in sorted(files, key=lambda file: file.name == MANIFEST):
        (copies / file).parent.mkdir(parents=True, exist_ok=True)
        os.replace(new / file, copies / file)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def diff(plan: Plan) -> str:
    """What the merge changes, as a unified diff of the files below the release's root."""
    parts = []
    for file in plan.files:
        before = file.pristine.splitlines(keepends=True)
        after = file.merged.text.splitlines(keepends=True)
        path = f"{PACKAGE}/{file.file}"
        for line in difflib.unified_diff(before, after, f"a/{path}", f"b/{path}"):
            parts.append(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n")
    return "".join(parts)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "merge",
        help="write the full copies of a release",
        description="Merge the fix into a release's pristine files and write the full copies.",
    )
    parser.add_argument("release", help="a release of VERSIONS.toml, such as 0.30")
    parser.add_argument(
        "--source",
        type=Path,
        help="take the pristine files from a site-packages folder, a checkout, a wheel or an sdist",
    )
    parser.add_argument("--python", type=Path, help="take them from this interpreter's environment")
    parser.add_argument("--output", type=Path, help="the folder to write (default: vendor/releases/TAG)")
    parser.add_argument("--dry-run", action="store_true", help="print the diff and write nothing")
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    parser.set_defaults(func=_merge_command)


def _merge_command(args: argparse.Namespace) -> int:
    progress = Progress(quiet=args.quiet or args.json)
    release = versions.get(args.release)
    with progress.step("Looking for vllm-gaudi"):
        tree = releases.find(args.source, args.python)
    with progress.step(f"Merging into {tree.path}"):
        planned = plan(release, tree)
    target = args.output or folder(release)
    outcome = {
        "release": release.name,
        "tag": release.tag,
        "source": {"kind": tree.kind, "path": str(tree.path), "version": tree.version},
        "folder": str(target),
        "written": not args.dry_run,
        "pinned": planned.manifest["pinned"],
        "files": {file.file: [insertion.what for insertion in file.merged.insertions] for file in planned.files},
    }
    if args.dry_run:
        outcome["diff"] = diff(planned)
    else:
        write(planned, target)
    if args.json:
        print(json.dumps(outcome, indent=2))
    elif args.dry_run:
        sys.stdout.write(outcome["diff"])
    for file in planned.files:
        progress.say(f"{file.file}: {len(file.merged.insertions)} insertions, every anchor found")
    if not planned.manifest["pinned"]:
        progress.say(f"Release {release.name} is not pinned in VERSIONS.toml: this went by the anchors alone")
    if not args.dry_run:
        progress.say(f"Full copies and manifest: {target / NAME}")
    return 0
