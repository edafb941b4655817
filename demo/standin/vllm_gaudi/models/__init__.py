# SPDX-License-Identifier: Apache-2.0
"""Registration of the plugin's models."""


def register_model() -> None:
    """Register the Gemma 4 that carries the plugin's changes under vLLM's own architecture name."""
    from vllm.model_executor.models import ModelRegistry

    ModelRegistry.register_model(
        "Gemma4ForConditionalGeneration", "vllm_gaudi.models.gemma4:HpuGemma4ForConditionalGeneration"
    )
