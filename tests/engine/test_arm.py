# SPDX-License-Identifier: Apache-2.0
"""How the results of an engine's replicas become one run."""

import json

import numpy as np
import pytest

from engine.arm import _join


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Write a result per replica, with this error and one forward of this logit."""
    monkeypatch.chdir(tmp_path)

    def write(*replicas):
        for number, (error, logit) in enumerate(replicas):
            result = {"answers": [[number]], "forwards": [{"of": number}], "caches": [str(number)], "error": error}
            (tmp_path / f"result-{number}.json").write_text(json.dumps(result))
            np.savez(tmp_path / f"logits-{number}.npz", np.full((1, 2), logit))

    return write


def test_what_each_replica_served_is_kept_in_order(tmp_path, written):
    written((None, 0.5), (None, 1.5))
    _join(2)
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["answers"], result["caches"], result["error"]) == ([[0], [1]], ["0", "1"], None)
    with np.load(tmp_path / "logits.npz") as logits:
        assert [rows[0, 0] for rows in logits.values()] == [0.5, 1.5]


def test_an_error_of_any_replica_is_the_runs(tmp_path, written):
    written((None, 0.5), ("KeyError: 3", 1.5))
    _join(2)
    assert json.loads((tmp_path / "result.json").read_text())["error"] == "KeyError: 3"
