# SPDX-License-Identifier: Apache-2.0
"""How long merging both files of a release takes: python benchmarks/merge_time.py SOURCE"""

import argparse
import statistics
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from graft import copies, releases
from graft.errors import GraftError
from graft.merge import merge


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, help="a site-packages folder, a checkout, a wheel or an sdist")
    parser.add_argument("--repeat", type=int, default=10, help="merges of each file (default: 10)")
    args = parser.parse_args()
    console = Console(stderr=True)
    try:
        tree = releases.find(args.source)
        sources = {file: (copies.OVERRIDES / file).read_text() for file in copies.overridden()}
        pristine = {file: tree.read(file).decode() for file in sources}
        seconds: dict[str, list[float]] = {file: [] for file in sources}
        for _ in track(range(args.repeat), "Merging", console=console, disable=not console.is_terminal):
            for file, source in sources.items():
                start = time.perf_counter()
                merge(pristine[file], source, name=file, release=tree.version or "?")
                seconds[file].append(time.perf_counter() - start)
    except GraftError as error:
        print(f"merge_time: {error}", file=sys.stderr)
        return error.exit_code
    table = Table(title=f"{args.repeat} merges of each file, seconds")
    for column in ("file", "lines", "median", "longest"):
        table.add_column(column, justify="left" if column == "file" else "right")
    for file, times in seconds.items():
        lines = str(pristine[file].count("\n"))
        table.add_row(file, lines, f"{statistics.median(times):.2f}", f"{max(times):.2f}")
    both = [sum(times) for times in zip(*seconds.values(), strict=True)]
    table.add_row("all", "", f"{statistics.median(both):.2f}", f"{max(both):.2f}")
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
