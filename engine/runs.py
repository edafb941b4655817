# SPDX-License-Identifier: Apache-2.0
"""Run arms in processes of their own: per thread, plugin and mode one engine.arm that forks for each."""

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from engine import plugin
from engine.cases import Arm, Case
from engine.compare import Run
from graft import copies, releases, versions
from graft.errors import GraftError

NEEDS = ("vllm", "torchvision", "transformers")
ARM_SECONDS = 900
# Read while the plugin is imported, so a process serves one value of them.
AT_IMPORT = ("PT_HPU_LAZY_MODE",)


@dataclass
class Runs:
    """The plugin, the interpreter that holds vLLM, the test model, a scratch folder.

    As a context manager it ends the processes it has started.
    """

    plugin: plugin.Plugin
    python: Path
    model: Path
    scratch: Path
    _started: dict[tuple, subprocess.Popen] = field(default_factory=dict)

    def __enter__(self) -> "Runs":
        return self

    def __exit__(self, *exc) -> None:
        for process in self._started.values():
            process.stdin.close()
        for process in self._started.values():
            process.wait(30)

    def run(self, case: Case, arm: Arm) -> Run:
        """Serve one arm of a case. Never raises for what the plugin does: a run may hold an error."""
        out = Path(tempfile.mkdtemp(prefix=f"{case.name}-", dir=self.scratch))
        job = {
            "case": case.name,
            "flag": arm.flag,
            "model": str(self.model / arm.checkpoint),
            "out": str(out),
            "environ": case.environ,
        }
        begun = time.monotonic()
        status = self._serve(job, arm.fixed, case.environ)
        if not (out / "result.json").exists():
            lines = (out / "log").read_text(errors="replace") if (out / "log").exists() else ""
            error = f"{status}: {' '.join(lines.strip().splitlines()[-1:])}"
            result = {"error": error, "forwards": [], "answers": [], "caches": []}
            return Run({**result, "seconds": time.monotonic() - begun}, [])
        with np.load(out / "logits.npz") as logits:
            rows = [logits[name] for name in logits.files]
        return Run(json.loads((out / "result.json").read_text()), rows)

    def _serve(self, job: dict, fixed: bool, environ: Mapping[str, str]) -> str:
        """Have a process fork for `job`; how that ended, in words."""
        at_import = {name: environ[name] for name in AT_IMPORT if name in environ}
        key = (threading.get_ident(), fixed, *sorted(at_import.items()))
        process = self._started.get(key)
        if process is None or process.poll() is not None:
            process = self._started[key] = self._start(fixed, at_import)
        timer = threading.Timer(ARM_SECONDS, process.kill)
        timer.start()
        try:
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline().strip()
        except BrokenPipeError:
            answer = ""
        finally:
            timer.cancel()
        if answer:
            return f"the run ended with status {answer}"
        last = (self.scratch / "imports.log").read_text(errors="replace").strip().splitlines()[-1:]
        return f"the process ended, or gave no result in {ARM_SECONDS} s; the last it said: {' '.join(last)}"

    def _start(self, fixed: bool, at_import: Mapping[str, str]) -> subprocess.Popen:
        environ = plugin.environ(self.plugin, fixed=fixed, scratch=self.scratch, extra=at_import)
        with (self.scratch / "imports.log").open("a") as log:
            return subprocess.Popen(
                [self.python, "-m", "engine.arm"],
                env=environ,
                cwd=self.scratch,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )


def prepare(
    source: Path,
    scratch: Path,
    *,
    release: str | None = None,
    overrides: Path = copies.OVERRIDES,
    allow_drift: bool = False,
    python: Path = Path(sys.executable),
) -> Runs:
    """Make the full copies for a source, and write the test model.

    Args:
        source: a checkout, a site-packages folder, a wheel or an sdist of vllm-gaudi.
        scratch: an empty folder for all that is made.
        release: of VERSIONS.toml; None for the one whose files the source has.
        allow_drift: go by the anchors where the source's files are not the release's pinned ones.
        python: an interpreter that has the matching vLLM.
    Raises:
        GraftError: the source, the release or the environment is not fit.
    """
    chosen = versions.get(release) if release else plugin.release_of(releases.find(source))
    if chosen is None:
        raise GraftError(f"{source} does not tell which release it is of", "Name the release with --release")
    probe = f"import importlib.util as u; print(*[n for n in {NEEDS} if not u.find_spec(n)])"
    done = subprocess.run([python, "-I", "-c", probe], capture_output=True, text=True)
    if done.returncode or done.stdout.strip():
        raise GraftError(
            f"{python} lacks {done.stdout.strip() or 'a working Python'}",
            "Run `nox -s engine -- --source PATH`, or give the interpreter that has it with --python",
        )
    prepared = plugin.prepare(source, chosen, overrides, scratch, drifted=allow_drift)
    environ = plugin.environ(prepared, fixed=False, scratch=scratch, extra={})
    model = scratch / "model"
    made = subprocess.run([python, "-m", "engine.model", model, "--text"], env=environ, capture_output=True, text=True)
    if made.returncode:
        last = " ".join(made.stderr.strip().splitlines()[-1:])
        raise GraftError(f"The test model could not be written: {last}", "Use the environment of `nox -s engine`")
    return Runs(prepared, python, model, scratch)
