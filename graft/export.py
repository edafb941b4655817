# SPDX-License-Identifier: Apache-2.0
"""Makes the patches to send upstream, as `git am` takes them, and the text of the pull request beside them."""

import argparse
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from graft import copies, releases, series, versions
from graft.errors import GraftError
from graft.progress import Progress
from graft.releases import PACKAGE, Tree
from graft.series import UPSTREAM, Stage
from graft.versions import Release

OURS = "[0-9][0-9][0-9][0-9]-Gemma4-*.patch"  # how git names the patches after their messages
Contents = Mapping[str, bytes]  # by path in upstream's repository


def signer(folder: Path) -> tuple[str, str]:
    """The name and e-mail address that git uses in a folder.

    Raises:
        GraftError: git does not know them, or there is no git.
    """
    found = []
    for key, example in (("user.name", "Your Name"), ("user.email", "you@example.org")):
        try:
            done = subprocess.run(["git", "-C", folder, "config", key], capture_output=True, text=True)
        except OSError:
            raise GraftError("There is no git to make a patch with", "Install git") from None
        if not done.stdout.strip():
            raise GraftError(
                f"vllm-gaudi takes only signed-off patches, and git does not know your {key}",
                f'Run `git config --global {key} "{example}"` with your own',
            )
        found.append(done.stdout.strip())
    return found[0], found[1]


def signed(message: str, name: str, address: str) -> str:
    """A commit message with its sign-off."""
    return f"{message.strip()}\n\nSigned-off-by: {name} <{address}>\n"


def commits(release: Release, tree: Tree, stages: Sequence[Stage]) -> list[tuple[str, Contents]]:
    """What upstream's files are, as released and after each patch: the message and the files of each commit.

    Raises:
        Drift: the tree is another release's, or a stage cannot be merged into it.
    """
    found: list[tuple[str, Contents]] = []
    with tempfile.TemporaryDirectory() as folder:
        for stage in stages:
            plan = copies.plan(release, tree, overrides=stage.write(Path(folder, stage.name)))
            if not found:
                found.append(("before", {f"{PACKAGE}/{file.file}": file.pristine.encode() for file in plan.files}))
            merged = {f"{PACKAGE}/{file.file}": file.merged.text.encode() for file in plan.files}
            tests = {f"tests/{path}": data for path, data in stage.tests.items()}
            found.append((stage.message, merged | tests))
    return found


def patches(made: Sequence[tuple[str, Contents]], name: str, address: str) -> dict[str, bytes]:
    """The commits but the first as git writes them for e-mail, by file name; made in a repository that is thrown away.

    Raises:
        GraftError: git fails.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch).resolve()
        author = ("-c", f"user.name={name}", "-c", f"user.email={address}")
        series.git(folder, "init", "--quiet", "--initial-branch=main")
        for message, contents in made:
            for path, data in contents.items():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_bytes(data)
            series.git(folder, "add", "--all")
            words = ("commit", "--quiet", "--allow-empty", "--file=-")
            series.git(folder, *author, *words, given=signed(message, name, address).encode())
        series.git(folder, "format-patch", "--quiet", "--no-signature", "-o", "out", f"-{len(made) - 1}")
        return {path.name: path.read_bytes() for path in sorted((folder / "out").iterdir())}


def export(made: Mapping[str, bytes], folder: Path) -> list[Path]:
    """Write the patches and the pull request's text into a folder; answers the paths.

    Those of an earlier export that are no longer made are removed, and nothing else.

    Raises:
        GraftError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in made.items():
            (folder / name).write_bytes(data)
        for old in folder.glob(OURS):
            if old.name not in made:
                old.unlink()
        shutil.copyfile(UPSTREAM / "pull_request.md", folder / "pull_request.md")
    except OSError as error:
        raise GraftError(f"{folder} cannot be written: {error.strerror}", "Name another with --output") from None
    return [*(folder / name for name in made), folder / "pull_request.md"]


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "export",
        help="make the patches to send upstream",
        description="Write patches for `git am` on a checkout of the release, a first one that is the fix and one for "
        "each further part, and the pull request's text.",
    )
    parser.add_argument("release", help="a release of VERSIONS.toml, such as 0.30")
    parser.add_argument("--source", type=Path, help="a site-packages folder, a checkout, a wheel or an sdist")
    parser.add_argument("--python", type=Path, help="the interpreter of an environment that has it")
    parser.add_argument("--output", type=Path, help="the folder to write (default: dist/TAG)")
    parser.add_argument("--single", action="store_true", help="one patch of all parts")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    parser.set_defaults(func=_export_command)


def _export_command(args: argparse.Namespace) -> int:
    progress = Progress(quiet=args.quiet)
    release = versions.get(args.release)
    name, address = signer(copies.ROOT)
    with progress.step("Looking for vllm-gaudi"):
        tree = releases.find(args.source, args.python)
    with progress.step(f"Merging into {tree.path}"):
        made = commits(release, tree, series.stages())
    if args.single:
        whole = (UPSTREAM / "commit_message.txt").read_text(encoding="utf-8")
        made = [made[0], (whole, made[-1][1])]
    folder = args.output or copies.ROOT / "dist" / release.tag
    written = export(patches(made, name, address), folder)
    for path in written:
        progress.say(f"Written: {path}")
    if not args.quiet:
        print(f"git am {shlex.quote(str(folder))}/{OURS}")
    return 0
