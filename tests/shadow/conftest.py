# SPDX-License-Identifier: Apache-2.0
"""An environment whose vllm_gaudi is shadowed, for every Python of this machine."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.environments import (
    Environment,
    copies_of,
    install_tree,
    make_environment,
    plain_tree,
    pythons,
    turn_on,
)


@dataclass
class Shadowed:
    """An environment, the vllm_gaudi it imports, and the copies that stand in its place."""

    environment: Environment
    package: Path
    copies: Path


@pytest.fixture(params=pythons(), ids=lambda version: f"py{version}")
def version(request) -> str:
    """A version of Python that this machine has."""
    return request.param


@pytest.fixture
def bare(tmp_path, version) -> Environment:
    """An empty environment."""
    return make_environment(tmp_path / "environment", version)


@pytest.fixture
def shadowed(tmp_path, bare) -> Shadowed:
    """An environment with a vllm_gaudi from a wheel, shadowed by copies in a folder beside it."""
    return shadow(tmp_path, bare, "wheel")


def shadow(tmp_path: Path, environment: Environment, style: str) -> Shadowed:
    """Install a vllm_gaudi in a style and shadow it."""
    package = install_tree(environment, plain_tree(tmp_path / "tree"), style)
    copies = copies_of(package, tmp_path / "checkout" / "releases" / "v0.30.0")
    turn_on(environment, copies.parent)
    return Shadowed(environment, package, copies)
