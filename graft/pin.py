# SPDX-License-Identifier: Apache-2.0
"""Writes the hashes of a release's pristine files into VERSIONS.toml, and leaves all else in it as it is."""

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import tomlkit

from graft import copies, releases, versions
from graft.errors import Drift, GraftError
from graft.progress import Progress
from graft.versions import Release


def pin(release: Release, hashes: dict[str, str], path: Path) -> bool:
    """Write hashes into VERSIONS.toml, comments and order kept; answers whether that changed it.

    Raises:
        Drift: the release is pinned to other files.
        GraftError: it cannot be written.
    """
    others = [file for file, found in hashes.items() if release.files.get(file) not in (None, found)]
    if others:
        raise Drift(
            f"{path.name} pins other files of release {release.name}: {', '.join(others)} is not the pinned one",
            f'Give a pristine vllm-gaudi {release.tag}, or set it to "{versions.UNPINNED}" first',
        )
    text = path.read_text(encoding="utf-8")
    document = tomlkit.parse(text)
    files = document["releases"][release.name]["files"]
    for file, found in hashes.items():
        if release.files.get(file) is None:
            files[file] = f"sha256:{found}"
    written = tomlkit.dumps(document)
    if written == text:
        return False
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as new:
            new.write(written)
        os.chmod(new.name, path.stat().st_mode)
        os.replace(new.name, path)
    except OSError as error:
        raise GraftError(f"{path} cannot be written: {error.strerror}", "Free space or permissions") from None
    return True


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "pin",
        help="write the hashes of a release's pristine files into VERSIONS.toml",
        description="Only from files that every anchor matches; check that they are the release's own.",
    )
    parser.add_argument("release", help="a release of VERSIONS.toml, such as 0.30")
    parser.add_argument("--source", type=Path, help="a site-packages folder, a checkout, a wheel or an sdist")
    parser.add_argument("--python", type=Path, help="the interpreter of an environment that has it")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    parser.set_defaults(func=_pin_command)


def _pin_command(args: argparse.Namespace) -> int:
    progress = Progress(quiet=args.quiet)
    release = versions.get(args.release)
    with progress.step("Looking for vllm-gaudi"):
        tree = releases.find(args.source, args.python)
    with progress.step(f"Merging into {tree.path}"):
        plan = copies.plan(release, tree, allow_drift=True)
    hashes = {entry["file"]: entry["pristine_sha256"] for entry in plan.manifest["modules"].values()}
    changed = pin(release, hashes, versions.VERSIONS)
    for file, found in hashes.items():
        progress.say(f"{file}: sha256:{found}")
    if tree.version is None:
        progress.say(f"Nothing in {tree.path} says which release it is: make sure that it is {release.tag}")
    progress.say("Written to VERSIONS.toml" if changed else "Already pinned, nothing was changed")
    return 0
