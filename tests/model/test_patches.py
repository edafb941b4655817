# SPDX-License-Identifier: Apache-2.0
"""The fix after each patch of the series says what it says with the flag off, and runs the rows it is said to run."""

import importlib.util
import os
import subprocess
import sys

import pytest

from graft import series

STAGES = series.stages()
TESTS = ("test_parity.py::test_mixed_lengths_and_padding_rows", "test_parity.py::test_one_prompt[129]")


@pytest.mark.parametrize("stage", STAGES[:-1], ids=lambda stage: stage.name)  # the last one is what all tests test
def test_parity_after_each_patch(tmp_path, stage):
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("these need vLLM without kernels: `nox -s tests` installs it")
    folder = os.path.dirname(__file__)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(f"{folder}/{test}" for test in TESTS)]
    variables = {**os.environ, "OVERRIDES": str(stage.write(tmp_path))}
    done = subprocess.run(command, capture_output=True, text=True, env=variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(TESTS)} passed" in done.stdout
