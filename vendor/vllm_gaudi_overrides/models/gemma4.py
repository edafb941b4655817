# SPDX-License-Identifier: Apache-2.0
"""Fast prefill for Gemma 4 on HPU: which layers run, and on which rows.

Why: in Gemma 4 E2B and E4B the last layers write no KV cache of their own, they read an earlier layer's. While a
prompt is prefilled nothing needs their output but the token that is sampled, the prompt's last one.
How: with --kv-sharing-fast-prefill a prompt batch runs the layers before the first KV-shared one on every token, and
the KV-shared ones on one row per prompt; so does the last layer with a KV cache of its own, once it has written K/V of
every token. vLLM's own `fast_prefill_forward` needs per-layer GPU attention metadata, which the HPU runner does not
build; this one needs only what that runner hands over anyway.
Related: vllm#22628 (the flag), vllm#60445 (on by default for E2B and E4B on GPU), vllm#54917 (shared layers project
queries only).
Future: once a step tells how many of its tokens are sampled, every prompt with context can take this path, not only
those of a server that never preempts.
"""

import os
from contextlib import contextmanager
from functools import wraps
from itertools import islice

import torch
import torch.nn as nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.gemma4 import (
    Gemma4Model as UpstreamGemma4Model, )
from vllm.model_executor.models.gemma4 import (
    Gemma4ForCausalLM as UpstreamGemma4ForCausalLM, )
from vllm.model_executor.models.gemma4 import Gemma4DecoderLayer
from vllm.model_executor.models.registry import ModelRegistry
from vllm.sequence import IntermediateTensors
from vllm.v1.engine.input_processor import InputProcessor
from vllm_gaudi.extension.logger import logger as plugin_logger
from vllm_gaudi.extension.ops import LoraMask
from vllm_gaudi_overrides.merging import added, before


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
            `row * S + query length - 1`, went through all the layers; the other ones through those that ran on them.
        """
        if inputs_embeds is None:
            inputs_embeds = self.embed_input_ids(input_ids)
            per_layer_inputs = self.get_per_layer_inputs(input_ids)
        attn_metadata = get_forward_context().attn_metadata
        first_shared = _first_kv_shared_layer(self.config)
        reason = _why_not_fast_prefill(attn_metadata, positions, self.layers, self.fast_prefill_context_slots)
        if reason is not None:
            if attn_metadata is not None and attn_metadata.is_prompt:
                plugin_logger().info_once("Fast prefill: all layers run on all tokens of prompts where %s.", reason)
            per_layer_inputs = self.project_per_layer_inputs(inputs_embeds, per_layer_inputs)
            return _hpu_run_decoder_layers(self.layers, 0, positions, inputs_embeds, per_layer_inputs, **kwargs)

        first_on_rows = first_shared - 1 if self.last_kv_layer_splits else first_shared
        rows = _last_token_rows(attn_metadata.seq_lens_tensor, positions.shape[1])
        per_layer_inputs, row_inputs = self._split_per_layer_inputs(inputs_embeds, per_layer_inputs, first_on_rows,
                                                                    rows)
        hidden_states = _hpu_run_decoder_layers(islice(self.layers, first_on_rows), 0, positions, inputs_embeds,
                                                per_layer_inputs, **kwargs)

        if self.last_kv_layer_splits:
            row_states = _hpu_run_decoder_layers([self.layers[first_on_rows]],
                                                 first_on_rows,
                                                 positions,
                                                 hidden_states,
                                                 row_inputs,
                                                 last_token_rows=rows,
                                                 **kwargs)
        else:
            row_states = hidden_states.index_select(0, rows)
        shared_layers = list(islice(self.layers, first_shared, None))
        row_positions = positions.flatten().index_select(0, rows)
        with _lora_mask_of(rows), _rotary_caches_of(shared_layers, row_positions):
            row_states = _hpu_run_decoder_layers(shared_layers, first_shared, row_positions, row_states, row_inputs,
                                                 **kwargs)
        return hidden_states.index_copy(0, rows, row_states)

    def _split_per_layer_inputs(
        self,
        inputs_embeds: torch.Tensor,
        per_layer_inputs: torch.Tensor | None,
        first_on_rows: int,
        rows: torch.Tensor,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The per-layer inputs of all tokens, for the layers before first_on_rows, and of the last tokens.

        Args:
            inputs_embeds: [B * S, D].
            per_layer_inputs: [B * S, layers, P] embeddings, or None.
            first_on_rows: the first layer that runs on the last tokens only.
            rows: [B] int64, of the last tokens.
        Returns:
            [B * S, layers or first_on_rows, P] and [B, layers, P], or None twice for a model without them.
        """
        if not self._can_split_per_layer_inputs(inputs_embeds, per_layer_inputs):
            per_layer_inputs = self.project_per_layer_inputs(inputs_embeds, per_layer_inputs)
            return per_layer_inputs, per_layer_inputs.index_select(0, rows) if per_layer_inputs is not None else None
        row_inputs = self.project_per_layer_inputs(inputs_embeds.index_select(0, rows),
                                                   per_layer_inputs.index_select(0, rows))
        first_inputs = per_layer_inputs[:, :first_on_rows]
        weight = self.per_layer_model_projection.weight[:first_inputs[0].numel()]
        first_rows = nn.functional.linear(inputs_embeds, weight).mul(self.per_layer_projection_scale)
        first_rows = self.per_layer_projection_norm(first_rows.view(first_inputs.shape))
        return first_rows.add(first_inputs).mul(self.per_layer_input_scale), row_inputs

    def _can_split_per_layer_inputs(self, inputs_embeds: torch.Tensor, per_layer_inputs: torch.Tensor | None) -> bool:
        """Whether that is asked for, and the projection is a plain matrix: neither quantised nor spread over ranks."""
        if not self.per_layer_inputs_split or per_layer_inputs is None:
            return False
        weight = getattr(self.per_layer_model_projection, "weight", None)
        return (weight is not None and weight.dtype == inputs_embeds.dtype
                and weight.shape == (per_layer_inputs[0].numel(), inputs_embeds.shape[1]))


@added
class HpuGemma4LastKVDecoderLayer(Gemma4DecoderLayer):
    """The last layer with a KV cache of its own: later layers need its K/V of every token, its output of the last ones.
    """

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
        per_layer_input: torch.Tensor | None = None,
        last_token_rows: torch.Tensor | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the layer; with last_token_rows write K/V of all rows and run the rest on those rows.

        Args:
            positions: [B, S].
            hidden_states: [B * S, D].
            residual: unused, as in the base class.
            per_layer_input: [rows of the output, P].
            last_token_rows: [B] int64, or None to run on every row.
        Returns:
            [B, D] or [B * S, D], and None.
        """
        if last_token_rows is not None:
            self._write_kv(positions, self.input_layernorm(hidden_states))
            positions = positions.flatten().index_select(0, last_token_rows)
            hidden_states = hidden_states.index_select(0, last_token_rows)
        return super().forward(positions, hidden_states, residual, per_layer_input=per_layer_input, **kwargs)

    def _write_kv(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> None:
        """Project, normalise and rotate K, normalise V, of every row, and put them into the KV cache.

        The projection runs whole, query included: a product with the K/V part of the weight alone would save a
        hundredth of the prompt's work, and round K/V in another way than without the flag.
        """
        attention = self.self_attn
        projected = attention.qkv_proj(hidden_states)[0][..., attention.q_size:]
        key, value = projected.unflatten(-1, (2, attention.num_kv_heads, attention.head_dim)).unbind(-3)
        key = attention.rotary_emb(positions, attention.k_norm(key).flatten(-2), None)[0]
        attention.attn.impl.write_prompt_kv(key, attention.v_norm(value), attention.attn.kv_cache,
                                            get_forward_context().attn_metadata)


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


@contextmanager
def _rotary_caches_of(layers: list, positions: torch.Tensor):
    """Within it the rotary embeddings of these layers that cache cos and sin of a forward's tokens hold these ones'.

    Args:
        positions: [B] of the tokens that the layers get.
    """
    modules = {id(rotary): rotary for rotary in (layer.self_attn.rotary_emb for layer in layers)}
    caching = [rotary for rotary in modules.values() if hasattr(rotary, "prepare_cos_sin")]
    for rotary_emb in caching:
        rotary_emb.prepare_cos_sin(positions)
    yield
    for rotary_emb in caching:
        del rotary_emb.cos, rotary_emb.sin


@contextmanager
def _lora_mask_of(rows: torch.Tensor):
    """Within it the plugin's LoRA mask, which has a row per token of the batch, holds these rows' alone."""
    mask = LoraMask.getLoraMask()
    LoraMask.setLoraMask(mask.index_select(0, rows) if mask is not None else None)
    yield
    LoraMask.setLoraMask(mask)


def _why_not_fast_prefill(attn_metadata, positions: torch.Tensor, layers: nn.ModuleList,
                          context_slots: int | None) -> str | None:
    """Why the KV-shared layers must run on every token of this batch; None if one row per prompt will do.

    Decided from Python values and shapes alone, so that it costs no synchronisation and is the same for all the
    batches that share a graph.

    Args:
        attn_metadata: the runner's metadata for all layers.
        positions: [B, S].
        layers: all of them; their KV caches are tuples once the runner has allocated them.
        context_slots: how many slots each cache must have for prompts with context; None if they never may.
    """
    if attn_metadata is None:
        return "there is no attention metadata"
    if not attn_metadata.is_prompt:
        return "the step decodes"
    kv_caches = [layer.self_attn.attn.kv_cache for layer in layers]
    if not all(isinstance(kv_cache, tuple) for kv_cache in kv_caches):
        return "no KV cache is allocated yet"
    if attn_metadata.seq_lens_tensor is None or attn_metadata.slot_mapping is None:
        return "the runner gave no query lengths or no slot mapping"
    if not (positions.dim() == 2 and positions.shape == attn_metadata.slot_mapping.shape
            and positions.shape[0] == attn_metadata.seq_lens_tensor.shape[0]):
        return "the batch is not one padded row per prompt"
    if attn_metadata.block_list is None:
        return None
    if context_slots is None:
        return "earlier tokens are in the KV cache, and a KV connector or VLLM_FAST_PREFILL_WITH_CONTEXT=0 forbids it"
    slots = {kv_cache[0].shape[0] for kv_cache in kv_caches}
    if context_slots > 0 and (len(slots) > 1 or min(slots) < context_slots):  # if they differ, not all are given out
        return ("earlier tokens are in the KV cache (prefix-cache hits, later chunks), which is not known to have room "
                "for max_num_seqs requests of max_model_len tokens, so that one may be preempted")
    if positions.shape[0] != 1:
        return "several prompts with context share a batch"
    if attn_metadata.attn_bias is None or attn_metadata.window_attn_bias is None:
        return "the runner gave no masks for the context"
    return None


def _configure_fast_prefill(model: UpstreamGemma4Model, vllm_config: VllmConfig) -> None:
    """Turn --kv-sharing-fast-prefill off where no batch could use it, and say so; refuse what it cannot serve.

    Raises:
        ValueError: the KV cache is FP8.
    """
    if not model.fast_prefill_enabled:
        return
    model.fast_prefill_context_slots = _context_slots(vllm_config)
    reason = _why_fast_prefill_is_off(model, vllm_config)
    if reason is not None:
        model.fast_prefill_enabled = False
        plugin_logger().warning("--kv-sharing-fast-prefill has no effect: %s.", reason)
    elif any(layer.self_attn.attn.kv_cache_dtype.startswith("fp8") for layer in model.layers):
        raise ValueError("--kv-sharing-fast-prefill reads K/V from the cache as they are and cannot read an FP8 KV "
                         "cache on HPU. Drop the flag, or drop --kv-cache-dtype fp8_inc.")
    else:
        _prepare_fast_prefill(model, vllm_config)


def _context_slots(vllm_config: VllmConfig) -> int | None:
    """How many slots the KV cache must have for prompts with context to take the fast path; None if they never may.

    A request that was preempted and finds a part of itself in the prefix cache, or that a KV connector puts back,
    samples several tokens of a step that has context, and the metadata does not tell such a step from others. In a
    cache with room for max_num_seqs requests of max_model_len tokens nothing is preempted.
    """
    asked = _environment_switch("VLLM_FAST_PREFILL_WITH_CONTEXT")
    if asked == "0" or vllm_config.kv_transfer_config is not None:
        return None
    if asked == "1":
        return 0
    block_size = vllm_config.cache_config.block_size
    # A block more for each request, for tokens that are scheduled ahead; and two that are nobody's, vLLM's null block
    # and the plugin's block for padding.
    blocks_per_request = -(-vllm_config.model_config.max_model_len // block_size) + 1
    return (vllm_config.scheduler_config.max_num_seqs * blocks_per_request + 2) * block_size


def _environment_switch(name: str) -> str | None:
    """What an environment variable of ours says, "0" or "1"; None if it is not set.

    Raises:
        ValueError: it says something else.
    """
    value = os.environ.get(name)
    if value not in (None, "0", "1"):
        raise ValueError(f"{name} is {value!r}: set it to 1 or 0, or leave it out.")
    return value


def _prepare_fast_prefill(model: UpstreamGemma4Model, vllm_config: VllmConfig) -> None:
    """Settle what splits between all tokens and the last ones; free what vLLM keeps for CUDA graphs."""
    layer = model.layers[_first_kv_shared_layer(model.config) - 1]
    # What is set for all tokens, a rotary embedding's cos and sin or a LoRA mask, cannot serve the last rows too.
    model.last_kv_layer_splits = (vllm_config.lora_config is None
                                  and not hasattr(layer.self_attn.rotary_emb, "prepare_cos_sin"))
    if model.last_kv_layer_splits:
        layer.__class__ = HpuGemma4LastKVDecoderLayer
    # Off unless asked for: a product with a part of a weight may round otherwise than one with the whole, and then the
    # prompt's K/V are not those without the flag to the last bit.
    model.per_layer_inputs_split = (_environment_switch("VLLM_FAST_PREFILL_SPLIT_PER_LAYER_INPUTS") == "1"
                                    and vllm_config.lora_config is None)
    model.positions = model.hidden_states = model.per_layer_inputs = None


def _why_fast_prefill_is_off(model: UpstreamGemma4Model, vllm_config: VllmConfig) -> str | None:
    """Why no batch of this server can take a fast prefill; None if some can."""
    if _first_kv_shared_layer(model.config) == model.config.num_hidden_layers:
        return "this model has no KV-shared layers"
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        return "the layers are spread over pipeline stages"
    if vllm_config.model_config.runner_type == "pooling":
        return "pooling needs every token"
    if vllm_config.speculative_config is not None:
        return "speculative decoding pads short prompt steps with drafts, and their rows are sampled as well"
    if any(layer.self_attn.attn.impl.use_merged_prefill for layer in model.layers):
        return "merged prefill puts several prompts in one row"
    return None


def _refuse_prompt_logprobs(processor: type[InputProcessor]) -> None:
    """Have requests that ask for prompt_logprobs refused with the flag: they would come from rows that skipped layers.

    vLLM's server refuses them itself; LLM.generate does not.
    """
    process_inputs = processor.process_inputs

    @wraps(process_inputs)
    def process_checked_inputs(self, request_id, prompt, params, *args, **kwargs):
        if (self.vllm_config.cache_config.kv_sharing_fast_prefill
                and getattr(params, "prompt_logprobs", None) is not None):
            raise ValueError("prompt_logprobs cannot be had with --kv-sharing-fast-prefill: drop one of the two.")
        return process_inputs(self, request_id, prompt, params, *args, **kwargs)

    processor.process_inputs = process_checked_inputs


@before
def _apply_hpu_gemma4_patches(language_model: nn.Module) -> None:
    _configure_fast_prefill(language_model.model, get_current_vllm_config())


@added
class HpuGemma4ForCausalLM(UpstreamGemma4ForCausalLM):
    """The model of a text-only checkpoint, with fast prefill; without the flag it is vLLM's."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        # The multimodal model patches its text model, which has a prefix, itself.
        self.has_fast_prefill = not prefix and self.model.fast_prefill_enabled
        if self.has_fast_prefill:
            _apply_hpu_gemma4_patches(self)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs,
    ) -> torch.Tensor | IntermediateTensors:
        """Flatten the token ids: the runner does so for the multimodal checkpoints alone, and then per-layer inputs of
        [B, S, layers, P] would be indexed by token.

        Args:
            input_ids: [B, S], or [B * S].
            positions: [B, S].
        Returns:
            [B * S, D] with fast prefill; else what the base class gives.
        """
        if self.has_fast_prefill and input_ids is not None:
            input_ids = input_ids.flatten()
        return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds, **kwargs)


ModelRegistry.register_model("Gemma4ForCausalLM", HpuGemma4ForCausalLM)
_refuse_prompt_logprobs(InputProcessor)
