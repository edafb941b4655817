# SPDX-License-Identifier: Apache-2.0
"""What a forward can be, which rows its KV-shared layers see, and how long an answer is."""

PROMPT = "prompt"  # whole prompts or first chunks: nothing cached before them
CONTEXT = "context"  # a prompt, or a chunk of one, that follows cached tokens
MERGED = "merged"  # several prompts in one row
DECODE = "decode"

FAST = "fast"  # one row per sequence
ALL = "all"  # every token place of the batch

TOKENS = 64  # that every answer has
