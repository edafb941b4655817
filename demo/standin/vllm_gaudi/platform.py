# SPDX-License-Identifier: Apache-2.0
"""The platform vLLM sees: out of tree, every tensor on the CPU, nothing compiled."""

from vllm.platforms import Platform, PlatformEnum


class HpuPlatform(Platform):
    _enum = PlatformEnum.OOT
    device_name = "hpu"
    device_type = "cpu"
    dispatch_key = "CPU"

    @classmethod
    def get_attn_backend_cls(cls, selected_backend, attn_selector_config, num_heads=None) -> str:
        return "vllm_gaudi.attention.backends.hpu_attn.HPUAttentionBackend"

    @classmethod
    def check_and_update_config(cls, vllm_config) -> None:
        vllm_config.cache_config.block_size = 128

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return cls.device_name

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return 0

    @classmethod
    def inference_mode(cls):
        import torch

        return torch.no_grad()
