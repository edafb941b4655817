# SPDX-License-Identifier: Apache-2.0
"""Makes the patch to send upstream, as `git am` takes it, and the text of the pull request beside it."""

import argparse
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graft import copies, releases, versions
from graft.errors import GraftError
from graft.progress import Progress
from graft.releases import PACKAGE

UPSTREAM = copies.ROOT / "vendor" / "upstream"  # what goes upstream besides the fix
TESTS = UPSTREAM / "tests"


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


def message(name: str, address: str) -> str:
    """The commit message."""
    text = (UPSTREAM / "commit_message.txt").read_text(encoding="utf-8").strip()
    return f"{text}\n\nSigned-off-by: {name} <{address}>\n"


def files(plan: copies.Plan) -> dict[str, tuple[bytes | None, bytes]]:
    """What the patch changes, by path in upstream's repository: the bytes before, if any, and after."""
    found: dict[str, tuple[bytes | None, bytes]] = {}
    for file in plan.files:
        found[f"{PACKAGE}/{file.file}"] = (file.pristine.encode(), file.merged.text.encode())
    for test in sorted(TESTS.rglob("*.py")):
        found[f"tests/{test.relative_to(TESTS).as_posix()}"] = (None, test.read_bytes())
    return found


def patch(changed: Mapping[str, tuple[bytes | None, bytes]], text: str, name: str, address: str) -> bytes:
    """One commit as git writes it for e-mail, made in a repository that is thrown away.

    Raises:
        GraftError: git fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        variables = {
            **{k: v for k, v in os.environ.items() if not k.startswith("GIT_")},
            "GIT_CONFIG_GLOBAL": os.devnull,  # no hooks, signing or line ends of the user's
            "GIT_CONFIG_SYSTEM": os.devnull,
            **{f"GIT_{role}_NAME": name for role in ("AUTHOR", "COMMITTER")},
            **{f"GIT_{role}_EMAIL": address for role in ("AUTHOR", "COMMITTER")},
        }

        def git(*words: str, given: str | None = None) -> bytes:
            done = subprocess.run(
                ["git", *words],
                cwd=folder,
                env=variables,
                input=given.encode() if given else None,
                capture_output=True,
            )
            if done.returncode:
                said = done.stderr.decode(errors="replace")
                raise GraftError(f"git {words[0]} failed: {said}", "Look at what git says")
            return done.stdout

        git("init", "--quiet", "--initial-branch=main")
        for moment, title in ((0, "before"), (1, text)):
            for path, contents in changed.items():
                if contents[moment] is not None:
                    Path(folder, path).parent.mkdir(parents=True, exist_ok=True)
                    Path(folder, path).write_bytes(contents[moment])
            git("add", "--all")
            git("commit", "--quiet", "--allow-empty", "--file=-", given=title)
        return git("format-patch", "-1", "--stdout", "--no-signature")


def export(plan: copies.Plan, folder: Path, name: str, address: str) -> list[Path]:
    """Write the patch and the pull request's text into a folder; answers both paths.

    Raises:
        GraftError: git fails, or the folder cannot be written.
    """
    made = patch(files(plan), message(name, address), name, address)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        written = [folder / "gemma4-fast-prefill.patch", folder / "pull_request.md"]
        written[0].write_bytes(made)
        shutil.copyfile(UPSTREAM / "pull_request.md", written[1])
    except OSError as error:
        raise GraftError(f"{folder} cannot be written: {error.strerror}", "Name another with --output") from None
    return written


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "export",
        help="make the patch to send upstream",
        description="Write a patch for `git am` on a checkout of the release, and the pull request's text.",
    )
    parser.add_argument("release", help="a release of VERSIONS.toml, such as 0.30")
    parser.add_argument("--source", type=Path, help="a site-packages folder, a checkout, a wheel or an sdist")
    parser.add_argument("--python", type=Path, help="the interpreter of an environment that has it")
    parser.add_argument("--output", type=Path, help="the folder to write (default: dist/TAG)")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    parser.set_defaults(func=_export_command)


def _export_command(args: argparse.Namespace) -> int:
    progress = Progress(quiet=args.quiet)
    release = versions.get(args.release)
    name, address = signer(copies.ROOT)
    with progress.step("Looking for vllm-gaudi"):
        tree = releases.find(args.source, args.python)
    with progress.step(f"Merging into {tree.path}"):
        plan = copies.plan(release, tree)
    folder = args.output or copies.ROOT / "dist" / release.tag
    written = export(plan, folder, name, address)
    for path in written:
        progress.say(f"Written: {path}")
    if not args.quiet:
        print(f"git am {written[0]}")
    return 0
