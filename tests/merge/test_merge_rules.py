# SPDX-License-Identifier: Apache-2.0
"""What the merge does with each part of an override source, on small files in upstream's manner."""

from textwrap import dedent

import pytest

from graft.errors import Drift, GraftError
from graft.merge import definition, fingerprint, merge, strip

UPSTREAM = '''\
# SPDX-License-Identifier: Apache-2.0
"""Layers of a plugin."""

import os
from itertools import chain

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger

logger = init_logger(__name__)


class Plain:

    def size(self):
        return os.cpu_count()


class Layer(Plain):
    """A layer."""

    def __init__(self, width):
        self.width = width

    # What the runner calls.
    def forward(
        self,
        query,
        positions=None,
        **kwargs,
    ):
        """Run the layer."""
        # First the width.
        width = self.width
        return query * width


def run(layers, config: VllmConfig):
    return list(chain(layers))


# Kept for old configurations.
def patch(model):
    model.layers = run(model.layers, None)
'''


def merged(override: str, upstream: str = UPSTREAM) -> str:
    result = merge(upstream, dedent(override), name="layers.py", release="1.0")
    assert strip(result) == upstream
    for insertion in result.insertions:
        assert 0 <= insertion.start < insertion.end <= len(result.text)
    return result.text


def expect(override: str, old: str, new: str, upstream: str = UPSTREAM) -> None:
    """The merge changes `old` into `new`, and nothing else."""
    assert upstream.count(old) == 1
    assert merged(override, upstream) == upstream.replace(old, new)


MARKERS = "from vllm_gaudi_overrides.merging import before, replace\n"


def test_a_method_goes_to_the_end_of_its_class():
    expect(
        """
        class Layer(Plain):

            def narrow(self):
                return self.width // 2
        """,
        "        return query * width\n",
        "        return query * width\n\n    def narrow(self):\n        return self.width // 2\n",
    )


def test_methods_keep_their_order_and_comments_between_them():
    expect(
        '''
        class Layer:

            # Half of it.
            def narrow(self):
                """Half."""
                return self.width // 2

            limit = 8
            slots: int = 4

            @property
            def wide(self):
                return self.width * 2
        ''',
        "        return query * width\n",
        '''\
        return query * width

    # Half of it.
    def narrow(self):
        """Half."""
        return self.width // 2

    limit = 8
    slots: int = 4

    @property
    def wide(self):
        return self.width * 2
''',
    )


def test_a_class_is_extended_above_the_comments_that_end_it():
    upstream = UPSTREAM.replace(
        "        return query * width\n", "        return query * width\n\n    # Nothing more.\n"
    )
    text = merged("class Layer:\n    size = 1\n", upstream)
    assert "width\n\n    size = 1\n\n    # Nothing more.\n\n\ndef run" in text


def test_a_body_marked_before_goes_below_the_docstring_and_above_the_comments():
    expect(
        f"""
        {MARKERS}
        class Layer:

            @before
            def forward(self, query, **kwargs):
                # Empty batches.
                if query is None:
                    return None
        """,
        '        """Run the layer."""\n',
        '        """Run the layer."""\n'
        "        # Empty batches.\n        if query is None:\n            return None\n\n",
    )


def test_a_body_marked_before_goes_to_the_top_of_a_function_without_docstring():
    expect(
        f'''
        {MARKERS}
        @before
        def patch(model):
            """Not for the merged file."""
            check(model)


        def check(model):
            """Check."""
            assert model
        ''',
        """\
def patch(model):
    model.layers = run(model.layers, None)
""",
        '''\
def patch(model):
    check(model)

    model.layers = run(model.layers, None)


def check(model):
    """Check."""
    assert model
''',
    )


def test_a_body_marked_before_goes_into_a_function_that_is_only_a_docstring():
    upstream = UPSTREAM + '\n\ndef hook(model):\n    """Does nothing."""\n'
    override = f"{MARKERS}\n@before\ndef hook(model):\n    model.eval()\n"
    assert merged(override, upstream) == upstream + "    model.eval()\n"


def test_a_body_marked_before_may_use_the_names_of_upstreams_parameters_and_module():
    text = merged(f"{MARKERS}\n@before\ndef run(layers):\n    logger.info(os.name, layers)\n")
    assert "    logger.info(os.name, layers)\n\n    return list(chain(layers))\n" in text


def test_a_replaced_method_takes_the_place_of_upstreams():
    old = definition(UPSTREAM, "Layer.__init__")
    expect(
        f"""
        {MARKERS}
        class Layer:

            @replace("{fingerprint(old)}")
            def __init__(self, width, depth=1):
                # Deeper.
                self.width = width
                self.depth = depth
        """,
        old,
        "    def __init__(self, width, depth=1):\n"
        "        # Deeper.\n        self.width = width\n        self.depth = depth",
    )


def test_what_a_replacement_at_the_top_of_the_file_uses_goes_above_it():
    upstream = "def run(layers):\n    return 1\n"
    override = f'{MARKERS}\nFACTOR = 2\n\n\n@replace("{fingerprint(upstream)}")\ndef run(layers):\n    return FACTOR\n'
    assert merged(override, upstream) == "FACTOR = 2\n\n\ndef run(layers):\n    return FACTOR\n"


def test_a_new_function_goes_below_the_definition_it_follows():
    expect(
        """
        class Layer(Plain):
            pass


        # Doubles.
        def double(value):
            return value * 2


        FACTOR = 3
        """,
        "        return query * width\n",
        """\
        return query * width


# Doubles.
def double(value):
    return value * 2


FACTOR = 3
""",
    )


def test_a_new_function_that_follows_nothing_goes_above_its_first_user():
    expect(
        f"""
        {MARKERS}
        FACTOR = 3
        LIMIT = FACTOR + 1


        def double(value):
            return value * FACTOR


        @before
        def patch(model):
            double(model)
        """,
        """\
# Kept for old configurations.
def patch(model):
""",
        """\
FACTOR = 3
LIMIT = FACTOR + 1


def double(value):
    return value * FACTOR


# Kept for old configurations.
def patch(model):
    double(model)

""",
    )


def test_a_new_function_used_by_another_new_one_goes_above_that():
    text = merged(
        """
        def third(value):
            return value / 3


        def sixth(value):
            return third(value) / 2


        class Layer:

            def narrow(self):
                return sixth(self.width)
        """
    )
    inserted = "def third(value):\n    return value / 3\n\n\ndef sixth(value):\n    return third(value) / 2\n"
    assert f"\n\n\n{inserted}\n\nclass Layer(Plain):\n" in text


def test_what_nothing_uses_goes_to_the_end():
    assert merged("EXPORTED = 1\n") == UPSTREAM + "\n\nEXPORTED = 1\n"


def test_an_assignment_upstream_has_too_only_says_where_things_go():
    expect(
        """
        from vllm.logger import init_logger

        logger = init_logger(__name__)
        FACTOR = 3
        """,
        "logger = init_logger(__name__)\n",
        "logger = init_logger(__name__)\nFACTOR = 3\n",
    )


def test_a_function_below_an_assignment_gets_two_blank_lines_on_either_side():
    upstream = UPSTREAM.replace("\n\n\nclass Plain", "\nother = 1\n\n\nclass Plain")
    override = "logger = init_logger(__name__)\n\n\ndef double(value):\n    return value * 2\n"
    text = merged(override, upstream)
    assert "__name__)\n\n\ndef double(value):\n    return value * 2\n\n\nother = 1\n" in text


def test_declared_functions_and_methods_add_nothing():
    override = "class Layer(Plain):\n    def forward(self, query): ...\n\n\ndef run(layers): ...\n"
    assert merged(override + "FACTOR = 3\n") == UPSTREAM.replace("chain(layers))\n", "chain(layers))\n\n\nFACTOR = 3\n")


@pytest.mark.parametrize(
    ("statement", "neighbour"),
    [
        ("import math", "import os"),
        ("import numpy as np", "import torch"),
        ("from itertools import islice", "from itertools import chain"),
        ("from typing import Any", "from itertools import chain"),
        ("from vllm.forward_context import Any", "from vllm.config import VllmConfig"),
        ("from vllm.sequence import (\n    Any,\n)  # noqa", "from vllm.logger import init_logger"),
        ("from numpy import ndarray", "from vllm.logger import init_logger"),
    ],
)
def test_an_import_goes_below_the_nearest_of_its_kind(statement, neighbour):
    name = statement.replace("(\n    Any,\n)  # noqa", "Any").split()[-1]
    text = merged(f"{statement}\n\n\nclass Layer:\n\n    def more(self):\n        return {name}\n")
    assert f"{neighbour}\n{statement}\n" in text


def test_of_an_import_upstream_has_in_part_only_the_rest_is_added():
    text = merged(
        """
        from vllm.config import ModelConfig as Config, VllmConfig

        class Layer:

            def more(self) -> VllmConfig:
                return Config
        """
    )
    line = "from vllm.config import VllmConfig\nfrom vllm.config import ModelConfig as Config\n"
    assert line in text


def test_imports_that_only_a_dropped_signature_needs_are_not_added():
    text = merged(
        f"""
        from typing import Any
        {MARKERS}
        @before
        def patch(model: Any) -> Any:
            model.eval()
        """
    )
    assert "Any" not in text


def test_an_import_upstream_only_has_under_a_condition_is_added():
    upstream = UPSTREAM.replace("\nlogger =", "\nif os.name:\n    from vllm.sequence import Sequence\n\nlogger =")
    override = "from vllm.sequence import Sequence\n\n\ndef new():\n    return Sequence\n"
    assert "init_logger\nfrom vllm.sequence import Sequence\n" in merged(override, upstream)


@pytest.mark.parametrize(
    ("head", "changed"),
    [
        ("", "import math\n\n\n"),
        ("# A comment.\n\n", "# A comment.\n\nimport math\n\n\n"),
        ('"""Doc."""\n\n\n', '"""Doc."""\n\nimport math\n\n\n'),
        (
            '"""Doc."""\nfrom __future__ import annotations\n\n\n',
            '"""Doc."""\nfrom __future__ import annotations\n\nimport math\n\n\n',
        ),
    ],
)
def test_a_file_without_imports_gets_them_at_its_top(head, changed):
    rest = "class Layer:\n\n    def one(self):\n        return 1\n"
    override = "import math\n\n\nclass Layer:\n\n    def more(self):\n        return math.pi\n"
    assert merged(override, head + rest).startswith(changed + "class Layer:\n")


def test_the_byte_order_mark_stays_first():
    upstream = "\ufeffclass Layer:\n    size = 1\n"
    override = "import math\n\n\nclass Layer:\n    pi = math.pi\n"
    assert merged(override, upstream).startswith("\ufeffimport math\n\n\nclass Layer:\n    size = 1\n")


def test_annotations_may_name_what_comes_later_where_upstream_postpones_them():
    upstream = UPSTREAM.replace("import os\n", "from __future__ import annotations\n\nimport os\n", 1)
    assert "-> Layer:" in merged("class Layer:\n\n    def same(self) -> Layer:\n        return self\n", upstream)


def test_the_markers_and_the_module_docstring_leave_no_trace():
    text = merged(f'"""For reviewers."""\n{MARKERS}\n@before\ndef patch(model):\n    model.eval()\n')
    assert "reviewers" not in text
    assert "overrides" not in text
    assert "@" not in text


def test_markers_may_be_renamed():
    override = (
        "from vllm_gaudi_overrides.merging import before as first\n\n\n@first\ndef patch(model):\n    model.eval()\n"
    )
    assert "def patch(model):\n    model.eval()\n\n" in merged(override)


def test_insertions_adopt_upstreams_line_ends():
    upstream = UPSTREAM.replace("\n", "\r\n")
    text = merged("class Layer:\n\n    def more(self):\n        return 1\n", upstream)
    assert "\n" not in text.replace("\r\n", "")


def test_insertions_adopt_upstreams_indentation_but_for_the_inside_of_strings():
    upstream = "class Layer:\n\n\tdef one(self):\n\t\treturn 1\n"
    override = (
        "class Layer:\n\n    def more(self, a,\n             b):\n        if self:\n"
        '            return """x\n    y\n"""\n'
    )
    assert merged(override, upstream) == upstream + (
        '\n\tdef more(self, a,\n\t\t\t b):\n\t\tif self:\n\t\t\treturn """x\n    y\n"""\n'
    )


def test_two_spaces_of_indentation_are_adopted_too():
    upstream = "def patch(model):\n  model.eval()\n"
    override = f"{MARKERS}\n@before\ndef patch(model):\n    if model:\n        return None\n"
    assert merged(override, upstream) == ("def patch(model):\n  if model:\n    return None\n\n  model.eval()\n")


@pytest.mark.parametrize(
    "upstream",
    [
        "\ufeff" + UPSTREAM,
        UPSTREAM.removesuffix("\n"),
        UPSTREAM.replace("\n", "\r\n").removesuffix("\r\n"),
        UPSTREAM.replace("def run", "\fdef run"),
        UPSTREAM.replace("\n\ndef run", "\n\f\ndef run"),
        UPSTREAM + "\n\n\n# The end.\n   \n",
        UPSTREAM.replace("A layer.", "Schichten für Gemma \N{ROCKET}."),
        UPSTREAM.replace("    return list", "    layers = layers;  return list"),
        UPSTREAM.replace("width = self.width", "width = \\\n            self.width"),
    ],
    ids=["bom", "no-end", "crlf-no-end", "ff", "ff-line", "trailing", "utf8", "semicolon", "joined"],
)
def test_files_with_unusual_bytes_stay_as_they_are(upstream):
    override = (
        f"{MARKERS}\nclass Layer:\n\n    def more(self):\n        return new()\n\n\n"
        "def new():\n    pass; return 1\n\n\n@before\ndef patch(model):\n    model.eval()\n"
    )
    assert "    model.eval()" in merged(override, upstream)


def test_the_same_inputs_give_the_same_result():
    override = "import math\nfrom typing import Any\n\none: Any = math.pi\ntwo = 2\n"
    assert merged(override) == merged(override)


def test_names_in_comprehensions_walruses_matches_and_strings_are_understood():
    text = merged(
        """
        class Layer:

            def more(self, items: "VllmConfig | None") -> "Layer":
                total = [item for item in items if (half := item // 2)]
                match items:
                    case [first, *rest]:
                        return first, rest
                    case {"a": 1, **others}:
                        return others
                    case Plain(width=wide) as whole:
                        return wide, whole, half
                with open(__file__) as file:
                    return lambda value: value + file + total + __class__
                try:
                    import json
                except ValueError as error:
                    raise error from json
        """
    )
    assert "def more" in text


ADDED = """\
    from torch import nn
    from vllm_gaudi_overrides.merging import added

    class Layer(Plain):
        pass

    # A layer that keeps what it saw.
    @added
    class KeepingLayer(Layer):
        \"\"\"Keeps the last query.\"\"\"

        kept = None

        def forward(self, query, positions=None, **kwargs):
            self.kept = nn.functional.normalize(query)
            return super().forward(query, positions, **kwargs)
"""


def test_an_added_class_comes_whole_below_what_it_follows():
    text = merged(ADDED)
    assert "@added" not in text
    after = text.index("        return query * width")
    place = text.index("# A layer that keeps what it saw.\nclass KeepingLayer(Layer):\n")
    assert after < place < text.index("\ndef run(")
    assert "from torch import nn\n" in text
    scope = {}
    exec(text[place : text.index("\n\ndef run(")], {"Layer": object, "nn": None}, scope)
    assert scope["KeepingLayer"].kept is None


REGISTERED = """
from vllm_gaudi_overrides.merging import added


def patch(model): ...


@added
class Narrow(Layer):
    pass


patch(
    Narrow)  # as the others
"""


def test_a_lone_call_goes_below_what_it_follows_and_comes_with_its_comments():
    last = "    model.layers = run(model.layers, None)\n"
    assert merged(REGISTERED) == UPSTREAM + (
        "\n\nclass Narrow(Layer):\n    pass\n\n\npatch(\n    Narrow)  # as the others\n"
    )
    assert merged("def patch(model): ...\n\n# Now.\npatch(1)\n", UPSTREAM + "\n\nx = 1\n") == UPSTREAM.replace(
        last, last + "\n\n# Now.\npatch(1)\n"
    ) + ("\n\nx = 1\n")


def test_a_call_that_upstream_makes_too_is_not_made_twice():
    upstream = UPSTREAM + "\n\npatch(1)\n"
    assert merged("patch(\n    1)\n", upstream) == upstream


def test_what_a_call_needs_must_be_there_by_then():
    with pytest.raises(Drift, match="later is not defined there"):
        merged("patch(later)\n")
    with pytest.raises(Drift, match="run is defined too far down"):
        merged("logger = init_logger(__name__)\nrun(1)\n")


def test_a_call_on_something_that_upstream_imports_already():
    upstream = UPSTREAM.replace("import torch\n", "import torch\nfrom registry import Registry\n")
    override = "from registry import Registry\n\n\ndef patch(model): ...\n\n\nRegistry.register(patch)\n"
    assert merged(override, upstream) == upstream + "\n\nRegistry.register(patch)\n"


def test_a_file_that_holds_the_call_holds_the_fix():
    with pytest.raises(Drift, match="holds the fix already"):
        merged(REGISTERED, merged(REGISTERED))


def test_a_class_that_upstream_has_cannot_be_added():
    override = "from vllm_gaudi_overrides.merging import added\n\n@added\nclass Layer(Plain):\n    x = 1\n"
    with pytest.raises(Drift, match="Layer is defined already: upstream may have its own fix"):
        merged(override)


def test_a_class_that_upstream_lacks_must_say_that_it_is_added():
    with pytest.raises(Drift, match="Renamed is not there as a class"):
        merged("class Renamed:\n    x = 1\n")


@pytest.mark.parametrize(
    "override, why",
    [
        ("@added\ndef run2(): return 1\n", "marked added, which is for classes"),
        ("@added\nclass New:\n    @before\n    def f(self):\n        g()\n", "nothing in it can be marked"),
        ("@added\n@added\nclass New:\n    x = 1\n", "two markers"),
    ],
)
def test_refuses_an_added_mark_where_it_means_nothing(override, why):
    with pytest.raises(GraftError, match=why):
        merged("from vllm_gaudi_overrides.merging import added, before\n\n" + override)
