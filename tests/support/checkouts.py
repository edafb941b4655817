# SPDX-License-Identifier: Apache-2.0
"""Checkouts of this project of their own, and environments that hold a vllm_gaudi to merge the fix into."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.support.environments import (
    REPOSITORY,
    Environment,
    anchored_tree,
    install_anything,
    install_tree,
    make_environment,
    own_version,
)


@dataclass
class Checkout:
    """A copy of the tool and the fix, without git and without copies."""

    root: Path

    @property
    def releases(self) -> Path:
        return self.root / "vendor" / "releases"

    def run(self, *words, environment: Environment | None = None, **variables) -> subprocess.CompletedProcess:
        """Run `python -m graft`; with an environment, that is the active one."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VLLM_", "VIRTUAL_", "GAUDI_"))}
        if environment is not None:
            kept["VIRTUAL_ENV"] = str(environment.root)
        return subprocess.run(
            [sys.executable, "-m", "graft", *map(str, words)],
            capture_output=True,
            text=True,
            cwd=self.root,
            env=kept | {"PATH": "/nowhere"} | {k: str(v) for k, v in variables.items()},
        )

    def ok(self, *words, **more) -> str:
        """Run it, expect exit code 0, answer what it prints."""
        done = self.run(*words, **more)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def state(self, environment: Environment, release: str = "0.30") -> dict:
        """What `check --json` says of an environment; its exit code must agree."""
        done = self.run("check", release, "--json", environment=environment)
        report = json.loads(done.stdout)
        assert report["code"] == done.returncode
        return report


def make_checkout(root: Path) -> Checkout:
    """Copy what the tool needs of this project."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(REPOSITORY / "graft", root / "graft", ignore=ignored)
    shutil.copytree(
        REPOSITORY / "vendor" / "vllm_gaudi_overrides", root / "vendor" / "vllm_gaudi_overrides", ignore=ignored
    )
    shutil.copytree(REPOSITORY / "vendor" / "upstream", root / "vendor" / "upstream", ignore=ignored)
    shutil.copy(REPOSITORY / "VERSIONS.toml", root)
    return Checkout(root)


def with_release(
    tmp_path: Path, name: str, style: str, *, version: str | None = None, release: str = "0.30.0"
) -> Environment:
    """Make an environment of that name and install a stand-in in a style."""
    made = make_environment(tmp_path / name, version or own_version())
    tree = tmp_path / f"tree of {name}"
    install_tree(made, anchored_tree(tree, imports_leave=tmp_path / "imported"), style, release)
    install_anything(made)
    return made
