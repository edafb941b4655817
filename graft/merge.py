# SPDX-License-Identifier: Apache-2.0
"""Merges an override source into the pristine file of the same path: what it does not insert is left as it was.

The rules are in docs/merge.md. Places are found in the syntax tree, and text is inserted between lines.
"""

import builtins
import dataclasses
import hashlib
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import libcst as cst

from graft import override as overrides
from graft.errors import Drift
from graft.override import Extension, Import, ImportedName, Piece
from graft.source import Source, docstring, kind, names, parameters, statements

_DEFINITION = (cst.FunctionDef, cst.ClassDef)
_HELD = "is there already, as the fix has it"
_GIVEN = {*dir(builtins), "__class__", "__file__", "__path__", "__annotations__"}


@dataclass(frozen=True)
class Insertion:
    """What was inserted, its offsets in the merged text, and what stood there before ("" but for a replace)."""

    what: str
    start: int
    end: int
    replaced: str = ""


@dataclass(frozen=True)
class Merged:
    text: str
    insertions: tuple[Insertion, ...]


@dataclass(frozen=True)
class Finding:
    """How a definition, or a name, of the upstream file stands to the override source.

    kind: "ok", "missing" (upstream lacks it), "signature" (it cannot take what the override gives), "changed" (it is
    not what the override was written against) or "defined-upstream" (the override would define it a second time).
    detail: what is wrong, as the rest of a sentence that begins with the symbol.
    """

    kind: str
    symbol: str
    detail: str = ""


def merge(pristine: str, override: str, *, name: str, release: str) -> Merged:
    """Merge an override source into the upstream file it is for.

    Args:
        pristine: the upstream file's text with its own line ends, and its byte order mark if it has one.
        override: the override source's text.
        name: of the file below vllm_gaudi, for messages.
        release: for messages.
    Raises:
        Drift: the file is not one this override can be merged into; every reason is named.
        GraftError: the override source breaks the format's own rules.
    """
    findings, edits = _survey(pristine, override, name)
    broken = [finding for finding in findings if finding.kind != "ok"]
    if broken:
        raise _drift(broken, name, release)
    merged = _apply(pristine, edits)
    if strip(merged) != pristine:
        raise AssertionError(f"merging into {name} changed what was there")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(merged.text.removeprefix("\ufeff"), name, "exec", dont_inherit=True)
    except SyntaxError as error:
        raise Drift(
            f"{name} of release {release} does not compile after the merge: {error}",
            "See docs/drift.md",
        ) from None
    return merged


def strip(merged: Merged) -> str:
    """The pristine text: the merged one without its insertions, and with what they replaced."""
    parts, position = [], 0
    for insertion in merged.insertions:
        parts += [merged.text[position : insertion.start], insertion.replaced]
        position = insertion.end
    return "".join([*parts, merged.text[position:]])


def compare(pristine: str, override: str, *, name: str) -> list[Finding]:
    """Hold an override source against the upstream file it is for, without refusing anything.

    Raises:
        GraftError: the override source breaks the format's own rules.
    """
    return _survey(pristine, override, name)[0]


def fingerprint(definition: str) -> str:
    """What the replace marker names: a hash of a definition's lines, without indentation and trailing blanks."""
    lines = [line.rstrip() for line in definition.split("\n")]
    indent = min((len(line) - len(line.lstrip()) for line in lines if line), default=0)
    text = "\n".join(line[indent:] for line in lines).strip("\n")
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def definition(text: str, symbol: str) -> str | None:
    """The lines of a definition ("function", "Class" or "Class.method") in a file, or None if it has none such.

    Raises:
        ValueError: the text is not Python.
    """
    source = Source(text)
    block: cst.Module | cst.IndentedBlock = source.module
    found = None
    for part in symbol.split("."):
        found = _only(_definitions(block, source), part) if block else None
        if found is None:
            return None
        block = found.body if isinstance(getattr(found, "body", None), cst.IndentedBlock) else None
    return source.definition(found)


@dataclass(frozen=True)
class _Edit:
    """Text that goes to a place; `end` is beyond `start` where it takes the place of something.

    defines: the names it binds in the module. eager: those it needs when the module is loaded. inside: the class it is
    a member of.
    """

    what: str
    start: int
    end: int
    text: str
    defines: frozenset[str] = frozenset()
    eager: frozenset[str] = frozenset()
    inside: str = ""


def _survey(pristine: str, override: str, name: str) -> tuple[list[Finding], list[_Edit]]:
    parsed = overrides.parse(override, name)
    try:
        upstream = Source(pristine)
    except ValueError as error:
        return [Finding("missing", name, f"does not parse as Python ({error})")], []
    survey = _Survey(upstream, parsed)
    survey.run()
    return survey.findings, survey.edits


def _drift(broken: Sequence[Finding], name: str, release: str) -> Drift:
    if all(finding.detail == _HELD for finding in broken):
        return Drift(f"{name} of release {release} holds the fix already", "Give the pristine file")
    symbols: dict[str, list[str]] = {}
    for finding in broken:
        symbols.setdefault(finding.detail, []).append(finding.symbol)
    reasons = [f"{', '.join(named)} {detail}" for detail, named in symbols.items()]
    return Drift(f"{name} of release {release}: {'; '.join(reasons)}", "See docs/drift.md")


def _apply(pristine: str, edits: Sequence[_Edit]) -> Merged:
    parts, insertions, position, length = [], [], 0, 0
    for edit in edits:
        kept = pristine[position : edit.start]
        start = length + len(kept)
        length = start + len(edit.text)
        parts += [kept, edit.text]
        replaced = pristine[edit.start : edit.end]
        insertions.append(Insertion(edit.what, start, length, replaced))
        position = edit.end
    return Merged("".join([*parts, pristine[position:]]), tuple(insertions))


def _definitions(block: cst.Module | cst.IndentedBlock, source: Source) -> dict[str, list[cst.CSTNode]]:
    """The functions, classes, assignments to one name and lone calls that stand directly in a block."""
    found: dict[str, list[cst.CSTNode]] = {}
    for statement in block.body:
        if isinstance(statement, _DEFINITION):
            found.setdefault(statement.name.value, []).append(statement)
        elif isinstance(statement, cst.SimpleStatementLine):
            name = overrides.assigned(statement) or overrides.called(source, statement)
            if name is not None:
                found.setdefault(name, []).append(statement)
    return found


def _only(found: dict[str, list[cst.CSTNode]], name: str) -> cst.CSTNode | None:
    nodes = found.get(name, [])
    return nodes[0] if len(nodes) == 1 else None


class _Survey:
    """Goes through an override source and finds, for each piece, its place upstream or what is in the way."""

    def __init__(self, upstream: Source, override: overrides.Override) -> None:
        self.upstream = upstream
        self.override = override
        self.newline = upstream.newline
        self.top = _definitions(upstream.module, upstream)
        self.bound = upstream.bound
        self.findings: list[Finding] = []
        self.edits: list[_Edit] = []
        # What is inserted, and the top-level upstream statement it goes into or next to.
        self.inserted: list[tuple[Piece, cst.CSTNode | None]] = []
        self.added: list[tuple[Piece, cst.CSTNode | None]] = []
        self.imports = self._upstream_imports()

    def run(self) -> None:
        if not self.upstream.module.body:
            self._note("missing", "the code", "is not there: the file is empty")
            return
        anchor = None
        for item in self.override.items:
            if isinstance(item, Extension):
                anchor = self._extend(item) or anchor
            elif item.mark == "new" and not self._is_upstreams(item):
                self._add(item, anchor)
            else:
                anchor = self._meet(item, self.top, item.name) or anchor
        self._place_added()
        self.edits[:0] = self._imports()
        self.edits.sort(key=lambda edit: (edit.start, edit.end))
        self._resolve()
        self._order()

    def _note(self, kind: str, symbol: str, detail: str = "") -> None:
        self.findings.append(Finding(kind, symbol, detail))

    # What upstream has

    def _is_upstreams(self, piece: Piece) -> bool:
        """Whether upstream has the very same assignment or call."""
        line = _only(self.top, piece.name)
        if piece.is_block or not isinstance(line, cst.SimpleStatementLine):
            return False
        if overrides.called(self.upstream, line) is not None:
            return True  # found by its code
        code = [self.upstream.code(small) for small in line.body]
        return code == [self.upstream.code(small) for small in piece.node.body]

    def _unique(self, found: dict[str, list], name: str, symbol: str, type_: type) -> cst.CSTNode | None:
        nodes = found.get(name, [])
        if len(nodes) > 1:
            self._note("changed", symbol, "is defined more than once")
        elif not nodes or not isinstance(nodes[0], type_):
            what = "class" if type_ is cst.ClassDef else "function"
            self._note("missing", symbol, f"is not there as a {what}")
        else:
            return nodes[0]
        return None

    def _extend(self, extension: Extension) -> cst.ClassDef | None:
        node = self._unique(self.top, extension.name, extension.name, cst.ClassDef)
        if node is None:
            return None
        bases = tuple(self.upstream.code(base.value) for base in node.bases)
        if extension.bases and extension.bases != bases:
            expected, given = ", ".join(extension.bases), ", ".join(bases) or "nothing"
            self._note("changed", extension.name, f"derives from {given}, not from {expected}")
            return node
        if not isinstance(node.body, cst.IndentedBlock):
            self._note("changed", extension.name, "has its body on the line of its name")
            return node
        self._note("ok", extension.name)
        members = _definitions(node.body, self.upstream)
        bound = self.upstream.bound_in(node)
        new = []
        for piece in extension.members:
            own_name = piece.name.partition(".")[2]
            if piece.mark != "new":
                self._meet(piece, members, own_name, node)
            elif own_name in bound:
                self._defined(piece, _only(members, own_name))
            else:
                self._note("ok", piece.name)
                self.inserted.append((piece, node))
                new.append(piece)
        self._append(new, node)
        return node

    def _meet(
        self, piece: Piece, found: dict[str, list], own_name: str, into: cst.CSTNode | None = None
    ) -> cst.CSTNode | None:
        """Hold a piece that upstream must have against upstream's definition of that name."""
        if not piece.is_block:
            self._note("ok", piece.name)
            return _only(found, own_name)
        node = self._unique(found, own_name, piece.name, cst.FunctionDef)
        if node is None:
            return None
        why_not = self._why_not_replace if piece.mark == "replace" else self._why_not_before
        wrong = why_not(piece, node)
        self.findings.append(wrong or Finding("ok", piece.name))
        if wrong is None and piece.mark != "declared":
            self.inserted.append((piece, into or node))
            edit = self._replace if piece.mark == "replace" else self._before
            self.edits.append(edit(piece, node))
        return node

    def _defined(self, piece: Piece, node: cst.CSTNode | None) -> None:
        detail = "is defined already: upstream may have its own fix"
        if node is not None and self._is_ours(piece, node):
            detail = _HELD
        self._note("defined-upstream", piece.name, detail)

    def _is_ours(self, piece: Piece, node: cst.CSTNode) -> bool:
        """Whether the upstream definition is the very one that the override has."""
        own = "\n".join(piece.lines[piece.comments :])
        return fingerprint(self.upstream.definition(node)) == fingerprint(own)

    def _why_not_replace(self, piece: Piece, node: cst.FunctionDef) -> Finding | None:
        found = fingerprint(self.upstream.definition(node))
        if found == piece.fingerprint:
            return None
        if self._is_ours(piece, node):
            return Finding("defined-upstream", piece.name, _HELD)
        detail = f"is not what the fix replaces (its fingerprint is {found})"
        return Finding("changed", piece.name, detail)

    def _why_not_before(self, piece: Piece, node: cst.FunctionDef) -> Finding | None:
        theirs = parameters(node)
        lacking = [name for name in parameters(piece.node) if name not in theirs]
        if lacking:
            taken = ", ".join(theirs) or "nothing"
            detail = f"has no parameter {', '.join(lacking)} (it takes {taken})"
            return Finding("signature", piece.name, detail)
        if kind(piece.node) != kind(node) and piece.mark == "before":
            detail = f"is of kind {kind(node)}, not {kind(piece.node)}"
            return Finding("signature", piece.name, detail)
        decorators = [self.upstream.code(d.decorator) for d in node.decorators]
        for decorator in piece.node.decorators:
            if self.upstream.code(decorator.decorator) not in decorators:
                detail = f"is not decorated with {self.upstream.code(decorator.decorator)}"
                return Finding("signature", piece.name, detail)
        if piece.mark == "declared":
            return None
        if not isinstance(node.body, cst.IndentedBlock):
            return Finding("changed", piece.name, "has its body on the line of its name")
        first = docstring(node.body)
        if first is not None and len(first.body) > 1:
            return Finding("changed", piece.name, "has code on the line of its docstring")
        if self._holds(piece, node):
            return Finding("defined-upstream", piece.name, _HELD)
        own = names(node)
        ours = {name.lstrip("*") for name in parameters(piece.node)}
        clash = piece.names.local & own.own
        hidden = piece.names.free & (own.local | {name.lstrip("*") for name in theirs} - ours)
        if clash or hidden:
            detail = f"has a variable {min(clash | hidden)}, which means something else in the fix"
            return Finding("changed", piece.name, detail)
        return None

    def _holds(self, piece: Piece, node: cst.FunctionDef) -> bool:
        """Whether the upstream body holds the lines of the piece."""
        theirs = [line.strip() for line in self.upstream.definition(node).split("\n")]
        ours = [line.strip() for line in piece.lines]
        spans = range(len(theirs) - len(ours) + 1)
        return any(theirs[i : i + len(ours)] == ours for i in spans)

    # Where the pieces go

    def _code(self, piece: Piece, indent: str) -> str:
        """The piece's lines, set to upstream's indentation and line ends."""
        unit = self.upstream.module.default_indent
        lines = []
        for number, line in enumerate(piece.lines):
            if number in piece.verbatim or not line:
                lines.append(line)
                continue
            bare = line.lstrip(" ")
            deeper = max(len(line) - len(bare) - len(piece.indent), 0)
            levels, rest = divmod(deeper, 4)
            lines.append(indent + unit * levels + " " * rest + bare)
        return self.newline.join(lines)

    def _before(self, piece: Piece, node: cst.FunctionDef) -> _Edit:
        what = f"{piece.name} (before)"
        code = self._code(piece, self.upstream.indent(node.body))
        body = statements(node.body)
        if not body:
            at = self.upstream.ends[self.upstream.last_line(node.body.body[0]) - 1]
            return _Edit(what, at, at, self.newline + code)
        line = self.upstream.comment_line(body[0], attached=False)
        at = self.upstream.starts[line - 1]
        return _Edit(what, at, at, code + self.newline * 2)

    def _replace(self, piece: Piece, node: cst.FunctionDef) -> _Edit:
        first = self.upstream.first_line(node)
        line = self.upstream.line(first)
        indent = line[: len(line) - len(line.lstrip())]
        start = self.upstream.starts[first - 1]
        end = self.upstream.ends[self.upstream.last_line(node) - 1]
        what, text = f"{piece.name} (replaced)", self._code(piece, indent)
        inside = piece.name.rpartition(".")[0]
        return _Edit(what, start, end, text, eager=self._eager(piece), inside=inside)

    def _eager(self, piece: Piece) -> frozenset[str]:
        """The names a piece needs when the module is loaded."""
        has_annotations = any(
            found.module == "__future__" and any(name.bound == "annotations" for name in found.names)
            for found, _ in self.imports
        )
        return piece.names.eager - (piece.names.annotating if has_annotations else frozenset())

    def _append(self, pieces: Sequence[Piece], node: cst.ClassDef) -> None:
        """Add members to a class, above the comments that end it."""
        at = self.upstream.ends[self.upstream.last_line(node.body.body[-1]) - 1]
        indent = self.upstream.indent(node.body)
        after_function = isinstance(node.body.body[-1], cst.FunctionDef)
        for piece in pieces:
            gap = 1 if piece.is_block or after_function else min(piece.gap, 1)
            text = self.newline * (1 + gap) + self._code(piece, indent)
            self.edits.append(_Edit(piece.name, at, at, text, eager=self._eager(piece), inside=node.name.value))
            after_function = piece.is_block

    def _add(self, piece: Piece, anchor: cst.CSTNode | None) -> None:
        if piece.name in self.bound:
            self._defined(piece, _only(self.top, piece.name))
        else:
            self._note("ok", piece.name)
            self.added.append((piece, anchor))

    def _place_added(self) -> None:
        """Below the upstream definition that a piece follows; else above its first user; else with the piece it
        follows, or at the end."""
        places: dict[tuple[int, bool], tuple[cst.CSTNode, list[Piece]]] = {}
        last = (self.upstream.module.body[-1], False)
        for piece, anchor in self.added:
            user = None if anchor else self._first_user(piece, {piece.name})
            if anchor or user:
                last = (anchor or user, user is not None)
            node, is_above = last
            self.inserted.append((piece, node))
            places.setdefault((id(node), is_above), (node, []))[1].append(piece)
        for (_, is_above), (node, pieces) in places.items():
            (self._add_above if is_above else self._add_below)(pieces, node)

    def _first_user(self, piece: Piece, seen: set[str]) -> cst.CSTNode | None:
        """The first upstream statement that gets, or stands beside, code which uses a new name."""
        users = [node for other, node in self.inserted if piece.name in other.names.free]
        for other, anchor in self.added:
            if piece.name in other.names.free and other.name not in seen:
                users.append(anchor or self._first_user(other, seen | {other.name}))
        placed = [node for node in users if node is not None]
        return min(placed, key=self.upstream.first_line, default=None)

    def _add_below(self, pieces: Sequence[Piece], node: cst.CSTNode, *, apart: bool = False) -> None:
        """Add pieces below an upstream statement. apart: they belong to the definition that follows it."""
        last = self.upstream.last_line(node)
        at = self.upstream.ends[last - 1]
        below = self.upstream.blanks_below(last)
        after_block = isinstance(node, _DEFINITION)
        for piece in pieces:
            gap = min(piece.gap, 2)
            if piece.is_block or after_block:
                gap = 2
            elif apart and piece is pieces[0]:
                gap = 1
            text = self.newline * (1 + gap) + self._code(piece, "")
            if piece is pieces[-1] and below is not None:
                text += self.newline * max((2 if piece.is_block else int(apart)) - below, 0)
            self._add_edit(piece, at, text)
            after_block = piece.is_block

    def _add_above(self, pieces: Sequence[Piece], node: cst.CSTNode) -> None:
        """Add pieces above an upstream definition and its comments: below what stands there."""
        body = list(self.upstream.module.body)
        number = next(number for number, statement in enumerate(body) if statement is node)
        if number:
            self._add_below(pieces, body[number - 1], apart=True)
            return
        at = self.upstream.starts[self.upstream.comment_line(node, attached=True) - 1]
        for piece, follower in zip(pieces, [*pieces[1:], None], strict=True):
            one_line = follower and not (piece.is_block or follower.is_block)
            gap = min(follower.gap, 2) if one_line else 2
            self._add_edit(piece, at, self._code(piece, "") + self.newline * (1 + gap))

    def _add_edit(self, piece: Piece, at: int, text: str) -> None:
        defines = frozenset({piece.name})
        self.edits.append(_Edit(piece.name, at, at, text, defines, self._eager(piece)))

    # Names

    def _imports(self) -> list[_Edit]:
        needed = set().union(*(piece.names.free for piece, _ in self.inserted))
        beside, first = [], []
        for statement in self.override.imports:
            lacking = []
            for name in statement.names:
                if self._is_taken(name):
                    self._note("changed", name.bound, f"is not imported from {statement.module}")
                elif name.bound in needed:
                    has = [h for found, _ in self.imports for h in found.names if h.is_same(name)]
                    lacking += [] if has else [name]
            if lacking:
                lines = statement.lines
                if len(lacking) < len(statement.names):
                    lines = [name.statement for name in lacking]
                bound = [name.bound for name in lacking]
                what = f"import of {', '.join(bound)}"
                edit = _Edit(what, 0, 0, self.newline.join(lines), frozenset(bound))
                neighbour = _neighbour(statement, self._import_block())
                if neighbour is None:
                    first.append(edit)
                else:
                    beside.append(self._below(neighbour, edit, 0))
        return beside + self._first_imports(first)

    def _below(self, node: cst.SimpleStatementLine, edit: _Edit, gap: int) -> _Edit:
        at = self.upstream.ends[self.upstream.last_line(node) - 1]
        text = self.newline * (1 + gap) + edit.text
        return dataclasses.replace(edit, start=at, end=at, text=text)

    def _first_imports(self, edits: Sequence[_Edit]) -> list[_Edit]:
        """Imports for a file that has none: below its docstring and what it has from __future__, or at its top."""
        futures = [line for found, line in self.imports if found.module == "__future__"]
        head = (futures or [docstring(self.upstream.module)])[-1]
        if head is not None:
            return [self._below(head, edit, 0 if number else 1) for number, edit in enumerate(edits)]
        top = self.upstream.comment_line(self.upstream.module.body[0], attached=True)
        at = self.upstream.starts[top - 1]
        ends = [self.newline * (3 if edit is edits[-1] else 1) for edit in edits]
        return [
            dataclasses.replace(edit, start=at, end=at, text=edit.text + end)
            for edit, end in zip(edits, ends, strict=True)
        ]

    def _upstream_imports(self) -> list[tuple[Import, cst.SimpleStatementLine]]:
        """The imports that are always run, with the lines they stand on."""
        found = []
        for line in self.upstream.module.body:
            if isinstance(line, cst.SimpleStatementLine):
                imports = [overrides.imported(self.upstream, small) for small in line.body]
                found += [(statement, line) for statement in imports if statement]
        return found

    def _is_taken(self, name: ImportedName) -> bool:
        """Whether upstream binds the name to something else."""
        for node in self.bound.get(name.bound, []):
            found = overrides.imported(self.upstream, node)
            if found is None:
                return True
            if any(h.bound == name.bound and h.origin != name.origin for h in found.names):
                return True
        return False

    def _import_block(self) -> list[tuple[Import, cst.SimpleStatementLine]]:
        """The imports above the first class or function, but those from __future__."""
        blocks = [node for node in self.upstream.module.body if isinstance(node, _DEFINITION)]
        end = self.upstream.first_line(blocks[0]) if blocks else len(self.upstream.ends) + 1
        return [
            (found, line)
            for found, line in self.imports
            if self.upstream.first_line(line) < end and found.module != "__future__"
        ]

    def _order(self) -> None:
        """What the inserted code needs when the module is loaded must be defined further up."""
        defined = {name for edit in self.edits for name in edit.defines}
        above: set[str] = set()
        for edit in self.edits:
            for name in sorted(edit.eager):
                bound = self.upstream.first_bound(name)
                if name in defined - above or (bound is not None and (bound >= edit.start or name == edit.inside)):
                    self._note("changed", name, f"is defined too far down for {edit.what}")
            above |= edit.defines

    def _resolve(self) -> None:
        """Every name the inserted code takes from around it must mean something in the merged file."""
        known = _GIVEN | self.bound.keys() | {piece.name for piece, _ in self.added}
        known |= {name.bound for statement in self.override.imports for name in statement.names}
        users: dict[str, str] = {}
        for piece, _ in self.inserted:
            for name in sorted(piece.names.free - known):
                users.setdefault(name, piece.name)
        for name, user in users.items():
            self._note("missing", name, f"is not defined there, and {user} needs it")


def _neighbour(
    statement: Import, theirs: list[tuple[Import, cst.SimpleStatementLine]]
) -> cst.SimpleStatementLine | None:
    """The line a new import goes below: the last one of its kind, nearest to it in origin.

    Imports of its kind and package come first, then those of its kind and sort (standard library or not), of its sort,
    of its kind, any; among them the last one whose module sorts before the new one's: what is sorted stays sorted.
    """

    def package(found: Import) -> str:
        return found.module.partition(".")[0]

    def is_standard(found: Import) -> bool:
        return package(found) in sys.stdlib_module_names

    def nearness(found: Import) -> tuple[bool, ...]:
        same_kind = found.kind == statement.kind
        same_sort = is_standard(found) == is_standard(statement)
        return (same_kind and package(found) == package(statement), same_kind and same_sort, same_sort, same_kind)

    if not theirs:
        return None
    best = max(nearness(found) for found, _ in theirs)
    near = [(found, line) for found, line in theirs if nearness(found) == best]
    sorted_before = [line for found, line in near if found.module <= statement.module]
    return (sorted_before or [line for _, line in near])[-1]
