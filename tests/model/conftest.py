# SPDX-License-Identifier: Apache-2.0
"""vLLM's own Gemma 4 behind a stand-in of the plugin, the fix merged in; one pair of runners per configuration."""

import importlib.util
import os
from pathlib import Path

import pytest
import torch
from pairs import Pair

from demo import model, plugin
from demo.runner import Runner
from graft import copies


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The stand-in with the fix merged in, in use by this process; OVERRIDES names other override sources."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("these need vLLM without kernels: `nox -s tests` installs it")
    torch.set_num_threads(1)  # the models are too small for more
    overrides = Path(os.environ.get("OVERRIDES", copies.OVERRIDES))
    return plugin.use(plugin.make(tmp_path_factory.mktemp("standin") / "site", overrides=overrides))


@pytest.fixture(scope="session")
def pair_of(site):
    """Build a pair for a configuration, once."""
    made = {}

    def build(*, vision=False, dtype="float32", **shape) -> Pair:
        key = (vision, dtype, *sorted(shape.items()))
        if key not in made:
            config = model.text_config(**shape)
            reference = model.reference(config)
            runners = []
            for flag in (False, True):
                built, settings = model.build(config, reference, fast_prefill=flag, vision=vision, dtype=dtype)
                runners.append(Runner(built, settings))
            made[key] = Pair(*runners, reference, config)
        return made[key]

    return build


@pytest.fixture
def pair(pair_of):
    """E2B's shape: 35 layers of which 20 share, every fifth full, 8 heads on 1 KV head, window 128."""
    return pair_of()
