# SPDX-License-Identifier: Apache-2.0
"""What the shadow costs at interpreter start: `python -c pass` with it and without, in turns, on every Python here.

Run it from the root of the repository: `python -m benchmarks.startup`.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support.environments import (
    Environment,
    copies_of,
    install_tree,
    make_environment,
    plain_tree,
    pythons,
    turn_on,
)

HEAVY = {"pathlib", "json", "hashlib", "importlib.util", "importlib.metadata"}
LIMIT = 1.0  # milliseconds
VARIABLES = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def make(folder: Path, version: str, *, shadowed: bool) -> Environment:
    """An environment that holds a vllm_gaudi and one other .pth file, shadowed or not."""
    environment = make_environment(folder / ("with" if shadowed else "without"), version)
    package = install_tree(environment, plain_tree(folder / "tree"), "wheel")
    (environment.site_packages / "other.pth").write_text("# what other tools leave\n")
    if shadowed:
        turn_on(environment, copies_of(package, folder / "v0.30.0").parent)
    return environment


def start(environment: Environment, *options: str) -> subprocess.CompletedProcess:
    """One interpreter start."""
    command = [environment.python, *options, "-c", "pass"]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=VARIABLES)


def milliseconds(environment: Environment) -> tuple[float, float]:
    """How long one start takes, and how much processor time."""
    begin = time.perf_counter()
    child = os.posix_spawn(environment.python, [environment.python, "-c", "pass"], VARIABLES)
    usage = os.wait4(child, 0)[2]
    return 1000 * (time.perf_counter() - begin), 1000 * (usage.ru_utime + usage.ru_stime)


def imported(environment: Environment) -> set[str]:
    """The modules that a start imports."""
    lines = start(environment, "-X", "importtime").stderr.splitlines()
    return {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}


def main() -> int:
    """Print a row per Python; 1 where it takes more processor time than the limit or imports a heavy module.

    The clock says the same on an idle machine, and on a busy one what the others do.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=50, help="starts of each kind (default: 50)")
    starts = parser.parse_args().starts
    failed = False
    print("Medians in ms; the differences are medians of the differences of neighbours.")
    print(f"{'Python':8}{'clock':>9}{'with':>9}{'more':>8}{'processor':>12}{'with':>9}{'more':>8}  newly imported")
    for version in pythons():
        with tempfile.TemporaryDirectory() as folder:
            kinds = [make(Path(folder), version, shadowed=shadowed) for shadowed in (False, True)]
            for environment in kinds:
                start(environment)  # writes the bytecode
            pairs = [[milliseconds(environment) for environment in kinds] for _ in range(starts)]
            columns = []
            for kind in (0, 1):
                without, shadowed = ([pair[side][kind] for pair in pairs] for side in (0, 1))
                more = statistics.median(b - a for a, b in zip(without, shadowed, strict=True))
                columns += [statistics.median(without), statistics.median(shadowed), more]
            new = imported(kinds[1]) - imported(kinds[0])
        failed |= columns[5] > LIMIT or bool(new & HEAVY)
        shown = "{:9.2f}{:9.2f}{:8.2f}{:12.2f}{:9.2f}{:8.2f}".format(*columns)
        print(f"{version:8}{shown}  {', '.join(sorted(new))}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
