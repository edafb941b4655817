# SPDX-License-Identifier: Apache-2.0
"""With the flag on the model says what it says with the flag off, and what transformers' Gemma 4 says."""

import dataclasses

import pytest
import torch
from pairs import WINDOW

from demo import model
from demo.model import reference_logits
from demo.runner import Runner

FLAT = {"layers": 10, "shared": 5}


@pytest.mark.parametrize("length", [1, 2, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW, 3 * WINDOW + 77])
def test_one_prompt(pair, length):
    pair.assert_parity(pair.prompts(length))


def test_mixed_lengths_and_padding_rows(pair):
    pair.assert_parity(pair.prompts(1, WINDOW - 1, WINDOW, WINDOW + 1, 300, 3 * WINDOW), rows=8)


def test_a_batch_of_full_rows(pair):
    pair.assert_parity(pair.prompts(2 * WINDOW, 2 * WINDOW, 2 * WINDOW))


def test_a_prompt_shorter_than_its_padded_length_by_several_windows(pair):
    pair.assert_parity(pair.prompts(5, 140), padded=4 * WINDOW)


def test_prompts_of_one_token_padded_to_one_token(pair):
    pair.assert_parity(pair.prompts(1, 1), padded=1, rows=3)


def test_batches_one_after_the_other(pair):
    for lengths in ((200, 60), (60, 200), (300,), (17, 18, 19)):
        pair.assert_parity(pair.prompts(*lengths), steps=3)


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_groups_of_queries(pair_of, kv_heads):
    pair = pair_of(kv_heads=kv_heads, **FLAT)
    pair.assert_parity(pair.prompts(40, 300), rows=3)


def test_head_sizes_of_the_real_models(pair_of):
    pair = pair_of(head=256, full_head=512, heads=4, **FLAT)
    pair.assert_parity(pair.prompts(40, 300), rows=3)


def test_a_window_of_several_blocks(pair_of):
    pair = pair_of(window=2 * WINDOW, **FLAT)
    pair.assert_parity(pair.prompts(2 * WINDOW - 1, 2 * WINDOW + 1, 700))


@pytest.mark.parametrize("every, layers, shared", [(6, 42, 18), (5, 35, 20)])
def test_the_layer_patterns_of_e4b_and_e2b(pair_of, every, layers, shared):
    pair = pair_of(every=every, layers=layers, shared=shared)
    pair.assert_parity(pair.prompts(200, 33), rows=4)


def test_embeddings_handed_over_by_a_multimodal_runner(pair_of):
    """There the plugin's adapter finds the vision tower's rotary embedding and leaves the text model's alone."""
    pair = pair_of(vision=True)
    for lengths in ((200,), (60,), (200,)):
        pair.assert_parity(pair.prompts(*lengths), embeds=True)


def test_text_only_batches_of_a_model_with_a_vision_tower(pair_of):
    pair = pair_of(vision=True)
    for lengths in ((200, 60), (60, 200)):
        pair.assert_parity(pair.prompts(*lengths), rows=3)


def test_per_layer_inputs_projected_for_the_last_tokens_only(pair, pair_of, monkeypatch):
    for tried in (pair, pair_of(vision=True)):
        monkeypatch.setattr(tried.on.model.model.language_model.model, "per_layer_inputs_split", True)
        for lengths in ((1, 150, 300), (130,)):
            tried.assert_parity(tried.prompts(*lengths), embeds=tried is not pair)


def test_a_text_only_checkpoint(pair):
    """The runner does not flatten its ids. Without the flag the plugin fails on it: off is the multimodal model."""
    built, settings = model.build(pair.config, pair.reference, fast_prefill=True, text_only=True)
    text = dataclasses.replace(pair, on=Runner(built, settings))
    for lengths in ((1, 150, 300), (130,)):
        text.assert_parity(text.prompts(*lengths), rows=len(lengths) + 1)


def test_the_text_only_class_serves_its_architecture(site):
    from vllm import ModelRegistry
    from vllm_gaudi.models import gemma4

    assert ModelRegistry.models["Gemma4ForCausalLM"].load_model_cls() is gemma4.HpuGemma4ForCausalLM


def test_local_keys_and_values_are_never_used(pair, monkeypatch):
    """vLLM 0.26 hands a KV-shared layer keys and values that no one may use; here they are NaN."""
    from vllm_gaudi.ops import hpu_attention

    monkeypatch.setattr(hpu_attention, "local_kv_on_shared_layers", True)
    pair.assert_parity(pair.prompts(1, 150, 300), rows=4)


def test_the_scale_of_the_scores_counts(pair, monkeypatch):
    """Gemma 4's is 1, so another one is set here."""
    for runner in (pair.off, pair.on):
        for layer in runner.layers.values():
            monkeypatch.setattr(layer.impl, "scale", 0.5)
    prompts = pair.prompts(40, 300)
    (_, logits), (_, fast_logits) = (runner.prefill(prompts) for runner in (pair.off, pair.on))
    torch.testing.assert_close(fast_logits, logits, atol=5e-4, rtol=0)


def test_bfloat16_is_no_further_from_the_exact_logits_than_with_the_flag_off(pair_of):
    pair = pair_of(dtype="bfloat16")
    prompts = pair.prompts(1, WINDOW, WINDOW + 1, 300)
    exact = torch.stack([reference_logits(pair.reference, prompt)[-1] for prompt in prompts])
    error = {}
    for name, runner in (("off", pair.off), ("on", pair.on)):
        requests, logits = runner.prefill(prompts, rows=5)
        error[name] = (logits.float() - exact).square().mean().sqrt()
        runner.release(*requests)
    assert error["on"] < 1.3 * error["off"] < 0.2 * exact.std()
