# SPDX-License-Identifier: Apache-2.0
"""vLLM's Gemma 4 with its per-layer inputs picked by a tensor, so that every layer is the same graph."""

from itertools import islice

import torch
import torch.nn as nn
from vllm.logger import init_logger
from vllm.model_executor.models import gemma4 as upstream_gemma4
from vllm.model_executor.models.gemma4 import Gemma4Model as UpstreamGemma4Model
from vllm.model_executor.models.gemma4_mm import (
    Gemma4ForConditionalGeneration as UpstreamGemma4ForConditionalGeneration,
)

logger = init_logger(__name__)


class HpuGemma4Model(UpstreamGemma4Model):
    """vLLM's model, swapped in on a built instance; on the way in positions are `[batch, padded length]`."""

    def forward(
        self,
        input_ids,
        positions,
        intermediate_tensors,
        inputs_embeds=None,
        per_layer_inputs=None,
        **kwargs,
    ) -> torch.Tensor:
        """Return the hidden states, `[batch * padded length, hidden size]`, after the last norm."""
        if self.fast_prefill_enabled:
            return self.norm(self.fast_prefill_forward(input_ids, positions, inputs_embeds, per_layer_inputs, **kwargs))
        if inputs_embeds is None:
            inputs_embeds = self.embed_input_ids(input_ids)
            per_layer_inputs = self.get_per_layer_inputs(input_ids)
        states = _hpu_run_decoder_layers(
            list(islice(self.layers, self.start_layer, self.end_layer)),
            self.start_layer,
            positions,
            inputs_embeds,
            self.project_per_layer_inputs(inputs_embeds, per_layer_inputs),
            **kwargs,
        )
        return self.norm(states)


def _hpu_run_decoder_layers(
    decoder_layers,
    layer_idx_start,
    positions,
    hidden_states,
    per_layer_inputs=None,
    **kwargs,
) -> torch.Tensor:
    """Run layers one after the other, each with its own slice of `per_layer_inputs` `[tokens, layers, width]`."""
    own = None
    for layer in decoder_layers:
        if per_layer_inputs is not None:
            own = per_layer_inputs.index_select(1, layer.layer_idx_tensor)[:, 0]
        hidden_states, _ = layer(positions, hidden_states, None, per_layer_input=own, **kwargs)
    return hidden_states


def _apply_hpu_gemma4_patches(language_model: nn.Module) -> None:
    """Turn a built vLLM Gemma 4 into the plugin's: its model's class, its layers' index tensors, the layer loop."""
    model = language_model.model
    model.__class__ = HpuGemma4Model
    for index, layer in enumerate(model.layers):
        layer.register_buffer("layer_idx_tensor", torch.tensor([index]), persistent=False)
    upstream_gemma4._run_decoder_layers = _hpu_run_decoder_layers


class HpuGemma4ForConditionalGeneration(UpstreamGemma4ForConditionalGeneration):
    """The multimodal model, which is where the plugin makes its changes."""

    def __init__(self, *, vllm_config, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        _apply_hpu_gemma4_patches(self.language_model)
