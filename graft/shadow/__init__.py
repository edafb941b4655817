# SPDX-License-Identifier: Apache-2.0
"""The shadow: puts the merged copies in the place of the vllm_gaudi modules they were made from.

This runs at the start of every interpreter of the environment, so it imports nothing. What takes
time waits in `verify` until a submodule of vllm_gaudi is asked for.
"""

import os
import sys


class Finder:
    """Finds the copies; stands in front of every other finder of `sys.meta_path`."""

    def __init__(self) -> None:
        self.asking: set = set()  # (thread, module) whose own finders are being asked
        self.verdict: dict = {}  # {"copies": ...} once decided, for the whole process
        self.silence: list = [None]  # emptied by the one warning

    def find_spec(self, fullname, path=None, target=None):
        """Answer the spec of the copy of `fullname`, or None where vllm_gaudi's own is to load."""
        if not fullname.startswith("vllm_gaudi.") or switched_off():
            return None
        try:
            from vllm_gaudi_overrides import verify

            return verify.find(self, fullname, path, target)
        except Exception as error:
            self.warn(f"the shadow cannot work ({type(error).__name__}: {error})", "install again")
            return None

    def warn(self, cause: str, mend: str) -> None:
        """Say once in this process why vllm_gaudi's own modules load."""
        try:
            self.silence.pop()
        except IndexError:
            return
        import logging

        logging.getLogger("vllm_gaudi_overrides").warning(
            "vllm_gaudi_overrides: the fast-prefill fix is off and vllm-gaudi's own modules are "
            "loaded, because %s. To mend it: %s (`python -m vllm_gaudi_overrides` says more; "
            "VLLM_GAUDI_OVERRIDES=0 silences this).",
            cause,
            mend,
        )


def switched_off() -> bool:
    """Whether the user turned the shadow off."""
    return os.environ.get("VLLM_GAUDI_OVERRIDES") == "0"


def active() -> Finder | None:
    """Answer the finder that stands in `sys.meta_path`, or None."""
    for finder in sys.meta_path:
        if type(finder).__module__ == __name__:
            return finder
    return None


def start() -> None:
    """Put the finder in front of `sys.meta_path`, once."""
    if active() is None and not switched_off():
        sys.meta_path.insert(0, Finder())
