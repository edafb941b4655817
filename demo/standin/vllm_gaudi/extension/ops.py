# SPDX-License-Identifier: Apache-2.0
"""Attention in eager torch: over a prompt, and one token per request over the blocks of the cache.

Both take grouped queries, add an additive bias where they are given one, and take the softmax in float32.
"""

import torch


def _grouped(query: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """`[..., heads, head size]` -> `[..., kv heads, queries per kv head, head size]`."""
    return query.unflatten(-2, (kv_heads, query.shape[-2] // kv_heads))


def prompt_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    attn_bias: torch.Tensor | None,
    valid_seq_lengths: torch.Tensor | None,
) -> torch.Tensor:
    """Attend a batch of prompts to themselves and, where the keys are longer, to their context.

    Args:
        query: `[batch, queries, heads, head size]`.
        key, value: `[batch, keys, kv heads, head size]`.
        scale: factor of the scores.
        attn_bias: `[batch or 1, 1, queries, keys]`, or none for causal attention within `valid_seq_lengths`.
        valid_seq_lengths: `[batch]`, tokens of each row that are not padding.
    Returns:
        `[batch, queries, heads, head size]`; a query that sees no key gives zeros.
    """
    batch, queries = query.shape[:2]
    kv_heads = key.shape[2]
    q = _grouped(query * scale, kv_heads).permute(0, 2, 3, 1, 4).flatten(1, 2)  # [batch, heads, queries, d]
    per_kv = q.shape[1] // kv_heads
    q = q.reshape(batch * kv_heads, per_kv * queries, -1)
    k = key.permute(0, 2, 3, 1).reshape(batch * kv_heads, -1, key.shape[1])
    v = value.permute(0, 2, 1, 3).reshape(batch * kv_heads, value.shape[1], -1)
    scores = torch.bmm(q, k).float().view(batch, kv_heads * per_kv, queries, -1)
    if attn_bias is not None:
        scores += attn_bias
    else:
        where = torch.arange(queries)
        seen = (where[None, :] <= where[:, None]) & (where < valid_seq_lengths.view(-1, 1, 1))
        scores.masked_fill_(~seen.unsqueeze(1), float("-inf"))
    weights = torch.softmax(scores, dim=-1).nan_to_num_(0.0).to(value.dtype)
    out = torch.bmm(weights.view(batch * kv_heads, per_kv * queries, -1), v)
    return out.view(batch, kv_heads * per_kv, queries, -1).transpose(1, 2)


def decode_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scale: float,
    block_bias: torch.Tensor,
    block_groups: torch.Tensor,
    block_mapping: torch.Tensor,
) -> torch.Tensor:
    """Attend one query per request to that request's blocks, block by block.

    Args:
        query: `[batch, heads, head size]`.
        keys, values: `[blocks, block size, kv heads, head size]`, gathered from the cache.
        scale: factor of the scores.
        block_bias: `[blocks, block size]`, -inf where a slot is not to be seen.
        block_groups: int `[blocks]`, the request a block belongs to; padding blocks carry `batch`.
        block_mapping: `[blocks, batch]`, the same as ones and zeros.
    Returns:
        `[batch, heads, head size]`; a request without blocks gives zeros.
    """
    batch, kv_heads = query.shape[0], keys.shape[2]
    per_block = torch.matmul(block_mapping.to(query.dtype), (scale * query).flatten(1)).view(-1, *query.shape[1:])
    scores = torch.einsum("nkgd,nskd->nkgs", _grouped(per_block, kv_heads), keys).float()
    scores += block_bias[:, None, None, :]
    owned = block_mapping.bool()[:, :, None, None]
    best = torch.where(owned, scores.amax(-1).unsqueeze(1), -1e30).amax(0)
    best = torch.cat((best, torch.zeros_like(best[:1])))  # for the padding blocks
    weights = torch.exp(scores - best[block_groups].unsqueeze(-1))
    total = torch.zeros_like(best).index_add_(0, block_groups, weights.sum(-1))
    parts = torch.einsum("nkgs,nskd->nkgd", weights.to(values.dtype), values).float()
    out = parts.new_zeros(batch + 1, *parts.shape[1:]).index_add_(0, block_groups, parts)
    return (out / total.clamp(min=1e-30).unsqueeze(-1))[:batch].flatten(1, 2).to(query.dtype)


class LoraMask:
    """Which adapter each token of the batch has, for the LoRA layers: a row per token, or None without LoRA."""

    _rows = None

    @classmethod
    def setLoraMask(cls, rows):
        cls._rows = rows

    @classmethod
    def getLoraMask(cls):
        return cls._rows
