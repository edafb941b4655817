# SPDX-License-Identifier: Apache-2.0
"""The KV cache as a module: writes by slot, reads by block."""

import torch


class VLLMKVCache(torch.nn.Module):
    """One of the two halves of a layer's cache, `[slots, kv heads, head size]`."""

    def __init__(self, is_v_cache: bool = False):
        super().__init__()
        self.is_v_cache = is_v_cache

    def forward(self, input, cache, slot_mapping, scales=None, block_size=None, is_prompt=False, **kwargs):
        """Store `input` `[tokens, kv heads, head size]` at its slots, in place; padding lands in the last slot."""
        return cache if input is None else cache.index_copy_(0, slot_mapping, input)

    def fetch_from_cache(self, cache, blocks, scales=None, **kwargs):
        """Gather `blocks` of a cache seen as `[blocks, block size, kv heads, head size]`."""
        return cache.index_select(0, blocks)


class VLLMFP8KVCache(VLLMKVCache):
    """The 8-bit cache, of which only the type is needed: the fix refuses it."""
