# SPDX-License-Identifier: Apache-2.0
"""A small runner: batches of prompts and decode steps over a paged KV cache, with the plugin's metadata."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch

BLOCK = 128


def round_up(count: int, step: int) -> int:
    """Return the smallest multiple of `step` that is at least `count`."""
    return -(-count // step) * step


@dataclass
class Request:
    """A prompt under way: the blocks that hold its keys and values, and how many of its tokens they hold."""

    blocks: list[int] = field(default_factory=list)
    length: int = 0

    def slots(self, start: int, end: int) -> list[int]:
        return [self.blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(start, end)]


class Runner:
    """Runs one model over caches of its own.

    Args:
        model: what `demo.model.build` returns.
        settings: its `VllmConfig`.
        blocks: number of cache blocks; one more, the last, takes what padding tokens write.
    """

    def __init__(self, model, settings, blocks: int = 64):
        from vllm_gaudi.v1.worker.hpu_model_runner import HpuModelAdapter

        self.model = HpuModelAdapter(model, settings)
        self.settings = settings
        self.window = settings.model_config.hf_text_config.sliding_window
        self.layers = {
            name: layer
            for name, layer in settings.compilation_config.static_forward_context.items()
            if hasattr(layer, "kv_sharing_target_layer_name")
        }
        self.caches = self._allocate(blocks)
        self.free = list(range(blocks))
        random.Random(0).shuffle(self.free)  # neighbours in a prompt are none in the cache

    def _allocate(self, blocks: int) -> dict[str, tuple]:
        caches = {}
        for name, layer in self.layers.items():
            target = layer.kv_sharing_target_layer_name
            if target is None:
                shape = layer.attn_backend.get_kv_cache_shape(blocks + 1, BLOCK, layer.num_kv_heads, layer.head_size)
                keys, values = (torch.zeros(shape, dtype=layer.dtype) for _ in range(2))
                caches[name] = (keys, values, None, None)
            layer.kv_cache = caches[target or name]
        return caches

    def _reserve(self, request: Request, tokens: int) -> None:
        while len(request.blocks) * BLOCK < request.length + tokens:
            request.blocks.append(self.free.pop())

    def release(self, *requests: Request) -> None:
        """Give the blocks of finished requests back."""
        for request in requests:
            self.free.extend(request.blocks)
            request.blocks, request.length = [], 0

    @torch.no_grad()
    def prefill(
        self,
        prompts: list[list[int]],
        *,
        padded: int | None = None,
        rows: int | None = None,
        embeds: bool = False,
    ) -> tuple[list[Request], torch.Tensor]:
        """Run new prompts as one batch.

        Args:
            prompts: token ids of each prompt.
            padded: padded length; the longest prompt, rounded up to a block, if None.
            rows: batch size; rows beyond the prompts only pad it. As many as there are prompts if None.
            embeds: hand over embeddings and per-layer inputs beside the ids, as a multimodal batch does.
        Returns:
            the requests, and logits `[prompts, vocabulary]` at each prompt's last token.
        """
        requests = [Request() for _ in prompts]
        logits = self._prompt_step(requests, prompts, padded, rows or len(prompts), embeds)
        return requests, logits

    @torch.no_grad()
    def extend(self, request: Request, tokens: list[int], *, padded: int | None = None):
        """Run further prompt tokens of one request, with what the cache holds of it as context.

        Returns:
            logits `[1, vocabulary]` at the last token.
        """
        return self._prompt_step([request], [tokens], padded, 1, False)

    def _prompt_step(self, requests, prompts, padded, rows, embeds) -> torch.Tensor:
        from vllm_gaudi.v1.worker.hpu_model_runner import TrimmedAttentionMetadata

        padded = padded or round_up(max(map(len, prompts)), BLOCK)
        ids = torch.full((rows, padded), -1, dtype=torch.int32)
        positions = torch.full((rows, padded), -1, dtype=torch.int32)
        slots = torch.full((rows, padded), -1, dtype=torch.int64)
        lengths = torch.zeros(rows, dtype=torch.int32)
        context = torch.zeros(rows, dtype=torch.int32)
        block_list = window_list = None
        for row, (request, tokens) in enumerate(zip(requests, prompts, strict=True)):
            start, count = request.length, len(tokens)
            if start:  # alone in its batch
                past = request.blocks[: round_up(start, BLOCK) // BLOCK]
                block_list = torch.tensor([*past, -1], dtype=torch.int32)  # buckets pad it
                kept = self.window // BLOCK + 1
                window_list = torch.tensor((past[-kept:] + [-1] * kept)[:kept], dtype=torch.int32)
            self._reserve(request, count)
            request.length += count
            ids[row, :count] = torch.tensor(tokens)
            positions[row, :count] = torch.arange(start, start + count)
            slots[row, :count] = torch.tensor(request.slots(start, start + count))
            lengths[row], context[row] = count, start
        metadata = TrimmedAttentionMetadata(
            is_prompt=True,
            block_size=BLOCK,
            slot_mapping=slots,
            seq_lens_tensor=lengths,
            context_lens_tensor=context,
            block_list=block_list,
            window_block_list=window_list,
        )
        inputs = self._embeddings(ids.view(-1)) if embeds else {}
        states = self.model(ids, positions, metadata, **inputs)
        last = torch.arange(len(prompts)) * padded + lengths[: len(prompts)] - 1
        return self.model.compute_logits(states[last])

    def _embeddings(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        # the model keeps the per-layer inputs that belong to them
        return {"inputs_embeds": self.model.model.embed_input_ids(ids.clamp(min=0))}

    @torch.no_grad()
    def decode(self, requests: list[Request], tokens: list[int], *, rows: int | None = None) -> torch.Tensor:
        """Run one token of each request.

        Args:
            requests: the requests.
            tokens: the token that each of them got last.
            rows: batch size; as many as there are requests if None.
        Returns:
            logits `[requests, vocabulary]`.
        """
        from vllm_gaudi.v1.worker.hpu_model_runner import TrimmedAttentionMetadata

        rows = rows or len(requests)
        ids = torch.zeros((rows, 1), dtype=torch.int32)
        positions = torch.zeros((rows, 1), dtype=torch.int32)
        slots = torch.full((rows, 1), -1, dtype=torch.int64)
        everything, recent = [], []  # (block, row, first slot, end)
        for row, (request, token) in enumerate(zip(requests, tokens, strict=True)):
            self._reserve(request, 1)
            position = request.length
            request.length += 1
            ids[row], positions[row] = token, position
            slots[row] = torch.tensor(request.slots(position, position + 1))
            oldest = max(0, position - self.window + 1)
            for index in range(position // BLOCK + 1):
                start, end = index * BLOCK, min(position + 1, (index + 1) * BLOCK)
                block = request.blocks[index]
                everything.append((block, row, 0, end - start))
                if end > oldest:
                    recent.append((block, row, max(0, oldest - start), end - start))
        metadata = TrimmedAttentionMetadata(
            is_prompt=False,
            block_size=BLOCK,
            slot_mapping=slots,
            **_block_fields("", everything),
            **_block_fields("window_", recent),
            window_attn_bias=_used_slots(recent, self.model.dtype),
        )
        states = self.model(ids, positions, metadata)
        return self.model.compute_logits(states[: len(requests)])


def _block_fields(prefix: str, entries: list[tuple[int, int, int, int]]) -> dict[str, torch.Tensor]:
    entries = [*entries, (-1, -1, 0, 0)]  # buckets pad them
    blocks, groups, _, used = (torch.tensor(column) for column in zip(*entries, strict=True))
    return {
        f"{prefix}block_list": blocks,
        f"{prefix}block_groups": groups,
        f"{prefix}block_usage": used,
    }


def _used_slots(entries: list[tuple[int, int, int, int]], dtype: torch.dtype) -> torch.Tensor:
    bias = torch.full((len(entries) + 1, BLOCK), float("-inf"), dtype=dtype)
    for row, (_, _, first, end) in enumerate(entries):
        bias[row, first:end] = 0
    return bias


def greedy(runner: Runner, prompts: list[list[int]], steps: int, **how) -> tuple[list[list[int]], torch.Tensor]:
    """Prefill a batch and decode greedily.

    Args:
        steps: tokens to generate per prompt.
        how: `padded`, `rows`, `embeds` of `Runner.prefill`.
    Returns:
        the tokens per prompt, and the logits they were taken from, `[steps, prompts, vocabulary]`.
    """
    requests, logits = runner.prefill(prompts, **how)
    seen, tokens = [logits], [logits.argmax(-1).tolist()]
    for _ in range(steps - 1):
        seen.append(runner.decode(requests, tokens[-1], rows=how.get("rows")))
        tokens.append(seen[-1].argmax(-1).tolist())
    runner.release(*requests)
    return [list(column) for column in zip(*tokens, strict=True)], torch.stack(seen).float()
