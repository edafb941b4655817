# SPDX-License-Identifier: Apache-2.0
"""The test model's vocabulary and the prompts made of it."""

import random

WORDS = 512

SPECIAL_TOKENS = {
    "<pad>": 0,
    "<eos>": 1,
    "<bos>": 2,
    "<unk>": 3,
    "<|image|>": 500,
    "<|audio|>": 501,
    "<|image>": 502,
    "<image|>": 503,
    "<|video|>": 504,
    "<|audio>": 505,
    "<audio|>": 506,
}


def prompt(length, seed=0):
    """`length` token ids, the first <bos>, the others plain words; the same for the same arguments."""
    draw = random.Random(f"{length} {seed}")
    return [SPECIAL_TOKENS["<bos>"], *(draw.randrange(4, 500) for _ in range(length - 1))]
