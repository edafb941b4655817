# SPDX-License-Identifier: Apache-2.0
"""How a source becomes the two plugins that are compared."""

import pytest

from engine.plugin import entry_points
from graft.errors import GraftError


def test_reads_entry_points_of_a_checkout_without_running_its_setup(tmp_path):
    setup = tmp_path / "setup.py"
    setup.write_text(
        'raise SystemExit("run")\nsetup(entry_points={"vllm.platform_plugins": ["hpu = vllm_gaudi:register"],'
        ' "vllm.general_plugins": ["a = b:c", "d = e:f"]})\n'
    )
    assert entry_points(setup).splitlines() == [
        "[vllm.platform_plugins]",
        "hpu = vllm_gaudi:register",
        "[vllm.general_plugins]",
        "a = b:c",
        "d = e:f",
    ]


@pytest.mark.parametrize("text", [None, "setup()\n"])
def test_says_what_to_do_where_no_entry_points_can_be_read(tmp_path, text):
    setup = tmp_path / "setup.py"
    if text is not None:
        setup.write_text(text)
    with pytest.raises(GraftError, match=r"declares no entry points.*--target"):
        entry_points(setup)
