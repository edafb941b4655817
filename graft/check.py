# SPDX-License-Identifier: Apache-2.0
"""Tells whether a release's copies load in an environment: 0 applied, 1 not applied, 2 drifted."""

import argparse
import json
from pathlib import Path
from typing import Any

from graft import copies, versions
from graft.install import ask, find_place
from graft.place import PTH, Place
from graft.progress import Progress
from graft.versions import Release

APPLIED, NOT_APPLIED, DRIFTED = 0, 1, 2
STATES = {APPLIED: "applied", NOT_APPLIED: "not applied", DRIFTED: "drifted"}


def check(release: Release, place: Place) -> dict:
    """The state of each file: {"code", "state", "release", "python", "folder", "files": [...]}.

    Each file has "file", "code" and "state", and where it is not applied "cause" and "mend".
    """
    found = ask(place.environment)
    report = {
        "release": release.name,
        "python": str(place.environment.python),
        "site_packages": str(place.folder),
        "folder": found["folder"] if found else None,
    }
    if found is None:
        files = _all(NOT_APPLIED, _why_no_shadow(place), _install(release))
    elif found["release"] not in (None, release.name):
        cause = f"release {found['release']} is installed in {place.folder}"
        files = _all(NOT_APPLIED, cause, f"{_install(release)} to replace it")
    else:
        files = found["files"]
        if found["code"] == APPLIED:
            files = [_against_this_checkout(release, line, Path(found["folder"])) for line in files]
    code = max(line["code"] for line in files)
    return {"code": code, "state": STATES[code], **report, "files": files}


def _install(release: Release) -> str:
    return f"run `python -m graft install {release.name}`"


def _all(code: int, cause: str, mend: str) -> list[dict]:
    return [_line(file, code, cause, mend) for file in copies.overridden()]


def _line(file: str, code: int, cause: str, mend: str) -> dict:
    return {"file": file, "code": code, "state": STATES[code], "cause": cause, "mend": mend}


def _why_no_shadow(place: Place) -> str:
    """Why a fresh interpreter of the environment has no shadow that answers."""
    if place.is_empty():
        return f"nothing is installed in {place.folder}"
    if not place.pth.exists():
        return f"an install or uninstall in {place.folder} was interrupted"
    entry = place.entry()
    if entry is not None and not (entry / copies.NAME).is_dir():
        return f"{PTH} points at {entry}, which was moved or deleted"
    return f"the shadow in {entry / copies.NAME if entry else place.package} is damaged"


def _against_this_checkout(release: Release, line: dict, folder: Path) -> dict:
    """What the environment cannot know: whether the fix, or the pin, is another one here by now."""
    file = line["file"]
    manifest = json.loads((folder / copies.MANIFEST).read_bytes())
    entry = manifest["modules"][copies.module_name(file)]
    source = copies.OVERRIDES / file
    pin = release.files.get(file)
    if not source.is_file() or copies.sha256(source.read_bytes()) != entry["override_sha256"]:
        return _line(file, DRIFTED, f"{source} changed since the copy was merged", _install(release))
    if pin is not None and pin != entry["pristine_sha256"]:
        cause = "the copy was merged from another file than the release's pinned one, with --allow-drift"
        return _line(file, DRIFTED, cause, f"install vllm-gaudi {release.tag}, then {_install(release)}")
    shadow = {path.name: copies.sha256(path.read_bytes()) for path in copies.SHADOW.glob("*.py")}
    if manifest["shadow"] != shadow:
        return _line(file, DRIFTED, "the shadow changed since the install", _install(release))
    return line


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "check",
        help="tell whether a release's copies load in an environment",
        description="Exit code 0: applied. 1: not applied. 2: drifted.",
    )
    parser.add_argument("release", help="a release of VERSIONS.toml, such as 0.30")
    parser.add_argument("--python", type=Path, help="the environment's interpreter")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quiet", action="store_true", help="print nothing, only exit")
    parser.set_defaults(func=_check_command)


def _check_command(args: argparse.Namespace) -> int:
    release = versions.get(args.release)
    with Progress(quiet=args.quiet or args.json).step("Asking a fresh interpreter"):
        report = check(release, find_place(args.python))
    if args.json:
        print(json.dumps(report, indent=2))
    elif not args.quiet:
        for line in report["files"]:
            why = f": {line['cause']}. To mend it: {line['mend']}." if "cause" in line else ""
            print(f"{line['file']}: {line['state']}{why}")
    return report["code"]
