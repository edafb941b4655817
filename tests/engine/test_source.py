# SPDX-License-Identifier: Apache-2.0
"""A real release, served with the flag off and on: each case of the engine table as a test."""

import importlib.metadata
import os
from pathlib import Path

import pytest

from engine.cases import CASES
from engine.compare import judge
from engine.plugin import release_of
from engine.runs import prepare
from graft import releases

ROOT = os.environ.get("GAUDI_FIXES_ROOT")


def why_not():
    """Why no release can be served here."""
    if not ROOT:
        return "GAUDI_FIXES_ROOT names no vllm-gaudi"
    release = release_of(releases.find(Path(ROOT)))
    if release is None:
        return f"{ROOT} is of no release in VERSIONS.toml"
    try:
        here = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        here = "none"
    if here != release.vllm:
        return f"vllm-gaudi {release.tag} wants vLLM {release.vllm}, here is {here}: `nox -s engine` brings it"
    return None


pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    with prepare(Path(ROOT), tmp_path_factory.mktemp("engine")) as runs:
        yield runs


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_serves(runs, case):
    verdict = judge(case, runs.run(case, case.first), runs.run(case, case.second))
    assert verdict.holds, f"{case.promise}: {'; '.join(verdict.problems)}"
