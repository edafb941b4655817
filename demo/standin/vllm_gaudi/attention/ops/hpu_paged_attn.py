# SPDX-License-Identifier: Apache-2.0
"""The layout of the paged KV cache."""


class HPUPagedAttention:
    @staticmethod
    def get_supported_head_sizes() -> list[int]:
        return list(range(1, 577))

    @staticmethod
    def get_kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        return (num_blocks * block_size, num_kv_heads, head_size)

    @staticmethod
    def split_kv_cache(kv_cache: tuple, num_kv_heads: int, head_size: int) -> tuple:
        """Take a layer's cache apart: keys, values, scales of the keys, scales of the values."""
        keys, values, key_scales, value_scales = kv_cache
        return keys, values, key_scales, value_scales
