# SPDX-License-Identifier: Apache-2.0
"""The fix as a series of patches, the way it goes upstream: a first one that works alone, one for each further part.

Kept are the whole fix and, for each further part, the difference it makes to the override sources and to the tests that
go upstream (`vendor/upstream/series`, all of it our own text). Taken back one after the other they give each stage.
`python -m graft.series unfold FOLDER` writes every stage out, to look at or to work on; `fold FOLDER` makes the patches
of the stages there.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from graft import copies
from graft.errors import GraftError

UPSTREAM = copies.ROOT / "vendor" / "upstream"  # what goes upstream besides the fix
SERIES = UPSTREAM / "series"
OVERRIDES = copies.OVERRIDES.name
TESTS = "upstream/tests"
RULE = "---\n"  # between a patch's message and its difference


@dataclass(frozen=True)
class Stage:
    """The fix after one more patch. name: of that patch; message: its commit message; files: below vendor/."""

    name: str
    message: str
    files: Mapping[str, bytes]

    def write(self, folder: Path) -> Path:
        """Lay it out as vendor/ is; answers the folder of its override sources."""
        for name, data in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        return folder / OVERRIDES

    @property
    def tests(self) -> dict[str, bytes]:
        """The tests that go upstream with it, by path below upstream's tests/."""
        prefix = TESTS + "/"
        return {name.removeprefix(prefix): data for name, data in self.files.items() if name.startswith(prefix)}


def environ() -> dict[str, str]:
    """The variables git gets: no settings, hooks or repository of the user's."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return {**kept, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}


def git(folder: Path, *words: str, given: bytes | None = None, accept: tuple[int, ...] = (0,)) -> bytes:
    """Run git in a folder; answers what it prints.

    Raises:
        GraftError: git is not there, or fails.
    """
    nowhere = {name: str(folder / "no home") for name in ("HOME", "XDG_CONFIG_HOME")}  # for a git older than 2.32
    variables = {**environ(), **nowhere, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    try:
        done = subprocess.run(["git", *words], cwd=folder, env=variables, input=given, capture_output=True)
    except FileNotFoundError:
        raise GraftError("There is no git to make a patch with", "Install git") from None
    if done.returncode not in accept:
        said = done.stderr.decode(errors="replace").strip()
        raise GraftError(f"git {words[0]} failed: {said}", "Look at what git says")
    return done.stdout


def stages(vendor: Path | None = None) -> tuple[Stage, ...]:
    """The stages, from the first patch's to the whole fix.

    Args:
        vendor: a folder laid out as vendor/ is; this project's unless given.
    Raises:
        GraftError: a patch does not fit the one after it, or there is no git.
    """
    vendor = vendor or UPSTREAM.parent
    patches = sorted((vendor / "upstream" / "series").glob("*.patch"), key=_number)
    found: list[Stage] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch).resolve()
        Stage("", "", _files(vendor)).write(folder)
        for patch in reversed(patches):
            message, _, difference = patch.read_text(encoding="utf-8").partition(RULE)
            found.append(Stage(patch.stem, message.strip(), _files(folder)))
            if difference.strip():
                try:
                    git(folder, "apply", "--reverse", "--whitespace=nowarn", "-", given=difference.encode())
                except GraftError as error:
                    raise GraftError(
                        f"{patch.name} does not fit the override sources as they are ({error})",
                        "Make the series again: see CONTRIBUTING.md",
                    ) from None
    return tuple(reversed(found))


def _number(path: Path) -> int:
    """The place of a patch or a stage in the series: what its name begins with."""
    return int(path.name.partition("-")[0])


def _files(vendor: Path) -> dict[str, bytes]:
    """The override sources and the tests that go upstream, by path below vendor/."""
    names = [f"{OVERRIDES}/{file}" for file in copies.overridden(vendor / OVERRIDES)]
    names += [path.relative_to(vendor).as_posix() for path in sorted((vendor / TESTS).rglob("*.py"))]
    return {name: (vendor / name).read_bytes() for name in names}


def unfold(folder: Path) -> list[Path]:
    """Write every stage below a folder, each in one of its patch's name; answers those folders.

    Raises:
        GraftError: there is something in the folder, perhaps changes of the user's.
    """
    if folder.is_dir() and any(folder.iterdir()):
        raise GraftError(f"{folder} is not empty", "Name another folder, or remove what is there")
    written = []
    for stage in stages():
        stage.write(folder / stage.name)
        (folder / stage.name / "message.txt").write_text(stage.message + "\n", encoding="utf-8")
        written.append(folder / stage.name)
    return written


def fold(folder: Path, vendor: Path | None = None) -> list[Path]:
    """Make the patches of the stages below a folder; answers their paths.

    Raises:
        GraftError: the last stage is not the fix as it is, or one of the patches there are has no stage.
    """
    vendor = vendor or UPSTREAM.parent
    series = vendor / "upstream" / "series"
    found = sorted((path for path in folder.iterdir() if (path / "message.txt").is_file()), key=_number)
    if not found or _files(found[-1]) != _files(vendor):
        mend = "Copy the last stage over vendor/, or vendor/ into it"
        raise GraftError(f"The last stage in {folder} is not the fix as it is", mend)
    lost = sorted({path.stem for path in series.glob("*.patch")} - {path.name for path in found})
    if lost:
        raise GraftError(f"{folder} has no stage {', '.join(lost)}", "To leave a part out, remove its patch first")
    patches = {}
    with tempfile.TemporaryDirectory() as scratch:
        for number, stage in enumerate(found):
            message = (stage / "message.txt").read_text(encoding="utf-8").strip()
            if RULE in f"\n{message}\n":
                raise GraftError(f"A line of {stage / 'message.txt'} ends in {RULE.strip()}", "Word it otherwise")
            difference = b""
            if number:
                root = Path(scratch).resolve() / stage.name
                for side, source in (("a", found[number - 1]), ("b", stage)):
                    Stage("", "", _files(source)).write(root / side)
                words = ["diff", "--no-index", "--no-prefix", "--no-color", "--no-renames", "a", "b"]
                difference = git(root, *words, accept=(0, 1))
            patches[stage.name] = f"{message}\n{RULE}".encode() + difference
    series.mkdir(parents=True, exist_ok=True)
    for name, text in patches.items():
        (series / f"{name}.patch").write_bytes(text)
    return [series / f"{name}.patch" for name in patches]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m graft.series", description="Work on the series of patches.")
    parser.add_argument("what", choices=("unfold", "fold"))
    parser.add_argument("folder", type=Path)
    options = parser.parse_args(argv)
    try:
        for path in (unfold if options.what == "unfold" else fold)(options.folder):
            print(path)
    except (GraftError, OSError) as error:
        print(f"series: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
