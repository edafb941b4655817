# SPDX-License-Identifier: Apache-2.0
"""The series of patches: every stage is an override source that merges, and the last one is the fix as it is."""

import shutil
from pathlib import Path

import pytest

from demo import plugin
from graft import copies, override, series
from graft.errors import GraftError
from graft.merge import merge, strip

VENDOR = series.UPSTREAM.parent
STAGES = series.stages()


def vendor_copy(folder: Path) -> Path:
    """A vendor/ of its own."""
    return Path(shutil.copytree(VENDOR, folder / "vendor", ignore=shutil.ignore_patterns("releases", "__pycache__")))


def test_the_last_stage_is_the_fix():
    for name, data in STAGES[-1].files.items():
        assert data == (VENDOR / name).read_bytes(), name
    assert {f"{series.OVERRIDES}/{file}" for file in copies.overridden()} <= STAGES[-1].files.keys()


def test_each_patch_says_what_it_is_and_changes_something():
    assert len({stage.message for stage in STAGES}) == len(STAGES) > 1
    assert all(stage.message.startswith("Gemma4") for stage in STAGES)
    assert all(STAGES[i].files != STAGES[i + 1].files for i in range(len(STAGES) - 1))


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_each_stage_merges_and_uses_all_that_it_imports(stage):
    for file in copies.overridden():
        source = stage.files[f"{series.OVERRIDES}/{file}"].decode()
        pristine = (plugin.STANDIN / file).read_text()
        merged = merge(pristine, source, name=file, release="the stand-in")
        assert strip(merged) == pristine
        names = [name.bound for found in override.parse(source, file).imports for name in found.names]
        body = source.partition("\n\n\n")[2]
        assert all(name.partition(".")[0] in body for name in names)


def test_unfolded_stages_fold_to_the_same_patches(tmp_path):
    vendor = vendor_copy(tmp_path)
    before = {path.name: path.read_bytes() for path in (vendor / "upstream" / "series").iterdir()}
    series.unfold(tmp_path / "stages")
    series.fold(tmp_path / "stages", vendor)
    assert {path.name: path.read_bytes() for path in (vendor / "upstream" / "series").iterdir()} == before


def test_a_fix_that_moved_on_is_noticed(tmp_path):
    vendor = vendor_copy(tmp_path)
    model = vendor / series.OVERRIDES / "models" / "gemma4.py"
    added = [line[1:] for line in last_difference().splitlines() if line.startswith("+    ")]
    model.write_text(model.read_text().replace(added[0] + "\n", ""))
    with pytest.raises(GraftError, match=r"\.patch does not fit the override sources as they are"):
        series.stages(vendor)


def last_difference() -> str:
    """What the last patch changes."""
    return sorted(series.SERIES.glob("*.patch"))[-1].read_text().partition(series.RULE)[2]


def test_a_stage_that_is_missing_or_a_message_that_would_be_cut_is_refused(tmp_path):
    vendor = vendor_copy(tmp_path)
    before = {path.name: path.read_bytes() for path in (vendor / "upstream" / "series").iterdir()}
    first, second, *_ = series.unfold(tmp_path / "stages")
    (first / "message.txt").write_text("Gemma4: so\n---\nand so\n")
    with pytest.raises(GraftError, match="ends in ---"):
        series.fold(tmp_path / "stages", vendor)
    shutil.rmtree(second)
    with pytest.raises(GraftError, match=f"has no stage {second.name}"):
        series.fold(tmp_path / "stages", vendor)
    assert {path.name: path.read_bytes() for path in (vendor / "upstream" / "series").iterdir()} == before


def test_stages_in_work_are_not_written_over(tmp_path):
    series.unfold(tmp_path / "stages")
    with pytest.raises(GraftError, match="is not empty"):
        series.unfold(tmp_path / "stages")


def test_the_tenth_patch_comes_after_the_second():
    assert sorted(map(Path, ("10-a", "2-b", "1-c")), key=series._number) == [Path("1-c"), Path("2-b"), Path("10-a")]


def test_stages_that_end_elsewhere_are_not_folded(tmp_path, capsys):
    series.unfold(tmp_path / "stages")
    last = sorted((tmp_path / "stages").iterdir())[-1]
    with (last / series.OVERRIDES / "models" / "gemma4.py").open("a") as file:
        file.write("# more\n")
    before = {path.name: path.read_bytes() for path in series.SERIES.iterdir()}
    assert series.main(["fold", str(tmp_path / "stages")]) == 1
    assert "is not the fix as it is" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in series.SERIES.iterdir()} == before
