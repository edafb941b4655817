# SPDX-License-Identifier: Apache-2.0
"""Attention of one query per prompt in a fast prefill.

Why: with --kv-sharing-fast-prefill the last layers of Gemma 4 get one row per prompt, its last token, while the
metadata still describes the whole padded prompts.
How: that query attends to its prompt's K/V where they have just been written, at the prompt's slots. Local keys and
values are never looked at: a KV-shared layer has none (vllm#54917), or ones that were neither normalised nor rotated.
Related: vllm-gaudi#1786 (the same read-back for whole prompts).
Future: the plugin's fused attention could take this over once it masks by query length for a single query.
"""

from typing import Optional

import torch
from vllm.v1.attention.backend import AttentionImpl, AttentionLayer
from vllm_gaudi.attention.ops.hpu_paged_attn import HPUPagedAttention
from vllm_gaudi_overrides.merging import before


class HPUAttentionImpl(AttentionImpl, torch.nn.Module):

    @before
    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: Optional[torch.Tensor],
        value: Optional[torch.Tensor],
        kv_cache: torch.Tensor,
        attn_metadata: HPUAttentionMetadata,
        output: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        if self._is_last_token_prefill(query, attn_metadata):
            return self._forward_last_token_prefill(query, kv_cache, attn_metadata)

    def _is_last_token_prefill(self, query: torch.Tensor, attn_metadata: HPUAttentionMetadata) -> bool:
        """Whether a layer got one row per prompt while the slots cover the padded prompts."""
        if query.dim() != 2 or not attn_metadata.is_prompt:
            return False
        slot_mapping = attn_metadata.slot_mapping
        return (slot_mapping is not None and slot_mapping.dim() == 2
                and query.shape[0] == slot_mapping.shape[0] != slot_mapping.numel())

    def write_prompt_kv(self, key: torch.Tensor, value: torch.Tensor, kv_cache: tuple,
                        attn_metadata: HPUAttentionMetadata) -> None:
        """Put K/V of a prompt step into the cache, at the step's slots.

        Args:
            key, value: [B * S, ...] after norm and rotary embedding, in whatever split of num_kv_heads * head_size.
            kv_cache: this layer's own.
            attn_metadata: slot_mapping [B, S].
        """
        parts = HPUPagedAttention.split_kv_cache(kv_cache, self.num_kv_heads, self.head_size)
        writes = (self.k_cache, self.v_cache)
        for write, states, cache, scales in zip(writes, (key, value), parts[:2], parts[2:], strict=True):
            write(states.reshape(-1, self.num_kv_heads, self.head_size).to(cache.dtype),
                  cache,
                  attn_metadata.slot_mapping.flatten(),
                  scales=scales,
                  block_size=attn_metadata.block_size,
                  is_prompt=attn_metadata.is_prompt)

    def _forward_last_token_prefill(
        self,
        query: torch.Tensor,
        kv_cache: tuple,
        attn_metadata: HPUAttentionMetadata,
    ) -> torch.Tensor:
        """Attention of each prompt's last token.

        Args:
            query: [B, num_heads * head_size], one row per prompt.
            kv_cache: the layer's or its target's key and value cache, each [slots, num_kv_heads, head_size], and their
                scales.
            attn_metadata: of the whole prompts: slot_mapping [B, S], seq_lens_tensor [B] (query lengths), and the block
                lists and masks of a prompt with context (B = 1).
        Returns:
            [B, num_heads * head_size] in the query's dtype.
        Raises:
            NotImplementedError: the KV cache is FP8, or the layer wants what Gemma 4 has no use for.
        """
        if self.sinks is not None or self.alibi_slopes is not None or self.is_chunked_attention:
            raise NotImplementedError("Fast prefill knows no attention sinks, ALiBi or chunked attention.")
        key_cache, value_cache, _, _ = HPUPagedAttention.split_kv_cache(kv_cache, self.num_kv_heads, self.head_size)
        if self.enable_fp8_attn or key_cache.dtype.itemsize == 1:
            raise NotImplementedError("Fast prefill cannot read an FP8 KV cache: drop --kv-sharing-fast-prefill.")
        block_list, mask = attn_metadata.block_list, attn_metadata.attn_bias
        if block_list is not None and self.sliding_window:
            windowed, mask = attn_metadata.window_block_list, attn_metadata.window_attn_bias
            block_list = block_list if windowed is None else windowed
        slots, bias = _last_token_keys(attn_metadata.slot_mapping, attn_metadata.seq_lens_tensor, self.sliding_window,
                                       block_list, attn_metadata.block_size, mask)
        grouped_query = query.view(-1, self.num_kv_heads, self.num_queries_per_kv, self.head_size)
        return _attend(grouped_query, key_cache, value_cache, slots, bias, self.scale).to(query.dtype).view(query.shape)


def _last_token_keys(
    slot_mapping: torch.Tensor,
    query_lens: torch.Tensor,
    sliding_window: Optional[int] = None,
    block_list: Optional[torch.Tensor] = None,
    block_size: int = 0,
    mask: Optional[torch.Tensor] = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which cache slots each prompt's last token attends to.

    The step's own tokens are taken by their distance p - j from the query at p, nearest first: what lies outside a
    sliding window (p - j >= sliding_window, as in the reference model) is then never read, whatever the length. With
    context its blocks come first, and what the last token sees is its row of the runner's mask.

    Args:
        slot_mapping: [B, S] int64, the slot of each token of the step; -1 where a prompt is padded.
        query_lens: [B] int32; 0 for a row that only pads the batch.
        sliding_window: in tokens; None or 0 for full attention.
        block_list: [blocks] the context's blocks, padded with -1; None without context. With context B is 1.
        block_size: slots per block.
        mask: [1, 1, S, blocks * block_size + S], 0 or -inf; used with context only.
    Returns:
        slots: [B, N] int64, all valid.
        bias: [B, N] float32 to add to the scores; not finite where the mask is not. A row that only pads the batch
            sees nothing, but by the lowest finite bias, so that it gives no NaN.
    """
    padded_len = slot_mapping.shape[1]
    num_keys = min(padded_len, sliding_window or padded_len)
    last = query_lens.long().unsqueeze(1) - 1
    token = last - torch.arange(num_keys, device=slot_mapping.device)  # [B, N], below 0 before the first token
    # What is masked still has to be read from somewhere: from the first token, and slot 0 for padding rows.
    slots = slot_mapping.gather(1, token.clamp(min=0))
    bias = torch.zeros_like(token, dtype=torch.float32).masked_fill(token < 0, torch.finfo(torch.float32).min / 2)
    if block_list is not None:
        offsets = torch.arange(block_size, device=slot_mapping.device)
        context_slots = (block_list.long().unsqueeze(1) * block_size + offsets).view(1, -1)
        seen = mask.view(padded_len, -1).index_select(0, last.view(-1).clamp(min=0)).float()
        context_seen, step_seen = seen.split([context_slots.shape[1], padded_len], dim=1)
        slots = torch.cat((context_slots, slots), dim=1)
        bias = torch.cat((context_seen, bias + step_seen.gather(1, token.clamp(min=0))), dim=1)
    return slots.clamp(min=0), bias


def _attend(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    bias: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """softmax(scale * q k^T + bias) v in float32, one query per sequence, keys and values from these cache slots.

    Args:
        query: [B, num_kv_heads, queries per kv head, head_size].
        key_cache, value_cache: [all slots, num_kv_heads, head_size].
        slots: [B, N] int64.
        bias: [B, N] float32.
        scale: of the scores.
    Returns:
        [B, num_kv_heads, queries per kv head, head_size] float32.
    """
    keys = key_cache.index_select(0, slots.flatten()).unflatten(0, slots.shape).float()
    values = value_cache.index_select(0, slots.flatten()).unflatten(0, slots.shape).float()
    scores = torch.matmul(query.float(), keys.permute(0, 2, 3, 1)) * scale + bias[:, None, None, :]
    return torch.matmul(torch.softmax(scores, dim=-1), values.transpose(1, 2))
