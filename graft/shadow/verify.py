# SPDX-License-Identifier: Apache-2.0
"""Decides whether the copies may load: only when every file is what it was when they were made."""

import hashlib
import json
import os
import sys
from _thread import get_ident
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from importlib.util import spec_from_file_location

FOLDER = os.path.dirname(os.path.abspath(__file__))
APPLIED, NOT_APPLIED, DRIFTED = 0, 1, 2


class Doubt(Exception):
    """Why a copy may not load: the exit code of a check, the cause and what to run."""

    def __init__(self, code: int, cause: str, mend: str) -> None:
        super().__init__(f"{cause}. To mend it: {mend}")
        self.code, self.cause, self.mend = code, cause, mend


class Copy(SourceFileLoader):
    """Loads a copy from the very bytes that were verified; writes and reads no `.pyc`."""

    def __init__(self, fullname: str, path: str, source: bytes) -> None:
        super().__init__(fullname, path)
        self.source = source

    def get_code(self, fullname):
        """Compile the verified bytes."""
        return self.source_to_code(self.source, self.path)


def find(finder, fullname: str, path, target):
    """Answer the spec of the copy of `fullname`, or None where vllm_gaudi's own module is to load.

    The first of our modules that is asked for decides for all of them and for the whole process:
    two merged files belong together, one alone could compute something wrong.
    """
    if (get_ident(), fullname) in finder.asking:  # another tool's finder asks everyone again
        return None
    verdict = finder.verdict
    try:
        if "manifest" not in verdict:
            verdict.setdefault("manifest", read_manifest())
        if fullname not in verdict["manifest"]["modules"]:
            return None
        with stepping_aside(finder, fullname):
            pristine = ask_the_others(finder, fullname, path, target)
        if pristine is None:  # vllm_gaudi has no such module
            return None
        if "copies" not in verdict:
            verdict.setdefault("copies", decide(verdict["manifest"], fullname, pristine))
    except Doubt as doubt:
        verdict.setdefault("manifest", {"modules": {}})
        verdict.setdefault("copies", {})
        finder.warn(doubt.cause, doubt.mend)
    copy = verdict["copies"].get(fullname)
    if copy is None:
        return None
    return spec_from_file_location(fullname, copy[0], loader=Copy(fullname, *copy))


def decide(manifest: dict, fullname: str, pristine) -> dict:
    """Answer every copy as {module: (path, source)}. Raises Doubt where any file is not right.

    `pristine` is the spec of vllm_gaudi's own module `fullname`.
    """
    root = root_of(pristine, manifest["modules"][fullname]["file"])
    for name in manifest["modules"]:
        check_pristine(manifest, name, root)
    return {name: read_copy(manifest, name) for name in manifest["modules"]}


@contextmanager
def stepping_aside(finder, fullname: str):
    """For as long as it lasts, our finder does not answer for `fullname` in this thread."""
    key = (get_ident(), fullname)
    finder.asking.add(key)
    try:
        yield
    finally:
        finder.asking.discard(key)


def ask_the_others(finder, fullname: str, path, target=None):
    """Answer the spec that the finders behind ours give, or None."""
    finders = list(sys.meta_path)
    behind = finders[finders.index(finder) + 1 :] if finder in finders else finders
    for other in behind:
        find_spec = getattr(other, "find_spec", None)
        spec = find_spec(fullname, path, target) if find_spec else None
        if spec is not None:
            return spec
    return None


def read_manifest(folder: str = FOLDER) -> dict:
    """Read `manifest.json`. Raises Doubt where it is missing or not one of ours."""
    path = os.path.join(folder, "manifest.json")
    again = "run `python -m graft install RELEASE` in the checkout again"
    try:
        with open(path, "rb") as file:
            manifest = json.load(file)
    except OSError as error:
        raise Doubt(NOT_APPLIED, f"{path} cannot be read ({error.strerror})", again) from None
    except ValueError:
        raise Doubt(NOT_APPLIED, f"{path} is broken", again) from None
    if not well_formed(manifest):
        raise Doubt(NOT_APPLIED, f"{path} is not a manifest this shadow knows", again)
    return manifest


def well_formed(manifest) -> bool:
    """Whether a manifest has the fields that are read from it, and stays inside its folder."""
    try:
        modules = manifest["modules"]
        return (
            manifest["schema"] == 1
            and isinstance(manifest["release"], str)
            and bool(modules)
            and all(
                name == "vllm_gaudi." + entry["file"][: -len(".py")].replace("/", ".")
                and entry["file"].endswith(".py")
                and ".." not in entry["file"]
                and isinstance(entry["pristine_sha256"], str)
                and isinstance(entry["merged_sha256"], str)
                for name, entry in modules.items()
            )
        )
    except (TypeError, KeyError, AttributeError):
        return False


def install_command(manifest: dict) -> str:
    """What to run to make the copies of this release again."""
    return f"run `python -m graft install {manifest['release']}` in the checkout"


def read_copy(manifest: dict, name: str, folder: str = FOLDER) -> tuple:
    """Read one copy as (path, source). Raises Doubt where it is not what was merged."""
    entry = manifest["modules"][name]
    path = os.path.join(folder, *entry["file"].split("/"))
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        cause = f"the copy {path} cannot be read ({error.strerror})"
        raise Doubt(NOT_APPLIED, cause, install_command(manifest)) from None
    if hashlib.sha256(source).hexdigest() != entry["merged_sha256"]:
        cause = f"the copy {path} is not what was merged: it was cut short or edited"
        raise Doubt(NOT_APPLIED, cause, install_command(manifest))
    return path, source


def root_of(spec, file: str) -> str:
    """Answer the folder of vllm_gaudi, from the spec of its module at `file`. Raises Doubt."""
    origin = os.path.abspath(spec.origin) if spec.origin else ""
    tail = os.path.join("", *file.split("/"))
    if not origin.endswith(os.sep + tail):
        cause = f"vllm-gaudi's own {file} is not a source file (found {spec.origin})"
        raise Doubt(DRIFTED, cause, "install vllm-gaudi from a wheel or a checkout")
    return origin[: -len(tail) - 1]


def check_pristine(manifest: dict, name: str, root: str) -> None:
    """Raises Doubt where vllm_gaudi's own file is not the one the copy was merged from."""
    entry = manifest["modules"][name]
    path = os.path.join(root, *entry["file"].split("/"))
    try:
        with open(path, "rb") as file:
            digest = hashlib.sha256(file.read()).hexdigest()
    except OSError as error:
        cause = f"vllm-gaudi's own {path} cannot be read ({error.strerror})"
        raise Doubt(DRIFTED, cause, "install vllm-gaudi again") from None
    if digest != entry["pristine_sha256"]:
        cause = (
            f"vllm-gaudi's own {path} is not the file that the copies for {manifest['release']} "
            "were merged from: it was upgraded or edited since"
        )
        mend = f"{install_command(manifest)}, or `python -m graft uninstall`"
        raise Doubt(DRIFTED, cause, mend)


def without_importing(name: str):
    """Answer the spec that `import name` would use, without importing its parent packages.

    Asks the finders as the import system does. None where a parent or the module is not found.
    """
    path = None
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        spec = None
        for finder in list(sys.meta_path):
            find_spec = getattr(finder, "find_spec", None)
            spec = find_spec(".".join(parts[:depth]), path, None) if find_spec else None
            if spec is not None:
                break
        if spec is None:
            return None
        path = spec.submodule_search_locations
        if path is None and depth < len(parts):
            return None
    return spec
