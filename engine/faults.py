# SPDX-License-Identifier: Apache-2.0
"""Put each fault of tests/faults.py into the fix, and show which engine case catches it."""

import runpy
import shutil
import sys
import tempfile
from pathlib import Path

from engine.cases import BY_NAME
from engine.compare import Run, judge
from engine.plugin import PROJECT
from engine.runs import Runs, prepare
from graft import copies
from graft.errors import GraftError

# The likeliest to catch something first; the rest of a fault's cases are not run once one has.
CASES = ("batch", "lengths", "image", "prefix", "chunks", "server", "scale")


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


def report(source: Path, *, release: str | None, python: Path) -> int:
    """Print a table in Markdown, a fault per line; 1 if one goes unnoticed or no longer applies, else 0."""
    faults = runpy.run_path(str(PROJECT / "tests" / "faults.py"))["FAULTS"]
    stock: dict[str, Run] = {}
    missed = 0
    print("| fault | caught by the engine case |\n|---|---|", flush=True)
    for fault in faults:
        with tempfile.TemporaryDirectory(prefix="engine-") as scratch:
            try:
                overrides = overrides_with(fault, Path(scratch))
                with prepare(source, Path(scratch), release=release, overrides=overrides, python=python) as runs:
                    caught = _first_catch(runs, stock)
            except GraftError as error:
                caught = None
                print(f"engine: {error}", file=sys.stderr)
        missed += caught is None
        print(f"| {fault.name} | {caught or '**nothing**'} |", flush=True)
    return 1 if missed else 0


def _first_catch(runs: Runs, stock: dict[str, Run]) -> str | None:
    """The first of CASES that does not hold, and why. `stock` keeps the stock runs from one fault to the next."""
    for name in CASES:
        case = BY_NAME[name]
        if name not in stock:
            stock[name] = runs.run(case, case.first)
        verdict = judge(case, stock[name], runs.run(case, case.second))
        if not verdict.holds:
            return f"`{name}`: {verdict.problems[0]}"
    return None
