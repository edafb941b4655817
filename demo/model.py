# SPDX-License-Identifier: Apache-2.0
"""Small Gemma 4 models with random weights: vLLM's, behind the plugin, and transformers', the reference."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path

import torch


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
                tensor.uniform_(0.9, 1.1)
            elif not name.endswith("weight"):
                continue
            elif name.endswith("q_norm.weight"):  # scores of a few units: attention to many keys, not to one
                tensor.normal_(1.0, 0.2).mul_(2 * tensor.shape[0] ** -0.5)
            elif (
                "post_" in name and "norm" in name
            ):  # what a layer adds; larger, and rounding grows from layer to layer
                tensor.normal_(0.5, 0.1)
            elif name == "model.norm.weight":  # logits up to where the soft cap bends them
                tensor.normal_(8.0, 1.0)
            elif "norm" in name:
                tensor.normal_(1.0, 0.2)
            elif "embed_tokens_per_layer" in name:
                tensor.normal_(0.0, config.hidden_size_per_layer_input**-0.5)
            elif "embed_tokens" in name:
                tensor.normal_(0.0, config.hidden_size**-0.5)
            else:
                tensor.normal_(0.0, tensor.shape[-1] ** -0.5)
    return model


def reference_logits(model, tokens: list[int]) -> torch.Tensor:
    """Return float32 logits `[tokens, vocabulary]` of a full pass over `tokens`, every layer on every token."""
    with torch.no_grad():
        return model(torch.tensor([tokens]), use_cache=False, logits_to_keep=0).logits[0].float()


def vllm_config(config, folder: str, *, vision: bool, text_only: bool, fast_prefill: bool, dtype: str, max_tokens: int):
    """Make the `VllmConfig` of an eager one-process run; `folder` is to hold the model's configuration.

    Args:
        config: of the text model; it is put into a multimodal one, which is what the plugin changes.
        vision: build the vision tower; without it images are turned off, as for serving text only.
        text_only: leave the text model by itself, as in a checkpoint that is text alone.
    """
    from transformers import Gemma4Config, Gemma4VisionConfig
    from vllm.config import (
        CacheConfig,
        CompilationConfig,
        CompilationMode,
        DeviceConfig,
        ModelConfig,
        SchedulerConfig,
        VllmConfig,
    )

    tower = Gemma4VisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
    )
    text = copy.deepcopy(config)  # what takes it changes it
    if text_only:
        text.architectures = ["Gemma4ForCausalLM"]
        text.save_pretrained(folder)
    else:
        Gemma4Config(
            architectures=["Gemma4ForConditionalGeneration"], text_config=text, vision_config=tower, audio_config=None
        ).save_pretrained(folder)
    model_config = ModelConfig(
        model=folder,
        skip_tokenizer_init=True,
        dtype=dtype,
        enforce_eager=True,
        max_model_len=config.max_position_embeddings,
        limit_mm_per_prompt=None if text_only else {"image": int(vision), "video": 0, "audio": 0},
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


def build(
    config,
    weights,
    *,
    fast_prefill: bool,
    vision: bool = False,
    text_only: bool = False,
    dtype: str = "float32",
    max_tokens: int = 4096,
):
    """Build the plugin's Gemma 4, which is vLLM's with the plugin's changes, with the weights of a transformers model.

    Args:
        config: what `text_config` returns.
        weights: what `reference` returns for it, or a model that `build` returned, whose tensors are then shared, or
            None to leave them as they come.
        fast_prefill: vLLM's flag.
        vision: build the vision tower as well; its rotary embedding is then the first the plugin finds.
        text_only: build the text model by itself; its `weights` are a transformers model's or None.
        max_tokens: most tokens of a batch, padding included.
    Returns:
        the `HpuGemma4ForConditionalGeneration`, or `HpuGemma4ForCausalLM`, and its `VllmConfig`.
    """
    from vllm.config import set_current_vllm_config
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm_gaudi.models import gemma4

    with tempfile.TemporaryDirectory() as folder:
        settings = vllm_config(
            config,
            folder,
            vision=vision,
            text_only=text_only,
            fast_prefill=fast_prefill,
            dtype=dtype,
            max_tokens=max_tokens,
        )
        with set_current_vllm_config(settings), set_default_torch_dtype(settings.model_config.dtype):
            one_process()
            made = gemma4.HpuGemma4ForCausalLM if text_only else gemma4.HpuGemma4ForConditionalGeneration
            model = made(vllm_config=settings).eval()
    if isinstance(weights, gemma4.HpuGemma4ForConditionalGeneration):
        model.load_state_dict(weights.state_dict(), assign=True)
    elif weights is not None:
        (model if text_only else model.language_model).load_weights(weights.state_dict().items())
    return model, settings
