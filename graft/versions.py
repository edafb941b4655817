# SPDX-License-Identifier: Apache-2.0
"""Reads VERSIONS.toml: the supported releases, the hashes of their pristine files and what has been run on them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import tomlkit
from packaging.version import InvalidVersion, Version
from tomlkit.exceptions import TOMLKitError

from graft.errors import GraftError

VERSIONS = Path(__file__).resolve().parent.parent / "VERSIONS.toml"

UNPINNED = "unpinned"
_PIN = re.compile(r"sha256:[0-9a-f]{64}")
_TEXTS = ("tag", "vllm", "torch", "gaudi-software")
_EVIDENCE = ("what", "where", "by")


@dataclass(frozen=True)
class Evidence:
    """What has been run on a release, on what, and by whom."""

    what: str
    where: str
    by: str


@dataclass(frozen=True)
class Release:
    """A supported release. files: the hexadecimal sha256 of each pristine file; None for one not pinned yet."""

    name: str
    tag: str
    vllm: str
    torch: str
    gaudi_software: str
    override_revision: int
    files: Mapping[str, str | None]
    evidence: tuple[Evidence, ...]

    @property
    def is_pinned(self) -> bool:
        return None not in self.files.values()


def load(path: Path | None = None) -> dict[str, Release]:
    """All releases by name, in the file's order. path: VERSIONS.toml unless given.

    Raises:
        GraftError: the file cannot be read, or an entry is incomplete or malformed; the first such entry is named.
    """
    path = path or VERSIONS
    try:
        data = tomlkit.parse(path.read_text(encoding="utf-8")).unwrap()
    except OSError as error:
        raise GraftError(f"{path} cannot be read: {error.strerror}", "Restore it from git") from None
    except (TOMLKitError, UnicodeDecodeError) as error:
        raise GraftError(f"{path} is not TOML: {error}", "Mend it, or restore it from git") from None
    releases = data.get("releases")
    if not isinstance(releases, dict) or not releases:
        raise GraftError(f"{path} names no release", 'Add a [releases."0.30"] table')
    return {name: _release(name, entry, path) for name, entry in releases.items()}


def get(name: str, path: Path | None = None) -> Release:
    """One release, by its name ("0.30"), its version ("0.30.0") or its tag ("v0.30.0").

    Raises:
        GraftError: there is no such release, or the file is not right.
    """
    releases = load(path)
    for release in releases.values():
        if name in (release.name, release.tag, release.tag.removeprefix("v")):
            return release
    known = ", ".join(releases)
    raise GraftError(f"Release {name} is not in VERSIONS.toml", f"It knows {known}; take one of them")


def _release(name: str, entry: Any, path: Path) -> Release:
    def bad(what: str) -> GraftError:
        return GraftError(f"{path.name}, release {name}: {what}", "Mend the entry; the others show the form")

    if not isinstance(entry, dict):
        raise bad("it is not a table")
    for key in _TEXTS:
        if not isinstance(entry.get(key), str) or not entry[key]:
            raise bad(f"{key} is not a text" if key in entry else f"{key} is missing")
    known = {*_TEXTS, "override-revision", "files", "evidence"}
    if unknown := sorted(entry.keys() - known):
        raise bad(f"{unknown[0]} is unknown")
    try:
        fits_name = Version(entry["tag"]).release[:2] == Version(name).release
    except InvalidVersion:
        fits_name = False
    if not fits_name or not entry["tag"].startswith("v"):
        raise bad(f"the tag {entry['tag']} is not one of it, as v{name}.0 would be")
    revision = entry.get("override-revision")
    if type(revision) is not int or revision < 1:
        raise bad("override-revision is not a whole number from 1")
    files = entry.get("files")
    if not isinstance(files, dict) or not files:
        raise bad("files is missing or empty")
    for file, pin in files.items():
        inside = PurePosixPath(file)
        if inside.is_absolute() or ".." in inside.parts or inside.suffix != ".py" or str(inside) != file:
            raise bad(f"the file {file} is no path of a .py file below vllm_gaudi")
        if not isinstance(pin, str) or not (pin == UNPINNED or _PIN.fullmatch(pin)):
            raise bad(f'the hash of {file} is neither "{UNPINNED}" nor "sha256:" and 64 digits')
    evidence = entry.get("evidence", [])
    if not isinstance(evidence, list) or not all(_is_evidence(item) for item in evidence):
        raise bad(f"evidence needs the texts {', '.join(_EVIDENCE)}, and no others")
    pins = {file: None if pin == UNPINNED else pin.removeprefix("sha256:") for file, pin in files.items()}
    return Release(
        name=name,
        tag=entry["tag"],
        vllm=entry["vllm"],
        torch=entry["torch"],
        gaudi_software=entry["gaudi-software"],
        override_revision=revision,
        files=pins,
        evidence=tuple(Evidence(**item) for item in evidence),
    )


def _is_evidence(item: Any) -> bool:
    return (
        isinstance(item, dict)
        and item.keys() == set(_EVIDENCE)
        and all(isinstance(text, str) and text for text in item.values())
    )
