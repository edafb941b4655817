# SPDX-License-Identifier: Apache-2.0
"""A Python file as text and as a concrete syntax tree, and on which lines its statements stand.

Everything the merge inserts goes between two lines, so lines are all the tree has to tell: the text itself is never
generated from it.
"""

import ast
import re
from dataclasses import dataclass

import libcst as cst
import libcst.matchers as m
from libcst.metadata import (
    BuiltinScope,
    FunctionScope,
    GlobalScope,
    MetadataWrapper,
    Scope,
    ScopeProvider,
    WhitespaceInclusivePositionProvider,
)

_BOM = "\ufeff"
_NEWLINE = re.compile(r"\r\n?|\n")

Statement = cst.SimpleStatementLine | cst.BaseCompoundStatement
Block = cst.Module | cst.IndentedBlock


class Source:
    """The text of a file, its tree, and the place of each statement.

    Raises:
        ValueError: the text is not Python, or LibCST cannot give it back unchanged.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        code = text.removeprefix(_BOM)
        try:
            self.module = cst.parse_module(code)
        except cst.ParserSyntaxError as error:
            raise ValueError(f"line {error.raw_line}: {error.message}") from None
        # LibCST drops the form feed before a statement, which moves no line.
        if self.module.code.replace("\f", "") != code.replace("\f", ""):
            raise ValueError("its line ends are not those of one system")
        wrapper = MetadataWrapper(self.module, unsafe_skip_copy=True)
        self._positions = wrapper.resolve(WhitespaceInclusivePositionProvider)
        self._scopes = {scope for scope in wrapper.resolve(ScopeProvider).values() if scope}
        top = next((scope for scope in self._scopes if isinstance(scope, GlobalScope)), None)
        self.bound = _bound(top) if top else {}
        self.newline = self.module.default_newline
        self.starts = [len(text) - len(code)]
        self.ends = []
        for match in _NEWLINE.finditer(text):
            self.ends.append(match.start())
            self.starts.append(match.end())
        self.ends.append(len(text))

    def line(self, number: int) -> str:
        """The line of this number (from 1) without its line end."""
        return self.text[self.starts[number - 1] : self.ends[number - 1]]

    def is_blank(self, number: int) -> bool:
        return not self.line(number).strip()

    def first_line(self, node: Statement) -> int:
        """The first line of a statement's own code, its decorators included."""
        return self._positions[node].start.line + len(node.leading_lines)

    def comment_line(self, node: Statement, *, attached: bool) -> int:
        """The first line of the comments above a statement: all of them, or those that touch it."""
        first = self.first_line(node)
        above = range(first - len(node.leading_lines), first)
        if not attached:
            return next((number for number in above if not self.is_blank(number)), first)
        return max((number + 1 for number in above if self.is_blank(number)), default=above.start)

    def last_line(self, node: cst.CSTNode) -> int:
        """The last line of a statement that is not blank, comments that end its block included."""
        end = self._positions[node].end
        number = min(end.line if end.column else end.line - 1, len(self.ends))
        while self.is_blank(number):
            number -= 1
        return number

    def decorator_lines(self, node: cst.Decorator) -> range:
        """The lines of a decorator."""
        place = self._positions[node]
        return range(place.start.line + len(node.leading_lines), place.end.line)

    def blanks_above(self, number: int) -> int:
        """How many blank lines stand right above a line."""
        above = number - 1
        while above and self.is_blank(above):
            above -= 1
        return number - 1 - above

    def blanks_below(self, number: int) -> int | None:
        """How many blank lines stand right below a line; None where nothing follows them."""
        below = number + 1
        while below <= len(self.ends) and self.is_blank(below):
            below += 1
        return below - number - 1 if below <= len(self.ends) else None

    def indent(self, block: cst.IndentedBlock) -> str:
        """What stands before the statements of a block."""
        line = self.line(self.first_line(block.body[0]))
        return line[: len(line) - len(line.lstrip())].rpartition("\f")[2]

    def code(self, node: cst.CSTNode) -> str:
        """The source of an expression or a small statement."""
        return self.module.code_for_node(node).strip()

    def definition(self, node: Statement) -> str:
        """The lines of a statement, its decorators included, without the comments above it."""
        lines = range(self.first_line(node), self.last_line(node) + 1)
        return "\n".join(self.line(number) for number in lines)

    def bound_in(self, node: cst.ClassDef) -> set[str]:
        """The names that a class body binds, wherever in it."""
        return set().union(*(_bound(s) for s in self._scopes if getattr(s, "node", None) is node))

    def first_bound(self, name: str) -> int | None:
        """The offset of the line on which the module first binds a name; None if it does not."""
        lines = [self._positions[node].start.line for node in self.bound.get(name, [])]
        return min((self.starts[line - 1] for line in lines), default=None)


def _bound(scope: Scope) -> dict[str, list[cst.CSTNode]]:
    """The names bound in a scope, and the nodes that bind them."""
    found: dict[str, list[cst.CSTNode]] = {}
    for assignment in scope.assignments:
        if "." not in assignment.name and hasattr(assignment, "node"):
            found.setdefault(assignment.name, []).append(assignment.node)
    return found


def statements(block: Block) -> list[Statement]:
    """The statements of a block without its docstring."""
    return list(block.body[1:] if docstring(block) else block.body)


def docstring(block: Block) -> cst.SimpleStatementLine | None:
    """The line that holds a block's docstring, if it has one."""
    if block.body and m.matches(
        block.body[0],
        m.SimpleStatementLine(
            [m.Expr(m.SimpleString() | m.ConcatenatedString()), m.ZeroOrMore()],
        ),
    ):
        return block.body[0]
    return None


def parameters(function: cst.FunctionDef) -> list[str]:
    """The names of a function's parameters, those that collect the rest with their stars."""
    given = function.params
    plain = [*given.posonly_params, *given.params, *given.kwonly_params]
    names = [parameter.name.value for parameter in plain]
    if isinstance(given.star_arg, cst.Param):
        names.append("*" + given.star_arg.name.value)
    if given.star_kwarg is not None:
        names.append("**" + given.star_kwarg.name.value)
    return names


@dataclass(frozen=True)
class Names:
    """The names of a piece of code.

    free: taken from around it. eager: those of them that are needed when it is defined.
    annotating: those of the eager ones that only annotations need. local: bound in the function
    itself, parameters aside. own: all that the function itself binds or reads, functions nested in
    it seen from outside. declared: global or nonlocal.
    """

    free: frozenset[str]
    eager: frozenset[str]
    annotating: frozenset[str]
    local: frozenset[str]
    own: frozenset[str]
    declared: frozenset[str]


def names(node: Statement) -> Names:
    """The names of a statement that stands by itself; the local ones are those of a function definition."""
    wrapper = MetadataWrapper(cst.Module([node]), unsafe_skip_copy=True)
    scopes = {scope for scope in wrapper.resolve(ScopeProvider).values() if scope is not None}
    bound = _bound_elsewhere(node)
    keys = {pattern.key for pattern in m.findall(node, m.MatchKeywordElement())}
    free, eager, evaluated, local, own = set(), set(), set(), set(bound), set(bound)
    for scope in scopes:
        is_own = isinstance(scope, FunctionScope) and scope.node is node
        if is_own:
            for assignment in scope.assignments:
                root = assignment.name.partition(".")[0]
                own.add(root)
                if not isinstance(getattr(assignment, "node", None), cst.Param):
                    local.add(root)
        for access in scope.accesses:
            if access.node in keys:
                continue
            found = _roots(access.node) - bound
            inside = [
                referent.scope
                for referent in access.referents
                if not isinstance(referent.scope, GlobalScope | BuiltinScope)
            ]
            if not inside:
                free |= found
                if not _is_deferred(scope) and not isinstance(access.node, cst.BaseString):
                    eager |= found
                    evaluated |= set() if access.is_annotation else found
            if is_own or not inside or any(scope.node is node for scope in inside):
                own |= found
    declared = {item.name.value for statement in m.findall(node, m.Global() | m.Nonlocal()) for item in statement.names}
    return Names(
        free=frozenset(free),
        eager=frozenset(eager),
        annotating=frozenset(eager - evaluated),
        local=frozenset(local),
        own=frozenset(own | local | declared),
        declared=frozenset(declared),
    )


def _is_deferred(scope: Scope) -> bool:
    """Whether code in this scope runs later than the statement that holds it."""
    while not isinstance(scope, GlobalScope):
        if isinstance(scope, FunctionScope):
            return True
        scope = scope.parent
    return False


def _bound_elsewhere(node: cst.CSTNode) -> set[str]:
    """The names bound by `case` patterns and by `:=`, which LibCST's scopes miss or misplace."""
    found = [walrus.target for walrus in m.findall(node, m.NamedExpr(target=m.Name()))]
    found += [pattern.name for pattern in m.findall(node, m.MatchAs() | m.MatchStar())]
    found += [pattern.rest for pattern in m.findall(node, m.MatchMapping())]
    return {name.value for name in found if name is not None}


def _roots(node: cst.CSTNode) -> set[str]:
    """The name at the left end of an expression; the names in a string that is an annotation."""
    while not isinstance(node, cst.Name):
        if isinstance(node, cst.Attribute):
            node = node.value
        elif isinstance(node, cst.Call):
            node = node.func
        elif isinstance(node, cst.SimpleString | cst.ConcatenatedString):
            tree = ast.parse(node.evaluated_value, mode="eval")
            return {name.id for name in ast.walk(tree) if isinstance(name, ast.Name)}
        else:
            return set()
    return {node.value}


class _Yields(cst.CSTVisitor):
    """Whether a function's own body yields."""

    found = False

    def visit_Yield(self, node: cst.Yield) -> None:
        self.found = True

    def visit_Lambda(self, node: cst.Lambda) -> bool:
        return False

    def visit_FunctionDef(self, node: cst.FunctionDef) -> bool:
        return False


def kind(function: cst.FunctionDef) -> str:
    """How a function is run: plain, as a generator or with await."""
    yields = _Yields()
    function.body.visit(yields)
    words = ["async"] if function.asynchronous else []
    words.append("generator" if yields.found else "function")
    return " ".join(words)
