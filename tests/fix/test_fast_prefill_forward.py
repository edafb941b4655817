# SPDX-License-Identifier: Apache-2.0
"""Which rows run through which layers, and when all of them do, on layers that write down what they are given."""

import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

HIDDEN, PER_LAYER, LAYERS, SHARED = 4, 3, 5, 2


class Rotary:
    """Caches cos and sin of the tokens it was last prepared for, as the plugin's does."""

    def __init__(self):
        self.prepared = []

    def prepare_cos_sin(self, positions, offsets=None, recompute_cos_sin=False):
        self.prepared.append(positions.clone())
        self.cos = self.sin = positions


class Layer:
    """Adds 1 to the hidden states, and its index to the first of them; keeps its inputs."""

    def __init__(self, index, rotary, kv_cache):
        impl = types.SimpleNamespace(use_merged_prefill=False)
        attn = types.SimpleNamespace(kv_cache=kv_cache, kv_cache_dtype="auto", impl=impl)
        self.self_attn = types.SimpleNamespace(rotary_emb=rotary, attn=attn)
        self.index = index
        self.calls = []

    def __call__(self, positions, hidden_states, per_layer_input, **kwargs):
        cos = getattr(self.self_attn.rotary_emb, "cos", None)
        self.calls.append((positions.clone(), hidden_states.clone(), per_layer_input, cos))
        return hidden_states + 1


@pytest.fixture
def gemma(model):
    """A model of five layers, the last two KV-shared: one with the cached rotary embedding, one without."""
    made = object.__new__(model.HpuGemma4Model)
    sliding, full = Rotary(), types.SimpleNamespace()
    made.config = types.SimpleNamespace(num_hidden_layers=LAYERS, num_kv_shared_layers=SHARED)
    made.fast_prefill_enabled = True
    cache = (torch.zeros(1), torch.zeros(1), None, None)
    made.layers = [Layer(i, full if i == LAYERS - 1 else sliding, cache) for i in range(LAYERS)]
    made.embed_input_ids = lambda ids: ids.float().unsqueeze(1).expand(-1, HIDDEN) * 100
    made.get_per_layer_inputs = lambda ids: (
        ids.float().view(-1, 1, 1) + torch.arange(LAYERS).view(1, -1, 1) / 10
    ).expand(-1, -1, PER_LAYER)
    made.project_per_layer_inputs = lambda embeds, inputs: inputs
    return made


def batch(lens, padded_len, first_position=0):
    """Ids (each token's own), positions and metadata of a prompt batch without context."""
    size = len(lens)
    ids = torch.arange(size * padded_len, dtype=torch.int32)
    positions = torch.full((size, padded_len), -1, dtype=torch.int32)
    slots = torch.full((size, padded_len), -1, dtype=torch.int64)
    for row, n in enumerate(lens):
        positions[row, :n] = torch.arange(first_position, first_position + n)
        slots[row, :n] = torch.arange(n) + row * padded_len
    metadata = types.SimpleNamespace(
        is_prompt=True,
        block_list=None,
        slot_mapping=slots,
        seq_lens_tensor=torch.tensor(lens, dtype=torch.int32),
    )
    return ids, positions, metadata


LENS, S = [3, 8, 0, 1], 8
ROWS = [2, 15, 16, 24]  # row * S + query length - 1; a padding row's own first one


def run(model, gemma, lens=LENS, padded_len=S, **changes):
    ids, positions, metadata = batch(lens, padded_len)
    vars(metadata).update(changes)
    model.context.attn_metadata = metadata
    return gemma.fast_prefill_forward(ids, positions)


def test_the_layers_before_the_first_shared_one_run_on_every_token(model, gemma):
    run(model, gemma)
    for layer in gemma.layers[: LAYERS - SHARED]:
        [(positions, hidden_states, per_layer_input, _)] = layer.calls
        assert positions.shape == (4, S)
        assert hidden_states.shape == (4 * S, HIDDEN)
        assert per_layer_input.shape == (4 * S, PER_LAYER)


def test_the_shared_layers_run_on_each_prompts_last_token_only(model, gemma):
    run(model, gemma)
    for depth, layer in enumerate(gemma.layers[LAYERS - SHARED :]):
        [(positions, hidden_states, per_layer_input, _)] = layer.calls
        assert positions.tolist() == [2, 7, -1, 0]
        expected = torch.tensor(ROWS) * 100 + (LAYERS - SHARED) + depth
        assert hidden_states[:, 0].tolist() == expected.tolist()
        inputs = torch.tensor(ROWS) + layer.index / 10
        torch.testing.assert_close(per_layer_input[:, 0], inputs.float())


def test_the_sampled_rows_went_through_all_the_layers_and_the_others_through_the_first(model, gemma):
    out = run(model, gemma)
    expected = torch.arange(4 * S).float() * 100 + (LAYERS - SHARED)
    expected[ROWS] += SHARED
    assert out[:, 0].tolist() == expected.tolist()


def test_the_rotary_cache_holds_the_gathered_positions_for_the_shared_layers(model, gemma):
    rotary = gemma.layers[0].self_attn.rotary_emb
    rotary.prepare_cos_sin(torch.arange(4 * S))
    run(model, gemma)
    assert gemma.layers[0].calls[0][3].numel() == 4 * S
    assert gemma.layers[LAYERS - SHARED].calls[0][3].tolist() == [2, 7, -1, 0]


def test_the_rotary_cache_is_dropped_afterwards(model, gemma):
    run(model, gemma)
    rotary = gemma.layers[0].self_attn.rotary_emb
    assert len(rotary.prepared) == 1
    assert not hasattr(rotary, "cos") and not hasattr(rotary, "sin")


def test_given_embeddings_and_per_layer_inputs_are_used(model, gemma):
    ids, positions, model.context.attn_metadata = batch([8], 8)
    embeds, inputs = torch.rand(8, HIDDEN), torch.rand(8, LAYERS, PER_LAYER)
    out = gemma.fast_prefill_forward(ids, positions, embeds, inputs)
    torch.testing.assert_close(out[7], embeds[7] + LAYERS)
    torch.testing.assert_close(gemma.layers[4].calls[0][2], inputs[7:, 4])


def test_a_model_without_per_layer_inputs_works(model, gemma):
    gemma.get_per_layer_inputs = lambda ids: None
    out = run(model, gemma, [8], 8)
    assert gemma.layers[4].calls[0][2] is None
    assert out[7, 0] == 700 + LAYERS


def test_keyword_arguments_reach_every_layer(model, gemma):
    seen = []
    for layer in gemma.layers:
        layer.__class__ = type(
            "Keyword",
            (Layer,),
            {"__call__": lambda self, *args, extra=None: (seen.append(extra), Layer.__call__(self, *args))[1]},
        )
    ids, positions, model.context.attn_metadata = batch([8], 8)
    gemma.fast_prefill_forward(ids, positions, extra=1)
    assert seen == [1] * LAYERS


@given(st.integers(1, 64).flatmap(lambda s: st.tuples(st.just(s), st.lists(st.integers(0, s), min_size=1, max_size=9))))
def test_rows_are_distinct_and_inside_their_own_prompt(shape):
    padded_len, lens = shape
    rows = LAST_TOKEN_ROWS(torch.tensor(lens, dtype=torch.int32), padded_len)
    assert rows.dtype == torch.int64
    for row, n in enumerate(lens):
        assert rows[row] == row * padded_len + max(n - 1, 0)


def LAST_TOKEN_ROWS(*args):
    """Set by the fixture below: hypothesis and function-scoped fixtures do not mix."""
    raise NotImplementedError


@pytest.fixture(autouse=True)
def _last_token_rows(model, monkeypatch):
    monkeypatch.setitem(globals(), "LAST_TOKEN_ROWS", model._last_token_rows)


# When every token must run through every layer.

FALL_BACKS = {
    "decode": (dict(is_prompt=False), None),
    "context": (dict(block_list=torch.zeros(1)), "earlier tokens are in the KV cache already"),
    "no query lengths": (dict(seq_lens_tensor=None), "no query lengths or no slot mapping"),
    "no slot mapping": (dict(slot_mapping=None), "no query lengths or no slot mapping"),
    "several prompts in a row": (dict(seq_lens_tensor=torch.ones(9)), "not one padded row per prompt"),
    "another layout": (dict(slot_mapping=torch.zeros(4 * S)), "not one padded row per prompt"),
}


@pytest.mark.parametrize("case", FALL_BACKS)
def test_falls_back_to_all_layers_on_all_tokens(model, gemma, case):
    changes, reason = FALL_BACKS[case]
    out = run(model, gemma, **changes)
    assert [call[1].shape[0] for layer in gemma.layers for call in layer.calls] == [4 * S] * LAYERS
    assert out[:, 0].tolist() == (torch.arange(4 * S) * 100.0 + LAYERS).tolist()
    assert not gemma.layers[0].self_attn.rotary_emb.prepared
    assert [reason in line for line in model.log] == ([True] if reason else [])


def test_falls_back_before_the_kv_cache_is_allocated(model, gemma):
    for layer in gemma.layers:
        layer.self_attn.attn.kv_cache = torch.tensor([])
    run(model, gemma)
    assert gemma.layers[4].calls[0][1].shape[0] == 4 * S
    assert "no KV cache is allocated yet" in model.log[0]


def test_falls_back_without_attention_metadata(model, gemma):
    ids, positions, _ = batch([8], 8)
    gemma.fast_prefill_forward(ids, positions)
    assert gemma.layers[4].calls[0][1].shape[0] == 8


def test_each_reason_is_logged_once(model, gemma):
    for _ in range(3):
        run(model, gemma, block_list=torch.zeros(1))
    assert len(model.log) == 1


def test_no_host_synchronisation(model, gemma):
    """Fake tensors hold no data: whatever needs a value raises."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    ids, positions, metadata = batch(LENS, S)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for name in ("slot_mapping", "seq_lens_tensor"):
            setattr(metadata, name, mode.from_tensor(getattr(metadata, name)))
        model.context.attn_metadata = metadata
        out = gemma.fast_prefill_forward(mode.from_tensor(ids), mode.from_tensor(positions))
    assert out.shape == (4 * S, HIDDEN)
    assert gemma.layers[4].calls[0][1].shape == (4, HIDDEN)


# What is decided when the server starts.


@pytest.fixture
def server(model):
    vars(model.config).update(
        lora_config=None,
        parallel_config=types.SimpleNamespace(pipeline_parallel_size=1),
        model_config=types.SimpleNamespace(runner_type="generate"),
    )
    return model.config


def start(model, gemma):
    model._apply_hpu_gemma4_patches(types.SimpleNamespace(model=gemma))


def test_stays_on_for_a_plain_server(model, gemma, server):
    start(model, gemma)
    assert gemma.fast_prefill_enabled
    assert not model.log


def no_shared_layers(gemma, server):
    gemma.config.num_kv_shared_layers = 0


def lora(gemma, server):
    server.lora_config = object()


def merged_prefill(gemma, server):
    gemma.layers[3].self_attn.attn.impl.use_merged_prefill = True


def pipeline_stages(gemma, server):
    server.parallel_config.pipeline_parallel_size = 2
    gemma.layers[0] = types.SimpleNamespace()  # another stage's layer has no attention


def pooling(gemma, server):
    server.model_config.runner_type = "pooling"


@pytest.mark.parametrize(
    "change, reason",
    [
        (no_shared_layers, "no KV-shared layers"),
        (lora, "LoRA"),
        (merged_prefill, "merged prefill"),
        (pipeline_stages, "pipeline stages"),
        (pooling, "pooling"),
    ],
)
def test_turns_itself_off_and_says_why(model, gemma, server, change, reason):
    change(gemma, server)
    start(model, gemma)
    assert not gemma.fast_prefill_enabled
    [line] = model.log
    assert "has no effect" in line and reason in line


def test_refuses_an_fp8_kv_cache_at_start(model, gemma, server):
    gemma.layers[2].self_attn.attn.kv_cache_dtype = "fp8_inc"
    with pytest.raises(ValueError, match=r"FP8 KV cache on HPU. Drop the flag, or drop --kv-cache-dtype"):
        start(model, gemma)


def test_touches_nothing_without_the_flag(model, gemma, server):
    gemma.fast_prefill_enabled = False
    gemma.layers[2].self_attn.attn.kv_cache_dtype = "fp8_inc"
    lora(gemma, server)
    start(model, gemma)
    assert not model.log
