# SPDX-License-Identifier: Apache-2.0
"""Turns gemma4-fast-prefill's shadow on at interpreter start; never raises, never prints."""

import os
import sys


class Missing:
    """Says once, when vllm_gaudi is imported, that there is nothing to turn on."""

    def __init__(self, error):
        self.error = error

    def find_spec(self, fullname, path=None, target=None):
        if fullname == "vllm_gaudi" and self in sys.meta_path:
            sys.meta_path.remove(self)
            import logging

            logging.getLogger("vllm_gaudi_overrides").warning(
                "vllm_gaudi_overrides: the fast-prefill fix is off and vllm-gaudi's own modules "
                "are loaded, because the folder that vllm_gaudi_overrides.pth points at was moved, "
                "deleted or damaged (%s). To mend it: run `python -m graft install RELEASE` in the "
                "checkout again, or `pip uninstall vllm-gaudi-overrides`.",
                self.error,
            )


def start():
    if os.environ.get("VLLM_GAUDI_OVERRIDES") == "0":
        return
    try:
        import vllm_gaudi_overrides

        vllm_gaudi_overrides.start()
    except Exception as error:
        if not any(type(finder).__module__ == __name__ for finder in sys.meta_path):
            sys.meta_path.insert(0, Missing(error))


start()
