# SPDX-License-Identifier: Apache-2.0
"""What of ours is in an environment's site-packages, and what belongs there."""

import base64
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from graft import copies
from graft.releases import Environment
from graft.transaction import LEFTOVER
from graft.versions import Release

FILES = Path(__file__).resolve().parent / "site_packages"
GUARD = "vllm_gaudi_overrides_start.py"
PTH = "vllm_gaudi_overrides.pth"
START = "vllm_gaudi_overrides.start"
SWITCHES = (GUARD, PTH, START)  # in the order in which they are written
USERS = "installed.json"


@dataclass(frozen=True)
class Place:
    """The site-packages folder of an environment."""

    environment: Environment

    @property
    def folder(self) -> Path:
        return self.environment.purelib

    @property
    def pth(self) -> Path:
        return self.folder / PTH

    @property
    def package(self) -> Path:
        """Where the copies are when they are kept inside site-packages."""
        return self.folder / copies.NAME

    def entry(self) -> Path | None:
        """The folder that the .pth file's path entry names, or None."""
        try:
            lines = self.pth.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError):
            return None
        paths = [line for line in lines if line and not line.startswith(("#", "import "))]
        return Path(paths[0]) if paths else None

    def records(self) -> list[Path]:
        """The metadata folders that our installs wrote; more than one after an interruption."""
        return sorted(self.folder.glob(f"{copies.NAME}-*.dist-info"))

    def is_empty(self) -> bool:
        """Whether nothing of ours is here, leftovers of a killed install included."""
        return not self.written() and not list(self.folder.glob(f"{LEFTOVER}*"))

    def written(self) -> list[Path]:
        """The files and folders that installs wrote here, and the bytecode Python made of them; what turns the
        copies on comes first, in the order in which to take it away.

        They are known by their names, so that they are found also where a kill or a hand left no record of them.
        """
        bytecode = (self.folder / "__pycache__").glob(f"{Path(GUARD).stem}.*.pyc")
        found = [*(self.folder / name for name in reversed(SWITCHES)), *bytecode, *self.records(), self.package]
        return [path for path in found if os.path.lexists(path)]


def record_name(release: Release) -> str:
    """The name of the metadata folder that `pip list` and `pip uninstall` read."""
    return f"{copies.NAME}-{_version(release)}.dist-info"


def _version(release: Release) -> str:
    return f"{release.tag.removeprefix('v')}+r{release.override_revision}"


def contents(plan: copies.Plan, entry: Path | None) -> dict[str, bytes]:
    """What an install writes into site-packages besides the copies, in the order of writing.

    entry: the folder with the copies, or None where they are inside site-packages.
    """
    switches = {name: (FILES / name).read_bytes() for name in SWITCHES}
    if entry is not None:
        comment, line = switches[PTH].splitlines(keepends=True)
        switches[PTH] = b"".join([comment, f"{entry}\n".encode("ascii"), line])
    info = record_name(plan.release)
    described = {
        f"{info}/METADATA": (
            "Metadata-Version: 2.1\n"
            "Name: vllm-gaudi-overrides\n"
            f"Version: {_version(plan.release)}\n"
            f"Summary: gemma4-fast-prefill: copies of two modules of vllm-gaudi {plan.release.tag} "
            "with fast prefill for Gemma 4 merged in.\n"
        ).encode(),
        f"{info}/INSTALLER": b"gemma4-fast-prefill\n",
    }
    listed = {**described, **switches} | (dict(plan.contents) if entry is None else {})
    record = "".join(_row(name, data) for name, data in sorted(listed.items())) + f"{info}/RECORD,,\n"
    return {f"{info}/RECORD": record.encode(), **described, **switches}


def _row(name: str, data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(data)}\n"


def users(folder: Path) -> dict:
    """Which environments use the copies in a folder: {"environments": [site-packages, ...],
    "made_by_install": bool}. Those that point elsewhere by now are left out."""
    try:
        data = json.loads((folder / copies.NAME / USERS).read_text(encoding="utf-8"))
        named = [str(name) for name in data["environments"]]
        made = bool(data["made_by_install"])
    except (OSError, ValueError, KeyError, TypeError):
        return {"environments": [], "made_by_install": False}
    return {"environments": [name for name in named if _uses(name, folder)], "made_by_install": made}


def _uses(site_packages: str, folder: Path) -> bool:
    try:
        lines = Path(site_packages, PTH).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return False
    return str(folder) in lines


def encode_users(data: Mapping) -> bytes:
    """The bytes of the file that `users` reads."""
    return (json.dumps(data, indent=2) + "\n").encode()


def same_place(one: str | Path, other: str | Path) -> bool:
    """Whether two paths name one folder."""
    return os.path.realpath(one) == os.path.realpath(other)
