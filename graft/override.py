# SPDX-License-Identifier: Apache-2.0
"""Reads an override source, a partial module, into the pieces the merge puts into the upstream file."""

import ast
import dataclasses
from dataclasses import dataclass
from typing import NoReturn

import libcst as cst
import libcst.matchers as m
from libcst.metadata import MetadataWrapper, PositionProvider

from graft.errors import GraftError
from graft.source import Names, Source, Statement, names, statements

MARKERS = "vllm_gaudi_overrides.merging"


@dataclass(frozen=True)
class ImportedName:
    """A name an import binds, what it is bound to, what is imported for it, and the import of it alone."""

    bound: str
    origin: str
    target: str
    statement: str

    def is_same(self, other: "ImportedName") -> bool:
        return (self.bound, self.origin, self.target) == (other.bound, other.origin, other.target)


@dataclass(frozen=True)
class Import:
    """An import statement: its kind ("import" or "from"), its module, and what it binds."""

    kind: str
    module: str
    names: tuple[ImportedName, ...]
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class Piece:
    """A function, a method, an assignment, a whole class, or a call that stands alone (its name is its code).

    mark: "new", "before", "replace", or "declared" for one that only says that upstream has it.
    lines: what is inserted, without line ends. verbatim: the indices of those that begin inside a
    string. comments: how many of them are comments above it. gap: how many blank lines stand above
    them. names: those of its code; of the body alone for "before".
    """

    name: str
    mark: str
    fingerprint: str
    node: cst.FunctionDef | cst.ClassDef | cst.SimpleStatementLine
    indent: str
    lines: tuple[str, ...]
    verbatim: frozenset[int]
    comments: int
    gap: int
    names: Names

    @property
    def is_block(self) -> bool:
        """Whether it is a function or a class, no assignment or call."""
        return not isinstance(self.node, cst.SimpleStatementLine)


@dataclass(frozen=True)
class Extension:
    """What an upstream class of this name gets. bases: as the override gives them."""

    name: str
    bases: tuple[str, ...]
    members: tuple[Piece, ...]


@dataclass(frozen=True)
class Override:
    imports: tuple[Import, ...]
    items: tuple[Piece | Extension, ...]


def parse(text: str, name: str) -> Override:
    """Read an override source.

    Raises:
        GraftError: it is not Python, or holds what the merge has no rule for.
    """
    return _Reader(text, name).override()


def imported(source: Source, statement: cst.CSTNode) -> Import | None:
    """What an import statement imports; None for other statements and for a star import."""
    if isinstance(statement, cst.Import):
        found = []
        for alias in statement.names:
            dotted = source.code(alias.name)
            bound = alias.evaluated_alias or dotted.partition(".")[0]
            whole = f"import {dotted} as {bound}" if alias.evaluated_alias else f"import {dotted}"
            origin = dotted if alias.evaluated_alias else bound
            found.append(ImportedName(bound, origin, dotted, whole))
        return Import("import", found[0].target, tuple(found))
    if isinstance(statement, cst.ImportFrom) and not isinstance(statement.names, cst.ImportStar):
        module = "." * len(statement.relative)
        module += source.code(statement.module) if statement.module else ""
        found = []
        for alias in statement.names:
            plain, renamed = alias.evaluated_name, alias.evaluated_alias
            item = f"{plain} as {renamed}" if renamed else plain
            origin = f"{module}:{plain}"
            whole = f"from {module} import {item}"
            found.append(ImportedName(renamed or plain, origin, origin, whole))
        return Import("from", module, tuple(found))
    return None


def assigned(line: cst.SimpleStatementLine) -> str | None:
    """The one name a line binds by assigning to it, or None."""
    if len(line.body) == 1:
        statement = line.body[0]
        if m.matches(statement, m.Assign(targets=[m.AssignTarget(m.Name())])):
            return statement.targets[0].target.value
        if m.matches(statement, m.AnnAssign(target=m.Name())):
            return statement.target.value
    return None


def called(source: Source, line: cst.SimpleStatementLine) -> str | None:
    """The code of a call that stands alone, however it is laid out; or None."""
    if len(line.body) == 1 and m.matches(line.body[0], m.Expr(m.Call())):
        return ast.unparse(ast.parse(source.code(line.body[0])))
    return None


class _Reader:
    def __init__(self, text: str, name: str) -> None:
        self.name = name
        try:
            self.source = Source(text.replace("\r\n", "\n"))
        except ValueError as error:
            self._refuse(f"it does not parse ({error})")
        self.inside_strings = self._lines_inside_strings()
        self.markers: dict[str, str] = {}

    def _refuse(self, why: str) -> NoReturn:
        raise GraftError(
            f"The override source {self.name} cannot be merged: {why}",
            f"Mend vendor/vllm_gaudi_overrides/{self.name}",
        )

    def _lines_inside_strings(self) -> set[int]:
        wrapper = MetadataWrapper(self.source.module, unsafe_skip_copy=True)
        positions = wrapper.resolve(PositionProvider)
        inside: set[int] = set()
        for string in m.findall(self.source.module, m.SimpleString() | m.FormattedString()):
            place = positions[string]
            inside.update(range(place.start.line + 1, place.end.line + 1))
        return inside

    def override(self) -> Override:
        imports, items = [], []
        for statement in statements(self.source.module):
            if isinstance(statement, cst.ClassDef):
                is_added = any(self._marker(decorator) == "added" for decorator in statement.decorators)
                items.append(self._added(statement) if is_added else self._extension(statement))
            elif isinstance(statement, cst.FunctionDef):
                items.append(self._function(statement, statement.name.value))
            elif isinstance(statement, cst.SimpleStatementLine):
                found = None
                if len(statement.body) == 1:
                    found = imported(self.source, statement.body[0])
                if found is None:
                    items.append(self._assignment(statement, ""))
                elif found.module == MARKERS:
                    self.markers |= {n.bound: n.origin.partition(":")[2] for n in found.names}
                elif found.module == "__future__":
                    self._refuse("a __future__ import would change what upstream's own code means")
                else:
                    imports.append(dataclasses.replace(found, lines=self._lines(statement)))
            else:
                line = self.source.first_line(statement)
                self._refuse(f"line {line} is no import, function, class, assignment or call")
        given = [item.name for item in items]
        for item in items:
            if isinstance(item, Extension):
                given += [member.name for member in item.members]
        twice = sorted({name for name in given if given.count(name) > 1})
        if twice:
            self._refuse(f"it defines {twice[0]} twice")
        return Override(tuple(imports), tuple(items))

    def _lines(self, node: Statement) -> tuple[str, ...]:
        numbers = range(self.source.first_line(node), self.source.last_line(node) + 1)
        return tuple(self.source.line(number) for number in numbers)

    def _marker(self, decorator: cst.Decorator) -> str | None:
        """The marker that a decorator is, or None."""
        call = decorator.decorator
        return self.markers.get(self.source.code(call.func if isinstance(call, cst.Call) else call))

    def _added(self, node: cst.ClassDef) -> Piece:
        """A class that upstream does not have."""
        name = node.name.value
        kept = [decorator for decorator in node.decorators if self._marker(decorator) is None]
        if len(kept) != len(node.decorators) - 1:
            self._refuse(f"{name} has two markers")
        if any(self._marker(decorator) for decorator in m.findall(node.body, m.Decorator())):
            self._refuse(f"class {name} is marked added, so nothing in it can be marked")
        dropped = {n for d in node.decorators if d not in kept for n in self.source.decorator_lines(d)}
        first = self.source.comment_line(node, attached=False)
        numbers = [n for n in range(first, self.source.last_line(node) + 1) if n not in dropped]
        unmarked = node.with_changes(decorators=kept)
        return self._piece(name, "new", "", unmarked, numbers, names(unmarked))

    def _extension(self, node: cst.ClassDef) -> Extension:
        name = node.name.value
        if node.decorators or node.keywords:
            self._refuse(f"class {name} has decorators or keywords, which are upstream's to give")
        members = []
        if isinstance(node.body, cst.IndentedBlock):
            for statement in statements(node.body):
                if isinstance(statement, cst.FunctionDef):
                    members.append(self._function(statement, f"{name}.{statement.name.value}"))
                elif isinstance(statement, cst.SimpleStatementLine):
                    if not _is_empty(statement):
                        members.append(self._assignment(statement, f"{name}."))
                else:
                    line = self.source.first_line(statement)
                    self._refuse(f"line {line} of class {name} is no method or attribute")
        elif not all(_is_placeholder(small) for small in node.body.body):
            self._refuse(f"the body of class {name} stands on the line of its name")
        bases = tuple(self.source.code(base.value) for base in node.bases)
        return Extension(name, bases, tuple(members))

    def _assignment(self, node: cst.SimpleStatementLine, prefix: str) -> Piece:
        name = assigned(node)
        if name is None and not prefix:
            name = called(self.source, node)
        if name is None:
            line = self.source.first_line(node)
            self._refuse(f"line {line} is no import, no assignment to one name and no call")
        first = self.source.comment_line(node, attached=False)
        numbers = list(range(first, self.source.last_line(node) + 1))
        return self._piece(prefix + name, "new", "", node, numbers, names(node))

    def _function(self, node: cst.FunctionDef, name: str) -> Piece:
        mark, fingerprint, marker_lines = "new", "", range(0)
        kept = []
        for decorator in node.decorators:
            call, marker = decorator.decorator, self._marker(decorator)
            if marker is None:
                kept.append(decorator)
                continue
            if mark != "new":
                self._refuse(f"{name} has two markers")
            if marker == "added":
                self._refuse(
                    f"{name} is marked added, which is for classes: a function that upstream lacks needs no mark"
                )
            mark, marker_lines = marker, self.source.decorator_lines(decorator)
            if mark == "replace":
                if not m.matches(call, m.Call(args=[m.Arg(m.SimpleString())])):
                    self._refuse(f"the replace marker of {name} needs one fingerprint, a string")
                fingerprint = call.args[0].value.evaluated_value
        unmarked = node.with_changes(decorators=kept)
        if isinstance(node.body, cst.IndentedBlock):
            body = statements(node.body)
        elif all(_is_placeholder(small) for small in node.body.body):
            body = []
        else:
            self._refuse(f"the body of {name} stands on the line of its name")
        empty = all(_is_empty(statement) for statement in body)
        if mark == "before":
            if empty:
                self._refuse(f"{name} is marked before and has no body to put there")
            return self._top_of(unmarked, name, body)
        if empty and mark == "new":
            return self._piece(name, "declared", "", unmarked, [], names(unmarked))
        first = self.source.comment_line(node, attached=False)
        numbers = range(first, self.source.last_line(node) + 1)
        numbers = [number for number in numbers if number not in marker_lines]
        return self._piece(name, mark, fingerprint, unmarked, numbers, names(unmarked))

    def _top_of(self, node: cst.FunctionDef, name: str, body: list[Statement]) -> Piece:
        first = self.source.comment_line(body[0], attached=False)
        numbers = list(range(first, self.source.last_line(body[-1]) + 1))
        given = names(_bare(node, body))
        if given.declared:
            self._refuse(f"{name} declares {min(given.declared)} global or nonlocal")
        return self._piece(name, "before", "", node, numbers, given)

    def _piece(
        self,
        name: str,
        mark: str,
        fingerprint: str,
        node: cst.FunctionDef | cst.ClassDef | cst.SimpleStatementLine,
        numbers: list[int],
        given: Names,
    ) -> Piece:
        lines = [self.source.line(number) for number in numbers]
        indent = ""
        if lines:
            indent = lines[0][: len(lines[0]) - len(lines[0].lstrip())]
        inside = self.inside_strings
        verbatim = frozenset(i for i, number in enumerate(numbers) if number in inside)
        gap = self.source.blanks_above(numbers[0]) if numbers else 0
        comments = next((i for i, line in enumerate(lines) if not _is_comment(line)), 0)
        return Piece(name, mark, fingerprint, node, indent, tuple(lines), verbatim, comments, gap, given)


def _bare(node: cst.FunctionDef, body: list[Statement]) -> cst.FunctionDef:
    """The function with these statements for a body, and of its signature nothing but the names."""

    def bare(parameter: cst.Param) -> cst.Param:
        return parameter.with_changes(default=None, annotation=None, equal=cst.MaybeSentinel.DEFAULT)

    given = node.params
    params = given.with_changes(
        posonly_params=[bare(parameter) for parameter in given.posonly_params],
        params=[bare(parameter) for parameter in given.params],
        kwonly_params=[bare(parameter) for parameter in given.kwonly_params],
        star_arg=bare(given.star_arg) if isinstance(given.star_arg, cst.Param) else given.star_arg,
        star_kwarg=bare(given.star_kwarg) if given.star_kwarg else None,
    )
    return node.with_changes(params=params, returns=None, decorators=[], body=cst.IndentedBlock(body))


def _is_placeholder(statement: cst.BaseSmallStatement) -> bool:
    return m.matches(statement, m.Pass() | m.Expr(m.Ellipsis()))


def _is_empty(statement: Statement) -> bool:
    return isinstance(statement, cst.SimpleStatementLine) and all(_is_placeholder(small) for small in statement.body)


def _is_comment(line: str) -> bool:
    return not line.strip() or line.lstrip().startswith("#")
