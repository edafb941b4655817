# SPDX-License-Identifier: Apache-2.0
"""Properties of the merge over generated modules in upstream's manner: nothing is lost, nothing is merged twice."""

import ast
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from yapf.yapflib.yapf_api import FormatCode

from graft.errors import Drift
from graft.merge import merge, strip

OVERRIDE = '''\
"""For reviewers."""
import math
from itertools import chain

from vllm_gaudi_overrides.merging import before

LIMIT = 8


class Layer:

    # Comments come along.
    def narrow(self, value):
        """Text
      in a string keeps its place."""
        if value:
            return """
  as here""", math.pi
        return new_helper(value)

    share = 2

    @before
    def forward(self, query):
        if query is None:  # an empty batch
            return LIMIT


def new_helper(value):
    return chain(value)


@before
def new_target(model):
    """Dropped."""
    new_helper(model)
'''

# Bodies of statements; each line is indented where it goes, {u} is one further level.
BODIES = st.sampled_from(
    [
        "return 1",
        "pass",
        "if self:\n{u}return 2\nelse:\n{u}pass",
        "value = '''a\n   b\n\tc'''\nreturn value",
        "return (1 +\n        2)",
        "x = 1; y = 2",
        "def inner(a, *, b=1):\n{u}return a\n\nreturn inner",
        "total = 1 + \\\n   2\nreturn total",
        "# a comment\nreturn f'{1}'  # another",
        "\n\nreturn 3\n# the end",
        "for i in []:\n{u}for j in []:\n{u}{u}pass\n# less",
        "try:\n{u}pass\nexcept ValueError as e:\n{u}raise e from None\nfinally:\n{u}pass",
        "with open('ä') as f: return f",
    ]
)
DOCSTRINGS = st.sampled_from(["", '"""Doc."""\n', '"""Doc\n\n  more.\n"""\n\n', "'a' 'b'\n", "# no doc\n"])
DECORATORS = st.sampled_from(["", "@staticmethod\n", "@wraps(\n    None,\n)\n# between\n@other\n"])
ABOVE = st.sampled_from(["", "# above\n", "# apart\n\n", "\n\n\n", "\f\n", "  # askew\n"])


def indented(text: str, unit: str) -> str:
    """The text one level deeper; the inside of strings goes along, as a generator may choose it."""
    return "".join(unit + line if line.strip() else line for line in text.splitlines(keepends=True))


@st.composite
def functions(draw, name: str, unit: str, parameters: str = "self") -> str:
    body = draw(DOCSTRINGS) + draw(BODIES).replace("{u}", unit)
    text = f"def {name}({parameters}):\n" + indented(body + "\n", unit)
    if draw(st.booleans()) and name not in ("forward", "new_target"):
        text = f"async {text}" if draw(st.booleans()) else f"def {name}({parameters}): return 1\n"
    return text


@st.composite
def classes(draw, name: str, unit: str, needed: str | None) -> str:
    members = [draw(st.sampled_from(["x = 1\n", "'''Doc'''\n", "if True:\n" + unit + "y = 2\n", ""]))]
    for number in range(draw(st.integers(0, 2))):
        head = draw(ABOVE) + draw(DECORATORS)
        members.append(head + draw(functions(f"f{number}", unit)))
    if needed:
        method = draw(ABOVE) + draw(functions(needed, unit, "self, query, **kwargs"))
        members.insert(draw(st.integers(1, len(members))), method)
    members.append(draw(st.sampled_from(["z = 3\n", "# the class ends\n", "\n\n"])) if needed else "z = 3\n")
    base = draw(st.sampled_from(["", "()", "(Base, metaclass=M)"]))
    return f"class {name}{base}:\n" + indented("".join(members), unit)


@st.composite
def modules(draw, newlines=("\n", "\r\n"), units=("    ", "\t", "  "), tidy: bool = False) -> str:
    unit = draw(st.sampled_from(units))
    head = draw(st.sampled_from(["", "# SPDX\n", '"""Doc."""\n', '# SPDX\n\n"""Doc.\n\nMore."""\n']))
    imports = [
        draw(st.sampled_from(["", "from __future__ import annotations\n"])),
        draw(st.sampled_from(["", "import math\n", "import os, sys\nimport vllm.config\n"])),
        draw(st.sampled_from(["", "from itertools import (islice, chain)\n", "from vllm import (\n    a,\n)\n"])),
        draw(st.sampled_from(["", "\nlogger = 1\n", "if True:\n" + unit + "import json\n"])),
    ]
    items = [
        draw(classes("Layer", unit, "forward")),
        draw(functions("new_target", unit, "model=None, *args")),
    ]
    for number in range(draw(st.integers(0, 3))):
        kind = draw(st.sampled_from(["function", "class", "statement"]))
        if kind == "class":
            item = draw(classes(f"Other{number}", unit, None))
        elif kind == "function":
            item = draw(functions(f"f{number}", unit))
        else:
            item = f"value{number} = [\n  1,\n]\n"
        items.insert(draw(st.integers(0, len(items))), item)
    separator = st.sampled_from(["", "\n", "\n\n", "\n\n# above\n", "\n# apart\n\n"])
    if tidy:
        head = '"""Doc."""\n\nimport os\n'
    text = head + "".join(imports) + "".join(draw(separator) + item for item in items)
    text += draw(st.sampled_from(["", "\n\n", "# the end\n", "\n\n# the end\n \t\n"]))
    if not tidy:
        if draw(st.booleans()):
            text = text.removesuffix("\n")
        if draw(st.booleans()):
            text = "\ufeff" + text
    return text.replace("\n", draw(st.sampled_from(newlines)))


def is_python(text: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(text.removeprefix("\ufeff"), "x", "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return True


def outline(text: str) -> dict[str, str]:
    """Every definition by its dotted name, and what it consists of."""
    found = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in node.body:
            name = getattr(child, "name", None)
            if name and isinstance(child, ast.ClassDef):
                visit(child, f"{prefix}{name}.")
            elif name:
                found[prefix + name] = ast.dump(child)

    visit(ast.parse(text.removeprefix("\ufeff")), "")
    return found


@given(modules())
@settings(max_examples=100, deadline=None)
def test_without_its_insertions_a_merged_file_is_the_pristine_one(pristine):
    if not is_python(pristine):
        return
    merged = merge(pristine, OVERRIDE, name="layers.py", release="1.0")
    assert strip(merged) == pristine
    assert is_python(merged.text)
    before, after = outline(pristine), outline(merged.text)
    added = {"Layer.narrow", "new_helper"}
    assert after.keys() == before.keys() | added
    assert {name for name in before if before[name] != after[name]} == {"Layer.forward", "new_target"}
    newline = "\r\n" if "\r\n" in pristine else "\n"
    assert all(newline in merged.text[i.start : i.end] for i in merged.insertions)
    if newline == "\r\n":
        assert "\n" not in merged.text.replace("\r\n", "")
    again = merge(pristine, OVERRIDE, name="layers.py", release="1.0")
    assert again == merged


@given(modules())
@settings(max_examples=30, deadline=None)
def test_merging_twice_is_refused(pristine):
    if not is_python(pristine):
        return
    merged = merge(pristine, OVERRIDE, name="layers.py", release="1.0")
    with pytest.raises(Drift, match="holds the fix|own fix"):
        merge(merged.text, OVERRIDE, name="layers.py", release="1.0")


@given(
    st.text()
    | st.binary().map(lambda data: data.decode("latin-1"))
    | modules().flatmap(lambda text: st.integers(0, len(text)).map(lambda cut: text[:cut]))
)
@settings(max_examples=100, deadline=None)
def test_any_text_is_merged_or_refused(text):
    try:
        merged = merge(text, OVERRIDE, name="layers.py", release="1.0")
    except Drift:
        return
    assert strip(merged) == text


FORMAT = "{based_on_style: pep8, column_limit: 120}"


def formatted(text: str) -> str:
    return FormatCode(text, style_config=FORMAT)[0]


@given(modules(newlines=("\n",), units=("    ",), tidy=True))
@settings(max_examples=25, deadline=None)
def test_a_file_in_upstreams_format_stays_in_it(text):
    # yapf sets comments that end a block, or stand apart between two, by what follows them; no promise of ours.
    text = "".join(line for line in text.splitlines(keepends=True) if " ends" not in line and "# apart" not in line)
    if not is_python(text):
        return
    pristine = formatted(text)
    if formatted(pristine) != pristine:
        return
    override = formatted(OVERRIDE)
    merged = merge(pristine, override, name="layers.py", release="1.0")
    assert formatted(merged.text) == merged.text
