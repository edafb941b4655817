# SPDX-License-Identifier: Apache-2.0
"""The fused attention and rotary kernels, as their definitions say and in float32."""

import enum
import os

import torch


class RotaryPosEmbeddingMode(enum.Enum):
    BLOCKWISE = 0  # first half against second half
    PAIRWISE = 1  # even against odd


def apply_rotary_pos_emb(x, cos, sin, position_ids, offset, mode):
    """Rotate x [..., d] by cos and sin, which are gathered per token and as wide as x."""
    if position_ids is not None or offset != 0:
        raise NotImplementedError("rotary kernel: only cos and sin gathered by the caller")
    if mode == RotaryPosEmbeddingMode.BLOCKWISE:
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
    else:
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    return (x.float() * cos.float() + turned.float() * sin.float()).to(x.dtype)


class FusedSDPA:
    @staticmethod
    def apply(
        query,
        key,
        value,
        attn_mask=None,
        dropout_p=0.0,
        is_causal=False,
        scale=None,
        softmax_mode="fast",
        recompute_mode=None,
        valid_seq_lengths=None,
        padding_side="left",
        is_amax_s=False,
        is_amax_o=False,
        window_size=(-1, -1),
        sinks=None,
    ):
        """Attention over [batch, heads, length, d]; fewer key heads means grouped queries.

        A query sees the `valid_seq_lengths` [batch] first keys, with `is_causal` none after its
        own place, with `window_size` (left, _) only the `left` last ones; a query that sees no key
        gives zeros. Refused, because the kernel's behaviour is not known here: dropout, sinks, left
        padding, and a causal mask over unequal query and key lengths.

        HPU_ON_CPU_ATTENTION=fused: by torch's fused kernel, which is quick and rounds in the query's dtype.
        """
        places, keys = query.shape[-2], key.shape[-2]
        if dropout_p or sinks is not None:
            raise NotImplementedError("attention kernel: dropout and sinks")
        if valid_seq_lengths is not None and padding_side != "right":
            raise NotImplementedError("attention kernel: valid lengths with left padding")
        if is_causal and places != keys:
            raise NotImplementedError(f"attention kernel: causal over {places} queries, {keys} keys")
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        at = torch.arange(places, device=query.device).view(-1, 1) + (keys - places)
        seen = torch.arange(keys, device=query.device).view(1, -1)
        hidden = torch.zeros(places, keys, dtype=torch.bool, device=query.device)
        if is_causal:
            hidden = hidden | (seen > at)
        if window_size is not None and window_size[0] >= 0:
            hidden = hidden | (seen <= at - window_size[0])
        if valid_seq_lengths is not None:
            hidden = hidden | (seen.view(1, 1, 1, -1) >= valid_seq_lengths.view(-1, 1, 1, 1))
        given = torch.zeros((), device=query.device) if attn_mask is None else attn_mask.float()
        mask = torch.where(hidden, float("-inf"), given)
        if os.environ.get("HPU_ON_CPU_ATTENTION") == "fused":
            mask = mask.to(query.dtype)
            out = torch.nn.functional.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, scale=scale, enable_gqa=True
            )
            return out.nan_to_num(0.0)
        groups = query.shape[1] // key.shape[1]
        key = key.repeat_interleave(groups, dim=1).float()
        weights = torch.softmax(query.float() @ key.transpose(-1, -2) * scale + mask, dim=-1).nan_to_num(0.0)
        value = value.repeat_interleave(groups, dim=1).float()
        return (weights @ value).to(query.dtype)
