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
    made.last_kv_layer_splits = False
    made.fast_prefill_context_slots = 0
    made.per_layer_inputs_split = False
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
        attn_bias=None,
        window_attn_bias=None,
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
    "several prompts with context": (dict(block_list=torch.zeros(1)), "several prompts with context"),
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


MASKED = dict(block_list=torch.zeros(1), attn_bias=torch.zeros(1, 1, S, S), window_attn_bias=torch.zeros(1, 1, S, S))


def test_asked_for_it_does_so_in_caches_of_any_size(model, gemma):
    gemma.layers[0].self_attn.attn.kv_cache = (torch.zeros(2), torch.zeros(2), None, None)
    run(model, gemma, [5], S, **MASKED)
    assert gemma.layers[4].calls[0][1].shape[0] == 1


def test_a_prompt_with_context_takes_the_fast_path(model, gemma):
    run(model, gemma, [5], S, **MASKED)
    assert [layer.calls[0][1].shape[0] for layer in gemma.layers] == [S] * (LAYERS - SHARED) + [1] * SHARED


@pytest.mark.parametrize(
    "case, changes, reason",
    [
        ("small cache", {}, "one may be preempted"),
        ("caches of different sizes", {}, "one may be preempted"),
        ("never", {}, "forbids it"),
        ("no mask", dict(attn_bias=None), "no masks for the context"),
        ("no window mask", dict(window_attn_bias=None), "no masks for the context"),
    ],
)
def test_a_prompt_with_context_falls_back_where_its_rows_are_not_known_to_be_enough(
    model, gemma, case, changes, reason
):
    gemma.fast_prefill_context_slots = {"small cache": 2, "never": None}.get(case, 1)  # the cache has one
    if case == "caches of different sizes":
        gemma.layers[0].self_attn.attn.kv_cache = (torch.zeros(2), torch.zeros(2), None, None)
    run(model, gemma, [5], S, **{**MASKED, **changes})
    assert gemma.layers[4].calls[0][1].shape[0] == S
    assert reason in model.log[0]


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
        kv_transfer_config=None,
        speculative_config=None,
        lora_config=None,
        parallel_config=types.SimpleNamespace(pipeline_parallel_size=1),
        model_config=types.SimpleNamespace(runner_type="generate", max_model_len=300),
        scheduler_config=types.SimpleNamespace(max_num_seqs=2),
        cache_config=types.SimpleNamespace(block_size=128),
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


def merged_prefill(gemma, server):
    gemma.layers[3].self_attn.attn.impl.use_merged_prefill = True


def pipeline_stages(gemma, server):
    server.parallel_config.pipeline_parallel_size = 2
    gemma.layers[0] = types.SimpleNamespace()  # another stage's layer has no attention


def drafts(gemma, server):
    server.speculative_config = object()


def pooling(gemma, server):
    server.model_config.runner_type = "pooling"


@pytest.mark.parametrize(
    "change, reason",
    [
        (no_shared_layers, "no KV-shared layers"),
        (merged_prefill, "merged prefill"),
        (pipeline_stages, "pipeline stages"),
        (pooling, "pooling"),
        (drafts, "speculative decoding"),
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
    gemma.positions = buffer = torch.zeros(4)
    start(model, gemma)
    assert not model.log
    assert gemma.positions is buffer
    assert type(gemma.layers[2]) is Layer


def test_the_buffers_for_cuda_graphs_are_freed(model, gemma, server):
    gemma.positions, gemma.hidden_states, gemma.per_layer_inputs = (torch.zeros(4) for _ in range(3))
    start(model, gemma)
    assert gemma.positions is gemma.hidden_states is gemma.per_layer_inputs is None


# Two requests of 300 tokens in blocks of 128: three blocks each and one ahead; two blocks are nobody's.
ENOUGH = (2 * 4 + 2) * 128


@pytest.mark.parametrize(
    "asked, connector, slots",
    [(None, None, ENOUGH), ("0", None, None), ("1", None, 0), (None, 1, None), ("1", 1, None)],
)
def test_prompts_with_context_take_the_fast_path_where_nothing_is_preempted_or_on_request(
    model, gemma, server, monkeypatch, asked, connector, slots
):
    monkeypatch.delenv("VLLM_FAST_PREFILL_WITH_CONTEXT", raising=False)
    if asked is not None:
        monkeypatch.setenv("VLLM_FAST_PREFILL_WITH_CONTEXT", asked)
    server.kv_transfer_config = connector
    start(model, gemma)
    assert gemma.fast_prefill_enabled
    assert gemma.fast_prefill_context_slots == slots


@pytest.mark.parametrize("name", ["VLLM_FAST_PREFILL_WITH_CONTEXT", "VLLM_FAST_PREFILL_SPLIT_PER_LAYER_INPUTS"])
def test_refuses_another_word_in_a_variable(model, gemma, server, monkeypatch, name):
    monkeypatch.setenv(name, "yes")
    with pytest.raises(ValueError, match=f"{name} is 'yes': set it to 1 or 0"):
        start(model, gemma)


# The last layer with a KV cache of its own.


def test_it_splits_where_its_rotary_embedding_caches_nothing(model, gemma, server):
    gemma.layers[2].self_attn.rotary_emb = types.SimpleNamespace()
    start(model, gemma)
    assert gemma.last_kv_layer_splits
    assert type(gemma.layers[2]) is model.HpuGemma4LastKVDecoderLayer
    assert all(type(gemma.layers[i]) is Layer for i in (0, 1, 3, 4))


@pytest.mark.parametrize("why", ["cached rotary embedding", "LoRA"])
def test_it_stays_whole_where_the_rows_would_need_state_of_their_own(model, gemma, server, why):
    if why == "LoRA":
        gemma.layers[2].self_attn.rotary_emb = types.SimpleNamespace()
        server.lora_config = object()
    start(model, gemma)
    assert not gemma.last_kv_layer_splits
    assert type(gemma.layers[2]) is Layer


@pytest.fixture
def kv_layer(model):
    """The split layer with two heads of size 4, one KV head, and its K/V writes in `.written`."""
    heads, kv_heads, head_dim, written = 2, 1, 4, []
    layer = object.__new__(model.HpuGemma4LastKVDecoderLayer)
    weight = torch.rand((heads + 2 * kv_heads) * head_dim, HIDDEN)
    layer.input_layernorm = lambda states: states * 2
    layer.base_forward = lambda positions, states, inputs: (positions, states, inputs)
    layer.self_attn = types.SimpleNamespace(
        qkv_proj=lambda states: (states @ weight.T, None),
        q_size=heads * head_dim,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        k_norm=lambda key: key + 10,
        v_norm=lambda value: value + 20,
        rotary_emb=lambda positions, query, key: (query * positions.flatten().unsqueeze(1), key),
        attn=types.SimpleNamespace(
            kv_cache="cache",
            impl=types.SimpleNamespace(write_prompt_kv=lambda *what: written.append(what)),
        ),
    )
    layer.written = written
    return layer


def test_it_writes_the_keys_and_values_of_every_token(model, kv_layer):
    model.context.attn_metadata = "metadata"
    states, positions = torch.rand(6, HIDDEN), torch.arange(6).view(2, 3)
    kv_layer.forward(positions, states, None, last_token_rows=torch.tensor([1, 5]))
    [(key, value, cache, metadata)] = kv_layer.written
    qkv, _ = kv_layer.self_attn.qkv_proj(states * 2)
    torch.testing.assert_close(key.reshape(6, 4), (qkv[:, 8:12] + 10) * torch.arange(6).unsqueeze(1))
    torch.testing.assert_close(value.reshape(6, 4), qkv[:, 12:] + 20)
    assert (cache, metadata) == ("cache", "metadata")


def test_the_rest_of_it_runs_on_the_last_tokens(model, kv_layer):
    states, positions, inputs = torch.rand(6, HIDDEN), torch.arange(6).view(2, 3), torch.rand(2, PER_LAYER)
    (out, _) = kv_layer.forward(positions, states, None, inputs, last_token_rows=torch.tensor([1, 5]))
    assert out[0].tolist() == [1, 5]
    torch.testing.assert_close(out[1], states[[1, 5]])
    assert out[2] is inputs


def test_it_is_the_layer_it_was_without_rows(model, kv_layer):
    states, positions, inputs = torch.rand(6, HIDDEN), torch.arange(6).view(2, 3), torch.rand(6, PER_LAYER)
    (out, _) = kv_layer.forward(positions, states, None, inputs)
    assert out[0] is positions and out[1] is states and out[2] is inputs
    assert not kv_layer.written


def test_a_split_layer_gets_the_rows_and_hands_them_on(model, gemma):
    class Split(Layer):
        def __call__(self, positions, hidden_states, per_layer_input, last_token_rows=None):
            self.rows = last_token_rows
            out = super().__call__(positions, hidden_states, per_layer_input)
            return out.index_select(0, last_token_rows)

    gemma.last_kv_layer_splits = True
    gemma.layers[2].__class__ = Split
    out = run(model, gemma)
    assert gemma.layers[2].rows.tolist() == ROWS
    assert gemma.layers[2].calls[0][1].shape == (4 * S, HIDDEN)
    assert gemma.layers[2].calls[0][2].shape == (4, PER_LAYER)
    assert [layer.calls[0][1].shape[0] for layer in gemma.layers[3:]] == [4, 4]
    expected = torch.arange(4 * S).float() * 100 + (LAYERS - SHARED - 1)
    expected[ROWS] += SHARED + 1
    assert out[:, 0].tolist() == expected.tolist()


# Per-layer inputs: of all layers where only the last tokens run on the rest.


@pytest.fixture
def projecting(gemma):
    """Projects as Gemma 4 does: a product, a scale, a norm, the embeddings, another scale."""
    torch.manual_seed(0)
    gemma.per_layer_model_projection = types.SimpleNamespace(weight=torch.rand(LAYERS * PER_LAYER, HIDDEN))
    gemma.per_layer_projection_scale, gemma.per_layer_input_scale = 0.5, 0.25
    gemma.per_layer_projection_norm = lambda states: states / (1 + states.amax(-1, keepdim=True))

    def project(embeds, inputs):
        gemma.projected.append(embeds.shape[0])
        product = (embeds @ gemma.per_layer_model_projection.weight.T).view(-1, LAYERS, PER_LAYER) * 0.5
        return (gemma.per_layer_projection_norm(product) + inputs) * 0.25

    gemma.projected, gemma.project_per_layer_inputs = [], project
    return gemma


def inputs_of_layers(gemma):
    return [layer.calls[-1][2] for layer in gemma.layers]


@pytest.mark.parametrize("splits", [False, True])
def test_split_per_layer_inputs_are_those_of_the_whole_projection(model, projecting, splits):
    projecting.last_kv_layer_splits = splits
    for layer in projecting.layers:
        layer.__class__ = type("Rows", (Layer,), {"__call__": rows_only})
    run(model, projecting)
    whole = inputs_of_layers(projecting)
    assert projecting.projected == [4 * S]
    projecting.per_layer_inputs_split = True
    run(model, projecting)
    assert projecting.projected == [4 * S, 4]
    torch.testing.assert_close(inputs_of_layers(projecting), whole)


def rows_only(layer, positions, hidden_states, per_layer_input, last_token_rows=None):
    out = Layer.__call__(layer, positions, hidden_states, per_layer_input)
    return out if last_token_rows is None else out.index_select(0, last_token_rows)


@pytest.mark.parametrize("why", ["of another dtype", "spread over ranks", "packed"])
def test_a_weight_that_is_no_plain_matrix_is_not_cut(model, projecting, why):
    projecting.per_layer_inputs_split = True
    weight = torch.rand(LAYERS * PER_LAYER, HIDDEN)
    other = weight.to(torch.float8_e4m3fn) if why == "of another dtype" else weight[: LAYERS * PER_LAYER // 2]
    projecting.project_per_layer_inputs = lambda embeds, inputs: inputs
    projecting.per_layer_model_projection.weight = other
    if why == "packed":
        del projecting.per_layer_model_projection.weight
    run(model, projecting)
    assert [inputs.shape[0] for inputs in inputs_of_layers(projecting)] == [4 * S] * 3 + [4] * 2


def test_a_fall_back_projects_everything_once(model, projecting):
    projecting.per_layer_inputs_split = True
    run(model, projecting, block_list=torch.zeros(1))
    assert projecting.projected == [4 * S]


@pytest.mark.parametrize(
    "asked, lora, splits", [(None, None, False), ("0", None, False), ("1", None, True), ("1", 1, False)]
)
def test_per_layer_inputs_split_on_request_and_without_lora(model, gemma, server, monkeypatch, asked, lora, splits):
    monkeypatch.delenv("VLLM_FAST_PREFILL_SPLIT_PER_LAYER_INPUTS", raising=False)
    if asked is not None:
        monkeypatch.setenv("VLLM_FAST_PREFILL_SPLIT_PER_LAYER_INPUTS", asked)
    server.lora_config = lora
    start(model, gemma)
    assert gemma.per_layer_inputs_split == splits


# LoRA masks.


def test_the_lora_mask_holds_the_rows_while_they_run_and_all_tokens_before_and_after(model, gemma):
    mask = torch.arange(4 * S).unsqueeze(1)
    model.lora.setLoraMask(mask)
    seen = []
    for layer in gemma.layers:
        layer.__class__ = type(
            "Masked",
            (Layer,),
            {"__call__": lambda self, *args: (seen.append(model.lora.getLoraMask()), Layer.__call__(self, *args))[1]},
        )
    run(model, gemma)
    assert [len(rows) for rows in seen] == [4 * S] * (LAYERS - SHARED) + [4] * SHARED
    assert seen[-1].flatten().tolist() == ROWS
    assert model.lora.getLoraMask() is mask


# Text-only checkpoints.


@pytest.fixture
def text_model(model, gemma, server, monkeypatch):
    """Make a text-only model; `.patched` is what was patched as the plugin does."""
    patched = []
    monkeypatch.setattr(model, "_apply_hpu_gemma4_patches", patched.append)
    monkeypatch.setattr(model.text_base, "made", gemma)

    def make(prefix=""):
        made = model.HpuGemma4ForCausalLM(vllm_config=server, prefix=prefix)
        made.patched = patched
        return made

    return make


def test_a_text_only_model_is_registered_and_patched(model, text_model):
    assert model.registered == {"Gemma4ForCausalLM": model.HpuGemma4ForCausalLM}
    made = text_model()
    assert made.patched == [made]


@pytest.mark.parametrize("shape", [(2, 3), (6,)])
def test_its_ids_are_flattened_and_the_rest_is_handed_on(text_model, shape):
    positions = torch.zeros(2, 3)
    ids, *rest = text_model().forward(torch.arange(6).view(shape), positions, None, "embeds", extra=1)
    assert ids.tolist() == list(range(6))
    assert rest == [positions, None, "embeds", {"extra": 1}]


def test_embeddings_alone_go_through_it(text_model):
    assert text_model().forward(None, torch.zeros(2, 3), None, "embeds")[0] is None


@pytest.mark.parametrize("why", ["no flag", "part of a multimodal model"])
def test_else_it_is_the_base_class(gemma, text_model, why):
    gemma.fast_prefill_enabled = why != "no flag"
    made = text_model(prefix="" if why == "no flag" else "language_model")
    ids = torch.arange(6).view(2, 3)
    assert made.forward(ids, torch.zeros(2, 3))[0] is ids
    assert not made.patched


# Prompt logprobs.


@pytest.fixture
def processor(model):
    """vLLM's front door, as the model's module leaves it."""
    made = model.InputProcessor()
    made.vllm_config = types.SimpleNamespace(cache_config=types.SimpleNamespace(kv_sharing_fast_prefill=True))
    return made


@pytest.mark.parametrize("count", [0, 3])
def test_requests_for_prompt_logprobs_are_refused_with_the_flag(processor, count):
    asked = types.SimpleNamespace(prompt_logprobs=count)
    with pytest.raises(ValueError, match="prompt_logprobs cannot be had with --kv-sharing-fast-prefill"):
        processor.process_inputs("id", "prompt", asked)
    with pytest.raises(ValueError, match="prompt_logprobs"):
        processor.process_inputs("id", "prompt", params=asked, priority=1)


@pytest.mark.parametrize("why", ["no flag", "not asked for", "pooling"])
def test_other_requests_are_handed_on(processor, why):
    processor.vllm_config.cache_config.kv_sharing_fast_prefill = why != "no flag"
    params = types.SimpleNamespace(prompt_logprobs=3 if why == "no flag" else None)
    if why == "pooling":
        params = types.SimpleNamespace()  # has none
    assert processor.process_inputs("id", "prompt", params, ("generate",), priority=1) == (
        ("id", "prompt", params, ("generate",)),
        {"priority": 1},
    )
