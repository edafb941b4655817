# SPDX-License-Identifier: Apache-2.0
"""Runs batches of prompts with the flag off and on: times, counted FLOPs, and whether both say the same."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode

from demo import model
from demo.runner import BLOCK, Runner, greedy, round_up

LOGIT_LIMIT = 2e-3  # float32 rounding over 35 layers, on logits of up to 30


@dataclass(frozen=True)
class Batch:
    """Prompts that are prefilled together; `rows` beyond their number only pad the batch."""

    prompts: list[list[int]]
    rows: int

    @property
    def tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def padded(self) -> int:
        return self.rows * round_up(max(map(len, self.prompts)), BLOCK)


@dataclass(frozen=True)
class Outcome:
    """One batch, flag off and on: median seconds of a prefill, its FLOPs, and how the outputs differ."""

    batch: Batch
    seconds: tuple[float, float]
    flops: tuple[int, int]
    difference: float
    same_tokens: bool

    @property
    def parity(self) -> bool:
        return self.same_tokens and self.difference <= LOGIT_LIMIT


def batches(tokens: int, vocab: int) -> list[Batch]:
    """One prompt of `tokens` tokens, a batch of mixed lengths, and one with a row that only pads it."""
    dice = random.Random(0)

    def prompts(*lengths: int) -> list[list[int]]:
        return [[dice.randrange(vocab) for _ in range(max(1, length))] for length in lengths]

    return [
        Batch(prompts(tokens), 1),
        Batch(prompts(tokens // 4, tokens // 5, tokens // 16, 1), 4),
        Batch(prompts(tokens // 4, tokens // 8), 3),
    ]


def count_flops(runner: Runner, batch: Batch) -> int:
    """Count the floating-point operations of the matrix products of one prefill, as they are run."""
    with FlopCounterMode(display=False) as counter:
        requests, _ = runner.prefill(batch.prompts, rows=batch.rows)
    runner.release(*requests)
    return counter.get_total_flops()


def seconds(runner: Runner, batch: Batch) -> float:
    """Time one prefill, sampled logits included."""
    start = time.perf_counter()
    requests, _ = runner.prefill(batch.prompts, rows=batch.rows)
    elapsed = time.perf_counter() - start
    runner.release(*requests)
    return elapsed


def compare(off: Runner, on: Runner, batch: Batch, *, repeat: int, steps: int, done: Callable[[], None]) -> Outcome:
    """Prefill a batch with the flag off and on in turn, then decode greedily with both.

    Args:
        repeat: timed prefills each; the pass that counts FLOPs comes first and warms up.
        steps: tokens to generate per prompt.
        done: called after each run; `runs(repeat)` times in all.
    """

    def each(run):
        results = []
        for runner in (off, on):
            results.append(run(runner))
            done()
        return results

    flops = each(lambda runner: count_flops(runner, batch))
    times = [each(lambda runner: seconds(runner, batch)) for _ in range(repeat)]
    outputs = each(lambda runner: greedy(runner, batch.prompts, steps, rows=batch.rows))
    (tokens, logits), (fast_tokens, fast_logits) = outputs
    return Outcome(
        batch,
        tuple(statistics.median(column) for column in zip(*times, strict=True)),
        tuple(flops),
        (logits - fast_logits).abs().max().item(),
        tokens == fast_tokens,
    )


def runs(repeat: int) -> int:
    """Return how many runs `compare` makes."""
    return 2 * (repeat + 2)


def count_e2b(tokens: int) -> tuple[int, int]:
    """Count the FLOPs of one prompt on the real sizes of Gemma 4 E2B, flag off and on, without doing any."""
    config = model.text_config(
        hidden=1536, mlp=6144, per_layer=256, head=256, full_head=512, window=512, vocab=262144, max_len=tokens
    )
    counts = []
    for flag in (False, True):
        with torch.device("meta"):
            runner = Runner(*model.build(config, None, fast_prefill=flag, max_tokens=tokens))
            counts.append(count_flops(runner, Batch([[0] * tokens], 1)))
    return tuple(counts)
