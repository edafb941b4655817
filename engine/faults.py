# SPDX-License-Identifier: Apache-2.0
"""Put each fault of tests/faults.py into the fix, and show which engine case catches it."""

import argparse
import os
import runpy
import shutil
import sys
import tempfile
from pathlib import Path

from engine.__main__ import prepare
from engine.cases import BY_NAME
from engine.compare import judge
from engine.plugin import PROJECT
from graft import copies
from graft.errors import GraftError

# The likeliest to catch something first; the rest of a fault's cases are not run once one has.
CASES = ("batch", "lengths", "image", "prefix", "chunks", "server")


def overrides_with(fault, folder: Path) -> Path:
    """The override sources with `fault` in them, below `folder`.

    Raises:
        GraftError: the fault's text no longer stands there once.
    """
    vendor = folder / "vendor"
    shutil.copytree(copies.OVERRIDES, vendor / copies.OVERRIDES.name)
    for path, old, new in fault.edits:
        file = folder / path
        text = file.read_text(encoding="utf-8")
        if text.count(old) != 1:
            raise GraftError(f"{old!r} stands {text.count(old)} times in {path}", "Mend tests/faults.py")
        file.write_text(text.replace(old, new), encoding="utf-8")
    return vendor / copies.OVERRIDES.name


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.faults", description=__doc__)
    parser.add_argument("--source", type=Path, default=os.environ.get("GAUDI_FIXES_ROOT"))
    parser.add_argument("--release")
    parser.add_argument("--python", type=Path, default=Path(sys.executable))
    parser.add_argument("--only", metavar="WORD", help="faults whose name holds this")
    options = parser.parse_args()
    if options.source is None:
        parser.error("give --source, or set GAUDI_FIXES_ROOT")
    options.allow_drift = False
    faults = runpy.run_path(str(PROJECT / "tests" / "faults.py"))["FAULTS"]
    stock, missed = {}, 0
    print("| fault | caught by the engine case |\n|---|---|", flush=True)
    for fault in faults:
        if options.only and options.only not in fault.name:
            continue
        with tempfile.TemporaryDirectory(prefix="engine-") as scratch:
            folder = Path(scratch)
            try:
                options.overrides = overrides_with(fault, folder)
                with prepare(options, folder) as runs:
                    caught = None
                    for case in map(BY_NAME.get, CASES):
                        if case.name not in stock:
                            stock[case.name] = runs.run(case, case.first)
                        verdict = judge(case, stock[case.name], runs.run(case, case.second))
                        if not verdict.holds:
                            caught = f"`{case.name}`: {verdict.problems[0]}"
                            break
            except GraftError as error:
                caught = None
                print(f"engine: {error}", file=sys.stderr)
        missed += caught is None
        print(f"| {fault.name} | {caught or '**nothing**'} |", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
