# SPDX-License-Identifier: Apache-2.0
"""Counted work of a prompt, from the shapes of a Gemma 4 text model; and what a card could make of it."""

from dataclasses import dataclass

SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class Shape:
    """What the count needs to know of a checkout's text_config."""

    layer_types: tuple[str, ...]
    shared: int
    hidden: int
    mlp: int
    wide_shared_mlp: bool
    heads: int
    kv_heads: int
    head: int
    full_head: int
    full_kv_heads: int
    per_layer: int
    window: int
    vocabulary: int

    @classmethod
    def of(cls, text: dict) -> "Shape":
        """From config.json's text_config (or the config itself, of a text model)."""
        kv_heads = text["num_key_value_heads"]
        return cls(
            layer_types=tuple(text["layer_types"]),
            shared=text.get("num_kv_shared_layers", 0),
            hidden=text["hidden_size"],
            mlp=text["intermediate_size"],
            wide_shared_mlp=bool(text.get("use_double_wide_mlp", False)),
            heads=text["num_attention_heads"],
            kv_heads=kv_heads,
            head=text["head_dim"],
            full_head=text.get("global_head_dim") or text["head_dim"],
            full_kv_heads=text.get("num_global_key_value_heads") or kv_heads,
            per_layer=text.get("hidden_size_per_layer_input") or 0,
            window=text["sliding_window"],
            vocabulary=text["vocab_size"],
        )

    @property
    def own(self) -> int:
        """Layers with a KV cache of their own."""
        return len(self.layer_types) - self.shared


E2B = Shape(
    ((SLIDING,) * 4 + (FULL,)) * 7, 20, 1536, 6144, True, 8, 1, 256, 512, 1, 256, 512, 262144
)  # fmt: skip
E4B = Shape(
    ((SLIDING,) * 5 + (FULL,)) * 7, 18, 2560, 10240, False, 8, 2, 256, 512, 2, 256, 512, 262144
)  # fmt: skip


def projections(shape: Shape, layer: int) -> tuple[int, int]:
    """Parameters of a layer's linear maps per token: of query (key and value where it has its own), and of the rest."""
    full = shape.layer_types[layer] == FULL
    head = shape.full_head if full else shape.head
    kv_heads = shape.full_kv_heads if full else shape.kv_heads
    shared = layer >= shape.own
    first = shape.hidden * shape.heads * head
    if not shared:
        first += 2 * shape.hidden * kv_heads * head
    mlp = shape.mlp * (2 if shared and shape.wide_shared_mlp else 1)
    rest = shape.heads * head * shape.hidden + 3 * shape.hidden * mlp + 2 * shape.hidden * shape.per_layer
    return first, rest


def attention(shape: Shape, layer: int, keys: float) -> float:
    """Multiplications of one query's scores and weighted sum over `keys` keys."""
    head = shape.full_head if shape.layer_types[layer] == FULL else shape.head
    return 2 * shape.heads * head * keys


@dataclass(frozen=True)
class Fast:
    """What a fast prefill leaves out besides the KV-shared layers.

    last_kv_layer: of the last layer with a KV cache all but query, key and value. per_layer_inputs: the projection of
    the per-layer inputs for the layers that run on the last token only.
    """

    last_kv_layer: bool = True
    per_layer_inputs: bool = False


DEFAULT = Fast()


def prompt_flops(shape: Shape, length: int, fast: Fast | None, cached: int = 0) -> float:
    """FLOPs (two per multiplication) of one prompt without padding, up to its first token.

    Args:
        length: its tokens, without those that are cached.
        fast: what runs on the last token only; None: every layer runs on every token.
        cached: tokens before them whose keys and values are in the KV cache.
    """
    layers = len(shape.layer_types)
    all_tokens = layers if fast is None else shape.own - fast.last_kv_layer  # layers that run on all of them
    projected = all_tokens if fast is not None and fast.per_layer_inputs else layers
    work = length * shape.hidden * projected * shape.per_layer
    if projected < layers:
        work += shape.hidden * layers * shape.per_layer  # all layers' for the last token
    for layer, kind in enumerate(shape.layer_types):
        first, rest = projections(shape, layer)
        window = shape.window if kind == SLIDING else cached + length
        seen = sum(min(place + 1, window) for place in range(cached, cached + length)) / length  # keys per query
        last_seen = min(cached + length, window)
        if layer < all_tokens:
            work += length * (first + rest + attention(shape, layer, seen))
        elif layer < shape.own:
            work += length * first + rest + attention(shape, layer, last_seen)
        else:
            work += first + rest + attention(shape, layer, last_seen)
    return 2 * (work + shape.hidden * shape.vocabulary)


def limit(shape: Shape, length: int, fast: Fast | None = DEFAULT, cached: int = 0) -> float:
    """How many times fewer FLOPs a prompt costs with the flag."""
    return prompt_flops(shape, length, None, cached) / prompt_flops(shape, length, fast, cached)


@dataclass(frozen=True)
class Card:
    """Public peak figures: dense bfloat16 FLOP/s, and bytes/s of its memory."""

    name: str
    flops: float
    memory: float


GAUDI2 = Card("Gaudi 2", 432e12, 2.45e12)
GAUDI3 = Card("Gaudi 3", 1835e12, 3.7e12)


def prompt_seconds(shape: Shape, card: Card, length: int, batch: int, fast: bool, reached: float) -> float:
    """A lower bound for one forward over `batch` prompts: arithmetic at `reached` of the peak, or reading the weights.

    Every layer's weights are read once per forward, whatever number of rows they serve.
    """
    weights = sum(sum(projections(shape, layer)) for layer in range(len(shape.layer_types)))
    weights += shape.hidden * shape.vocabulary
    arithmetic = batch * prompt_flops(shape, length, DEFAULT if fast else None) / (card.flops * reached)
    return max(arithmetic, 2 * weights / card.memory)
