# SPDX-License-Identifier: Apache-2.0
"""Tells on standard error what is going on: a spinner on a terminal, a line per long step elsewhere."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

_LONG = 1.0  # seconds


class Progress:
    def __init__(self, *, quiet: bool = False) -> None:
        self._console = Console(stderr=True, quiet=quiet, highlight=False)

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Something that may take a while."""
        start = time.monotonic()
        if self._console.is_terminal:
            with self._console.status(what):
                yield
        else:
            yield
        seconds = time.monotonic() - start
        if seconds > _LONG:
            self.say(f"{what}: {seconds:.1f} s")

    def say(self, what: str) -> None:
        self._console.print(what, markup=False, soft_wrap=True)
