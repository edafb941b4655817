# SPDX-License-Identifier: Apache-2.0
"""The greedy requests that are sent to each server: the built-in set and the user's own prompts."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# Around Gemma 4's sliding window of 512, KV blocks of 128, and beyond both.
LENGTHS = (1, 20, 127, 128, 129, 511, 512, 513, 1024, 2048, 4096)
BATCH = (3, 60, 128, 250, 513, 700, 90, 17)

# Token ids are cut from this, so that prompts have exact lengths and yet are text.
TEXT = """
A lighthouse keeper wrote down the weather every morning for thirty years. On clear days he noted which ships passed,
how many sails they carried and whether they answered his signal. On foggy days he noted only the hours, because there
was nothing else to see. When he retired, the harbour office put his books on a shelf and forgot them. Much later a
student asked for old records of the wind. She copied the columns, one for the hour, one for the direction and one for
the force, and found that the storms of that coast had moved two weeks towards spring. Nobody had looked for it, and
the keeper had never said a word about it; he had only been careful. What else is written down somewhere, complete and
correct, waiting for a question? Counting is cheap. Knowing what to count, and for whom, is the harder half of the work.
"""
CHATS = (
    "What is the capital of France? Answer in one sentence.",
    "Write a function in Python that reverses a string, and explain it.",
    "Summarise this in two sentences:\n" + TEXT,
)
COMPLETIONS = ("The three primary colours are", "def fibonacci(n):\n", "Once upon a time, in a harbour town,")


@dataclass(frozen=True)
class Request:
    """One greedy request. group: requests of one group are sent at the same time, groups one after the other.

    prompt: token ids or text of a completion, or the messages of a chat.
    """

    name: str
    group: str
    prompt: str | list
    chat: bool = False


def built_in(tokens: Sequence[int], longest: int) -> list[Request]:
    """Lengths one by one, a batch, shared prefixes, chats and completions.

    Args:
        tokens: ids of TEXT, the first of them the one that begins a text.
        longest: prompts of more tokens are left out.
    """
    body = list(tokens[1:])

    def cut(length: int, start: int = 0) -> list[int]:
        turned = body[start % len(body) :] + body[: start % len(body)]
        repeated = turned * (length // len(turned) + 1)
        return [tokens[0], *repeated[: length - 1]]

    # Each starts elsewhere: a prefix in the cache would be another measurement.
    requests = [Request(f"{n} tokens", f"{n} tokens", cut(n, start=13 * n)) for n in LENGTHS]
    requests += [Request(f"batch: {n} tokens", "batch", cut(n, start=7 * n)) for n in BATCH]
    prefix = cut(600, start=31)
    requests += [
        Request("prefix: first time", "prefix 1", prefix),
        Request("prefix: again", "prefix 2", prefix),
        Request("prefix: longer", "prefix 3", prefix + cut(200, start=5)[1:]),
        Request("prefix: shorter", "prefix 4", prefix[:400]),
    ]
    requests = [request for request in requests if len(request.prompt) <= longest]
    requests += [Request(f"completion {i}", f"completion {i}", text) for i, text in enumerate(COMPLETIONS, 1)]
    requests += [Request(f"chat {i}", f"chat {i}", _user(text), chat=True) for i, text in enumerate(CHATS, 1)]
    return requests


def from_file(path: Path) -> list[Request]:
    """A prompt per line: JSON text, {"prompt": ...} or {"messages": [...]}; any other line is a prompt as it stands.

    Raises:
        ValueError: a line's JSON is none of these; it is named.
    """
    requests = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        name = f"{path.name}:{number}"
        try:
            value = json.loads(line)
        except ValueError:
            value = line
        if isinstance(value, dict) and isinstance(value.get("messages"), list):
            requests.append(Request(name, name, value["messages"], chat=True))
        elif isinstance(value, dict) and isinstance(value.get("prompt"), str | list):
            requests.append(Request(name, name, value["prompt"]))
        elif isinstance(value, dict | list):
            raise ValueError(f"{path}, line {number}: neither a prompt nor messages")
        else:
            requests.append(Request(name, name, line if not isinstance(value, str) else value))
    return requests


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]
