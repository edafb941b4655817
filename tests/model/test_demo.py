# SPDX-License-Identifier: Apache-2.0
"""What `python -m demo` shows and with which exit code."""

import pytest

import demo.__main__ as command
from demo import measure, plugin

SMALL = ["--hidden", "48", "--layers", "10", "--tokens", "200", "--repeat", "1", "--steps", "2"]


@pytest.fixture
def demo_in_use(site, monkeypatch):
    """The demo, in a process that uses the stand-in already."""
    monkeypatch.setattr(plugin, "use", lambda folder: folder)


def test_shows_parity_and_both_ratios(demo_in_use, capfd):
    assert command.main(SMALL) == 0
    shown = capfd.readouterr().out
    assert "Parity: the same 2 greedy tokens per prompt" in shown
    assert "equal" in shown and "ratio 3." in shown


def test_exits_1_without_parity(demo_in_use, capfd, monkeypatch):
    monkeypatch.setattr(measure, "LOGIT_LIMIT", -1.0)
    assert command.main(SMALL) == 1
    assert "No parity" in capfd.readouterr().out


@pytest.mark.parametrize(
    "words, cause",
    [
        (["--tokens", "many"], "many is no whole number"),
        (["--layers", "12"], "multiple of 5"),
        (["--hidden", "100"], "multiple of 48"),
        (["--source", "."], "goes with --release"),
        (["--release", "0.1"], "Release 0.1 is not in VERSIONS.toml"),
        (["--release", "0.26", "--source", "/nowhere"], "/nowhere does not exist"),
    ],
)
def test_bad_input_is_told_in_one_line_with_exit_1(words, cause, capfd):
    try:
        code = command.main(words)
    except SystemExit as stop:
        code = stop.code
    assert code == 1
    told = capfd.readouterr().err
    assert cause in told and told.count("\n") == 1
