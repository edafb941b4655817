# SPDX-License-Identifier: Apache-2.0
"""Serve the test model with the real plugin, flag off and on, and print a table of what was equal."""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from engine import faults
from engine.cases import BY_NAME, CASES, Case
from engine.compare import Verdict, judge
from engine.runs import Runs, prepare
from graft import copies, series
from graft.errors import GraftError


def verdicts(runs: Runs, cases: list[Case], jobs: int, tell) -> Iterator[Verdict]:
    """Judge each case, in order of completion; `tell` hears of each run that ends."""

    def both(case: Case) -> Verdict:
        results = []
        for arm in (case.first, case.second):
            results.append(runs.run(case, arm))
            tell()
        return judge(case, *results)

    with ThreadPoolExecutor(jobs) as pool:
        for done in as_completed([pool.submit(both, case) for case in cases]):
            yield done.result()


def table(found: list[Verdict]) -> Table:
    view = Table(title="The real engine, flag off and on", show_lines=False)
    view.add_column("case")
    view.add_column("serves", overflow="fold")
    view.add_column("KV-shared layers ran on", overflow="fold")
    for name in ("tokens", "logits", "largest difference", "seconds"):
        view.add_column(name, justify="right")
    view.add_column("result", overflow="fold")
    for verdict in found:
        paths = [f"{kind}: {path} ({count})" for kind, taken in verdict.paths.items() for path, count in taken.items()]
        result = "; ".join(verdict.problems) or verdict.note or "equal"
        view.add_row(
            verdict.case,
            verdict.promise,
            ", ".join(paths),
            str(verdict.tokens or ""),
            str(verdict.sampled or ""),
            "" if verdict.difference is None else f"{verdict.difference:.1e}",
            f"{verdict.seconds:.0f}",
            result,
            style="" if verdict.holds else "bold red",
        )
    return view


@contextmanager
def _scratch(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield Path(tempfile.mkdtemp(prefix="engine-", dir=keep)).resolve()
    else:
        with tempfile.TemporaryDirectory(prefix="engine-") as folder:
            yield Path(folder).resolve()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m engine", description=__doc__)
    parser.add_argument(
        "--source",
        type=Path,
        default=os.environ.get("GAUDI_FIXES_ROOT"),
        help="checkout, site-packages, wheel or sdist of vllm-gaudi (GAUDI_FIXES_ROOT)",
    )
    parser.add_argument("--release", help="of VERSIONS.toml; by default the one whose files the source has")
    parser.add_argument("--case", action="append", choices=BY_NAME, help="only this; repeatable")
    parser.add_argument("--quick", action="store_true", help="only the cases that say the most")
    parser.add_argument("--overrides", type=Path, default=copies.OVERRIDES, help="another folder of override sources")
    parser.add_argument(
        "--patch",
        metavar="NAME",
        help="the fix after this patch of vendor/upstream/series; all layers may run anywhere",
    )
    parser.add_argument("--allow-drift", action="store_true", help="go by the anchors where a pinned file differs")
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="interpreter that has vLLM")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at once")
    parser.add_argument("--json", action="store_true", help="print the verdicts as JSON")
    parser.add_argument("--keep", type=Path, help="folder in which logs and results stay")
    parser.add_argument("--faults", action="store_true", help="show which case catches each fault of tests/faults.py")
    parser.add_argument("--list", action="store_true", help="print the cases and stop")
    return parser


def main() -> int:
    parser = _parser()
    options = parser.parse_args()
    if options.list:
        for case in CASES:
            print(f"{case.name:<20} {case.promise}")
        return 0
    if options.source is None:
        parser.error("give --source, or set GAUDI_FIXES_ROOT")
    if options.faults:
        return faults.report(options.source, release=options.release, python=options.python)
    cases = [BY_NAME[name] for name in options.case or ()] or list(CASES)
    if options.quick:
        cases = [case for case in cases if case.quick]
    stage = None
    if options.patch:
        known = series.stages()
        names = [stage.name for stage in known]
        if options.patch not in names:
            parser.error(f"--patch is one of {', '.join(names)}")
        so_far = known[: names.index(options.patch) + 1]
        stage = so_far[-1]
        brought = {stage.name.partition("-")[2] for stage in so_far}
        cases = [replace(case, may_fall_back=True) for case in cases if not case.since or case.since in brought]
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )
    found = []
    try:
        with _scratch(options.keep) as scratch, bar:
            task = bar.add_task("merging the fix, writing the model", total=2 * len(cases))
            with prepare(
                options.source,
                scratch,
                release=options.release,
                overrides=stage.write(scratch / "stage") if stage else options.overrides,
                allow_drift=options.allow_drift,
                python=options.python,
            ) as runs:
                bar.update(task, description="serving")
                for verdict in verdicts(runs, cases, options.jobs, lambda: bar.advance(task)):
                    found.append(verdict)
                    if not verdict.holds:
                        why = f"{verdict.case}: {'; '.join(verdict.problems)}"
                        bar.console.print(why, style="red", markup=False)
    except GraftError as error:
        print(f"engine: {error}", file=sys.stderr)
        return error.exit_code
    order = [case.name for case in CASES]
    found.sort(key=lambda verdict: order.index(verdict.case))
    if options.json:
        print(json.dumps([{**asdict(v), "holds": v.holds} for v in found], indent=2))
    else:
        console = Console()
        if not console.is_terminal:
            console.width = 180
        console.print(table(found))
    return 0 if all(verdict.holds for verdict in found) else 1


if __name__ == "__main__":
    sys.exit(main())
