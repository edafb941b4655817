# SPDX-License-Identifier: Apache-2.0
"""What the merge refuses, and that it names the anchor, the file and the release when it does."""

import pytest

from graft.errors import Drift, GraftError
from graft.merge import compare, fingerprint, merge

UPSTREAM = '''\
"""Layers of a plugin."""

import os.path
from itertools import chain as joined

from vllm.config import VllmConfig


class Layer(Base):
    """A layer."""

    size = 1

    def forward(self, query, *args, scale=1, **kwargs):
        """Run the layer."""
        width = self.width
        for index, value in enumerate(query):
            width += value * index * limit
        return [part for part in width]

    @staticmethod
    def load(path):
        return open(path)

    async def wait(self):
        return await self.done

    def items(self):
        yield self

    @property
    def depth(self):
        return 1

    @depth.setter
    def depth(self, value):
        pass

    def short(self): return 1

    if os.path.sep:

        def hidden(self):
            return 2


def run(layers, config: VllmConfig):
    global limit
    limit = 8
    return [layer for layer in layers]


def run_all(
    layers,
):
    """Run all."""; return run(layers, None)


class Alias: pass


setup = run
'''

BEFORE = "from vllm_gaudi_overrides.merging import before\n\n\n"
REPLACE = "from vllm_gaudi_overrides.merging import replace\n\n\n"


def in_class(code: str, head: str = BEFORE, name: str = "Layer") -> str:
    lines = code.split("\n")
    return f"{head}class {name}:\n\n" + "".join(f"    {line}\n" if line else "\n" for line in lines)


def before(signature: str, body: str = "return None") -> str:
    return in_class(f"@before\n{signature}:\n    {body}")


def refused(override: str, upstream: str = UPSTREAM) -> Drift:
    findings = compare(upstream, override, name="layers.py")
    assert any(finding.kind != "ok" for finding in findings)
    with pytest.raises(Drift) as caught:
        merge(upstream, override, name="layers.py", release="1.0")
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    assert "layers.py of release 1.0" in caught.value.cause
    return caught.value


@pytest.mark.parametrize(
    ("override", "kind", "symbol", "detail"),
    [
        pytest.param(in_class("x = 1", "", "Missing"), "missing", "Missing", "is not there", id="class"),
        pytest.param(in_class("x = 1", "", "run"), "missing", "run", "is not there", id="function-for-class"),
        pytest.param(before("def gone(self)"), "missing", "Layer.gone", "is not there", id="method"),
        pytest.param(before("def hidden(self)"), "missing", "Layer.hidden", "is not there", id="under-an-if"),
        pytest.param(before("def size(self)"), "missing", "Layer.size", "is not there", id="attribute"),
        pytest.param(before("def depth(self)"), "changed", "Layer.depth", "more than once", id="two-of-them"),
        pytest.param(f"{BEFORE}@before\ndef gone():\n    return 1\n", "missing", "gone", "is not there", id="function"),
        pytest.param("def gone(): ...\n", "missing", "gone", "is not there", id="declared-function"),
        pytest.param("def run(model): ...\n", "signature", "run", "no parameter model", id="declared-signature"),
        pytest.param(
            before("def forward(self, keys, query, values)"),
            "signature",
            "Layer.forward",
            "has no parameter keys, values (it takes self, query, scale, *args, **kwargs)",
            id="parameters",
        ),
        pytest.param(before("def forward(self, *more)"), "signature", "Layer.forward", "*more", id="star"),
        pytest.param(before("def forward(self, kwargs)"), "signature", "Layer.forward", "kwargs", id="stars"),
        pytest.param(before("async def forward(self)"), "signature", "Layer.forward", "async", id="async"),
        pytest.param(before("def wait(self)"), "signature", "Layer.wait", "async", id="not-async"),
        pytest.param(before("def forward(self)", "yield 1"), "signature", "Layer.forward", "generator", id="yield"),
        pytest.param(before("def items(self)"), "signature", "Layer.items", "generator", id="no-yield"),
        pytest.param(
            in_class("@staticmethod\n@before\ndef forward(query):\n    return 1"),
            "signature",
            "Layer.forward",
            "is not decorated with staticmethod",
            id="decorator",
        ),
        pytest.param(before("def short(self)"), "changed", "Layer.short", "line of its name", id="one-line"),
        pytest.param(
            f"{BEFORE}@before\ndef run_all(layers):\n    return 1\n",
            "changed",
            "run_all",
            "line of its docstring",
            id="code-beside-the-docstring",
        ),
        pytest.param(in_class("x = 1", "", "Alias"), "changed", "Alias", "line of its name", id="one-line-class"),
        pytest.param(
            "class Layer(Other):\n    x = 1\n", "changed", "Layer", "derives from Base, not from Other", id="bases"
        ),
        pytest.param(before("def forward(self)", "width = 1"), "changed", "Layer.forward", "width", id="binds"),
        pytest.param(
            before("def forward(self, scale)", "scale = 2"), "changed", "Layer.forward", "scale", id="rebinds"
        ),
        pytest.param(
            before("def forward(self)", "import enumerate"), "changed", "Layer.forward", "enumerate", id="imports"
        ),
        pytest.param(before("def forward(self)", "f = (index := 1)"), "changed", "Layer.forward", "index", id="walrus"),
        pytest.param(
            before("def forward(self)", "for limit in []: pass"), "changed", "Layer.forward", "limit", id="for"
        ),
        pytest.param(
            before("def forward(self)", "return scale"), "changed", "Layer.forward", "scale", id="undeclared-parameter"
        ),
        pytest.param(
            f"{BEFORE}width = 1\n\n\n" + before("def forward(self)", "return width").removeprefix(BEFORE),
            "changed",
            "Layer.forward",
            "width",
            id="hidden-global",
        ),
        pytest.param(f"{BEFORE}@before\ndef run(layers):\n    limit = 1\n", "changed", "run", "limit", id="global"),
        pytest.param(
            in_class("def load(self):\n    return 2", ""),
            "defined-upstream",
            "Layer.load",
            "own fix",
            id="defined-method",
        ),
        pytest.param(
            in_class("def hidden(self):\n    return 2", ""),
            "defined-upstream",
            "Layer.hidden",
            "own fix",
            id="defined-under-an-if",
        ),
        pytest.param(in_class("size = 2", ""), "defined-upstream", "Layer.size", "own fix", id="defined-attribute"),
        pytest.param("def run(layers):\n    return 1\n", "defined-upstream", "run", "own fix", id="defined-function"),
        pytest.param("setup = 2\n", "defined-upstream", "setup", "own fix", id="defined-assignment"),
        pytest.param("limit = 2\n", "defined-upstream", "limit", "own fix", id="defined-as-global"),
        pytest.param("joined = 2\n", "defined-upstream", "joined", "own fix", id="imported-upstream"),
        pytest.param(
            "from other import VllmConfig\n\nx = VllmConfig\n", "changed", "VllmConfig", "from other", id="other-origin"
        ),
        pytest.param("import run\n\nx = run\n", "changed", "run", "is not imported", id="import-of-a-definition"),
        pytest.param(
            "import itertools as joined\n\nx = joined\n", "changed", "joined", "is not imported", id="other-target"
        ),
        pytest.param("def new():\n    return unknown\n", "missing", "unknown", "new needs it", id="unknown-name"),
        pytest.param(
            "def new(x: unknown):\n    pass; x()\n", "missing", "unknown", "new needs it", id="unknown-annotation"
        ),
        pytest.param(
            "def new(x: 'unknown'):\n    return x\n", "missing", "unknown", "new needs it", id="unknown-in-a-string"
        ),
        pytest.param(
            before("def forward(self)", "return unknown"), "missing", "unknown", "needs it", id="unknown-in-a-body"
        ),
        pytest.param(
            "def run(layers): ...\n\n\nlater = Alias\n", "changed", "Alias", "too far down for later", id="order"
        ),
        pytest.param(
            in_class("def new(self, other: Alias):\n    return other", ""),
            "changed",
            "Alias",
            "too far down",
            id="order-of-annotations",
        ),
        pytest.param(
            in_class("def new(self) -> Layer:\n    return self", ""), "changed", "Layer", "too far down", id="own-class"
        ),
        pytest.param(
            "def run(layers): ...\n\n\ndef one(x=TWO):\n    return x\n\n\nTWO = 2\n",
            "changed",
            "TWO",
            "too far down for one",
            id="own-order",
        ),
        pytest.param(
            in_class(f'@replace("sha256:{"0" * 64}")\ndef load(path):\n    return path', REPLACE),
            "changed",
            "Layer.load",
            "is not what the fix replaces (its fingerprint is sha256:",
            id="fingerprint",
        ),
    ],
)
def test_refuses(override, kind, symbol, detail):
    error = refused(override)
    assert symbol in error.cause
    assert detail in error.cause
    findings = compare(UPSTREAM, override, name="layers.py")
    assert (kind, symbol) in [(finding.kind, finding.symbol) for finding in findings]


def test_names_every_reason_at_once():
    error = refused(before("def gone(self)") + "\n\nsize = unknown\n\n\nsetup = 2\n")
    assert "Layer.gone is not there" in error.cause
    assert "unknown is not defined" in error.cause
    assert "setup is defined already" in error.cause


@pytest.mark.parametrize(
    ("upstream", "detail"),
    [
        ("class Layer(\n", "does not parse"),
        ("", "is empty"),
        ("# nothing\n", "is empty"),
        ("x = 1\r\ry = 2\r\nz = '''a\rb'''\r", "does not parse"),
    ],
)
def test_refuses_a_file_that_is_not_the_module(upstream, detail):
    assert detail in refused("class Layer:\n    x = 1\n", upstream).cause


def test_refuses_a_merge_whose_result_would_not_compile():
    upstream = "def run(layers):\n    global limit\n    limit = 8\n"
    with pytest.raises(Drift, match="does not compile"):
        merge(upstream, f"{BEFORE}@before\ndef run(layers):\n    limit()\n", name="a.py", release="1.0")


FIX = f'''\
{BEFORE}
# How many.
COUNT = 3


class Layer(Base):

    # More.
    @property
    def more(self):
        return COUNT

    @before
    def forward(self, query):
        if query is None:
            return self.more


def new():
    """New."""
    return COUNT
'''


def test_refuses_a_file_that_already_holds_the_fix():
    merged = merge(UPSTREAM, FIX, name="layers.py", release="1.0")
    error = refused(FIX, merged.text)
    assert "holds the fix already" in error.cause
    kinds = {finding.kind for finding in compare(merged.text, FIX, name="layers.py")}
    assert kinds == {"ok", "defined-upstream"}


def test_refuses_a_file_that_holds_a_replacement():
    old = "def run(layers):\n    return 1\n"
    new = f'{REPLACE}@replace("{fingerprint(old)}")\ndef run(layers):\n    return 2\n'
    merged = merge(old, new, name="layers.py", release="1.0")
    assert "holds the fix already" in refused(new, merged.text).cause


def test_refuses_a_file_that_holds_an_older_fix():
    merged = merge(UPSTREAM, FIX, name="layers.py", release="1.0")
    error = refused(FIX.replace("return COUNT", "return COUNT + 1"), merged.text)
    assert "Layer.more, new is defined already: upstream may have its own fix" in error.cause


def test_compare_finds_every_anchor_and_every_new_name_right():
    findings = compare(UPSTREAM, FIX, name="layers.py")
    assert [(finding.kind, finding.symbol) for finding in findings] == [
        ("ok", "COUNT"),
        ("ok", "Layer"),
        ("ok", "Layer.more"),
        ("ok", "Layer.forward"),
        ("ok", "new"),
    ]


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("class Layer(\n", "does not parse"),
        ("from __future__ import annotations\n", "__future__"),
        ("if True:\n    x = 1\n", "line 1 is no import, function, class, assignment or call"),
        ("from x import *\n", "line 1 is no import, no assignment"),
        ("x, y = 1, 2\n", "line 1 is no import, no assignment to one name and no call"),
        ("x = 1; y = 2\n", "line 1 is no import, no assignment to one name and no call"),
        ("print\n", "line 1 is no import, no assignment to one name and no call"),
        ("print(); print()\n", "line 1 is no import, no assignment to one name and no call"),
        ("class Layer:\n    print()\n", "line 2 is no import, no assignment to one name and no call"),
        ("print()\nprint()\n", r"defines print\(\) twice"),
        ("@decorated\nclass Layer:\n    x = 1\n", "class Layer has decorators"),
        ("class Layer(metaclass=M):\n    x = 1\n", "class Layer has decorators or keywords"),
        ("class Layer: x = 1\n", "class Layer stands on the line"),
        ("class Layer:\n    for x in y:\n        pass\n", "line 2 of class Layer"),
        ("class Layer:\n    class Inner:\n        pass\n", "line 2 of class Layer"),
        ("def new(): return 1\n", "body of new stands on the line"),
        ("x = 1\nx = 2\n", "defines x twice"),
        ("class Layer:\n    x = 1\n    def x(self):\n        return 1\n", "defines Layer.x twice"),
        (f"{BEFORE}@before\ndef run(layers):\n    pass\n", "no body"),
        (f"{BEFORE}@before\ndef run(layers):\n    '''Doc.'''\n", "no body"),
        (f"{BEFORE}@before\n@before\ndef run(layers):\n    f()\n", "two markers"),
        (f"{BEFORE}@before\ndef run(layers):\n    global x\n    x = 1\n", "declares x global"),
        (f"{REPLACE}@replace\ndef run(layers):\n    f()\n", "needs one fingerprint"),
        (f"{REPLACE}@replace(1)\ndef run(layers):\n    f()\n", "needs one fingerprint"),
    ],
)
def test_an_override_source_that_breaks_the_rules_is_named_with_the_place(override, why):
    with pytest.raises(GraftError, match=f"override source a/b.py cannot be merged: .*{why}") as caught:
        merge(UPSTREAM, override, name="a/b.py", release="1.0")
    assert not isinstance(caught.value, Drift)
    assert "vendor/vllm_gaudi_overrides/a/b.py" in caught.value.mend
