# SPDX-License-Identifier: Apache-2.0
"""Shows what changed upstream around the fix: in vllm-gaudi's files, and in the vLLM names the fix relies on."""

import argparse
import ast
import difflib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graft import copies, names, releases, versions
from graft.errors import Drift, GraftError
from graft.merge import Insertion, Merged, compare, merge, strip
from graft.names import Name, Vllm
from graft.progress import Progress
from graft.releases import Tree
from graft.versions import Release

SAME, MOVED, CONFLICT, MERGED_UPSTREAM = "same", "moved", "conflict", "merged upstream"


@dataclass(frozen=True)
class File:
    """How one upstream file stands to the fix.

    state: "same" (its hash is pinned), "moved" (it is another, or none is pinned; every anchor and signature
    matches and the merge is clean), "conflict" (an anchor or a signature changed) or "merged upstream" (it defines
    what the fix adds). symbols: the definitions concerned. diff: of those, against a pristine file we know.
    """

    file: str
    state: str
    detail: str = ""
    symbols: tuple[str, ...] = ()
    diff: str = ""


@dataclass(frozen=True)
class Pristine:
    """The texts of one vllm-gaudi, by path, under the name that a diff gives it."""

    label: str
    texts: Mapping[str, str]
    release: str | None = None


@dataclass(frozen=True)
class Report:
    """One vllm-gaudi held against the fix. release: whose hashes it was held against, if its version tells."""

    label: str
    release: str | None
    files: tuple[File, ...]


@dataclass
class Reach:
    """All that this run can read."""

    trees: list[Tree] = field(default_factory=list)
    kept: list[Pristine] = field(default_factory=list)
    vllms: list[Vllm] = field(default_factory=list)


def survey(
    label: str, texts: Mapping[str, bytes | None], release: Release | None, known: Sequence[Pristine] = ()
) -> Report:
    """Hold the files of one vllm-gaudi against the override sources.

    Args:
        texts: the bytes of each overridden file; None for one that is not there.
        release: whose pins count; without one, any release's.
        known: pristine files to diff against, the best first.
    """
    files = tuple(_file(name, data, release, known) for name, data in texts.items())
    return Report(label, release.name if release else None, files)


def _file(name: str, data: bytes | None, release: Release | None, known: Sequence[Pristine]) -> File:
    if data is None:
        return File(name, CONFLICT, "there is no such file")
    pins = [release] if release else list(versions.load().values())
    equal = [pinned.name for pinned in pins if pinned.files.get(name) == copies.sha256(data)]
    if equal:
        return File(name, SAME, f"as in release {equal[0]}")
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return File(name, CONFLICT, "it is not UTF-8 text")
    override = (copies.OVERRIDES / name).read_text(encoding="utf-8")
    findings = compare(text, override, name=name)
    broken = [finding for finding in findings if finding.kind != "ok"]
    concerned = tuple(dict.fromkeys(finding.symbol for finding in (broken or findings)))
    reference = next((pristine for pristine in known if name in pristine.texts), None)
    diff = _diff(name, concerned, reference, text) if reference else ""
    if broken:
        upstream = any(finding.kind == "defined-upstream" for finding in broken)
        detail = "; ".join(f"{finding.symbol} {finding.detail}" for finding in broken)
        return File(name, MERGED_UPSTREAM if upstream else CONFLICT, detail, concerned, diff)
    try:
        merge(text, override, name=name, release=release.name if release else "")
    except Drift as drift:
        return File(name, CONFLICT, drift.cause, concerned, diff)
    pinned = release is None or release.files.get(name) is not None
    detail = "its hash is not a pinned one" if pinned else f"release {release.name} is not pinned"
    if reference and not diff:
        detail += f", what the fix touches is as in {reference.label}"
    return File(name, MOVED, f"{detail}; every anchor matches", concerned, diff)


def _diff(name: str, symbols: Sequence[str], reference: Pristine, text: str) -> str:
    """What changed in these definitions since a pristine file we know; "" if nothing did."""
    parts = []
    for symbol in symbols:
        before, after = (_definition(source, symbol) for source in (reference.texts[name], text))
        if before == after:
            continue
        lines = difflib.unified_diff(
            before, after, f"{reference.label}  {name}  {symbol}", f"here  {name}  {symbol}", lineterm=""
        )
        parts += [*lines]
    return "".join(f"{line}\n" for line in parts)


def _definition(text: str, symbol: str) -> list[str]:
    """The lines of a definition; of a class those of its head, as its methods are symbols of their own."""
    try:
        block: ast.AST | None = ast.parse(text.removeprefix("\ufeff"))
    except SyntaxError:
        return []
    for part in symbol.split("."):
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        inside = [node for node in getattr(block, "body", []) if isinstance(node, kinds)]
        block = next((node for node in inside if node.name == part), None)
        if block is None:
            return []
    first = min([block.lineno, *(decorator.lineno for decorator in block.decorator_list)])
    last = block.body[0].lineno - 1 if isinstance(block, ast.ClassDef) else block.end_lineno
    return text.splitlines()[first - 1 : max(first, last)]


def explain(release: Release, tree: Tree) -> str:
    """What a vllm-gaudi changed around the fix, for somebody whose install was just refused."""
    report = survey(label_of(tree), read(tree), release, _best(kept(), release, label_of(tree)))
    lines = []
    for file in report.files:
        lines.append(f"{file.file}: {file.state}{': ' if file.detail else ''}{file.detail}\n{file.diff}")
    return "".join(lines)


def read(tree: Tree) -> dict[str, bytes | None]:
    """The bytes of every overridden file of a vllm-gaudi; None for one it does not have."""
    found: dict[str, bytes | None] = {}
    for name in copies.overridden():
        try:
            found[name] = tree.read(name)
        except GraftError:
            found[name] = None
    return found


def label_of(tree: Tree) -> str:
    """What to call a vllm-gaudi: its version, or where it is."""
    if tree.version:
        return f"vllm-gaudi {tree.version}"
    return f"vllm-gaudi {tree.package.parent.name if tree.package else tree.path.name}"


def release_of(tree: Tree) -> Release | None:
    """The supported release that a vllm-gaudi says it is of."""
    for release in versions.load().values():
        try:
            copies.check_release(release, tree)
        except Drift:
            continue
        if tree.version is not None:
            return release
    return None


def kept() -> list[Pristine]:
    """The pristine files of the releases whose copies are kept here: the copies less what was inserted."""
    found = []
    for path in sorted(copies.COPIES.glob(f"*/{copies.NAME}/{copies.MANIFEST}")):
        try:
            manifest = json.loads(path.read_text(encoding="utf-8"))
            texts = {}
            for entry in manifest["modules"].values():
                text = (path.parent / entry["file"]).read_bytes().decode()
                insertions = tuple(Insertion(*insertion) for insertion in entry["insertions"])
                pristine = strip(Merged(text, insertions))
                if copies.sha256(pristine.encode()) == entry["pristine_sha256"]:
                    texts[entry["file"]] = pristine
        except (OSError, ValueError, KeyError, TypeError):
            continue
        found.append(Pristine(f"kept {manifest['tag']}", texts, manifest["release"]))
    return found


def _best(known: Sequence[Pristine], release: Release | None, not_this: str) -> list[Pristine]:
    """What to diff against: the same release's first; never a vllm-gaudi against itself."""
    others = [pristine for pristine in known if pristine.label != not_this]
    return sorted(others, key=lambda pristine: release is None or pristine.release != release.name)


def between(one: Pristine, other: Pristine) -> str:
    """What upstream changed between two releases in the definitions that the fix touches."""
    parts = []
    for name in sorted(one.texts.keys() & other.texts.keys()):
        override = (copies.OVERRIDES / name).read_text(encoding="utf-8")
        findings = [*compare(one.texts[name], override, name=name), *compare(other.texts[name], override, name=name)]
        symbols = list(dict.fromkeys(finding.symbol for finding in findings))
        renamed = Pristine(one.label, one.texts)
        diff = _diff(name, symbols, renamed, other.texts[name]).replace("+++ here", f"+++ {other.label}")
        parts.append(diff or f"{name}: what the fix touches is the same in {one.label} and {other.label}\n")
    return "".join(parts)


def reach(args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> Reach:
    """Everything that was named, or else what can be found: the environment, GAUDI_FIXES_ROOT, kept copies.

    Raises:
        GraftError: something that was named is not there.
    """
    found = Reach(kept=kept())
    found.trees = [releases.find(path) for path in args.source]
    found.vllms = [names.given(path) for path in args.vllm]
    python = args.python
    if not (args.source or args.vllm) or python:
        if environ.get("GAUDI_FIXES_ROOT") and not python:
            found.trees.append(releases.find(None, None, environ))
        inner = {k: v for k, v in environ.items() if k != "GAUDI_FIXES_ROOT"}
        try:
            found.trees.append(releases.find(None, python, inner))
        except GraftError:
            if python or not (found.trees or found.kept):
                raise
        for tree in found.trees:
            vllm = names.installed(tree.environment.python) if tree.environment else None
            found.vllms += [vllm] if vllm else []
    return found


def reports(found: Reach) -> list[Report]:
    """Hold every vllm-gaudi within reach against the fix."""
    known = list(found.kept)
    texts = {id(tree): read(tree) for tree in found.trees}
    for tree in found.trees:
        pinned = survey(label_of(tree), texts[id(tree)], release_of(tree))
        if all(file.state == SAME for file in pinned.files):
            decoded = {name: data.decode() for name, data in texts[id(tree)].items()}
            known.append(Pristine(pinned.label, decoded, pinned.files[0].detail.rpartition(" ")[2]))
    made = []
    for tree in found.trees:
        release = release_of(tree)
        best = _best(known, release, label_of(tree))
        made.append(survey(label_of(tree), texts[id(tree)], release, best))
    if not found.trees:
        for pristine in found.kept:
            release = versions.load().get(pristine.release)
            encoded = {name: text.encode() for name, text in pristine.texts.items()}
            best = _best(known, release, pristine.label)
            made.append(survey(pristine.label, encoded, release, best))
    return made


def exit_code(made: Sequence[Report], relied: Mapping[str, Sequence[Name]]) -> int:
    """2 where something drifted. What is not pinned and merges cleanly has nothing to drift from."""
    for report in made:
        release = versions.load().get(report.release) if report.release else None
        for file in report.files:
            unpinned = release is not None and release.files.get(file.file) is None
            if file.state != SAME and not (file.state == MOVED and unpinned):
                return Drift.exit_code
    drifted = any(name.state != "same" for found in relied.values() for name in found)
    return Drift.exit_code if drifted else 0


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as columns of text; the first is the head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    ruled = [rows[0], ["-" * width for width in widths], *rows[1:]]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in ruled)
    return "".join(f"{line}\n" for line in lines)


def _files_table(made: Sequence[Report]) -> str:
    rows = [("vllm-gaudi", "file", "state", "why")]
    for report in made:
        for file in report.files:
            rows.append((report.label.removeprefix("vllm-gaudi "), file.file, file.state, file.detail))
    return table(rows)


def _names_table(relied: Mapping[str, Sequence[Name]]) -> str:
    kind = next(iter(relied)).split()[0]
    rows = [(f"in {kind}", "name", *(label.removeprefix(kind).strip() for label in relied))]
    for every in zip(*relied.values(), strict=True):
        module = every[0].file.removesuffix(".py").partition("/")[2].replace("/", ".")
        rows.append((module, every[0].symbol, *(name.state for name in every)))
    return table(rows)


def reader(tree: Tree) -> Callable[[str], str | None]:
    """Reads a vllm-gaudi's files as text; None for one that is not there or is no text."""

    def read(file: str) -> str | None:
        try:
            return tree.read(file.partition("/")[2]).decode()
        except (GraftError, UnicodeDecodeError):
            return None

    return read


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "drift",
        help="show what changed upstream around the fix",
        description="Exit code 0: all as pinned, or not pinned and every anchor matches. 2: something drifted.",
    )
    parser.add_argument(
        "--source",
        type=Path,
        action="append",
        default=[],
        help="a vllm-gaudi: site-packages, a checkout, a wheel or an sdist; may be given again",
    )
    parser.add_argument(
        "--vllm",
        type=Path,
        action="append",
        default=[],
        help="a vLLM: site-packages, a checkout, a wheel or an sdist; may be given again",
    )
    parser.add_argument("--python", type=Path, help="look at this interpreter's vllm-gaudi and vLLM")
    parser.add_argument("--table", action="store_true", help="print the tables without the diffs")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quiet", action="store_true", help="print nothing, only exit")
    parser.set_defaults(func=_drift_command)


def _drift_command(args: argparse.Namespace) -> int:
    progress = Progress(quiet=args.quiet or args.json)
    with progress.step("Looking for vllm-gaudi and vLLM"):
        found = reach(args)
    with progress.step("Comparing"):
        made = reports(found)
        relied = {label_of(tree): names.survey("vllm_gaudi", reader(tree)) for tree in found.trees}
        relied_vllm = {f"vLLM {vllm.version or vllm.path}": names.survey("vllm", vllm.read) for vllm in found.vllms}
        pairs = [] if args.source or args.vllm else list(zip(found.kept, found.kept[1:]))  # noqa: B905
        changes = [between(one, other) for one, other in pairs]
    code = exit_code(made, {**relied, **relied_vllm})
    if args.json:
        print(json.dumps({"code": code, **_as_json(made, relied, relied_vllm, changes)}, indent=2))
    elif not args.quiet:
        sys.stdout.write(_as_text(made, [relied, relied_vllm], changes, diffs=not args.table))
    return code


def _as_json(
    made: Sequence[Report],
    relied: Mapping[str, Sequence[Name]],
    relied_vllm: Mapping[str, Sequence[Name]],
    changes: Sequence[str],
) -> dict:
    def plain(found: Mapping[str, Sequence[Name]]) -> dict:
        return {label: [vars(name) for name in every] for label, every in found.items()}

    return {
        "releases": [{"label": r.label, "release": r.release, "files": [vars(file) for file in r.files]} for r in made],
        "vllm_gaudi": plain(relied),
        "vllm": plain(relied_vllm),
        "between_kept_copies": list(changes),
    }


def _as_text(
    made: Sequence[Report],
    packages: Sequence[Mapping[str, Sequence[Name]]],
    changes: Sequence[str],
    *,
    diffs: bool,
) -> str:
    parts = []
    if made:
        parts.append(_files_table(made))
    parts += [_names_table(relied) for relied in packages if relied]
    for relied in packages:
        for label, found in relied.items():
            wrong = [name for name in found if name.detail]
            parts += (
                ["".join(f"{label}: {name.file}: {name.symbol}: {name.detail}\n" for name in wrong)] if wrong else []
            )
    if diffs:
        for report in made:
            parts += [f"{report.label}, {file.file}:\n{file.diff}" for file in report.files if file.diff]
            for file in report.files:
                if file.symbols and file.state in (CONFLICT, MERGED_UPSTREAM) and not file.diff:
                    parts.append(f"{report.label}, {file.file}: no pristine file to compare with is within reach\n")
        parts += changes
    if any(file.state != SAME for report in made for file in report.files):
        parts.append("What to do about it: docs/drift.md\n")
    return "\n".join(parts)
