# SPDX-License-Identifier: Apache-2.0
"""Markers of an override source: how a definition joins the upstream one of the same name.

An override source is a partial module. A function that upstream lacks is added; a class that upstream has gets the new
methods, and a class that it lacks must say so; a definition that upstream has must say by one of these markers what
becomes of upstream's body. The merge reads the markers from the syntax tree and leaves no trace of them, and calling
them changes nothing.
"""

from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F", bound=Callable)
C = TypeVar("C", bound=type)


def added(cls: C) -> C:
    """A class of the fix's own, added whole.

    Without this mark a class is upstream's of that name, so that one which upstream renamed is noticed.
    """
    return cls


def before(function: F) -> F:
    """Put this body at the top of the upstream body, after its docstring.

    Every parameter must be one of upstream's, by name.
    """
    return function


def replace(fingerprint: str) -> Callable[[F], F]:
    """Take the place of the upstream definition whose fingerprint this is.

    Args:
        fingerprint: "sha256:" and the hexadecimal hash of the upstream definition, as drift reports it. Upstream's
            definition having another one is drift: this is a fork of upstream's code and must be looked at again.
    """
    return lambda function: function
