# SPDX-License-Identifier: Apache-2.0
"""What stands between the plugin's runner and the model: the metadata, its masks, and the rotary cache."""

from collections import namedtuple

import torch
from vllm.forward_context import set_forward_context

from vllm_gaudi.extension.device import DeviceIndexing

_BLOCK_FIELDS = ("attn_bias", "block_list", "block_mapping", "block_usage", "block_groups")
FIELDS = (
    *("is_prompt", "block_size", "slot_mapping", "seq_lens_tensor", "context_lens_tensor"),
    *(prefix + name for prefix in ("", "window_", "chunked_") for name in _BLOCK_FIELDS),
    *("prep_initial_states", "has_initial_states_p", "last_chunk_indices_p", "load_indices_tensor"),
    *("store_indices_tensor", "query_start_loc", "query_start_loc_p", "padding_mask_flat"),
    *("blocks_caching_range", "mamba_chunks_to_block_mapping", "seqlens_offsets_for_blocks"),
)
TrimmedAttentionMetadata = namedtuple("TrimmedAttentionMetadata", FIELDS, defaults=[None] * len(FIELDS))


def _bias(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))


def _prompt_masks(metadata, length: int, window: int | None, dtype: torch.dtype):
    """Add the masks of a prompt step: one for the sliding layers, and with context one for the full ones."""
    query = torch.arange(length)[:, None]
    key = torch.arange(length)[None, :]
    causal = key <= query
    recent = causal & (query - key < window) if window else causal
    if metadata.block_list is None:
        batch = metadata.slot_mapping.shape[0]
        return metadata._replace(window_attn_bias=_bias(recent.expand(batch, 1, length, length), dtype))

    context = metadata.context_lens_tensor.long()
    real = key < metadata.seq_lens_tensor
    past = torch.arange(metadata.block_list.numel() * metadata.block_size)[None, :]
    full = torch.cat(((past < context).expand(length, -1), causal & real), dim=1)
    metadata = metadata._replace(attn_bias=_bias(full[None, None], dtype))
    if window:
        frame = metadata.window_block_list.numel() * metadata.block_size
        rounded = (context + metadata.block_size - 1) // metadata.block_size * metadata.block_size
        past = torch.arange(frame)[None, :] + (rounded - frame).clamp(min=0)
        visible = (past < context) & (context + query - past < window)
        window_bias = _bias(torch.cat((visible, recent & real), dim=1)[None, None], dtype)
        metadata = metadata._replace(window_attn_bias=window_bias)
    return metadata


def _decode_masks(metadata, batch: int, dtype: torch.dtype):
    """Add block mapping and bias of a decode step, for all layers and for the sliding ones."""
    added = {}
    for prefix in ("", "window_"):
        groups = getattr(metadata, prefix + "block_groups")
        added[prefix + "block_mapping"] = (groups[:, None] == torch.arange(batch)).to(dtype)
        added[prefix + "block_groups"] = torch.where(groups < 0, batch, groups)
        if getattr(metadata, prefix + "attn_bias") is None:
            used = torch.arange(metadata.block_size) < getattr(metadata, prefix + "block_usage")[:, None]
            added[prefix + "attn_bias"] = _bias(used, dtype)
    return metadata._replace(**added)


def _first_rotary(module: torch.nn.Module):
    return next((m for m in module.modules() if type(m).__name__.endswith("RotaryEmbedding")), None)


class HpuModelAdapter(torch.nn.Module):
    """Calls the model as the runner does: masks made, cos and sin prepared once and dropped afterwards, and ids flat,
    but as they are for a checkpoint that is text alone.

    Only the first rotary embedding found below the model is prepared and dropped, whichever that is.
    """

    def __init__(self, model, vllm_config):
        super().__init__()
        self.model = model
        self.vllm_config = vllm_config
        self.dtype = vllm_config.model_config.dtype
        self.sliding_window = vllm_config.model_config.hf_text_config.sliding_window
        rotary = _first_rotary(model)
        self._flattens = vllm_config.model_config.hf_config.model_type == "gemma4"
        self._rotary_embed_module = rotary if hasattr(rotary, "prepare_cos_sin") else None

    def forward(self, input_ids, positions, attn_metadata, **kwargs) -> torch.Tensor:
        """Return hidden states `[batch * length, hidden]` for `input_ids` and `positions` `[batch, length]`."""
        batch, length = input_ids.shape
        if attn_metadata is not None:
            if attn_metadata.is_prompt:
                attn_metadata = _prompt_masks(attn_metadata, length, self.sliding_window, self.dtype)
            else:
                attn_metadata = _decode_masks(attn_metadata, batch, self.dtype)
        rotary = self._rotary_embed_module
        with DeviceIndexing(), set_forward_context(attn_metadata, self.vllm_config, num_tokens=-1):
            if rotary is not None:
                rotary.prepare_cos_sin(positions)
            if self._flattens:
                input_ids = input_ids.view(-1)
            states = self.model(input_ids=input_ids, positions=positions, **kwargs)
            if rotary is not None:
                for name in ("cos", "sin"):
                    if hasattr(rotary, name):
                        delattr(rotary, name)
        return states

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.model.compute_logits(hidden_states)
