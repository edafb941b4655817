# SPDX-License-Identifier: Apache-2.0
"""vLLM's attention layer calls the plugin's implementation directly, with flat queries and no output tensor."""

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention.attention import Attention

# What a KV-shared layer hands over. vLLM 0.30 gives None; vLLM 0.26 projects keys and values that are of no use,
# which True reproduces by tensors of the same shapes that spoil whatever reads them.
local_kv_on_shared_layers = False


def call_implementation(self, query, key, value, output_shape=None, output_dtype=None):
    """Attend `query` `[tokens, heads * head size]`; `key` and `value` may be None on a KV-shared layer."""
    if key is None and local_kv_on_shared_layers:
        key = value = query.new_full((query.shape[0], self.num_kv_heads * self.head_size), torch.nan)
    return self.impl.forward(self, query, key, value, self.kv_cache, get_forward_context().attn_metadata)


Attention.forward = call_implementation
