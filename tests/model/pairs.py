# SPDX-License-Identifier: Apache-2.0
"""The same model with the flag off, with the flag on and in transformers, and what is asked of the three."""

import contextlib
import random
from dataclasses import dataclass

import torch

from demo import model
from demo.runner import Runner, greedy

STEPS = 16
WINDOW = 128


@dataclass
class Pair:
    """The same weights with the flag off and on, and in transformers."""

    off: Runner
    on: Runner
    reference: torch.nn.Module
    config: object

    def prompts(self, *lengths: int) -> list[list[int]]:
        """Token ids of as many prompts, the same for the same lengths."""
        dice = random.Random(str(lengths))
        return [[dice.randrange(self.config.vocab_size) for _ in range(n)] for n in lengths]

    def assert_parity(self, prompts, *, steps=STEPS, off_to_on=5e-4, to_reference=1e-3, **how):
        """Decode greedily with the flag off and on: same tokens, same logits, and those of transformers."""
        tokens, logits = greedy(self.off, prompts, steps, **how)
        fast_tokens, fast_logits = greedy(self.on, prompts, steps, **how)
        assert fast_tokens == tokens
        torch.testing.assert_close(fast_logits, logits, atol=off_to_on, rtol=0)
        for row, prompt in enumerate(prompts):
            expected = model.reference_logits(self.reference, prompt + tokens[row])[len(prompt) - 1 : -1]
            torch.testing.assert_close(fast_logits[:, row], expected, atol=to_reference, rtol=0)
            assert tokens[row] == expected.argmax(-1).tolist()


@contextlib.contextmanager
def rows_through(runner: Runner):
    """Collect the number of rows that each layer's MLP got, a list per forward."""
    forwards: list[list[int]] = []
    layers = runner.model.model.language_model.model.layers

    def note(mlp, args):
        if mlp is layers[0].mlp:
            forwards.append([])
        forwards[-1].append(args[0].shape[0])

    hooks = [layer.mlp.register_forward_pre_hook(note) for layer in layers]
    try:
        yield forwards
    finally:
        for hook in hooks:
            hook.remove()
