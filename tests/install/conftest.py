# SPDX-License-Identifier: Apache-2.0
"""A checkout, and an environment to install into."""

import pytest

from tests.support.checkouts import Checkout, make_checkout, with_release
from tests.support.environments import Environment


@pytest.fixture
def checkout(tmp_path) -> Checkout:
    """A checkout."""
    return make_checkout(tmp_path / "checkout")


@pytest.fixture
def environment(tmp_path) -> Environment:
    """An environment with a vllm_gaudi 0.30 from a wheel; importing that leaves the file `imported` behind."""
    return with_release(tmp_path, "environment", "wheel")
