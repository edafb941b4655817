# SPDX-License-Identifier: Apache-2.0
"""The last token's attention over the prompt's K/V in the cache, against a dense float64 reference."""

import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

BLOCK = 128


class Prompts:
    """Prompts of the given lengths, padded to one length, their K/V scattered over a paged cache.

    Every slot that belongs to no prompt is NaN, but for slot 0 of the spare first block: whoever reads a key that is
    not the prompt's own gets NaN.
    """

    def __init__(self, lens, padded_len, heads=4, kv_heads=1, head_size=32, dtype=torch.float32, seed=0):
        gen = torch.Generator().manual_seed(seed)
        self.lens, self.padded_len = lens, padded_len
        slots = (1 + sum(-(-n // BLOCK) for n in lens) + 2) * BLOCK
        self.key_cache = torch.full((slots, kv_heads, head_size), float("nan"), dtype=dtype)
        self.value_cache = self.key_cache.clone()
        self.key_cache[0] = self.value_cache[0] = 0
        self.slot_mapping = torch.full((len(lens), padded_len), -1, dtype=torch.int64)
        self.query_lens = torch.tensor(lens, dtype=torch.int32)
        self.query = torch.randn(len(lens), heads * head_size, generator=gen).to(dtype)
        blocks = (torch.randperm(slots // BLOCK - 1, generator=gen) + 1).tolist()
        self.keys, self.values = [], []
        for row, n in enumerate(lens):
            own = [blocks.pop() for _ in range(-(-n // BLOCK))]
            where = torch.tensor([own[t // BLOCK] * BLOCK + t % BLOCK for t in range(n)], dtype=torch.int64)
            key, value = (torch.randn(n, kv_heads, head_size, generator=gen).to(dtype) for _ in "kv")
            self.slot_mapping[row, :n] = where
            self.key_cache[where], self.value_cache[where] = key, value
            self.keys.append(key)
            self.values.append(value)

    def reference(self, scale, sliding_window=None):
        """Dense float64 attention of each last token over its own prompt, from the K/V as they were given."""
        batch, kv_heads, head_size = len(self.lens), *self.key_cache.shape[1:]
        query = self.query.double().view(batch, -1, head_size)
        out = torch.zeros_like(query)
        for row, n in enumerate(self.lens):
            for head in range(query.shape[1]):
                kv_head = head // (query.shape[1] // kv_heads)
                scores = scale * (self.keys[row][:, kv_head].double() @ query[row, head])
                for j in range(n):
                    if sliding_window and (n - 1) - j >= sliding_window:
                        scores[j] = -torch.inf
                out[row, head] = torch.softmax(scores, 0) @ self.values[row][:, kv_head].double()
        return out.view(batch, -1)

    def attend(self, attention, scale, sliding_window=None):
        kv_heads, head_size = self.key_cache.shape[1:]
        query = self.query.view(len(self.lens), kv_heads, -1, head_size)
        slots, bias = attention._last_token_keys(self.slot_mapping, self.query_lens, sliding_window)
        out = attention._attend(query, self.key_cache, self.value_cache, slots, bias, scale)
        return out.view(len(self.lens), -1)

    def metadata(self, **other):
        return types.SimpleNamespace(
            **{
                "is_prompt": True,
                "block_list": None,
                "attn_bias": None,
                "block_size": BLOCK,
                "slot_mapping": self.slot_mapping,
                "seq_lens_tensor": self.query_lens,
                **other,
            }
        )


def close(out, reference, lens, dtype=torch.float32):
    real = torch.tensor([n > 0 for n in lens])
    tolerance = dict(rtol=1e-5, atol=1e-5) if dtype == torch.float32 else dict(rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(out[real].double(), reference[real], **tolerance)


@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("lens", [[1], [2], [127], [128], [129], [256], [700], [1, 127, 128, 129, 300], [5, 0, 0]])
def test_matches_a_dense_reference(attention, lens, window):
    prompts = Prompts(lens, padded_len=-(-max(lens) // BLOCK) * BLOCK)
    close(prompts.attend(attention, 1.0, window), prompts.reference(1.0, window), lens)


@pytest.mark.parametrize("heads, kv_heads", [(8, 8), (8, 1), (8, 2)])
@pytest.mark.parametrize("head_size", [256, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matches_for_every_grouping_head_size_and_dtype(attention, heads, kv_heads, head_size, dtype):
    lens = [200, 130, 0]
    prompts = Prompts(lens, 256, heads, kv_heads, head_size, dtype)
    scale = head_size**-0.5
    close(prompts.attend(attention, scale, 128), prompts.reference(scale, 128), lens, dtype)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_matches_for_any_batch(attention, data):
    padded_len = data.draw(st.sampled_from([1, 8, 40, 128, 200]))
    lens = data.draw(st.lists(st.integers(0, padded_len), min_size=1, max_size=5))
    kv_heads, groups = data.draw(st.sampled_from([(1, 1), (1, 8), (2, 4), (4, 1)]))
    window = data.draw(st.sampled_from([None, 1, 7, padded_len, padded_len + 1, 64]))
    prompts = Prompts(lens, padded_len, kv_heads * groups, kv_heads, 16, seed=data.draw(st.integers(0, 99)))
    close(prompts.attend(attention, 0.7, window), prompts.reference(0.7, window), lens)


def test_a_query_as_long_as_the_padding_sees_every_token(attention):
    prompts = Prompts([256, 256], 256)
    close(prompts.attend(attention, 1.0), prompts.reference(1.0), [256, 256])


def test_a_padding_row_is_finite(attention):
    out = Prompts([3, 0], 128).attend(attention, 1.0, 128)
    assert torch.isfinite(out).all()


def test_keys_outside_the_window_are_never_read(attention):
    prompts = Prompts([500], 512)
    reference = prompts.reference(1.0, 128)
    for cache in (prompts.key_cache, prompts.value_cache):
        cache[prompts.slot_mapping[0, : 500 - 128]] = float("nan")
    close(prompts.attend(attention, 1.0, 128), reference, [500])


def test_softmax_is_float32_for_a_bfloat16_cache(attention):
    prompts = Prompts([300], 384, dtype=torch.bfloat16)
    out = prompts.attend(attention, 1.0)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), prompts.reference(1.0), rtol=1e-4, atol=1e-4)


def test_shapes_depend_on_the_padded_batch_alone(attention):
    """No host sync, no data-dependent shape: fake tensors hold no data, and one graph serves all lengths."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    prompts = Prompts([200, 10], 256)

    def attend(query, key_cache, value_cache, slot_mapping, query_lens):
        slots, bias = attention._last_token_keys(slot_mapping, query_lens, 128)
        return attention._attend(query, key_cache, value_cache, slots, bias, 1.0)

    def inputs(prompts):
        return (prompts.query.view(2, 1, 4, 32), *same_size(prompts), prompts.slot_mapping, prompts.query_lens)

    tensors = inputs(prompts)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(tensor) for tensor in tensors]
        assert attend(*fake).shape == (2, 1, 4, 32)

    graphs = []

    def count(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(attend, backend=count, fullgraph=True, dynamic=False)
    for lens in ([200, 10], [1, 256], [0, 7]):
        compiled(*inputs(Prompts(lens, 256)))
    assert len(graphs) == 1


def same_size(prompts, slots=6 * BLOCK):
    """The two caches, padded to one size."""
    caches = []
    for cache in (prompts.key_cache, prompts.value_cache):
        padded = torch.zeros(slots, *cache.shape[1:])
        padded[: len(cache)] = cache
        caches.append(padded)
    return caches


# Prompts with context.


class WithContext(Prompts):
    """One prompt whose first tokens are in the cache already, in scattered blocks; its step's tokens are padded.

    Each block list is padded with -1 as buckets do. The masks are arbitrary, but for the last token's own key, which
    every row sees: what the fix shows that token must be its row of them, whatever they say.
    """

    def __init__(self, context, step, padded_len, window_blocks=None, seed=0):
        super().__init__([context + step], context + step, seed=seed)
        gen = torch.Generator().manual_seed(seed + 1)
        self.context, self.step = context, step
        slots = self.slot_mapping[0]
        self.slot_mapping = torch.full((1, padded_len), -1, dtype=torch.int64)
        self.slot_mapping[0, :step] = slots[context:]
        self.query_lens = torch.tensor([step], dtype=torch.int32)
        blocks = [int(slots[start]) // BLOCK for start in range(0, context, BLOCK)]
        for block in blocks:  # a block's unused slots are masked, and read all the same
            unused = torch.isnan(self.key_cache[block * BLOCK : (block + 1) * BLOCK])
            for cache in (self.key_cache, self.value_cache):
                cache[block * BLOCK : (block + 1) * BLOCK][unused] = 0
        self.block_list = torch.tensor([*blocks, -1], dtype=torch.int32)
        kept = blocks[-window_blocks:] if window_blocks else []
        self.window_block_list = torch.tensor([*kept, -1], dtype=torch.int32) if kept else None
        self.first_kept = (len(blocks) - len(kept)) * BLOCK if kept else 0
        self.masks = {}
        for name, block_list, first in (
            ("full", self.block_list, 0),
            ("window", self.window_block_list, self.first_kept),
        ):
            if block_list is None:
                block_list = self.block_list
            past = len(block_list) * BLOCK
            mask = torch.rand(padded_len, past + padded_len, generator=gen) < 0.3
            mask[:, max(0, context - first) : past] = True  # slots of the blocks that hold no context, and padding
            mask[:, past + step :] = True
            mask[torch.arange(padded_len), past + torch.arange(padded_len)] = False
            self.masks[name] = torch.zeros(mask.shape).masked_fill(mask, -torch.inf).view(1, 1, *mask.shape)

    def metadata(self, **other):
        return super().metadata(
            block_list=self.block_list,
            window_block_list=self.window_block_list,
            attn_bias=self.masks["full"],
            window_attn_bias=self.masks["window"],
            **other,
        )

    def reference(self, scale, sliding_window=None):
        """Float64 attention of the last token over what its row of the mask shows of context and step."""
        mask = self.masks["window" if sliding_window else "full"][0, 0, self.step - 1]
        first = self.first_kept if sliding_window else 0
        past = mask.numel() - self.masks["full"].shape[2]
        shown = torch.cat((mask[: self.context - first], mask[past : past + self.step])).double()
        keys, values = (states[0][first:, 0].double() for states in (self.keys, self.values))
        if sliding_window:
            far = self.step - 1 - torch.arange(self.step) >= sliding_window
            shown[self.context - first :][far] = -torch.inf
        query = self.query.double().view(-1, keys.shape[1])
        return (torch.softmax(scale * query @ keys.T + shown, -1) @ values).view(1, -1)


@pytest.mark.parametrize("window", [None, 128, 256])
@pytest.mark.parametrize("context, step", [(128, 1), (100, 5), (300, 128), (640, 130), (129, 256)])
def test_with_context_the_last_token_sees_its_row_of_the_masks(attention, context, step, window):
    blocks = window // BLOCK + 1 if window else None
    prompts = WithContext(context, step, -(-step // BLOCK) * BLOCK, blocks)
    out = forward(impl(attention, sliding_window=window), prompts)
    close(out, prompts.reference(0.5, window), [step])


def test_without_a_block_list_of_its_own_the_window_uses_the_whole_one(attention):
    prompts = WithContext(300, 100, 128)
    assert prompts.window_block_list is None
    close(forward(impl(attention), prompts), prompts.reference(0.5, 128), [100])


def test_context_in_a_compiled_layer_is_one_graph_for_all_block_lists(attention):
    """The plugin marks the block list's length as unknown to the compiler."""
    made = impl(attention)
    torch._dynamo.reset()
    compiled = torch.compile(made.forward, backend="eager", fullgraph=True, dynamic=False)
    for context in (300, 150):
        prompts = WithContext(context, 100, 128, 2)
        kv_cache = (prompts.key_cache, prompts.value_cache, None, None)
        metadata = prompts.metadata()
        torch._dynamo.decorators.mark_unbacked(metadata.block_list, 0)
        out = compiled(None, prompts.query, None, None, kv_cache, metadata)
        close(out, prompts.reference(0.5, 128), [100])


# HPUAttentionImpl: when the one-query form applies, and what it refuses.


def impl(attention, **other):
    made = object.__new__(attention.HPUAttentionImpl)
    torch.nn.Module.__init__(made)
    vars(made).update(
        {
            "kv_sharing_target_layer_name": "layers.13.self_attn.attn",
            "num_heads": 4,
            "num_kv_heads": 1,
            "num_queries_per_kv": 4,
            "head_size": 32,
            "scale": 0.5,
            "sliding_window": 128,
            "sinks": None,
            "alibi_slopes": None,
            "is_chunked_attention": False,
            "enable_fp8_attn": False,
            **other,
        }
    )
    return made


def forward(made, prompts, key=None, value=None, **metadata):
    kv_cache = (prompts.key_cache, prompts.value_cache, None, None)
    return made.forward(None, prompts.query, key, value, kv_cache, prompts.metadata(**metadata))


@pytest.mark.parametrize("local", ["absent", "unusable"])
def test_local_keys_and_values_are_never_used(attention, local):
    prompts = Prompts([200, 3], 256)
    key = value = None if local == "absent" else torch.full((2, 32), float("nan"))
    out = forward(impl(attention), prompts, key, value)
    close(out, prompts.reference(0.5, 128), [200, 3])
    assert out.shape == prompts.query.shape


def test_the_result_has_the_dtype_of_the_query(attention):
    prompts = Prompts([200], 256, dtype=torch.bfloat16)
    assert forward(impl(attention), prompts).dtype == torch.bfloat16


def test_a_full_attention_layer_sees_past_the_window(attention):
    prompts = Prompts([300], 384)
    close(forward(impl(attention, sliding_window=None), prompts), prompts.reference(0.5), [300])


def test_the_cache_is_only_read(attention):
    prompts = Prompts([200, 0], 256)
    before = prompts.key_cache.clone(), prompts.value_cache.clone()
    forward(impl(attention), prompts, torch.ones(2, 32), torch.ones(2, 32))
    torch.testing.assert_close((prompts.key_cache, prompts.value_cache), before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "layer, metadata",
    [
        pytest.param({}, dict(is_prompt=False), id="decode"),
        pytest.param({}, dict(slot_mapping=None), id="no slot mapping"),
        pytest.param({}, dict(slot_mapping=torch.zeros(1, 2, dtype=torch.int64)), id="merged prefill"),
        pytest.param({}, dict(slot_mapping=torch.zeros(2, 1, dtype=torch.int64)), id="every row is there"),
    ],
)
def test_everything_else_goes_on_to_the_upstream_body(attention, layer, metadata):
    assert forward(impl(attention, **layer), Prompts([200, 3], 256), **metadata) is None


@pytest.mark.parametrize(
    "layer",
    [dict(sinks=torch.ones(4)), dict(alibi_slopes=torch.ones(4)), dict(is_chunked_attention=True)],
)
def test_refuses_what_gemma_4_has_no_use_for(attention, layer):
    with pytest.raises(NotImplementedError, match="sinks, ALiBi or chunked"):
        forward(impl(attention, **layer), Prompts([5], 128))


def test_refuses_an_fp8_cache(attention):
    prompts = Prompts([5], 128)
    with pytest.raises(NotImplementedError, match="FP8 KV cache: drop"):
        forward(impl(attention, enable_fp8_attn=True), prompts)
    prompts.key_cache = prompts.key_cache.to(torch.float8_e4m3fn)
    with pytest.raises(NotImplementedError, match="FP8 KV cache: drop"):
        forward(impl(attention), prompts)


def test_writes_the_keys_and_values_of_a_prompt_at_its_slots(attention):
    class Cache:
        def __call__(self, states, cache, slots, scales=None, block_size=None, is_prompt=False):
            assert block_size == BLOCK and is_prompt and scales is None
            cache.index_copy_(0, slots, states)

    prompts = Prompts([5, 3], 5)
    prompts.slot_mapping[1, 3:] = 0
    made = impl(attention, k_cache=Cache(), v_cache=Cache())
    key, value = torch.rand(10, 32), torch.rand(10, 1, 32)
    kv_cache = (prompts.key_cache, prompts.value_cache, None, None)
    made.write_prompt_kv(key, value, kv_cache, prompts.metadata())
    slots = prompts.slot_mapping.flatten()
    torch.testing.assert_close(prompts.key_cache[slots[:8], 0], key[:8])
    torch.testing.assert_close(prompts.value_cache[slots[:8], 0], value[:8, 0])
