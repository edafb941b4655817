# SPDX-License-Identifier: Apache-2.0
"""Which rows run which layers, what that leaves in the cache, and what a user is told."""

import logging

import pytest
import torch
from pairs import WINDOW, rows_through

from demo import model
from demo.model import reference_logits
from demo.runner import BLOCK, Runner

FIRST_ON_ROWS = 14  # the last layer with a KV cache of its own; of its output, too, only the last tokens' is needed
LAYERS = 35


@pytest.fixture
def fresh(pair):
    """The pair with its blocks handed out from the start, so that both runners use the same ones."""
    for runner in (pair.off, pair.on):
        for keys, values, *_ in runner.caches.values():
            keys.zero_(), values.zero_()
        runner.free = list(range(keys.shape[0] // BLOCK - 1))
    return pair


def test_only_one_row_per_prompt_runs_the_layers_whose_kv_nobody_needs(pair):
    with rows_through(pair.on) as forwards:
        pair.on.prefill(pair.prompts(5, 300), rows=4)
    assert forwards == [[4 * 384] * FIRST_ON_ROWS + [4] * (LAYERS - FIRST_ON_ROWS)]


def test_every_row_runs_every_layer_with_the_flag_off(pair):
    with rows_through(pair.off) as forwards:
        pair.off.prefill(pair.prompts(5, 300), rows=4)
    assert forwards == [[4 * 384] * 35]


def test_no_value_of_a_tensor_is_looked_at(site):
    """On meta tensors, which have shapes and no values, a synchronisation or a data-dependent shape is an error."""
    config = model.text_config(max_len=768)
    with torch.device("meta"):
        runner = Runner(*model.build(config, None, fast_prefill=True))
        with rows_through(runner) as forwards:
            _, logits = runner.prefill([[1] * 300, [2] * 5], rows=4)
    assert logits.shape == (2, config.vocab_size)
    assert forwards == [[4 * 384] * FIRST_ON_ROWS + [4] * (LAYERS - FIRST_ON_ROWS)]


def test_decode_steps_run_every_layer(pair):
    requests, _ = pair.on.prefill(pair.prompts(5, 300))
    with rows_through(pair.on) as forwards:
        pair.on.decode(requests, [7, 8], rows=4)
    assert forwards == [[4] * 35]


@pytest.mark.parametrize("room", [False, True])
@pytest.mark.parametrize("first, second", [(WINDOW, 40), (200, 1), (200, 190), (3 * WINDOW, 130)])
def test_prompts_with_context_take_the_fast_path_where_there_is_room_and_agree(pair, monkeypatch, first, second, room):
    slots = next(iter(pair.off.caches.values()))[0].shape[0] + (not room)
    monkeypatch.setattr(pair.on.model.model.language_model.model, "fast_prefill_context_slots", slots)
    (prompt,) = pair.prompts(first + second)
    logits, rows = {}, {}
    for name, runner in (("off", pair.off), ("on", pair.on)):
        (request,), _ = runner.prefill([prompt[:first]])
        with rows_through(runner) as forwards:
            logits[name] = runner.extend(request, prompt[first:])
        (rows[name],) = forwards
        runner.release(request)
    padded = rows["off"][0]
    assert rows["off"] == [padded] * LAYERS
    fast = LAYERS - FIRST_ON_ROWS if room else 0
    assert rows["on"] == [padded] * (LAYERS - fast) + [1] * fast
    torch.testing.assert_close(logits["on"], logits["off"], atol=5e-4, rtol=0)
    expected = reference_logits(pair.reference, prompt)[-1:]
    torch.testing.assert_close(logits["on"], expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("with_context", [False, True])
def test_the_cache_after_a_prompt_is_the_same_to_the_bit(fresh, monkeypatch, with_context):
    monkeypatch.setattr(fresh.on.model.model.language_model.model, "fast_prefill_context_slots", 0)
    for runner in (fresh.off, fresh.on):
        (first, *_), _ = runner.prefill(fresh.prompts(200, 127, 129, 300), rows=6)
        if with_context:
            runner.extend(first, [7] * 150)
    for name, cache in fresh.off.caches.items():
        for half, fast_half in zip(cache[:2], fresh.on.caches[name][:2], strict=True):
            assert torch.equal(half[:-128], fast_half[:-128])  # the last block takes what padding writes


def test_the_rotary_cache_is_gone_after_a_forward(pair_of):
    for runner in (pair_of().off, pair_of().on, pair_of(vision=True).on):
        runner.prefill([[1] * 9, [2] * 140])
        rotary = runner.model.model.language_model.model.layers[-2].self_attn.rotary_emb
        assert not hasattr(rotary, "cos") and not hasattr(rotary, "sin")


def test_all_layers_run_on_all_tokens_while_no_cache_is_allocated(pair):
    layers = pair.on.layers
    caches = {name: layer.kv_cache for name, layer in layers.items()}
    try:
        for layer in layers.values():
            layer.kv_cache = torch.tensor([])
        with rows_through(pair.on) as forwards:
            pair.on.prefill(pair.prompts(5, 130))
    finally:
        for name, layer in layers.items():
            layer.kv_cache = caches[name]
    assert forwards == [[2 * 256] * 35]


def test_each_reason_is_told_once_by_the_logger_that_vllm_sets_up(pair, monkeypatch):
    import vllm.logger

    told = []

    class Listener(logging.Handler):
        def emit(self, record):
            told.append(record.getMessage())

    vllm.logger._print_info_once.cache_clear()
    logger = logging.getLogger("vllm")
    monkeypatch.setattr(logger, "handlers", [Listener()])
    monkeypatch.setattr(logger, "level", logging.INFO)
    logger.manager._clear_cache()
    (request,), _ = pair.on.prefill(pair.prompts(130))
    for _ in range(3):
        pair.on.extend(request, [1, 2, 3])
    (reason,) = [line for line in told if "ast prefill" in line]
    assert "earlier tokens are in the KV cache" in reason


def test_only_models_with_kv_shared_layers_are_changed(pair_of):
    pair = pair_of(layers=6, shared=0)
    assert not pair.on.model.model.language_model.model.fast_prefill_enabled
    pair.assert_parity(pair.prompts(20, 140))
