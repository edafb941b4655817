# SPDX-License-Identifier: Apache-2.0
"""The plugin's logger factory: without a name it names the calling package's logger."""

from vllm.logger import init_logger


def logger(name: str = "vllm_gaudi"):
    """Return vLLM's logger of that name, with its `*_once` methods."""
    return init_logger(name)
