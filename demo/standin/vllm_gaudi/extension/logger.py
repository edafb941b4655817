# SPDX-License-Identifier: Apache-2.0
"""The plugin's logger is vLLM's, so that vLLM's settings hold for it."""

from vllm.logger import init_logger


def logger():
    """Return the logger named `vllm`, with its `*_once` methods."""
    return init_logger("vllm")
