# SPDX-License-Identifier: Apache-2.0
"""The attention implementation behind vLLM's attention layers, over a paged KV cache on the CPU."""

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionLayer, AttentionMetadata, AttentionType
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from vllm_gaudi.attention.ops.hpu_paged_attn import HPUPagedAttention
from vllm_gaudi.extension import ops
from vllm_gaudi.extension.logger import logger as init_logger
from vllm_gaudi.extension.utils import VLLMFP8KVCache, VLLMKVCache

logger = init_logger()


@register_backend(AttentionBackendEnum.CUSTOM, "HPU_ATTN")
class HPUAttentionBackend(AttentionBackend):
    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        return HPUAttentionImpl

    @staticmethod
    def get_builder_cls():
        raise NotImplementedError

    @staticmethod
    def get_kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        return HPUPagedAttention.get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size)


class HPUAttentionMetadata(AttentionMetadata):
    """Type of the metadata in signatures; what the model is given is a `TrimmedAttentionMetadata`."""


class HPUAttentionImpl(AttentionImpl, torch.nn.Module):
    """Attention of one layer, in the prompt step and in the decode step."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        use_irope: bool = False,
        sinks: torch.Tensor | None = None,
    ) -> None:
        torch.nn.Module.__init__(self)
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.num_queries_per_kv = num_heads // num_kv_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.sliding_window = sliding_window
        self.alibi_slopes = alibi_slopes
        self.sinks = sinks
        self.attn_type = attn_type
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.enable_fp8_attn = kv_cache_dtype == "fp8_inc"
        cache = VLLMFP8KVCache if self.enable_fp8_attn else VLLMKVCache
        self.k_cache = cache()
        self.v_cache = cache(is_v_cache=True)
        self.use_merged_prefill = False
        self.use_contiguous_pa = False
        self.prefill_impl = "fsdpa_impl"
        self.is_chunked_attention = False

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: HPUAttentionMetadata,
        output: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend every row of `query`; on a layer with a cache of its own, store `key` and `value` first.

        Args:
            query: `[batch * padded length, heads * head size]`.
            key, value: `[batch * padded length, kv heads * head size]`; on a KV-shared layer None or of no use.
            kv_cache: `(keys, values, None, None)`, each `[slots, kv heads, head size]`, or no tuple in the
                profiling run.
            attn_metadata: `TrimmedAttentionMetadata`.
        Returns:
            a tensor of the shape of `query`.
        """
        caches = None
        if isinstance(kv_cache, tuple):
            caches = HPUPagedAttention.split_kv_cache(kv_cache, self.num_kv_heads, self.head_size)[:2]
        shared = self.kv_sharing_target_layer_name is not None
        slots = attn_metadata.slot_mapping.reshape(-1)
        if caches and not shared:
            for store, cache, new in zip((self.k_cache, self.v_cache), caches, (key, value), strict=False):
                store(
                    new.reshape(-1, self.num_kv_heads, self.head_size),
                    cache,
                    slots,
                    block_size=attn_metadata.block_size,
                    is_prompt=attn_metadata.is_prompt,
                )
        elif caches and attn_metadata.is_prompt:
            key, value = (cache.index_select(0, slots) for cache in caches)
        if key is None:
            key = value = query.new_zeros(query.shape[0], self.num_kv_heads * self.head_size)

        if attn_metadata.is_prompt:
            return self._prompt(query, key, value, caches, attn_metadata).reshape(query.shape)
        if caches is None:
            return torch.zeros_like(query)
        return self._decode(query, caches, attn_metadata).reshape(query.shape)

    def _prompt(self, query, key, value, caches, attn_metadata) -> torch.Tensor:
        lengths = attn_metadata.seq_lens_tensor
        heads = (lengths.shape[0], -1, self.num_kv_heads, self.head_size)
        key, value = key.reshape(heads), value.reshape(heads)
        blocks, bias = attn_metadata.block_list, attn_metadata.attn_bias
        if self.sliding_window:
            bias = attn_metadata.window_attn_bias
            if attn_metadata.window_block_list is not None:
                blocks = attn_metadata.window_block_list
        if blocks is not None:
            past_key, past_value = self._fetch(caches, blocks, attn_metadata.block_size)
            key = torch.cat((past_key.reshape(heads), key), dim=1)
            value = torch.cat((past_value.reshape(heads), value), dim=1)
        query = query.reshape(lengths.shape[0], -1, self.num_heads, self.head_size)
        return ops.prompt_attention(query, key, value, scale=self.scale, attn_bias=bias, valid_seq_lengths=lengths)

    def _decode(self, query, caches, attn_metadata) -> torch.Tensor:
        prefix = "window_" if self.sliding_window else ""
        blocks, groups, mapping, bias = (
            getattr(attn_metadata, prefix + name)
            for name in ("block_list", "block_groups", "block_mapping", "attn_bias")
        )
        keys, values = self._fetch(caches, blocks, attn_metadata.block_size)
        return ops.decode_attention(
            query.reshape(-1, self.num_heads, self.head_size),
            keys,
            values,
            scale=self.scale,
            block_bias=bias,
            block_groups=groups,
            block_mapping=mapping,
        )

    def _fetch(self, caches, blocks, block_size):
        return (
            module.fetch_from_cache(cache.unflatten(0, (-1, block_size)), blocks)
            for module, cache in zip((self.k_cache, self.v_cache), caches, strict=False)
        )
