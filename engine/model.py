# SPDX-License-Identifier: Apache-2.0
"""Write a random Gemma 4 checkpoint shaped like E2B: `python -m engine.model FOLDER [--shape e2b] [--text]`.

Runs in the environment that holds vLLM, with the bridge on the path. The multimodal class, its
processor, a word-level tokenizer (token 7 is the word "t7") and one LoRA adapter are written too;
with --text also, in the folder `text`, the text model again as a checkpoint of the text-only class.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    Gemma4AudioConfig,
    Gemma4AudioFeatureExtractor,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4ImageProcessor,
    Gemma4Processor,
    Gemma4TextConfig,
    Gemma4VideoProcessor,
    Gemma4VisionConfig,
    PreTrainedTokenizerFast,
)

from engine.words import SPECIAL_TOKENS, WORDS

SLIDING, FULL = "sliding_attention", "full_attention"

SHAPES = {
    # Small in every width, but each mechanism of E2B is there; the window is one KV block.
    "tiny": dict(
        layer_types=[SLIDING, SLIDING, SLIDING, SLIDING, FULL] * 2,
        num_kv_shared_layers=5,
        vocab_size=WORDS,
        hidden_size=64,
        hidden_size_per_layer_input=16,
        intermediate_size=96,
        num_attention_heads=4,
        head_dim=32,
        global_head_dim=64,
        sliding_window=128,
        initializer_range=0.15,
    ),
    # E2B's own layer widths; a fifth of its depth in the same proportion (15 to 20), few words.
    "e2b": dict(
        layer_types=[SLIDING, SLIDING, FULL, SLIDING, SLIDING, SLIDING, FULL],
        num_kv_shared_layers=4,
        vocab_size=4096,
        hidden_size=1536,
        hidden_size_per_layer_input=256,
        intermediate_size=6144,
        num_attention_heads=8,
        head_dim=256,
        global_head_dim=512,
        sliding_window=512,
        initializer_range=0.02,
    ),
}


def config(shape):
    """The Gemma4Config of SHAPES[shape], with the smallest vision and audio towers."""
    widths = SHAPES[shape]
    text = Gemma4TextConfig(
        **widths,
        num_hidden_layers=len(widths["layer_types"]),
        vocab_size_per_layer_input=widths["vocab_size"],
        num_key_value_heads=1,
        use_double_wide_mlp=True,
        final_logit_softcapping=30.0,
        max_position_embeddings=32768,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )
    vision = Gemma4VisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        position_embedding_size=1024,
        default_output_length=70,
    )
    audio = Gemma4AudioConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        subsampling_conv_channels=[8, 4],
        output_proj_dims=32,
    )
    ids = {
        "image_token_id": "<|image|>",
        "audio_token_id": "<|audio|>",
        "video_token_id": "<|video|>",
        "boi_token_id": "<|image>",
        "eoi_token_id": "<image|>",
        "boa_token_id": "<|audio>",
        "eoa_token_index": "<audio|>",
    }
    ids = {name: SPECIAL_TOKENS[token] for name, token in ids.items()}
    return Gemma4Config(text_config=text, vision_config=vision, audio_config=audio, **ids)


def write(folder, shape="tiny", seed=0, text=False):
    """Write the checkpoint of `shape` below `folder`, the adapter in its folder `lora`, a text-only one in `text`."""
    folder = Path(folder)
    torch.manual_seed(seed)
    model = Gemma4ForConditionalGeneration(config(shape)).float().eval()
    with torch.no_grad():
        _away_from_one(model)
    model.save_pretrained(folder)
    # From our own widths: how a config tells a layer's head size differs between transformers' versions.
    _add_unused_weights(folder, SHAPES[shape])
    _write_words(folder)
    _write_adapter(folder / "lora", SHAPES[shape])
    if text:
        _write_text_only(folder, folder / "text", shape)
    return sum(p.numel() for p in model.parameters())


def _away_from_one(model):
    """Norms and layer scalars start at 1, where forgetting one of them would not show."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "language_model" in name and name.endswith("layer_scalar"):
            tensor.fill_(0.8 + 0.4 * torch.rand(()).item())
        elif "language_model" in name and "norm" in name and name.endswith("weight"):
            tensor.mul_(1 + 0.2 * torch.randn_like(tensor))


def _write_text_only(folder, text, shape):
    """The text model's weights under the names that a text-only checkpoint has, with its configuration and words."""
    text.mkdir(exist_ok=True)
    part = "model.language_model."
    weights = load_file(folder / "model.safetensors")
    weights = {name.replace(part, "model.", 1): w for name, w in weights.items() if name.startswith(part)}
    save_file(weights, text / "model.safetensors", metadata={"format": "pt"})
    settings = config(shape).text_config
    settings.architectures = ["Gemma4ForCausalLM"]
    settings.save_pretrained(text)
    for file in folder.glob("token*"):
        shutil.copy(file, text)


def _head(widths, layer):
    return widths["head_dim"] if widths["layer_types"][layer] == SLIDING else widths["global_head_dim"]


def _add_unused_weights(folder, widths):
    """Real checkpoints hold K and V weights for the shared layers as well; transformers saves none."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    layers = len(widths["layer_types"])
    for layer in range(layers - widths["num_kv_shared_layers"], layers):
        head = _head(widths, layer)
        prefix = f"model.language_model.layers.{layer}.self_attn."
        for name in ("k_proj", "v_proj"):
            weights[f"{prefix}{name}.weight"] = widths["initializer_range"] * torch.randn(head, widths["hidden_size"])
        weights[f"{prefix}k_norm.weight"] = torch.ones(head)
    save_file(weights, file, metadata={"format": "pt"})


def _write_words(folder):
    named = {number: token for token, number in SPECIAL_TOKENS.items()}
    vocabulary = {named.get(n, f"t{n}"): n for n in range(WORDS)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
        extra_special_tokens={
            "image_token": "<|image|>",
            "audio_token": "<|audio|>",
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
        },
        chat_template="{% for m in messages %}t40 {{ m['content'] }} t41 {% endfor %}",
    )
    tokenizer.save_pretrained(folder)
    Gemma4Processor(
        feature_extractor=Gemma4AudioFeatureExtractor(),
        image_processor=Gemma4ImageProcessor(max_soft_tokens=70),
        video_processor=Gemma4VideoProcessor(),
        tokenizer=tokenizer,
    ).save_pretrained(folder)


def _write_adapter(folder, widths, rank=8):
    """A LoRA adapter on the query and output projections of every layer."""
    folder.mkdir(exist_ok=True)
    weights = {}
    for layer in range(len(widths["layer_types"])):
        inner, outer = widths["num_attention_heads"] * _head(widths, layer), widths["hidden_size"]
        prefix = f"base_model.model.model.language_model.layers.{layer}.self_attn."
        for name, fan_in, fan_out in (("q_proj", outer, inner), ("o_proj", inner, outer)):
            weights[f"{prefix}{name}.lora_A.weight"] = 0.1 * torch.randn(rank, fan_in)
            weights[f"{prefix}{name}.lora_B.weight"] = 0.1 * torch.randn(fan_out, rank)
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(folder.parent),
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": ["q_proj", "o_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def main():
    parser = argparse.ArgumentParser(prog="python -m engine.model", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--text", action="store_true")
    options = parser.parse_args()
    count = write(options.folder, options.shape, options.seed, options.text)
    print(f"{count:,} parameters in {options.folder}")


if __name__ == "__main__":
    main()
