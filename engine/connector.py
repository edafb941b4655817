# SPDX-License-Identifier: Apache-2.0
"""A KV connector for the engine on a CPU: whole blocks of prompts stay in this process and are handed out again.

Why: of vLLM's own connectors that need no second server, the plugin refuses Gemma 4's caches in the one for offloading
and never calls the one for examples from its attention layers.
"""

from dataclasses import dataclass, field

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole

STORE: dict[tuple, list[torch.Tensor]] = {}
"""Tokens from a prompt's first to a block's last -> that block of each KV cache. Scheduler and worker share it."""


@dataclass
class Moves(KVConnectorMetadata):
    """What a step has to move: (tokens up to the block's end, block number) of each block."""

    load: list[tuple[tuple, int]] = field(default_factory=list)
    save: list[tuple[tuple, int]] = field(default_factory=list)
    requests: tuple = ()  # the plugin looks for requests of another kind here


class BlockStore(KVConnectorBase_V1):
    def __init__(self, vllm_config, role: KVConnectorRole, kv_cache_config=None):
        super().__init__(vllm_config, role, kv_cache_config)
        self._size = vllm_config.cache_config.block_size
        self._moves = Moves()
        self._caches: list[torch.Tensor] = []

    def _blocks(self, tokens) -> list[tuple]:
        return [tuple(tokens[:end]) for end in range(self._size, len(tokens) + 1, self._size)]

    # The scheduler's half.

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        known = 0
        for tokens in self._blocks(request.prompt_token_ids[:-1]):
            if tokens not in STORE:
                break
            known = len(tokens)
        return max(known - num_computed_tokens, 0), False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        numbers = blocks.get_block_ids()[0]
        known = self._blocks(request.prompt_token_ids[:-1])[: num_external_tokens // self._size]
        self._moves.load += zip(known, numbers, strict=False)

    def build_connector_meta(self, scheduler_output):
        moves, self._moves = self._moves, Moves()
        for request in scheduler_output.scheduled_new_reqs:
            done = request.num_computed_tokens + scheduler_output.num_scheduled_tokens[request.req_id]
            whole = self._blocks(request.prompt_token_ids[:done])
            moves.save += zip(whole, request.block_ids[0], strict=False)
        return moves

    # The worker's half.

    def register_kv_caches(self, kv_caches):
        tensors = [tensor for cache in kv_caches.values() for tensor in cache]
        self._caches = list({tensor.data_ptr(): tensor for tensor in tensors}.values())

    def start_load_kv(self, forward_context, **kwargs):
        for tokens, number in self._get_connector_metadata().load:
            for cache, block in zip(self._caches, STORE[tokens], strict=True):
                cache[number] = block

    def wait_for_save(self):
        for tokens, number in self._get_connector_metadata().save:
            STORE[tokens] = [cache[number].clone() for cache in self._caches]

    def wait_for_layer_load(self, layer_name):
        """Everything is loaded by then."""

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        """Everything is saved at once, after the step."""
