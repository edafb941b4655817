# SPDX-License-Identifier: Apache-2.0
"""Small Gemma 4 models with random weights: vLLM's, behind the plugin, and transformers', the reference."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

WINDOW = 512
E2B = {
    "layers": 35,
    "shared": 20,
    "every": 5,
    "hidden": 1536,
    "mlp": 6144,
    "per_layer": 256,
    "head": 256,
    "full_head": 512,
}


def text_config(
    *,
    layers: int = 35,
    shared: int = 20,
    every: int = 5,
    hidden: int = 64,
    mlp: int = 96,
    per_layer: int = 16,
    heads: int = 8,
    kv_heads: int = 1,
    head: int = 16,
    full_head: int = 32,
    window: int = 128,
    vocab: int = 512,
    max_len: int = 2048,
):
    """Configure a text model of E2B's shape: every `every`th layer full, the last `shared` ones KV-shared."""
    from transformers import Gemma4TextConfig

    kinds = ["full_attention" if i % every == every - 1 else "sliding_attention" for i in range(layers)]
    return Gemma4TextConfig(
        architectures=["Gemma4ForCausalLM"],
        vocab_size=vocab,
        vocab_size_per_layer_input=vocab,
        hidden_size=hidden,
        hidden_size_per_layer_input=per_layer,
        intermediate_size=mlp,
        use_double_wide_mlp=True,
        num_hidden_layers=layers,
        num_kv_shared_layers=shared,
        layer_types=kinds,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head,
        global_head_dim=full_head,
        sliding_window=window,
        final_logit_softcapping=30.0,
        max_position_embeddings=max_len,
    )


def reference(config, seed: int = 0):
    """Build transformers' model in float32 with random weights, norms and layer scalars away from one.

    Returns:
        a `Gemma4ForCausalLM` with eager attention, the weights of which `build` loads.
    """
    from transformers import Gemma4ForCausalLM

    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = Gemma4ForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("layer_scalar"):
                tensor.uniform_(0.7, 1.1)
            elif name.endswith("q_norm.weight"):  # keeps attention from being one key's
                tensor.normal_(1.0, 0.2).mul_(2 * tensor.shape[0] ** -0.5)
            elif "norm" in name and name.endswith("weight"):
                tensor.normal_(1.0, 0.2)
            elif name.endswith("weight"):
                scale = 1.0 if "embed" in name else tensor.shape[-1]
                tensor.normal_(0.0, scale**-0.5)
    return model


def reference_logits(model, tokens: list[int]) -> torch.Tensor:
    """Return float32 logits `[tokens, vocabulary]` of a full pass over `tokens`, every layer on every token."""
    with torch.no_grad():
        return model(torch.tensor([tokens]), use_cache=False, logits_to_keep=0).logits[0].float()


def vllm_config(config, *, fast_prefill: bool, dtype: str = "float32", max_tokens: int = 4096):
    """Make the `VllmConfig` of an eager one-process run over a model of `config`."""
    from vllm.config import (
        CacheConfig,
        CompilationConfig,
        CompilationMode,
        DeviceConfig,
        ModelConfig,
        SchedulerConfig,
        VllmConfig,
    )

    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        model_config = ModelConfig(
            model=folder,
            skip_tokenizer_init=True,
            dtype=dtype,
            enforce_eager=True,
            max_model_len=config.get_text_config().max_position_embeddings,
        )
        return VllmConfig(
            model_config=model_config,
            cache_config=CacheConfig(block_size=128, kv_sharing_fast_prefill=fast_prefill),
            scheduler_config=SchedulerConfig(
                max_num_batched_tokens=max_tokens,
                max_num_seqs=64,
                max_model_len=model_config.max_model_len,
                is_encoder_decoder=False,
            ),
            device_config=DeviceConfig(device="cpu"),
            compilation_config=CompilationConfig(mode=CompilationMode.NONE),
        )


def one_process() -> None:
    """Set vLLM's process groups up for one process; once is enough."""
    from vllm.distributed import parallel_state

    if parallel_state.model_parallel_is_initialized():
        return
    store = Path(tempfile.mkdtemp()) / "store"
    parallel_state.init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
    parallel_state.initialize_model_parallel(1, 1)


def build(config, weights, *, fast_prefill: bool, dtype: str = "float32", max_tokens: int = 4096):
    """Build vLLM's Gemma 4 for `config`, made the plugin's, with the weights of a transformers model.

    Returns:
        the `Gemma4ForCausalLM` and its `VllmConfig`.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.models.gemma4 import Gemma4ForCausalLM
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm_gaudi.models import gemma4

    settings = vllm_config(config, fast_prefill=fast_prefill, dtype=dtype, max_tokens=max_tokens)
    with set_current_vllm_config(settings), set_default_torch_dtype(settings.model_config.dtype):
        one_process()
        model = Gemma4ForCausalLM(vllm_config=settings).eval()
        gemma4._apply_hpu_gemma4_patches(model)
        model.load_weights(weights.state_dict().items())
    return model, settings
