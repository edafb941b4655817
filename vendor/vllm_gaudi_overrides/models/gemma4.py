# SPDX-License-Identifier: Apache-2.0
"""Fast prefill for Gemma 4 on HPU: which layers run, and on which rows.

Why: in Gemma 4 E2B and E4B the last layers write no KV cache of their own, they read an earlier layer's. While a
prompt is prefilled nothing needs their output but the token that is sampled, the prompt's last one.
How: with --kv-sharing-fast-prefill a prompt batch without context runs the layers before the first KV-shared one on
every token and the KV-shared ones on one row per prompt. vLLM's own `fast_prefill_forward` does so from per-layer GPU
attention metadata, which the HPU runner has no part for; this one needs only what the HPU runner hands over anyway.
Related: vllm#22628 (the flag), vllm#60445 (on by default for E2B and E4B on GPU), vllm#54917 (shared layers project
queries only).
Future: prompts with context take the normal path; they could take this one with the runner's masks.
"""

from itertools import islice

import torch
import torch.nn as nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.models.gemma4 import (
    Gemma4Model as UpstreamGemma4Model, )
from vllm_gaudi_overrides.merging import before

logger = init_logger(__name__)


class HpuGemma4Model(UpstreamGemma4Model):

    def fast_prefill_forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        inputs_embeds: torch.Tensor | None = None,
        per_layer_inputs: torch.Tensor | None = None,
        **kwargs,
    ) -> torch.Tensor:
        """Run the KV-shared layers on each prompt's last token only, or on every token where that may not be.

        B prompts of padded length S (a bucket), D the hidden size, P the per-layer input size.

        Args:
            input_ids: [B * S] token ids; unused when inputs_embeds is given.
            positions: [B, S] positions.
            inputs_embeds: [B * S, D] embeddings, or None for text-only batches.
            per_layer_inputs: [B * S, layers, P] embeddings of the per-layer inputs, beside inputs_embeds.
        Returns:
            [B * S, D] hidden states before the final norm. After a fast prefill only the rows that the runner samples,
            `row * S + query length - 1`, went through all the layers; the other ones are what the last layer with a KV
            cache of its own gave.
        """
        if inputs_embeds is None:
            inputs_embeds = self.embed_input_ids(input_ids)
            per_layer_inputs = self.get_per_layer_inputs(input_ids)
        per_layer_inputs = self.project_per_layer_inputs(inputs_embeds, per_layer_inputs)
        first_shared = _first_kv_shared_layer(self.config)
        hidden_states = _hpu_run_decoder_layers(islice(self.layers, first_shared), 0, positions, inputs_embeds,
                                                per_layer_inputs, **kwargs)

        shared_layers = list(islice(self.layers, first_shared, None))
        attn_metadata = get_forward_context().attn_metadata
        reason = _why_not_fast_prefill(attn_metadata, positions, shared_layers[0].self_attn.attn.kv_cache)
        if reason is not None:
            if attn_metadata is not None and attn_metadata.is_prompt:
                logger.info_once("Fast prefill: all layers run on all tokens of prompts where %s.", reason)
            return _hpu_run_decoder_layers(shared_layers, first_shared, positions, hidden_states, per_layer_inputs,
                                           **kwargs)

        rows = _last_token_rows(attn_metadata.seq_lens_tensor, positions.shape[1])
        row_positions = positions.flatten().index_select(0, rows)
        row_inputs = per_layer_inputs.index_select(0, rows) if per_layer_inputs is not None else None
        rotary_caches = _rotary_caches(shared_layers)
        for rotary_emb in rotary_caches:
            rotary_emb.prepare_cos_sin(row_positions)
        row_states = _hpu_run_decoder_layers(shared_layers, first_shared, row_positions,
                                             hidden_states.index_select(0, rows), row_inputs, **kwargs)
        for rotary_emb in rotary_caches:
            del rotary_emb.cos, rotary_emb.sin
        return hidden_states.index_copy(0, rows, row_states)


def _first_kv_shared_layer(config) -> int:
    """Index of the first decoder layer that reads an earlier layer's KV cache; the layer count if there is none."""
    return config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", 0) or 0)


def _last_token_rows(query_lens: torch.Tensor, padded_len: int) -> torch.Tensor:
    """Rows of the prompts' last tokens in a flattened batch.

    Args:
        query_lens: [B] int32 query lengths; 0 for a row that only pads the batch, which then gives its first row.
        padded_len: S, tokens per row.
    Returns:
        [B] int64, all distinct.
    """
    starts = torch.arange(query_lens.shape[0], device=query_lens.device) * padded_len
    return starts + (query_lens.long() - 1).clamp(min=0)


def _rotary_caches(layers: list) -> list:
    """The rotary embeddings of these layers that keep cos and sin of a whole forward's tokens, each once."""
    modules = {id(rotary): rotary for rotary in (layer.self_attn.rotary_emb for layer in layers)}
    return [rotary for rotary in modules.values() if hasattr(rotary, "prepare_cos_sin")]


def _why_not_fast_prefill(attn_metadata, positions: torch.Tensor, kv_cache) -> str | None:
    """Why the KV-shared layers must run on every token of this batch; None if one row per prompt will do.

    Decided from Python values and shapes alone, so that it costs no synchronisation and is the same for all the
    batches that share a graph.

    Args:
        attn_metadata: the runner's metadata for all layers.
        positions: [B, S].
        kv_cache: what is bound to a KV-shared layer; a tuple once the runner has allocated the caches.
    """
    if attn_metadata is None:
        return "there is no attention metadata"
    if not attn_metadata.is_prompt:
        return "the step decodes"
    if not isinstance(kv_cache, tuple):
        return "no KV cache is allocated yet"
    if attn_metadata.block_list is not None:
        return "earlier tokens are in the KV cache already (prefix cache hits, later chunks of a long prompt)"
    if attn_metadata.seq_lens_tensor is None or attn_metadata.slot_mapping is None:
        return "the runner gave no query lengths or no slot mapping"
    if not (positions.dim() == 2 and positions.shape == attn_metadata.slot_mapping.shape
            and positions.shape[0] == attn_metadata.seq_lens_tensor.shape[0]):
        return "the batch is not one padded row per prompt"
    return None


def _configure_fast_prefill(model: UpstreamGemma4Model, vllm_config: VllmConfig) -> None:
    """Turn --kv-sharing-fast-prefill off where no batch could use it, and say so; refuse what it cannot serve.

    Raises:
        ValueError: the KV cache is FP8.
    """
    if not model.fast_prefill_enabled:
        return
    reason = _why_fast_prefill_is_off(model, vllm_config)
    if reason is not None:
        model.fast_prefill_enabled = False
        logger.warning("--kv-sharing-fast-prefill has no effect: %s.", reason)
    elif any(layer.self_attn.attn.kv_cache_dtype.startswith("fp8") for layer in model.layers):
        raise ValueError("--kv-sharing-fast-prefill reads K/V from the cache as they are and cannot read an FP8 KV "
                         "cache on HPU. Drop the flag, or drop --kv-cache-dtype fp8_inc.")


def _why_fast_prefill_is_off(model: UpstreamGemma4Model, vllm_config: VllmConfig) -> str | None:
    """Why no batch of this server can take a fast prefill; None if some can."""
    if _first_kv_shared_layer(model.config) == model.config.num_hidden_layers:
        return "this model has no KV-shared layers"
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        return "the layers are spread over pipeline stages"
    if vllm_config.model_config.runner_type == "pooling":
        return "pooling needs every token"
    if vllm_config.lora_config is not None:
        return "the LoRA masks cover every token of a batch"
    if any(layer.self_attn.attn.impl.use_merged_prefill for layer in model.layers):
        return "merged prefill puts several prompts in one row"
    return None


@before
def _apply_hpu_gemma4_patches(language_model: nn.Module) -> None:
    _configure_fast_prefill(language_model.model, get_current_vllm_config())
