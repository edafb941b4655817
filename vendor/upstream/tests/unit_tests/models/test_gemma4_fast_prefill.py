# SPDX-License-Identifier: Apache-2.0
"""Fast prefill of Gemma 4: the rows that run through the KV-shared layers, and their attention."""

import pytest
import torch

from vllm_gaudi.attention.backends import hpu_attn
from vllm_gaudi.models import gemma4

BLOCK_SIZE = 128


def paged_prompts(query_lens: list[int], padded_len: int, num_kv_heads: int, head_size: int):
    """Keys, values and slots of prompts in a cache of NaN, but for slot 0, where masked keys come from: it holds 0."""
    generator = torch.Generator().manual_seed(len(query_lens) * padded_len)
    blocks_per_prompt = -(-padded_len // BLOCK_SIZE)
    num_slots = (1 + len(query_lens) * blocks_per_prompt) * BLOCK_SIZE
    caches = [torch.full((num_slots, num_kv_heads, head_size), torch.nan) for _ in range(2)]
    for cache in caches:
        cache[0] = 0
    slot_mapping = torch.full((len(query_lens), padded_len), -1, dtype=torch.int64)
    blocks = 1 + torch.randperm(len(query_lens) * blocks_per_prompt, generator=generator)
    for row, query_len in enumerate(query_lens):
        own = blocks[row * blocks_per_prompt:(row + 1) * blocks_per_prompt]
        slots = (own.unsqueeze(1) * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()[:query_len]
        slot_mapping[row, :query_len] = slots
        for cache in caches:
            cache[slots] = torch.randn(query_len, num_kv_heads, head_size, generator=generator)
    return *caches, slot_mapping


def dense_reference(query, key_cache, value_cache, slots, scale, sliding_window):
    """Attention in float64 of the last token of one prompt: query [kv heads, queries per kv head, head size]."""
    key, value = (cache[slots].double().transpose(0, 1) for cache in (key_cache, value_cache))
    scores = scale * query.double() @ key.transpose(1, 2)
    if sliding_window:
        distance = len(slots) - 1 - torch.arange(len(slots))
        scores[..., distance >= sliding_window] = -torch.inf
    return torch.softmax(scores, dim=-1) @ value


@pytest.mark.parametrize("sliding_window", [None, 128, 512])
@pytest.mark.parametrize("num_kv_heads,num_heads", [(1, 8), (2, 8), (4, 4)])
@pytest.mark.parametrize("query_lens,padded_len", [([1], 128), ([128], 128), ([5, 300, 129], 384), ([700, 0], 768)])
def test_last_token_attention(query_lens, padded_len, num_kv_heads, num_heads, sliding_window):
    head_size, scale = 64, 0.5
    key_cache, value_cache, slot_mapping = paged_prompts(query_lens, padded_len, num_kv_heads, head_size)
    query = torch.randn(len(query_lens),
                        num_kv_heads,
                        num_heads // num_kv_heads,
                        head_size,
                        generator=torch.Generator().manual_seed(0))
    slots, bias = hpu_attn._last_token_keys(slot_mapping, torch.tensor(query_lens, dtype=torch.int32), sliding_window)
    assert slots.shape[1] == min(padded_len, sliding_window or padded_len)
    out = hpu_attn._attend(query, key_cache, value_cache, slots, bias, scale)
    assert torch.isfinite(out).all()
    for row, query_len in enumerate(query_lens):
        if query_len:
            expected = dense_reference(query[row], key_cache, value_cache, slot_mapping[row, :query_len], scale,
                                       sliding_window)
            torch.testing.assert_close(out[row].double(), expected, atol=1e-5, rtol=1e-5)


def test_rows_of_the_last_tokens():
    rows = gemma4._last_token_rows(torch.tensor([5, 8, 0, 1], dtype=torch.int32), 8)
    assert rows.tolist() == [4, 15, 16, 24]


class HeldMask:
    """Holds a LoRA mask, as the plugin's class does."""

    mask = None

    @classmethod
    def setLoraMask(cls, mask):
        cls.mask = mask

    @classmethod
    def getLoraMask(cls):
        return cls.mask


def test_lora_mask_of_the_last_tokens(monkeypatch):
    monkeypatch.setattr(gemma4, "LoraMask", HeldMask)
    whole = torch.arange(32).unsqueeze(1)
    HeldMask.setLoraMask(whole)
    with gemma4._lora_mask_of(torch.tensor([4, 15])):
        assert HeldMask.getLoraMask().flatten().tolist() == [4, 15]
    assert HeldMask.getLoraMask() is whole


@pytest.mark.parametrize("sliding_window", [None, 128])
def test_last_token_attention_with_context(sliding_window):
    """Behind 200 cached tokens, in two blocks and a list that is padded, 70 tokens of a step padded to 128."""
    context, query_len, padded_len, head_size = 200, 70, 128, 64
    key_cache, value_cache, positions = paged_prompts([context + query_len], 384, 1, head_size)
    slot_mapping = torch.full((1, padded_len), -1, dtype=torch.int64)
    slot_mapping[0, :query_len] = positions[0, context:context + query_len]
    block_list = torch.tensor([positions[0, 0] // BLOCK_SIZE, positions[0, BLOCK_SIZE] // BLOCK_SIZE, -1])
    query_at = context + torch.arange(padded_len).unsqueeze(1)
    key_at = torch.cat((torch.arange(3 * BLOCK_SIZE), context + torch.arange(padded_len)))
    is_context = torch.arange(len(key_at)) < 3 * BLOCK_SIZE
    seen = (key_at <= query_at) & (~is_context | (key_at < context))
    if sliding_window:
        seen &= query_at - key_at < sliding_window
    mask = torch.zeros(1, 1, padded_len, len(key_at)).masked_fill(~seen, -torch.inf)
    query = torch.randn(1, 1, 8, head_size, generator=torch.Generator().manual_seed(0))
    slots, bias = hpu_attn._last_token_keys(slot_mapping, torch.tensor([query_len], dtype=torch.int32), sliding_window,
                                            block_list, BLOCK_SIZE, mask)
    out = hpu_attn._attend(query, key_cache, value_cache, slots, bias, 0.5)
    expected = dense_reference(query[0], key_cache, value_cache, positions[0, :context + query_len], 0.5,
                               sliding_window)
    torch.testing.assert_close(out[0].double(), expected, atol=1e-5, rtol=1e-5)
