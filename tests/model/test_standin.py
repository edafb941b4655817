# SPDX-License-Identifier: Apache-2.0
"""The stand-in has the plugin's traps: what would go wrong there goes wrong here."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

PROJECT = Path(__file__).parents[2]


@pytest.fixture
def text_model(pair):
    return pair.off.model.model.language_model.model


def test_without_the_fix_the_flag_fails_on_the_first_prompt(site, tmp_path):
    """As on a stock release: vLLM's own method wants metadata of the GPU runner."""
    program = """
        import pathlib, sys
        from demo import model, plugin
        from demo.runner import Runner
        plugin.use(plugin.make(pathlib.Path(sys.argv[1]) / "site", fix=False))
        config = model.text_config(layers=10, shared=5)
        runner = Runner(*model.build(config, model.reference(config), fast_prefill=True))
        try:
            runner.prefill([[1, 2, 3]])
        except AssertionError:
            print("stock fails")
    """
    words = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]
    run = subprocess.run(words, cwd=PROJECT, capture_output=True, text=True, timeout=300)
    assert run.stdout.splitlines()[-1:] == ["stock fails"], run.stderr


def test_only_the_sliding_layers_rotary_embedding_keeps_cos_and_sin(text_model):
    kinds = [hasattr(layer.self_attn.rotary_emb, "prepare_cos_sin") for layer in text_model.layers]
    assert kinds == [layer.self_attn.is_sliding for layer in text_model.layers]


def test_a_prepared_rotary_embedding_refuses_another_number_of_rows(text_model):
    rotary = text_model.layers[0].self_attn.rotary_emb
    rotary.prepare_cos_sin(torch.arange(8))
    try:
        with pytest.raises(RuntimeError):
            rotary(torch.arange(2), torch.ones(2, 8 * 16), None)
    finally:
        del rotary.cos, rotary.sin


def test_a_prepared_rotary_embedding_does_not_look_at_the_positions_of_a_call(text_model):
    rotary = text_model.layers[0].self_attn.rotary_emb
    query = torch.ones(2, 8 * 16)
    rotary.prepare_cos_sin(torch.tensor([3, 4]))
    try:
        prepared, _ = rotary(torch.tensor([0, 0]), query, None)
    finally:
        del rotary.cos, rotary.sin
    fresh, _ = rotary(torch.tensor([3, 4]), query, None)
    del rotary.cos, rotary.sin
    assert torch.equal(prepared, fresh)


@pytest.mark.parametrize("vision, prepared", [(False, 1), (True, 28)])
def test_the_adapter_prepares_the_first_rotary_embedding_it_finds(pair_of, monkeypatch, vision, prepared):
    """Once for all 28 sliding layers, unless what it finds is the vision tower's, which keeps nothing."""
    runner = pair_of(vision=vision).off
    rotary = runner.model.model.language_model.model.layers[0].self_attn.rotary_emb
    calls, original = [], rotary.prepare_cos_sin

    def count(*args, **kwargs):
        calls.append(args)
        original(*args, **kwargs)

    monkeypatch.setattr(rotary, "prepare_cos_sin", count)
    requests, _ = runner.prefill([[1] * 9, [2] * 140])
    assert len(calls) == prepared
    runner.release(*requests)


def test_padding_writes_land_in_the_spare_block_alone(pair):
    for keys, values, *_ in pair.off.caches.values():
        keys.zero_(), values.zero_()
    (request,), _ = pair.off.prefill(pair.prompts(5), padded=256, rows=3)
    for keys, values, *_ in pair.off.caches.values():
        written = keys.ne(0).any(-1).any(-1).nonzero().flatten().tolist()
        assert written == sorted([*request.slots(0, 5), keys.shape[0] - 1])
        assert values.ne(0).any(-1).any(-1).nonzero().flatten().tolist() == written
    pair.off.release(request)


def metadata_of(runner, call):
    """The metadata that the attention of a sliding layer was given."""
    given = []
    layer = next(layer for layer in runner.layers.values() if layer.sliding_window)
    original = layer.impl.forward

    def note(*args, **kwargs):
        given.append(args[5])
        return original(*args, **kwargs)

    layer.impl.forward = note
    try:
        call()
    finally:
        del layer.impl.forward
    return given[0]


def test_the_metadata_of_a_prompt_step(pair):
    metadata = metadata_of(pair.off, lambda: pair.off.prefill(pair.prompts(5, 130), rows=3))
    assert type(metadata).__name__ == "TrimmedAttentionMetadata" and metadata.is_prompt
    assert metadata.slot_mapping.shape == (3, 256) and metadata.slot_mapping.dtype == torch.int64
    assert metadata.slot_mapping[0, 5:].eq(-1).all() and metadata.slot_mapping[2].eq(-1).all()
    assert metadata.seq_lens_tensor.tolist() == [5, 130, 0] and metadata.seq_lens_tensor.dtype == torch.int32
    assert metadata.block_list is metadata.attn_bias is metadata.window_block_list is None
    assert metadata.window_attn_bias.shape == (3, 1, 256, 256)


def test_the_metadata_of_a_prompt_step_with_context(pair):
    (request,), _ = pair.off.prefill(pair.prompts(300))
    metadata = metadata_of(pair.off, lambda: pair.off.extend(request, [1] * 40))
    assert metadata.is_prompt and metadata.seq_lens_tensor.tolist() == [40]
    assert metadata.context_lens_tensor.tolist() == [300]
    assert metadata.block_list.shape == (4,) and metadata.attn_bias.shape == (1, 1, 128, 4 * 128 + 128)
    assert metadata.window_block_list.shape == (2,) and metadata.window_attn_bias.shape == (1, 1, 128, 2 * 128 + 128)


def test_the_metadata_of_a_decode_step(pair):
    requests, _ = pair.off.prefill(pair.prompts(5, 300))
    metadata = metadata_of(pair.off, lambda: pair.off.decode(requests, [1, 2], rows=4))
    assert not metadata.is_prompt and metadata.seq_lens_tensor is None
    assert metadata.slot_mapping.shape == (4, 1) and metadata.slot_mapping[2:].eq(-1).all()
    assert metadata.block_mapping.shape == (metadata.block_list.shape[0], 4)
    assert metadata.attn_bias.shape == (metadata.block_list.shape[0], 128)
