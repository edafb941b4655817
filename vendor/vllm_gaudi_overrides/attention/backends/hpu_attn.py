# SPDX-License-Identifier: Apache-2.0
"""Attention of one query per prompt on the KV-shared layers of a fast prefill.

Why: with --kv-sharing-fast-prefill the KV-shared layers of Gemma 4 get one row per prompt, its last token, while the
metadata still describes the whole padded prompts.
How: that query attends to its prompt's K/V where the target layer has just written them, at the prompt's slots. Local
keys and values are never looked at: they are absent (vllm#54917) or, before that, neither normalised nor rotated.
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
        """Whether a KV-shared layer got one row per prompt while the slots cover the padded prompts."""
        if self.kv_sharing_target_layer_name is None or query.dim() != 2 or not attn_metadata.is_prompt:
            return False
        slot_mapping = attn_metadata.slot_mapping
        return (slot_mapping is not None and slot_mapping.dim() == 2 and attn_metadata.block_list is None
                and query.shape[0] == slot_mapping.shape[0] != slot_mapping.numel())

    def _forward_last_token_prefill(
        self,
        query: torch.Tensor,
        kv_cache: tuple,
        attn_metadata: HPUAttentionMetadata,
    ) -> torch.Tensor:
        """Attention of each prompt's last token on a KV-shared layer.

        Args:
            query: [B, num_heads * head_size], one row per prompt.
            kv_cache: the target layer's key and value cache, each [slots, num_kv_heads, head_size], and their scales.
            attn_metadata: of the whole prompts: slot_mapping [B, S], seq_lens_tensor [B] (query lengths).
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
        grouped_query = query.view(-1, self.num_kv_heads, self.num_queries_per_kv, self.head_size)
        attended = _attend_last_tokens(grouped_query, key_cache, value_cache, attn_metadata.slot_mapping,
                                       attn_metadata.seq_lens_tensor, self.scale, self.sliding_window)
        return attended.to(query.dtype).view(query.shape)


def _attend_last_tokens(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    query_lens: torch.Tensor,
    scale: float,
    sliding_window: Optional[int] = None,
) -> torch.Tensor:
    """softmax(scale * q k^T) v in float32 for the last token of each prompt, over the keys of that prompt.

    Keys are taken by their distance p - j from the query at p, nearest first: what lies outside a sliding window
    (p - j >= sliding_window, as in the reference model) is then never read, whatever the prompt's length.

    Args:
        query: [B, num_kv_heads, queries per kv head, head_size].
        key_cache, value_cache: [slots, num_kv_heads, head_size].
        slot_mapping: [B, S] int64, the slot of each prompt token; -1 where a prompt is padded.
        query_lens: [B] int32; 0 for a row that only pads the batch, whose result is finite and means nothing.
        scale: of the scores.
        sliding_window: in tokens; None or 0 for full attention.
    Returns:
        [B, num_kv_heads, queries per kv head, head_size] float32.
    """
    num_seqs, padded_len = slot_mapping.shape
    num_keys = min(padded_len, sliding_window or padded_len)
    distance = torch.arange(num_keys, device=slot_mapping.device)
    token = query_lens.long().unsqueeze(1) - 1 - distance  # [B, num_keys], below 0 before the prompt's first token
    # What is masked still has to be read from somewhere: from the prompt's first token, and slot 0 for padding rows.
    slots = slot_mapping.gather(1, token.clamp(min=0)).clamp(min=0).flatten()
    keys = key_cache.index_select(0, slots).unflatten(0, (num_seqs, num_keys)).float()
    values = value_cache.index_select(0, slots).unflatten(0, (num_seqs, num_keys)).float()
    scores = torch.matmul(query.float(), keys.permute(0, 2, 3, 1)) * scale
    # The lowest finite score rather than -inf, so that a row which sees nothing gives no NaN.
    hidden = (token < 0).view(num_seqs, 1, 1, num_keys)
    scores = scores.masked_fill(hidden, torch.finfo(torch.float32).min)
    return torch.matmul(torch.softmax(scores, dim=-1), values.transpose(1, 2))
