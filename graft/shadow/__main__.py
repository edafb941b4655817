# SPDX-License-Identifier: Apache-2.0
"""`python -m vllm_gaudi_overrides [--json]`: says whether the copies load in this environment.

Exits with 0 (applied), 1 (not applied) or 2 (drifted). Needs nothing but the standard library, and
imports no module of vllm_gaudi.
"""

import argparse
import hashlib
import json
import os
import sys
from contextlib import nullcontext

from vllm_gaudi_overrides import active, switched_off, verify
from vllm_gaudi_overrides.verify import APPLIED, DRIFTED, NOT_APPLIED, Doubt

STATES = {APPLIED: "applied", NOT_APPLIED: "not applied", DRIFTED: "drifted"}


def report(folder: str = verify.FOLDER) -> dict:
    """Answer the state of each file: {"code", "state", "release", "folder", "files": [...]}."""
    facts = {"release": None, "folder": folder, "python": sys.executable}
    try:
        manifest = verify.read_manifest(folder)
    except Doubt as doubt:
        return {**summary({"manifest.json": doubt}), **facts}
    facts["release"] = manifest["release"]
    names = {entry["file"]: name for name, entry in manifest["modules"].items()}
    files = {file: why_not(at_rest, manifest, name, folder) for file, name in names.items()}
    if not any(files.values()):
        files = {file: why_not(at_work, manifest, name, folder) for file, name in names.items()}
    return {**summary(files), **facts}


def why_not(check, *arguments) -> Doubt | None:
    """Answer the doubt that a check raises, or None."""
    try:
        check(*arguments)
    except Doubt as doubt:
        return doubt
    return None


def at_rest(manifest: dict, name: str, folder: str) -> None:
    """Raises Doubt where a copy, or what it was merged from, is not what the manifest says."""
    verify.read_copy(manifest, name, folder)
    finder = active()
    with verify.stepping_aside(finder, name) if finder else nullcontext():
        pristine = verify.without_importing(name)
    if pristine is None and verify.without_importing("vllm_gaudi") is None:
        mend = "install vllm-gaudi, or run `python -m graft uninstall` in the checkout"
        raise Doubt(NOT_APPLIED, "this environment has no vllm_gaudi", mend)
    if pristine is None:
        raise Doubt(DRIFTED, f"vllm_gaudi has no module {name}", verify.install_command(manifest))
    root = verify.root_of(pristine, manifest["modules"][name]["file"])
    verify.check_pristine(manifest, name, root)
    check_source(manifest, name, folder)


def at_work(manifest: dict, name: str, folder: str) -> None:
    """Raises Doubt where an import in this interpreter would not give the copy."""
    if switched_off():
        mend = "unset VLLM_GAUDI_OVERRIDES"
        raise Doubt(NOT_APPLIED, "VLLM_GAUDI_OVERRIDES=0 turns the shadow off", mend)
    if active() is None:
        cause = "the shadow is not turned on: no .pth line ran in this interpreter"
        raise Doubt(NOT_APPLIED, cause, verify.install_command(manifest))
    found = verify.without_importing(name)
    if found is None or found.origin != verify.read_copy(manifest, name, folder)[0]:
        cause = f"another import hook answers first, with {found and found.origin}"
        raise Doubt(NOT_APPLIED, cause, f"look at the hooks before ours: {', '.join(hook_names())}")


def hook_names() -> list:
    """The types of the finders that stand before ours."""
    finders = [f if isinstance(f, type) else type(f) for f in sys.meta_path]
    ours = type(active())
    before = finders[: finders.index(ours)] if ours in finders else finders
    return [f"{f.__module__}.{f.__qualname__}" for f in before]


def check_source(manifest: dict, name: str, folder: str) -> None:
    """Raises Doubt where the fix's own source, if it can be reached, changed since the merge."""
    entry = manifest["modules"][name]
    vendor = os.path.dirname(os.path.dirname(os.path.dirname(folder)))
    path = os.path.join(vendor, "vllm_gaudi_overrides", *entry["file"].split("/"))
    try:
        with open(path, "rb") as file:
            digest = hashlib.sha256(file.read()).hexdigest()
    except OSError:
        return
    if digest != entry.get("override_sha256"):
        cause = f"{path} changed since the copy was merged"
        raise Doubt(DRIFTED, cause, verify.install_command(manifest))


def summary(files: dict) -> dict:
    """Answer {"code", "state", "files"} for {file: Doubt or None}; one doubt holds all back."""
    code = max((doubt.code for doubt in files.values() if doubt), default=APPLIED)
    lines = []
    for file, doubt in files.items():
        if doubt is None and code != APPLIED:
            other = next(name for name, reason in files.items() if reason)
            doubt = Doubt(code, f"right by itself, held back with {other}", "mend that one")
        line = {"file": file, "code": doubt.code if doubt else APPLIED}
        line["state"] = STATES[line["code"]]
        if doubt:
            line.update(cause=doubt.cause, mend=doubt.mend)
        lines.append(line)
    return {"code": code, "state": STATES[code], "files": lines}


class Parser(argparse.ArgumentParser):
    """Leaves exit code 2 to drift."""

    def error(self, message):
        """Exit with 1 and a line."""
        self.exit(NOT_APPLIED, f"{self.prog}: {message}. See --help.\n")


def main(arguments=None) -> int:
    """Print the report and answer its code."""
    parser = Parser(prog="python -m vllm_gaudi_overrides", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    found = report()
    if options.json:
        print(json.dumps(found, indent=2))
        return found["code"]
    for line in found["files"]:
        why = f": {line['cause']}. To mend it: {line['mend']}." if "cause" in line else ""
        print(f"{line['file']}: {line['state']}{why}")
    return found["code"]


if __name__ == "__main__":
    raise SystemExit(main())
