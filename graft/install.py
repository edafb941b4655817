# SPDX-License-Identifier: Apache-2.0
"""Puts the copies of a release in the place of an environment's own modules, and takes them out again."""

import argparse
import contextlib
import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from graft import copies, drift, names, releases, versions
from graft.errors import Drift, GraftError
from graft.place import GUARD, SWITCHES, USERS, Place, contents, encode_users, record_name, same_place, users
from graft.progress import Progress
from graft.releases import Environment, Tree
from graft.transaction import LEFTOVER, Interrupts, Transaction, locked, sweep

SERVE = "vllm serve google/gemma-4-E2B-it --kv-sharing-fast-prefill"
_CHECK_SECONDS = 120


def find_tree(python: Path | None, environ: Mapping[str, str] = os.environ) -> Tree:
    """The vllm-gaudi of the environment to install into. GAUDI_FIXES_ROOT, a source, means nothing here.

    Raises:
        GraftError: there is none.
    """
    return releases.find(None, python, {k: v for k, v in environ.items() if k != "GAUDI_FIXES_ROOT"})


def find_place(python: Path | None, environ: Mapping[str, str] = os.environ) -> Place:
    """The environment to look at: the named one; else the active virtual environment or the first python3 on
    PATH, whichever first holds vllm-gaudi or something of ours; else the first of them.

    Raises:
        GraftError: there is no Python to ask.
    """
    if python is not None:
        return Place(releases.probe(python))
    found = []
    for interpreter in releases.interpreters(environ):
        with contextlib.suppress(GraftError):
            found.append(Place(releases.probe(interpreter)))
    for place in found:
        if place.environment.packages or not place.is_empty():
            return place
    if found:
        return found[0]
    raise GraftError("No Python was found", "Name one with --python")


def why_inside(plan: copies.Plan, place: Place) -> str | None:
    """Why the copies must be put inside site-packages rather than pointed at; None if they need not."""
    folder = copies.folder(plan.release)
    if not (str(folder).isascii() and str(folder).isprintable() and str(folder) == str(folder).strip()):
        # Before Python 3.13 a .pth file is read in the locale's encoding: one that does not fit stops the interpreter.
        return f"the path {folder} would not be read in every locale"
    there = next(path for path in (folder / copies.NAME, folder, *folder.parents) if path.exists())
    if not os.access(there, os.W_OK):
        return f"{there} cannot be written"
    others = [user for user in users(folder)["environments"] if not same_place(user, place.folder)]
    if others and not _same_pristine(plan, folder):
        return f"{others[0]} uses the copies in {folder}, and those are of other files"
    return None


def _same_pristine(plan: copies.Plan, folder: Path) -> bool:
    try:
        there = json.loads((folder / copies.NAME / copies.MANIFEST).read_bytes())["modules"]
        mine = plan.manifest["modules"]
        return all(there[name]["pristine_sha256"] == mine[name]["pristine_sha256"] for name in mine)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def check_imports(tree: Tree) -> None:
    """Refuse an environment in which the copies would not load, as it lacks what they import.

    Raises:
        Drift: a name is missing in its vllm-gaudi, or in its vLLM if it has one.
    """
    lacking = names.lacking("vllm_gaudi", drift.reader(tree))
    vllm = names.installed(tree.environment.python)
    if vllm is not None:
        lacking += names.lacking("vllm", vllm.read)
    if lacking:
        missing = ", ".join(f"{name.symbol} in {name.file}" for name in lacking)
        raise Drift(
            f"The fix imports what is not there: {missing}", "Run `python -m graft drift`, and see docs/drift.md"
        )


def ask(environment: Environment) -> dict | None:
    """What `python -m vllm_gaudi_overrides --json` says in a fresh interpreter of an environment.

    None where it says nothing: there is no shadow, or a damaged one. "said" is what came on stderr.
    """
    variables = {k: v for k, v in os.environ.items() if k != "VLLM_GAUDI_OVERRIDES"}
    variables["PYTHONDONTWRITEBYTECODE"] = "1"
    try:
        done = subprocess.run(
            [environment.python, "-m", copies.NAME, "--json"],
            capture_output=True,
            text=True,
            timeout=_CHECK_SECONDS,
            cwd=environment.prefix,
            env=variables,
        )
        return {**_object(done.stdout), "said": done.stderr.strip()}
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None


def _object(text: str) -> dict:
    """The JSON object that a text ends with; an interpreter may print something before it.

    Raises:
        ValueError: it ends with none.
    """
    lines = text.strip().splitlines(keepends=True)
    for number, line in enumerate(lines):
        if line.startswith("{"):
            with contextlib.suppress(ValueError):
                return json.loads("".join(lines[number:]))
    raise ValueError("no JSON object")


def _noise(environment: Environment) -> set[str]:
    """The lines that the environment's interpreter puts on stderr at every start, without anything of ours."""
    variables = {**os.environ, "VLLM_GAUDI_OVERRIDES": "0", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [environment.python, "-c", "pass"], capture_output=True, text=True, cwd=environment.prefix, env=variables
    )
    return set(done.stderr.splitlines())


def prove(place: Place, folder: Path) -> None:
    """See for ourselves that a fresh interpreter of the environment imports the copies.

    Raises:
        GraftError: it does not.
    """
    mend = "See docs/install.md"
    found = ask(place.environment)
    if found is None:
        raise GraftError(f"{place.environment.python} does not start the shadow", mend)
    if found["code"] != 0:
        line = next(line for line in found["files"] if line["code"] != 0)
        raise GraftError(f"{line['file']} would not come from the copy: {line['cause']}", mend)
    if not same_place(found["folder"], folder / copies.NAME):
        raise GraftError(f"An older shadow in {found['folder']} comes first", "Remove it by hand")
    if found["said"]:
        noise = _noise(place.environment)
        said = [line for line in found["said"].splitlines() if line not in noise]
        if said:
            raise GraftError(f"The interpreter no longer starts silently: {' '.join(said)}", mend)


def install(plan: copies.Plan, place: Place, *, inside: bool, progress: Progress) -> Path:
    """Write the copies and what turns them on, and prove that they load; or leave everything as it was.

    inside: put the copies inside site-packages. Answers the folder of the copies' package.

    Raises:
        GraftError: something cannot be written, or the copies would not load.
    """
    folder = place.folder if inside else copies.folder(plan.release)
    with _writing(place, progress) as interrupts, contextlib.ExitStack() as stack:
        if not inside:
            stack.enter_context(_folders(folder))
            stack.enter_context(locked(folder, lambda: progress.say("Waiting for another install")))
            sweep(folder)
            sweep(folder / copies.NAME)
        sweep(place.folder)
        transaction = stack.enter_context(Transaction(place.folder, interrupts))
        with progress.step("Writing"):
            _write_all(plan, place, folder, inside, transaction)
        with progress.step("Proving it in a fresh interpreter"):
            try:
                prove(place, folder)
            finally:
                interrupts.check()  # a Ctrl-C reaches the interpreter that was asked, too
    _compile(place, folder)
    return folder / copies.NAME


@contextlib.contextmanager
def _folders(folder: Path) -> Iterator[None]:
    """Make a folder and those it is in; if the `with` block raises, remove those that were not there."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for path in new:
            with contextlib.suppress(OSError):  # somebody else uses it by now
                path.rmdir()
        raise


def _compile(place: Place, folder: Path) -> None:
    """Leave the bytecode of what every start imports, for environments that are read-only when they are used."""
    code = "import py_compile, sys; [py_compile.compile(file) for file in sys.argv[1:]]"
    starts = [place.folder / GUARD, folder / copies.NAME / "__init__.py"]
    subprocess.run([place.environment.python, "-I", "-S", "-B", "-c", code, *starts], capture_output=True)


def _write_all(plan: copies.Plan, place: Place, folder: Path, inside: bool, transaction: Transaction) -> None:
    """The order matters: whatever is written turns nothing on until the switches are, and those come last."""
    created = not inside and not (folder / copies.NAME).exists()
    transaction.keep(folder / copies.NAME)
    package = copies.write(plan, folder)
    if not inside:
        known = users(folder)
        names = [*known["environments"], str(place.folder)]
        data = {
            "made_by_install": known["made_by_install"] or created,
            "environments": list(dict.fromkeys(names)),
        }
        transaction.write(package / USERS, encode_users(data))
    files = contents(plan, None if inside else folder)
    info = record_name(plan.release)
    described = {name.split("/")[1]: data for name, data in files.items() if name.startswith(info)}
    transaction.write_folder(place.folder / info, described)
    for name in SWITCHES:
        transaction.write(place.folder / name, files[name])
    for stale in place.records():
        if stale.name != info:
            transaction.remove(stale)
    if not inside:
        transaction.remove(place.package)


def is_applied(plan: copies.Plan, place: Place, inside: bool) -> bool:
    """Whether an install would change nothing: every byte is there already, and the copies load."""
    folder = place.folder if inside else copies.folder(plan.release)
    files = {place.folder / name: data for name, data in contents(plan, None if inside else folder).items()}
    files |= {folder / name: data for name, data in plan.contents.items()}
    try:
        if any(path.read_bytes() != data for path, data in files.items()):
            return False
        if len(place.records()) != 1 or (not inside and place.package.exists()):
            return False
        if not inside and str(place.folder) not in users(folder)["environments"]:
            return False
        prove(place, folder)
    except (OSError, GraftError):
        return False
    return True


def uninstall(place: Place, progress: Progress) -> list[Path]:
    """Remove everything that installs wrote for an environment, and prove that nothing is left.

    Answers what was removed. Copies outside the environment go as well when an install made them and no
    other environment uses them.

    Raises:
        GraftError: something cannot be removed; then everything is as it was.
    """
    gone = []
    with _writing(place, progress) as interrupts, contextlib.ExitStack() as stack:
        entry = place.entry()
        if entry is not None and entry.is_dir():
            stack.enter_context(locked(entry, lambda: progress.say("Waiting for another install")))
        transaction = stack.enter_context(Transaction(place.folder, interrupts))
        gone += sweep(place.folder)
        for path in place.written():
            transaction.remove(path)
            gone.append(path)
        bytecode = place.folder / "__pycache__"
        if bytecode.is_dir() and not list(bytecode.iterdir()):
            transaction.remove(bytecode)
        if entry is not None:
            gone += _release_copies(entry, place, transaction)
        found = ask(place.environment)
        if place.written() or (found and found["folder"] == str(place.package)):
            raise GraftError(f"{place.folder} still holds something of ours", "Remove it by hand")
        interrupts.check()
    return gone


def _release_copies(entry: Path, place: Place, transaction: Transaction) -> list[Path]:
    """Remove the copies that installs of a checkout made and no environment uses any more.

    entry: the folder of the copies that the environment used. A checkout that is gone, or that is not ours to
    write in, is left alone.
    """
    gone = []
    with contextlib.suppress(OSError):
        for folder in sorted(entry.parent.glob("v*")):
            known = users(folder)
            others = [name for name in known["environments"] if not same_place(name, place.folder)]
            if others and others != known["environments"]:
                data = encode_users({**known, "environments": others})
                transaction.write(folder / copies.NAME / USERS, data)
            elif known["made_by_install"] and not others:
                only = [path.name for path in folder.iterdir() if not path.name.startswith(LEFTOVER)] == [copies.NAME]
                transaction.remove(folder if only else folder / copies.NAME)
                gone.append(folder / copies.NAME)
    return gone


@contextlib.contextmanager
def _writing(place: Place, progress: Progress) -> Iterator[Interrupts]:
    """Hold the lock of a site-packages folder, and turn what the system refuses into one line."""
    try:
        with (
            Interrupts() as interrupts,
            locked(place.folder, lambda: progress.say("Waiting for another install")),
        ):
            yield interrupts
    except OSError as error:
        read_only = error.errno in (errno.EROFS, errno.EACCES, errno.EPERM)
        mend = "Run it as the user who owns it" if read_only else "Free some space, then run it again"
        where = error.filename or place.folder
        raise GraftError(f"{where} cannot be written ({error.strerror}); nothing was changed", mend) from None


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "install",
        help="put the copies of a release in the place of an environment's own modules",
        description="Merge the fix into an environment's vllm-gaudi and turn the copies on there.",
    )
    parser.add_argument("release", help="a release of VERSIONS.toml, such as 0.30")
    parser.add_argument("--python", type=Path, help="the environment's interpreter")
    parser.add_argument("--copy", action="store_true", help="put the copies inside site-packages")
    parser.add_argument("--dry-run", action="store_true", help="print the diff, write nothing")
    parser.add_argument("--allow-drift", action="store_true", help="go by the anchors where a pinned file differs")
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    parser.set_defaults(func=_install_command)

    parser = subparsers.add_parser("uninstall", help="remove everything that installs wrote")
    parser.add_argument("--python", type=Path, help="the environment's interpreter")
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    parser.set_defaults(func=_uninstall_command)


def _install_command(args: argparse.Namespace) -> int:
    progress = Progress(quiet=args.quiet or args.json)
    release = versions.get(args.release)
    with progress.step("Looking for vllm-gaudi"):
        tree = find_tree(args.python)
    place = Place(tree.environment)
    with progress.step(f"Merging into {tree.package}"):
        plan = _plan(release, tree, args, progress)
    check_imports(tree)
    reason = None if args.copy else why_inside(plan, place)
    inside = args.copy or reason is not None
    folder = place.folder if inside else copies.folder(release)
    outcome = {
        "release": release.name,
        "python": str(place.environment.python),
        "site_packages": str(place.folder),
        "copies": str(folder / copies.NAME),
        "pinned": plan.manifest["pinned"],
    }
    if args.dry_run:
        outcome |= {"changed": False, "would_write": [str(path) for path in _targets(plan, place, inside)]}
        outcome["diff"] = copies.diff(plan)
    elif is_applied(plan, place, inside):
        outcome |= {"changed": False}
    else:
        install(plan, place, inside=inside, progress=progress)
        outcome |= {"changed": True}
    if args.json:
        print(json.dumps(outcome, indent=2))
        return 0
    if args.dry_run and not args.quiet:
        sys.stdout.write(outcome["diff"])
        print("Would write:", *outcome["would_write"], sep="\n  ")
        return 0
    if reason is not None:
        progress.say(f"The copies are inside site-packages, because {reason}")
    if not plan.manifest["pinned"]:
        progress.say(f"Release {release.name} is not pinned in VERSIONS.toml: this went by the anchors alone")
    word = "Installed" if outcome["changed"] else "Already installed, nothing was changed"
    for file in plan.files:
        progress.say(f"{file.file}: applied")
    progress.say(f"{word}: release {release.name} in {place.folder}, copies in {outcome['copies']}")
    if os.environ.get("VLLM_GAUDI_OVERRIDES") == "0":
        progress.say("VLLM_GAUDI_OVERRIDES=0 is set in this shell and turns it off here")
    if not args.quiet:
        print(SERVE)
    return 0


def _plan(release: versions.Release, tree: Tree, args: argparse.Namespace, progress: Progress) -> copies.Plan:
    """Merge; where the files drifted, show what about, and offer to go by the anchors if they match."""
    try:
        return copies.plan(release, tree, allow_drift=args.allow_drift)
    except Drift as refusal:
        if not args.allow_drift and not args.json and not args.quiet:
            sys.stdout.write(drift.explain(release, tree))
        try:
            copies.plan(release, tree, allow_drift=True)
        except GraftError:
            raise refusal from None
        mend = f"{refusal.mend}, or accept it with --allow-drift: every anchor matches"
        raise Drift(refusal.cause, mend) from None


def _targets(plan: copies.Plan, place: Place, inside: bool) -> list[Path]:
    folder = place.folder if inside else copies.folder(plan.release)
    names = contents(plan, None if inside else folder)
    return [*(folder / name for name in plan.contents), *(place.folder / name for name in names)]


def _uninstall_command(args: argparse.Namespace) -> int:
    progress = Progress(quiet=args.quiet or args.json)
    place = find_place(args.python)
    if place.is_empty():
        raise GraftError(f"Nothing of ours is installed in {place.folder}", "Name another interpreter with --python")
    gone = uninstall(place, progress)
    if args.json:
        print(json.dumps({"site_packages": str(place.folder), "removed": [str(path) for path in gone]}, indent=2))
    for path in gone:
        progress.say(f"Removed {path}")
    progress.say(f"{place.environment.python} imports vllm-gaudi's own modules again")
    return 0
