# SPDX-License-Identifier: Apache-2.0
"""Stand-in of the vllm-gaudi plugin: its interface, as far as Gemma 4 needs it, in plain torch on the CPU.

Not vllm-gaudi: written for the tests and the demo of this project from the plugin's interface.
"""


def register() -> str:
    """Answer vLLM's search for platform plugins: where the platform class is."""
    return "vllm_gaudi.platform.HpuPlatform"


def register_ops() -> None:
    """Put the plugin's attention call and rotary embedding in the place of vLLM's."""
    import vllm_gaudi.ops.hpu_attention
    import vllm_gaudi.ops.hpu_rotary_embedding  # noqa: F401
